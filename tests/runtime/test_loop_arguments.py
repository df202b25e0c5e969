"""Arguments of a wrapped training: what an automatic rule takes, and who is warned of links."""

import warnings

import pytest
import torch
from torch import nn

from toolkit.cost import Hardware
from toolkit.errors import UserError
from toolkit.runtime.loop_arguments import choose_rule, warn_of_slow_links
from toolkit.schedule import catalog

MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
EXAMPLE = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("example", "hardware", "missing"),
    [(None, "ethernet_10", "example"), (EXAMPLE, None, "hardware")],
)
def test_an_automatic_rule_takes_machines_and_an_example(example, hardware, missing):
    with pytest.raises(UserError, match=f"^rule='auto': got no {missing}; give "):
        choose_rule(MODEL, example, hardware, 2, 1)


def test_an_unknown_machine_is_refused():
    with pytest.raises(UserError, match="ethernet_11"):
        choose_rule(MODEL, EXAMPLE, "ethernet_11", 2, 1)


def test_machines_are_given_by_name_or_as_they_are():
    by_name, as_they_are = (
        choose_rule(MODEL, EXAMPLE, hardware, 2, 1)
        for hardware in ("h200_nvlink", Hardware.preset("h200_nvlink"))
    )
    assert by_name == as_they_are


def test_one_rank_waits_for_no_link():
    alone, _ = choose_rule(MODEL, EXAMPLE, "ethernet_10", 1, 3)
    assert (alone.n_ranks, alone.accumulate, alone.max_staleness) == (1, 3, 0)


def test_several_machines_are_warned_of_once_and_one_is_not(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="rule='auto'"):
        warn_of_slow_links(catalog.cyclic(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_links(catalog.data_parallel(4))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        warn_of_slow_links(catalog.cyclic(4))
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        warn_of_slow_links(catalog.cyclic(4))


@pytest.mark.parametrize(("here", "warns"), [(4, True), (8, False), (None, False)])
def test_devices_of_ranks_are_processes_of_a_machine(monkeypatch, here, warns):
    """4 ranks of 2 devices: 8 processes, so that 4 on a machine are 2 ranks."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_slow_links(catalog.data_parallel(4), 2)
        assert not caught
        warn_of_slow_links(catalog.cyclic(4), 2)
    # An automatic rule takes no width, so that it is no way out.
    texts = [str(warning.message) for warning in caught]
    assert ["simulate width=2 finds" in text for text in texts] == [True] * warns
    assert not any("auto" in text for text in texts)
