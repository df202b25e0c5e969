"""Options that differ between a saved run and the one that resumes it."""

import pytest

from toolkit.training.config_diff import changed_options, rate_follows_epochs
from toolkit.training.lr import Cosine, Step


def test_an_option_that_one_side_lacks_is_none_there():
    now = {"a": 1, "b": {"c": 2}, "none": None}
    assert changed_options({"a": 1, "d": 3}, now) == "b.c=2 (was None), d=None (was 3)"


def test_long_lists_are_cut():
    four, five = (dict.fromkeys(names, 1) for names in ("pqrs", "pqrst"))
    assert changed_options({}, four).endswith("s=1 (was None)")
    assert changed_options({}, five).endswith("and 1 more")


@pytest.mark.parametrize("before", [None, 3, [1, 2], "a: 2"])
def test_unknown_options_differ_in_nothing(before):
    assert changed_options(before, {"a": 1}) == ""
    assert not rate_follows_epochs(before, 20, Cosine())


def test_options_that_do_not_change_the_trajectory():
    now = {"epochs": 2, "data": {"num_workers": 3, "root": "b"}}
    before = {"epochs": 1, "data": {"num_workers": 1, "root": "a"}, "save": {"keep": 2}}
    assert changed_options(before, now) == "data.root=b (was a)"
    assert changed_options(before, now, ["data", "save"]) == "epochs=2 (was 1)"
    assert changed_options({"ab": 1}, {"ab": 2}, ["a"]) == "ab=2 (was 1)"


@pytest.mark.parametrize(
    ("lr", "epochs", "follows"), [(Cosine(), 20, True), (Cosine(), 10, False), (Step(), 20, False)]
)
def test_cosine_rates_depend_on_the_number_of_epochs(lr, epochs, follows):
    assert rate_follows_epochs({"epochs": 10}, epochs, lr) == follows
    assert not rate_follows_epochs({"epochs": "ten"}, epochs, lr)
