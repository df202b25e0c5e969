"""Schedules beside each other are told apart."""

from toolkit.schedule import labels


def test_a_name_that_schedules_share_is_told_with_its_key():
    names = {"dp": "DP", "late": "CDP delay 2", "cdp_v1": "CDP-v1", "later": "CDP delay 2"}
    assert labels(names) == {
        "dp": "DP",
        "late": "CDP delay 2 (late)",
        "cdp_v1": "CDP-v1",
        "later": "CDP delay 2 (later)",
    }
