"""Options that a resumed run has otherwise."""

from dataclasses import dataclass, field

import pytest
from omegaconf import MISSING, OmegaConf

from toolkit.training.config_diff import changed_options, rate_follows_epochs


def test_options_that_one_side_lacks_are_told():
    now = OmegaConf.create({"a": 1, "b": {"c": 2}})
    assert changed_options("a: 1\nd: 3\n", now) == "b.c=2 (was None), d=None (was 3)"
    four, five = (OmegaConf.create(dict.fromkeys(names, 1)) for names in ("pqrs", "pqrst"))
    assert changed_options("{}", four).endswith("s=1 (was None)")
    assert changed_options("{}", five).endswith("and 1 more")


@dataclass
class Sub:
    late: int = 1
    kept: list[int] = field(default_factory=list)
    asked: str = MISSING


@dataclass
class Known:
    sub: Sub = field(default_factory=Sub)
    top: bool = False


def test_an_option_that_there_was_not_yet_has_its_usual_value():
    """A run that an earlier version has saved is not told, or refused, for what came since."""
    usual = OmegaConf.structured(Known)
    assert changed_options("sub: {kept: []}", usual) == ""
    assert changed_options("{}", usual) == ""
    assert changed_options("{}", OmegaConf.merge(usual, {"sub": {"kept": [1]}})) == (
        "sub.kept=[1] (was None)"
    )
    other = OmegaConf.merge(usual, {"sub": {"late": 2}, "top": True})
    assert changed_options("sub: {kept: []}", other) == "sub.late=2 (was None), top=True (was None)"
    assert changed_options("sub: {late: 2, kept: []}", usual) == "sub.late=1 (was 2)"


@pytest.mark.parametrize("before", [None, 3, "[1, 2]", "a: [", "${a}: }"])
def test_of_options_that_are_unknown_nothing_is_told(before):
    assert changed_options(before, OmegaConf.create({"a": 1})) == ""


def test_some_options_change_nothing():
    now = OmegaConf.create({"epochs": 2, "data": {"num_workers": 3, "root": "b"}})
    before = "epochs: 1\ndata: {num_workers: 1, root: a}\nsave: {keep: 2}\n"
    assert changed_options(before, now) == "data.root=b (was a)"
    assert changed_options(before, now, ["data", "save"]) == "epochs=2 (was 1)"
    assert changed_options("ab: 1", OmegaConf.create({"ab": 2}), ["a"]) == "ab=2 (was 1)"


@pytest.mark.parametrize(
    ("lr", "epochs", "follows"), [("cosine", 20, True), ("cosine", 10, False), ("step", 20, False)]
)
def test_epochs_count_where_the_rate_follows_them(lr, epochs, follows):
    """Half a cosine that was planned for 10 epochs is another one over 20."""
    rate = {"_target_": f"toolkit.training.lr.{lr.title()}"}
    now = OmegaConf.create({"epochs": epochs, "lr": rate})
    assert rate_follows_epochs("epochs: 10", now) == follows
    assert not rate_follows_epochs("epochs: ten", now)
    assert not rate_follows_epochs(None, now)
