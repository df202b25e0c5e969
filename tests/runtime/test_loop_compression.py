"""CyclicDataParallel with messages of codes: the trajectory, states, bytes, refusals."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.runtime import models, test_compressed_sums
from tests.runtime.conform import sgd
from tests.runtime.test_compressed_sums import N_BEFORE, N_STEPS, SCHEDULES
from tests.runtime.train_by_loop import state, train
from tests.stages import in_loops
from toolkit.cost import Hardware, compressed_costs, profile, simulate
from toolkit.cost.compression import MESSAGE_CODES
from toolkit.errors import UserError
from toolkit.runtime import (
    CyclicDataParallel,
    SingleProcess,
    join,
    launch,
    loop_runtime,
)
from toolkit.runtime.compressed_sums import SumCompressor
from toolkit.runtime.executor import Executor
from toolkit.runtime.loop_runtime import LoopRuntime
from toolkit.runtime.process_group.world import World
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, Buffer, Instruction, catalog

# A loop has whole models. What 4 bits round to 8 where the state is sharded is as with int8.
CASES = [
    case
    for case in test_compressed_sums.CASES
    if case not in {("v2 sharded", "int4"), ("v2 and model parallel", "int4")}
]


def wrap(name, compression):
    return CyclicDataParallel(
        models.residual_for(compression),
        optimizer=sgd,
        rule=SCHEDULES[name],
        compression=compression,
        world=join(device="cpu"),
    )


def resumed(net, saved, batches):
    """The state and what is saved, after ``net`` has continued from ``saved``."""
    net.load_state_dict(copy.deepcopy(saved[0]))
    net.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    return ended(net, batches)


def ended(net, batches):
    found = state(train(net, batches))
    return found, copy.deepcopy(net.optimizer.state_dict()["cyclic"])


def trained(name, compression):
    """What the whole loop leaves, and what two others that continue a state that a rank saved."""
    schedule = SCHEDULES[name]
    batches = models.make_batches(schedule.n_microbatches, N_STEPS)
    net = train(wrap(name, compression), batches[:N_BEFORE])
    # Rank 2 reads the state alone, once the others are ahead by the steps whose weights they have.
    n_ahead = min(map(min, schedule.staleness))
    keys = [f"{name} {compression} {rank} is ahead" for rank in (0, 1)]
    saved = None
    if net.world.rank == 2:
        net.world.store.wait(keys)
        saved = copy.deepcopy((net.state_dict(), net.optimizer.state_dict()))
        n_ahead = 0
    else:
        train(net, batches[N_BEFORE : N_BEFORE + n_ahead])
        net.world.store.set(keys[net.world.rank], "")
    whole = ended(net, batches[N_BEFORE + n_ahead :])
    saved = net.world.gather(saved, "saved states")[2]
    others = [
        resumed(wrap(name, compression), saved, batches[N_BEFORE:]),
        resumed(net, saved, batches[N_BEFORE:]),
    ]
    return whole, others


def of_short_programs():
    """The state after all steps, with a program for each step."""
    with mock.patch.multiple(loop_runtime, FIRST_WINDOW=1, WINDOW=1):
        net = wrap("v1 rotated", "int4")
        return state(train(net, models.make_batches(3, N_STEPS)))


def kept_messages(net):
    """The versions of stage 0 whose messages a rank keeps, at the end."""
    compressor = net._loop._session.runtime._compressors[net.world.rank]
    return [version for stage, version in compressor.weights.messages if stage == 0]


def messages_of_a_long_loop():
    net = train(wrap("v1", "int8"), models.make_batches(3, 12))
    net.synchronize()
    return kept_messages(net)


def frozen():
    """What ranks keep as a weight of stage 1 is frozen, and what the next stages take of it."""
    net = wrap("v1", "int8")
    batches = models.make_batches(3, N_STEPS)
    train(net, batches[:N_BEFORE])
    saved = net.optimizer.state_dict()["cyclic"]
    net.module.get_parameter(saved["stages"][1][0]).requires_grad_(False)
    loaded = []
    load = LoopRuntime.load_state_dict

    def noted(runtime, state_dict):
        loaded.append(state_dict["ranks"])
        load(runtime, state_dict)

    with mock.patch.object(LoopRuntime, "load_state_dict", noted):
        train(net, batches[N_BEFORE:])
    net.synchronize()
    return saved["ranks"], loaded


def refused():
    """What is refused where a state of compressed messages meets none."""
    net = train(wrap("v1", "int8"), models.make_batches(3, 2))
    saved = net.optimizer.state_dict()
    other = wrap("v1", "none")
    other.optimizer.load_state_dict(saved)
    try:
        train(other, models.make_batches(3, 1))
    except UserError as error:
        return str(error)
    return ""


def sent(name, compression):
    """Bytes that this rank sends of the messages of a program of all steps."""
    schedule = SCHEDULES[name]
    rank = dist.get_rank()
    program = schedule.lower(N_STEPS)
    expected = {key_of(i) for i in program.ranks[rank] if i.action == Action.SEND}
    sent_bytes = Counter()
    send = Executor._send

    def noted(executor, position, payload):
        n_bytes = send(executor, position, payload)
        sent_bytes[key_of(executor._instructions[position])] += n_bytes
        return n_bytes

    with mock.patch.object(Executor, "_send", noted):
        net = train(wrap(name, compression), models.make_batches(3, N_STEPS))
        net.synchronize()
        dist.barrier()
    return sum(n_bytes for key, n_bytes in sent_bytes.items() if key in expected)


def key_of(i):
    return i.buffer, i.stage, i.step if i.buffer == Buffer.GRADIENT else i.version


def job():
    join(device="cpu")
    found = {case: trained(*case) for case in CASES}
    found["short programs"] = of_short_programs()
    found["messages"] = messages_of_a_long_loop()
    found["frozen"] = frozen()
    found["refused"] = refused()
    found["bytes"] = {case: sent(*case) for case in CASES}
    return found


@pytest.fixture(scope="module")
def found():
    return launch(in_loops(job), 3)


def single(name, compression):
    schedule = SCHEDULES[name]
    stages = models.cut(models.residual_for(compression), schedule)
    runtime = SingleProcess(
        stages,
        schedule,
        sgd,
        F.cross_entropy,
        order="scheduled",
        compression=compression,
    )
    list(runtime.run(models.make_batches(schedule.n_microbatches, N_STEPS)))
    return runtime


# The trajectory


@pytest.mark.parametrize("case", CASES, ids=str)
def test_follows_the_single_process(found, case):
    """Weights, and what is kept for the next messages."""
    runtime = single(*case)
    expected = runtime.state_dict()
    for of_rank in found:
        (weights, saved), _ = of_rank[case]
        models.assert_same(weights, expected["model"], 1e-10, 1e-10)
        assert saved["ranks"].keys() == expected["ranks"].keys()
        n_errors = 0
        for rank, entries in expected["ranks"].items():
            for stage, errors in entries["errors"].items():
                found_errors = saved["ranks"][rank]["errors"][stage]
                models.assert_same(found_errors, errors, 1e-10, 1e-10)
                n_errors += len(errors)
        assert n_errors > 0
        travelling = {}
        for versions in expected["versions"]:
            travelling |= versions[N_STEPS]
        models.assert_same(saved["versions"][N_STEPS], travelling, 1e-10, 1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_that_one_rank_saved_continues_with_the_same_bits(found, case):
    """In another instance and in the same, whatever the other ranks had sent by then."""
    for of_rank in found:
        (weights, saved), others = of_rank[case]
        assert len(others) == 2
        for other_weights, other_saved in others:
            models.assert_same(other_weights, weights, 0, 0)
            torch.testing.assert_close(
                other_saved["ranks"], saved["ranks"], rtol=0, atol=0
            )


def test_the_length_of_programs_changes_nothing(found):
    for of_rank in found:
        (weights, _), _ = of_rank["v1 rotated", "int4"]
        models.assert_same(of_rank["short programs"], weights, 0, 0)


def test_messages_of_old_versions_are_freed(found):
    """The owner keeps those of the versions that the next step may read."""
    for of_rank in found:
        assert len(of_rank["messages"]) <= 4
    assert any(of_rank["messages"] for of_rank in found)


def test_stages_of_other_weights_begin_without_errors(found):
    for of_rank in found:
        saved, (loaded,) = of_rank["frozen"]
        n_errors = 0
        for rank, entries in saved.items():
            errors = dict(entries["errors"])
            n_errors += errors.pop(1, None) is not None
            torch.testing.assert_close(loaded[rank]["errors"], errors, rtol=0, atol=0)
            assert not errors or errors.keys() == {0, 2}
        assert n_errors == 2  # the last rank hands no sum on


def test_bytes_are_those_predicted(found):
    x = torch.zeros(3, 1, 6, 6, dtype=torch.float64)
    for name, compression in CASES:
        schedule = SCHEDULES[name]
        stages = models.cut(models.residual_for(compression), schedule)
        costs = profile(stages, x)
        costs = compressed_costs(costs, compression, item_bytes=8, state=schedule.state)
        program = schedule.lower(N_STEPS).verify()
        predicted = simulate(program, costs, Hardware("test", 1e9, 1e9, 1e9))
        measured = [of_rank["bytes"][name, compression] for of_rank in found]
        assert measured == [*predicted.bytes_sent()], name


# A rank that is ahead

SEND = Instruction(0, Action.SEND, stage=0, step=0, buffer=Buffer.GRADIENT, peers=(1,))


def test_errors_of_steps_that_another_rank_may_still_read():
    """With a lead of 1 the errors of 3 steps are kept; a loaded one is of no step."""
    compressor = SumCompressor(MESSAGE_CODES["int8"])
    compressor.load({0: {1: torch.full((4,), 0.125)}})
    compressor.lead = 1
    errors = {0: torch.full((4,), 0.125)}
    for step in range(5):
        numbers = torch.rand(4, generator=torch.Generator().manual_seed(step))
        send = SEND._replace(step=step)
        compressor.compress(send, GradientSum({"w": numbers}), {"w"})
        errors[step + 1] = compressor.errors[0][1]
        for steps_done in range(max(0, step - 1), step + 2):
            (error,) = compressor.errors_after(steps_done)[0].values()
            assert torch.equal(error, errors[steps_done])
    assert len({tuple(error.tolist()) for error in errors.values()}) == 6
    assert not compressor.errors_after(2)


# Refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rule": "dp"}, "cdp_v1"),
        ({"rule": "dp", "state": "sharded"}, "cdp_v1"),
        ({"rule": catalog.cyclic(2, groups=1)}, "cdp_v1"),
        ({"rule": "cdp_v1", "compression": "int3"}, "int3"),
        ({"compression": "none", "boundary_compression": "int8"}, "CDP-v2 sends none"),
    ],
)
def test_refuses_what_is_not_handed_on_as_the_loop_begins(arguments, words):
    world = World(0, 2, torch.device("cpu"), "gloo", watch=None, store=None)
    options = {"compression": "int8", "world": world, "optimizer": sgd} | arguments
    with pytest.raises(UserError, match=words):
        CyclicDataParallel(models.residual(), **options)


def test_refuses_a_state_of_compressed_messages_without_them(found):
    for of_rank in found:
        assert "compression=int8" in of_rank["refused"]
