"""The user's model of a pilot."""

import torch
from torch import nn

from toolkit.plan.model_cut import model_maker


def net():
    return nn.Sequential(nn.Linear(3, 4))


def test_a_function_draws_weights_for_every_seed():
    make, _ = model_maker(net)
    drawn = torch.get_rng_state()
    first, again, other = (make(seed)[0].weight for seed in (0, 0, 1))
    assert (torch.equal(first, again), torch.equal(first, other)) == (True, False)
    assert torch.equal(drawn, torch.get_rng_state())


def test_only_a_function_that_can_be_imported_has_a_name_for_a_command_line():
    assert model_maker(net)[1] == f"{__name__}.net"
    assert model_maker(lambda: net())[1] == ""
    assert model_maker(net())[1] == ""
