"""CyclicDataParallel whose ranks are several devices: it follows a single process in float64."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

from tests.runtime.device_rows import (
    STEPS,
    adamw,
    batches,
    blocks,
    by_columns_and_rows,
    by_sequence,
    normed_blocks,
    sgd,
    single,
)
from tests.runtime.models import assert_same
from tests.stages import in_loops
from tests.thorough import THOROUGH, more, thorough
from toolkit.errors import UserError
from toolkit.model.gathered_weights import shard_parameters
from toolkit.model.loss_parallel import LossParallel
from toolkit.runtime import CyclicDataParallel, StepOptions, join, launch
from toolkit.schedule import catalog

CLIPPED = StepOptions(clip=0.05, ema=0.9)
PLAIN = StepOptions()
CASES = {
    "v1 SGD": (catalog.cyclic(2, 1), sgd, CLIPPED, by_columns_and_rows),
    "v1 AdamW": (catalog.cyclic(2, 1), adamw, PLAIN, by_sequence),
    "v2 SGD": (catalog.cyclic(2), sgd, PLAIN, by_sequence),
    "v2 AdamW": (catalog.cyclic(2), adamw, CLIPPED, by_columns_and_rows),
    "DP": (catalog.data_parallel(2), sgd, CLIPPED, by_columns_and_rows),
    "v2 sharing weights": (catalog.cyclic(2), sgd, CLIPPED, shard_parameters),
}
N_BEFORE = 2


def wrap(world, name, model=None, **options):
    schedule, optimizer, step_options, parallelize = CASES[name]
    return CyclicDataParallel(
        model or blocks(),
        partition="parameters",
        **{
            "optimizer": optimizer,
            "rule": schedule,
            "options": step_options,
            "width": 2,
            "parallelize": parallelize,
            "world": world,
        }
        | options,
    )


def train(net, of_steps, clip=None):
    """Train on the shares of this rank; its devices have the same."""
    for inputs, targets in of_steps:
        x = inputs.chunk(2)[net.world.rank]
        y = targets.chunk(2)[net.world.rank]
        F.mse_loss(net(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        net.optimizer.step()
    return net


def state(net):
    return {
        name.removeprefix("module."): tensor.clone()
        for name, tensor in net.state_dict().items()
    }


def trained(world, name):
    """The weights after some steps, and all; a saved state; the weights of who resumes it."""
    of_steps = batches(2)
    net = train(wrap(world, name), of_steps[:N_BEFORE])
    first = state(net)
    saved = copy.deepcopy((net.state_dict(), net.optimizer.state_dict()))
    last = state(train(net, of_steps[N_BEFORE:]))
    other = wrap(world, name)
    other.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    resumed = state(train(other, of_steps[N_BEFORE:]))
    return {"first": first, "last": last, "resumed": resumed, "saved": saved}


def evaluated(world):
    """What the model computes between steps; the state after further steps, and once more."""
    net = train(wrap(world, "v2 AdamW"), batches(2)[:N_BEFORE])
    net.eval()
    output = net(batches(2)[0][0]).detach()
    net.train()
    saved = copy.deepcopy((net.state_dict(), net.optimizer.state_dict()))
    last = state(train(net, batches(2)[N_BEFORE:]))
    net.load_state_dict(saved[0])
    net.optimizer.load_state_dict(saved[1])
    return output, last, state(train(net, batches(2)[N_BEFORE:]))


def of_ddp(world):
    """What is said of an optimizer's state under DDP."""
    net = train(wrap(world, "DP", options=PLAIN), batches(2)[:1])
    optimizer_state = copy.deepcopy(net.optimizer.state_dict())
    net.synchronize()
    del optimizer_state["cyclic"]
    other = wrap(world, "DP", options=PLAIN)
    other.optimizer.load_state_dict(optimizer_state)
    try:
        train(other, batches(2)[:1])
    except UserError as error:
        return str(error)
    return ""


def clipped_by_the_loop(world):
    """The state under CDP-v2, where each stage is clipped at its update; what DP says."""
    net = wrap(world, "v2 SGD")
    found = state(train(net, batches(2), clip=0.05))
    data_parallel = wrap(world, "DP", options=PLAIN)
    try:
        train(data_parallel, batches(2)[:1], clip=0.05)
    except UserError as error:
        return found, str(error)
    finally:
        data_parallel.optimizer.step()
        data_parallel.synchronize()
    return found, ""


class Averaging(torch.optim.SGD):
    """Evaluates with weights of its own, as schedule-free optimizers do."""

    def train(self):
        pass

    def eval(self):
        pass


def of_dtensors(world):
    """What is said of a model whose weights are sharded already."""
    model = blocks()
    mesh = init_device_mesh("cpu", (world.size,))
    name, weight = next(iter(model[0].named_parameters()))
    sharded = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh))
    parent, _, attribute = name.rpartition(".")
    setattr(model[0].get_submodule(parent), attribute, sharded)
    try:
        CyclicDataParallel(
            model,
            optimizer=sgd,
            rule=CASES["v2 SGD"][0],
            width=2,
            parallelize=by_columns_and_rows,
            world=world,
        )
    except UserError as error:
        return str(error)
    return ""


