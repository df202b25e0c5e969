"""Options that a resumed run has otherwise."""

from omegaconf import OmegaConf

from toolkit.training.changes import changed_options


def test_options_that_one_side_lacks_are_told():
    now = OmegaConf.create({"a": 1, "b": {"c": 2}})
    assert changed_options("a: 1\nd: 3\n", now) == "b.c=2 (was None), d=None (was 3)"
    four, five = (OmegaConf.create(dict.fromkeys(names, 1)) for names in ("pqrs", "pqrst"))
    assert changed_options("{}", four).endswith("s=1 (was None)")
    assert changed_options("{}", five).endswith("and 1 more")


def test_some_options_change_nothing():
    now = OmegaConf.create({"epochs": 2, "data": {"num_workers": 3, "root": "b"}})
    before = "epochs: 1\ndata: {num_workers: 1, root: a}\nsave: {keep: 2}\n"
    assert changed_options(before, now) == "data.root=b (was a)"
    assert changed_options(before, now, ["data", "save"]) == "epochs=2 (was 1)"
    assert changed_options("ab: 1", OmegaConf.create({"ab": 2}), ["a"]) == "ab=2 (was 1)"
