"""Devices that share weights, and gather them to read them, train as a single process does."""

import pytest
import torch
from torch import nn

from tests.model import gathered_models
from tests.model.gathered_models import CASES, MODELS, OPS
from tests.runtime import models
from tests.runtime.models import assert_same
from tests.thorough import more, thorough
from toolkit.errors import UserError
from toolkit.model.gathered_weights import sharded_dimension
from toolkit.model.tensor_parallel import default_parallelize
from toolkit.runtime import SingleProcess, launch

NAMES = more(
    ["DP", "CDP-v1, Nesterov", "CDP-v2", "CDP-v2, momentum", "1F1B, Nesterov", "ZB"],
    [*CASES],
)


@pytest.fixture(scope="module")
def found():
    """What 2 ranks of 2 devices find; processes start once."""
    return launch(gathered_models.train_all, 4, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_follows_the_single_process(found, name):
    """Weights, running statistics and averages, on every process."""
    runtime = gathered_models.runtime_of(SingleProcess, *CASES[name])
    expected = gathered_models.after(
        runtime, gathered_models.batches_of(CASES[name][0])
    )
    for of_process in found:
        state, averages = of_process[name]
        assert_same(state, expected, 1e-10, 1e-10)
        assert_same(averages, runtime.averages(), 1e-10, 1e-10)


def test_the_cases_train():
    """Also the running statistics, which :func:`test_follows_the_single_process` compares."""
    schedule, *_ = CASES["CDP-v2"]
    runtime = gathered_models.runtime_of(SingleProcess, *CASES["CDP-v2"])
    after = gathered_models.after(runtime, gathered_models.batches_of(schedule))
    before = models.residual().state_dict()
    for name, tensor in before.items():
        assert not torch.equal(after[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_odd_models_follow_the_single_process(found, name):
    expected = gathered_models.odd_model(SingleProcess, name)
    for of_process in found:
        assert_same(of_process["models"][name], expected, 1e-10, 1e-10)


@thorough
@pytest.mark.parametrize("width", [3, 4])
def test_other_widths_follow_the_single_process(width):
    """Each of three devices has a row of every kernel, and each of four a channel."""
    runtime = gathered_models.runtime_of(SingleProcess, *gathered_models.ON_ONE_RANK)
    of_steps = gathered_models.batches_of(gathered_models.ON_ONE_RANK[0])
    expected = gathered_models.after(runtime, of_steps)
    for state in launch(gathered_models.on_one_rank, width):
        assert_same(state, expected, 1e-10, 1e-10)


def test_formats_are_those_of_ranks_of_one_device(found):
    """In 16 bits a kernel of whole weights rounds alike, whoever gathered them."""
    for expected in launch(gathered_models.in_formats, 2):
        for of_process in found:
            for name, state in of_process["formats"].items():
                assert_same(state, expected[name], rtol=0, atol=1e-6)


def test_a_state_moves_between_widths(found):
    """From one device a rank to two, bit by bit, and back."""
    of_steps = gathered_models.batches_of(gathered_models.RESUMED[0])
    reference = gathered_models.runtime_of(SingleProcess, *gathered_models.RESUMED)
    expected = gathered_models.after(reference, of_steps)
    for of_process in found:
        state, taken_over, later = of_process["resumed"]
        torch.testing.assert_close(taken_over, state, rtol=0, atol=0, equal_nan=True)
        runtime = gathered_models.runtime_of(SingleProcess, *gathered_models.RESUMED)
        runtime.load_state_dict(later)
        assert_same(
            gathered_models.after(runtime, of_steps[3:]), expected, 1e-10, 1e-10
        )


def test_a_device_has_half_of_the_matrices(found):
    n_elements = 0
    n_halved = 0
    for parameter in models.residual().parameters():
        n_elements += parameter.numel()
        n_halved += parameter.numel() // (2 if parameter.dim() > 1 else 1)
    assert n_halved < 0.6 * n_elements
    for of_process in found:
        for kind in ("weights", "momenta"):
            assert of_process["sizes"][1][kind] == 8 * n_elements
            assert of_process["sizes"][2][kind] == 8 * n_halved


@pytest.mark.parametrize("name", OPS)
def test_an_op_reads_the_whole_weight(found, name):
    """Its gradient is the whole weight's, and takes no message."""
    expected = gathered_models.reading_in_one_process(name)
    for of_process in found:
        for dimension in (0, 1):
            reading = of_process["ops"][name, dimension]
            torch.testing.assert_close(reading.output, expected.output)
            torch.testing.assert_close(reading.gradient, expected.gradient)


def test_autograd_keeps_the_shard(found):
    """The transpose that a linear layer reads is no copy; its backward gathers once more."""
    _, weight = gathered_models.operands()
    for of_process in found:
        for dimension in (0, 1):
            reading = of_process["ops"]["matmul", dimension]
            assert reading.forward == ["all_gather_into_tensor"]
            # For the gradient of x; that of the weight takes no message.
            assert reading.backward == ["all_gather_into_tensor"]
            assert reading.kept_bytes == weight.nbytes / 2


def test_refuses(found):
    for of_process in found:
        fully_sharded, in_place = of_process["refused"]
        assert "shard_parameters" in fully_sharded
        assert "in place" in in_place


@pytest.mark.parametrize(
    ("shape", "width", "dimension"),
    [
        ((64, 3, 7, 7), 2, 0),
        ((64, 3, 7, 7), 3, 1),
        ((10, 512), 4, 1),
        ((5, 7), 2, 1),
        ((1, 3), 4, None),
        ((512,), 2, None),
        ((), 2, None),
    ],
)
def test_the_dimension_that_devices_share(shape, width, dimension):
    assert sharded_dimension(torch.empty(shape), width) == dimension


def test_refuses_a_model_of_vectors():
    with pytest.raises(UserError, match=r"width=2: .*BatchNorm1d"):
        default_parallelize(nn.BatchNorm1d(4), 2)