def refused(world):
    messages = [of_dtensors(world)]
    for options in (
        {"optimizer": lambda parameters: Averaging(parameters, lr=0.1)},
        {"compression": "int8"},
        {"rule": "auto"},
        {"width": 3},
        {"parallelize": LossParallel(by_columns_and_rows)},
    ):
        try:
            wrap(world, "v2 SGD", **options)
        except UserError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def odd_models(world, width):
    """Weights of models with norms and dropout, and of loops of different lengths."""
    options = {}
    if width == 1:
        options = {"width": 1, "parallelize": None}
    found = {}
    for name in ODD_RULES:
        torch.manual_seed(7)
        net = wrap(world, name, normed_blocks(0.3), **options)
        found["dropout", name] = state(train(net, batches(2)))
        net = wrap(world, name, normed_blocks(), **options)
        n_steps = STEPS - net.world.rank  # rank 1 ends a step before the other
        with net.join():
            train(net, batches(2)[:n_steps])
        found["uneven", name] = state(net)
    return found


ODD_RULES = ("v1 SGD", "v2 AdamW", "DP")
ODD_CASES = [(model, rule) for model in ("dropout", "uneven") for rule in ODD_RULES]
TRAINED = more(("v1 AdamW", "v2 AdamW"), CASES)


def job_of_one_device():
    return odd_models(join(device="cpu"), 1)


def job():
    world = join(device="cpu")
    found = {name: trained(world, name) for name in TRAINED}
    found["of DDP"] = of_ddp(world)
    found["evaluated"] = evaluated(world)
    found["clipped"] = clipped_by_the_loop(world)
    found["refused"] = refused(world)
    if THOROUGH:
        found["odd"] = odd_models(world, 2)
    return found


@pytest.fixture(scope="module")
def found():
    return launch(in_loops(job), 4)


def expected(name, n_steps=STEPS):
    schedule, optimizer, options, _ = CASES[name]
    runtime = single(schedule, optimizer, options)
    list(runtime.run(batches(2)[:n_steps]))
    return runtime


@pytest.mark.parametrize("name", TRAINED)
def test_follows_the_single_process(found, name):
    """Whole weights, parameter by parameter, on every device, whichever step it pauses after."""
    first = expected(name, N_BEFORE).module().state_dict()
    last = expected(name).module().state_dict()
    for of_process in found:
        assert_same(of_process[name]["first"], first, 1e-10, 1e-10)
        assert_same(of_process[name]["last"], last, 1e-10, 1e-10)


@pytest.fixture(scope="module")
def of_one_device():
    return launch(in_loops(job_of_one_device), 2)[0]


@thorough
@pytest.mark.parametrize("case", ODD_CASES)
def test_follows_ranks_of_one_device(found, of_one_device, case):
    for of_process in found:
        assert_same(of_process["odd"][case], of_one_device[case], 1e-10, 1e-10)


@pytest.mark.parametrize("name", TRAINED)
def test_a_saved_state_continues(found, name):
    for of_process in found:
        assert_same(of_process[name]["resumed"], of_process[name]["last"], 1e-12, 1e-12)


@pytest.mark.parametrize("name", ["v1 AdamW", "v2 AdamW"])
def test_a_state_has_whole_tensors(found, name):
    """Those of a single process's optimizer."""
    runtime = expected(name, N_BEFORE)
    by_shape = sorted(
        tuple(entry["exp_avg"].shape)
        for stage in runtime.state_dict()["stages"]
        for entry in stage["optimizer"]["state"].values()
    )
    for of_process in found:
        _, optimizer_state = of_process[name]["saved"]
        shapes = [
            tuple(entry["exp_avg"].shape) for entry in optimizer_state["state"].values()
        ]
        assert sorted(shapes) == by_shape


def test_evaluation_is_that_of_the_newest_weights(found):
    runtime = expected("v2 AdamW", N_BEFORE)
    output = runtime.module().eval()(batches(2)[0][0]).detach()
    for of_process in found:
        evaluated_output, *later = of_process["evaluated"]
        torch.testing.assert_close(evaluated_output, output, rtol=1e-10, atol=1e-10)
        for last in later:
            assert_same(last, of_process["v2 AdamW"]["last"], 1e-12, 1e-12)


def test_refuses_the_state_of_an_optimizer_under_ddp(found):
    for of_process in found:
        assert "one that has trained" in of_process["of DDP"]


def test_a_loop_clips_each_stage_by_its_whole_norm(found):
    """As ``StepOptions(clip=...)`` does; under DP it takes the model's, so it is refused."""
    schedule, optimizer, _, _ = CASES["v2 SGD"]
    runtime = single(schedule, optimizer, StepOptions(clip=0.05))
    list(runtime.run(batches(2)))
    for of_process in found:
        weights, message = of_process["clipped"]
        assert "StepOptions(clip=" in message
        assert_same(weights, runtime.module().state_dict(), 1e-10, 1e-10)


def test_refuses(found):
    words = (
        "DTensors with width=2",
        "Averaging with width=2",
        "bf16",
        "'auto' with width=2",
        "width=3 does not divide",
        "LossParallel",
    )
    for of_process in found:
        for message, expected_words in zip(of_process["refused"], words, strict=True):
            assert expected_words in message
