import pytest

from toolkit.config.flags import flags_first


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a=1", "a=1"),
        ("seed=0,1 -m epochs=1", "-m seed=0,1 epochs=1"),
        ("a=1 --multirun", "--multirun a=1"),
        ("a=1 --config-dir=mine b=2", "--config-dir=mine a=1 b=2"),
        ("a=1 --config-dir mine b=2 -cd other", "--config-dir mine -cd other a=1 b=2"),
        ("a=1 --cfg job ~b", "--cfg job a=1 ~b"),
        ("a=1 --info all", "--info all a=1"),
        ("--info a=1", "--info a=1"),
        ("", ""),
    ],
)
def test_flags_may_stand_anywhere(given, expected):
    assert flags_first(given.split()) == expected.split()
