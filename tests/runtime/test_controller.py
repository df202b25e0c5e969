"""A controller's ranks follow the single process, and end as they should."""

import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from tests.missing_packages import without_package
from tests.runtime import conform, models
from tests.runtime.models import assert_same, name_of
from tests.thorough import more, thorough
from toolkit.errors import UserError
from toolkit.model.kernel_work import tensors_in
from toolkit.runtime import (
    Controlled,
    Controller,
    JobFailedError,
    RankError,
    SingleProcess,
)
from toolkit.runtime.process_group import processes
from toolkit.runtime.process_group.machines import this_machine
from toolkit.runtime.process_group.shared_status import Process
from toolkit.schedule import catalog

ROOT = Path(__file__).parents[2]
SCHEDULES = [
    catalog.data_parallel(2),
    catalog.cyclic(2, state="sharded"),
    catalog.cyclic(2, 1, correction="extrapolate"),
    catalog.one_f_one_b(2, 4),
    conform.CHANGING,
]
KEPT_SCHEDULES = [
    catalog.cyclic(2, 1),
    catalog.cyclic(2, state="sharded"),
    catalog.one_f_one_b(2, 2),
]


@pytest.fixture(scope="module")
def controller():
    """Two ranks, which the tests use one after another."""
    with Controller(ranks=2) as found:
        yield found


def arguments(schedule, loss=F.cross_entropy):
    return models.cut(models.residual(), schedule), schedule, conform.sgd, loss


def alone(schedule):
    """A single process that has trained five steps, and the results."""
    runtime = SingleProcess(*arguments(schedule))
    return runtime, list(runtime.run(models.make_batches(schedule.n_microbatches)))


def processes_of(controller):
    return [Process(row["process"]) for row in controller.status()]


def await_end(processes):
    end = time.monotonic() + 60
    while not all(process.gone for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
    return all(process.gone for process in processes)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_follows_the_single_process(controller, schedule):
    batches = models.make_batches(schedule.n_microbatches)
    found = list(controller.train(*arguments(schedule), batches, record=2))
    single, expected = alone(schedule)
    for result, of_single in zip(found, expected, strict=True):
        assert (result.step, result.microbatches) == (
            of_single.step,
            of_single.microbatches,
        )
        torch.testing.assert_close(
            result.losses, of_single.losses, rtol=1e-10, atol=1e-12
        )
    assert_same(controller.module().state_dict(), single.module().state_dict())
    found_state, expected_state = controller.state_dict(), single.state_dict()
    torch.testing.assert_close(
        found_state["stages"], expected_state["stages"], rtol=1e-10, atol=1e-12
    )
    assert_same(found_state["model"], expected_state["model"])
    assert {row["rank"] for row in controller.measurements().by_rank()} == {0, 1}


def test_compressed_messages_follow_the_single_process(controller):
    schedule = catalog.cyclic(2, 1)
    batches = models.make_batches(2)
    list(controller.train(*arguments(schedule), batches, compression="int4"))
    single = SingleProcess(*arguments(schedule), order="scheduled", compression="int4")
    list(single.run(batches))
    assert_same(controller.module().state_dict(), single.module().state_dict())
    found, expected = controller.state_dict(), single.state_dict()
    torch.testing.assert_close(
        found["versions"], expected["versions"], rtol=1e-10, atol=1e-12
    )
    assert found["ranks"].keys() == expected["ranks"].keys()


def test_compressed_activations_follow_the_single_process(controller):
    schedule = catalog.one_f_one_b(2, 4)
    batches = models.make_batches(4)
    list(controller.train(*arguments(schedule), batches, boundary_compression="int4"))
    single = SingleProcess(
        *arguments(schedule), order="scheduled", boundary_compression="int4"
    )
    list(single.run(batches))
    assert_same(controller.module().state_dict(), single.module().state_dict(), 0, 0)
    with pytest.raises(UserError, match="sends none"):
        Controlled(
            *arguments(catalog.cyclic(2)),
            controller=controller,
            boundary_compression="int4",
        )


def test_trainings_and_changed_functions_use_the_same_processes(controller):
    losses, processes = [], []
    for factor in (1.0, 2.0):

        def loss(outputs, targets, factor=factor):
            return factor * F.cross_entropy(outputs, targets)

        runtime = Controlled(*arguments(catalog.cyclic(2), loss), controller=controller)
        losses.append(runtime.step(*models.make_batches(2)[0]).loss)
        processes.append([row["process"] for row in controller.status()])
    assert losses[1] == 2 * losses[0]
    assert processes[0] == processes[1]


def test_a_state_continues_in_the_same_ranks_and_in_new_ones(controller):
    schedule = catalog.cyclic(2, 1)
    single, _ = alone(schedule)
    batches = models.make_batches(2)
    runtime = Controlled(*arguments(schedule), controller=controller)
    list(runtime.run(batches[:3]))
    state = runtime.state_dict()
    for new in (False, True):
        if new:
            for process in processes_of(controller):
                process.kill()
            while controller.processes.ready():
                time.sleep(0.02)
            with pytest.raises(JobFailedError, match="load a state"):
                runtime.module()
        runtime.load_state_dict(copy.deepcopy(state))
        list(runtime.run(batches[3:]))
        assert_same(runtime.module().state_dict(), single.module().state_dict())


def test_switches_in_the_course_of_a_training(controller):
    batches = models.make_batches(2)
    expected = SingleProcess(*arguments(catalog.cyclic(2)))
    found = Controlled(*arguments(catalog.cyclic(2)), controller=controller)
    for runtime in (found, expected):
        list(runtime.run(batches[:2]))
        runtime.switch(catalog.data_parallel(2))
        list(runtime.run(batches[2:]))
    assert_same(found.module().state_dict(), expected.module().state_dict())


def test_batches_without_length_and_a_rank_without_data(controller):
    schedule = catalog.gpipe(2, 4)
    made = (batch for batch in models.make_batches(4))
    with pytest.raises(UserError, match="give n_steps"):
        next(controller.train(*arguments(schedule), made))
    assert len(list(controller.train(*arguments(schedule), made, 5))) == 5


def test_an_exception_names_rank_and_instruction(controller):
    def loss(outputs, targets):
        if os.environ["RANK"] == "1":
            raise RuntimeError("no loss here")
        return F.cross_entropy(outputs, targets)

    with pytest.raises(
        RankError, match=r"rank 1, in step 0 at FORWARD stage 1.*no loss here"
    ):
        list(
            controller.train(
                *arguments(catalog.cyclic(2), loss), models.make_batches(2)
            )
        )
    assert await_end(processes_of(controller))
    assert (
        len(
            list(
                controller.train(*arguments(catalog.cyclic(2)), models.make_batches(2))
            )
        )
        == 5
    )


def test_a_mistake_stays_a_users_error(controller):
    with pytest.raises(UserError, match="scalar"):
        list(
            controller.train(
                *arguments(catalog.cyclic(2), lambda outputs, targets: outputs),
                models.make_batches(2),
            )
        )
    with pytest.raises(UserError, match="multiple of 2"):
        list(
            controller.train(
                *arguments(catalog.cyclic(2)),
                [(torch.zeros(3, 3, 6, 6), torch.zeros(3))],
            )
        )
    with pytest.raises(UserError, match=r"Controller\(ranks=3\)"):
        controller.train(*arguments(catalog.cyclic(3)), models.make_batches(3))
    lock = threading.Lock()
    with pytest.raises(UserError, match="lock"):
        controller.train(
            *arguments(catalog.cyclic(2), lambda *_: lock), models.make_batches(2)
        )


def test_a_killed_rank_is_named(controller):
    steps = controller.train(*arguments(catalog.cyclic(2)), models.make_batches(2, 50))
    next(steps)
    processes = processes_of(controller)
    processes[1].kill()
    with pytest.raises(JobFailedError, match=r"rank 1 .*(died|ended by signal 9)"):
        list(steps)
    assert await_end(processes)


@pytest.mark.parametrize("schedule", KEPT_SCHEDULES, ids=name_of)
def test_training_continues_from_the_kept_state_when_ranks_are_lost(
    controller, schedule
):
    batches = iter(models.make_batches(2, 12))  # each is read once
    runtime = Controlled(*arguments(schedule), controller=controller, keep_every=5)
    found = []
    for result in runtime.run(batches, 12):
        found.append(result)
        if result.step in (3, 8):
            processes_of(controller)[result.step % 2].kill()
    expected = SingleProcess(*arguments(schedule))
    of_single = list(expected.run(models.make_batches(2, 12)))
    assert [result.step for result in found] == [result.step for result in of_single]
    for one, other in zip(found, of_single, strict=True):
        torch.testing.assert_close(one.losses, other.losses, rtol=1e-10, atol=1e-12)
    assert len(runtime.recoveries) == 2
    assert all(0 <= lost.step - lost.restart <= 5 for lost in runtime.recoveries)
    assert runtime.kept["steps_done"] == 12
    for process in processes_of(controller):
        process.kill()
    while controller.processes.ready():
        time.sleep(0.02)
    assert_same(runtime.module().state_dict(), expected.module().state_dict())


@pytest.mark.parametrize("schedule", KEPT_SCHEDULES, ids=name_of)
def test_state_is_whole_though_a_rank_is_lost_while_it_is_asked_for(
    controller, schedule
):
    """At random moments, from before the call until after it; the bits are the same."""
    runtime = Controlled(*arguments(schedule), controller=controller, keep_every=2)
    list(runtime.run(models.make_batches(2, 4)))
    expected = copy.deepcopy(runtime.state_dict())
    assert len(tensors_in(expected)) > 10
    moments = random.Random(0)
    for n_lost in range(1, 5):
        victim = processes_of(controller)[n_lost % 2]
        timer = threading.Timer(moments.uniform(0, 0.03), victim.kill)
        timer.start()
        while len(runtime.recoveries) < n_lost:
            found = runtime.state_dict()
            assert found["steps_done"] == 4
            assert all(map(torch.equal, tensors_in(found), tensors_in(expected)))
        timer.join()
    assert {lost.restart for lost in runtime.recoveries} == {4}
    list(runtime.run(models.make_batches(2, 6)[4:]))
    single = SingleProcess(*arguments(schedule))
    list(single.run(models.make_batches(2, 6)))
    assert_same(runtime.module().state_dict(), single.module().state_dict())


@thorough
@pytest.mark.parametrize("schedule", KEPT_SCHEDULES, ids=name_of)
def test_kills_at_random_moments_are_healed_to_the_same_bits(controller, schedule):
    """Of stretches of training and of gathers of state; one kill in each of them.

    ``KILLS=40 pytest -k random_moments`` raises their number, for each of the schedules.
    """
    n_kills = int(os.environ.get("KILLS", more(2, 14)))
    batches = models.make_batches(2, 4 * n_kills)

    def train(runtime, index):
        """Train four steps; return losses and all state."""
        results = list(runtime.run(batches[4 * index : 4 * index + 4]))
        return (
            results,
            copy.deepcopy(runtime.state_dict()),
            runtime.module().state_dict(),
        )

    undisturbed = Controlled(*arguments(schedule), controller=controller, keep_every=2)
    expected, seconds = [], []
    for index in range(n_kills):
        begin = time.monotonic()
        expected.append(copy.deepcopy(train(undisturbed, index)))
        seconds.append(time.monotonic() - begin)

    runtime = Controlled(*arguments(schedule), controller=controller, keep_every=2)
    moments = random.Random(len(schedule.name))
    for index in range(n_kills):
        n_recoveries = len(runtime.recoveries)
        victim = moments.choice(processes_of(controller))
        timer = threading.Timer(moments.uniform(0, min(seconds)), victim.kill)
        timer.start()
        results, state, weights = train(runtime, index)
        timer.join()
        of_expected, expected_state, expected_weights = expected[index]
        for result, other in zip(results, of_expected, strict=True):
            assert result.step == other.step
            assert torch.equal(result.losses, other.losses)
        for found, wanted in ((state, expected_state), (weights, expected_weights)):
            assert len(tensors_in(found)) == len(tensors_in(wanted)) > 0
            assert all(map(torch.equal, tensors_in(found), tensors_in(wanted)))
        # A kill after the last answer is healed by the next call.
        while len(runtime.recoveries) == n_recoveries:
            runtime.state_dict()
    assert len(runtime.recoveries) == n_kills
    single = SingleProcess(*arguments(schedule))
    list(single.run(batches))
    assert_same(runtime.module().state_dict(), single.module().state_dict())


def test_a_rank_that_is_lost_before_the_first_step_is_replaced(controller, tmp_path):
    """As it is made, and before its state is kept: it begins with the stages' weights."""
    schedule = catalog.cyclic(2, 1)
    expected = SingleProcess(*arguments(schedule))
    list(expected.run(models.make_batches(2, 4)))
    was_lost = tmp_path / "was_lost"

    def optimizer(parameters):
        if os.environ.get("RANK") == "1" and not was_lost.exists():
            was_lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return conform.sgd(parameters)

    stages, *_, loss = arguments(schedule)
    options = {"controller": controller, "keep_every": 2}
    runtime = Controlled(stages, schedule, optimizer, loss, **options)
    assert [lost.restart for lost in runtime.recoveries] == [0]
    processes_of(controller)[0].kill()
    list(runtime.run(models.make_batches(2, 4)))
    assert len(runtime.recoveries) == 2
    assert_same(runtime.module().state_dict(), expected.module().state_dict())


def test_a_rank_lost_before_its_first_step_is_in_no_step_of_the_training_before(
    controller,
):
    schedule = catalog.cyclic(2, 1)
    list(controller.train(*arguments(schedule), models.make_batches(2, 3)))
    assert all("in step 2" in row["at"] for row in controller.status())

    def optimizer(parameters):
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return conform.sgd(parameters)

    stages, *_, loss = arguments(schedule)
    with pytest.raises(JobFailedError, match="rank 1") as caught:
        list(
            controller.train(
                stages, schedule, optimizer, loss, models.make_batches(2, 3)
            )
        )
    of_rank_1, _, _ = str(caught.value).partition(";")
    assert "step" not in of_rank_1


def test_a_loaded_state_takes_the_place_of_the_kept_one_of_its_step(controller):
    """Also where both are of the same step, and a rank is lost before the next."""
    schedule = catalog.cyclic(2, 1)
    runtime = Controlled(*arguments(schedule), controller=controller, keep_every=2)
    list(runtime.run(models.make_batches(2, 2)))
    loaded = copy.deepcopy(runtime.state_dict())
    for tensor in loaded["model"].values():
        if tensor.is_floating_point():
            tensor.zero_()
    runtime.load_state_dict(loaded)
    expected = copy.deepcopy(runtime.module().state_dict())
    assert not any(
        tensor.any() for tensor in expected.values() if tensor.is_floating_point()
    )
    processes_of(controller)[1].kill()
    assert all(
        map(
            torch.equal, tensors_in(runtime.module().state_dict()), tensors_in(expected)
        )
    )
    assert len(runtime.recoveries) <= 1


@pytest.mark.parametrize("lost", [False, True], ids=["on its ranks", "after a loss"])
def test_a_refused_state_leaves_the_training_as_it_was(controller, lost):
    schedule = catalog.cyclic(2, 1)
    batches = models.make_batches(2, 4)
    runtime = Controlled(*arguments(schedule), controller=controller, keep_every=2)
    list(runtime.run(batches[:2]))
    refused = copy.deepcopy(runtime.state_dict())
    refused["steps_done"] = 1
    name = next(iter(refused["model"]))
    refused["model"][name] = torch.zeros(1)
    if lost:
        processes_of(controller)[1].kill()
        while controller.processes.ready():
            time.sleep(0.02)
    with pytest.raises(UserError):
        runtime.load_state_dict(refused)
    assert runtime.steps_done == 2
    list(runtime.run(batches[2:]))
    expected = SingleProcess(*arguments(schedule))
    list(expected.run(batches))
    assert_same(runtime.module().state_dict(), expected.module().state_dict())


def test_an_older_state_takes_the_place_of_the_kept_one(controller):
    """Ranks that continued from the later one would not meet the caller's step, and wait."""
    schedule = catalog.cyclic(2, 1)
    batches = models.make_batches(2, 12)
    runtime = Controlled(*arguments(schedule), controller=controller, keep_every=50)
    list(runtime.run(batches[:1]))
    older = copy.deepcopy(runtime.state_dict())
    list(runtime.run(batches[1:3]))
    assert runtime.kept["steps_done"] == 3
    runtime.load_state_dict(older)
    for result in runtime.run(batches[1:], 11):
        assert runtime.kept["steps_done"] == 1
        if result.step == 2:  # the ranks do not have the data of all steps yet
            processes_of(controller)[1].kill()
    assert [lost.restart for lost in runtime.recoveries] == [1]
    expected = SingleProcess(*arguments(schedule))
    list(expected.run(batches))
    assert_same(runtime.module().state_dict(), expected.module().state_dict())


def test_a_rank_that_is_lost_again_and_again_ends_the_training(controller):
    def loss(outputs, targets):
        os.kill(os.getpid(), signal.SIGKILL)

    runtime = Controlled(
        *arguments(catalog.cyclic(2), loss), controller=controller, keep_every=5
    )
    # Both ranks call the loss at the same time: either may be seen to end first.
    with pytest.raises(JobFailedError, match=r"rank [01] (was ended|has died)"):
        list(runtime.run(models.make_batches(2)))
    assert len(runtime.recoveries) == 2


@pytest.mark.parametrize("how", ["break", "interrupt"])
def test_what_is_not_exhausted_ends_the_ranks_and_can_be_repeated(controller, how):
    schedule = catalog.cyclic(2)
    steps = controller.train(*arguments(schedule), models.make_batches(2, 50))
    next(steps)
    processes = processes_of(controller)
    if how == "break":
        steps.close()
    else:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            assert [time.sleep(0.05) for _ in steps]
        steps.close()
    assert await_end(processes)
    with pytest.raises(UserError, match="not exhausted"):
        controller.module()
    assert (
        len(list(controller.train(*arguments(schedule), models.make_batches(2)))) == 5
    )


def test_status_is_a_table_of_live_ranks(controller):
    list(controller.train(*arguments(catalog.cyclic(2)), models.make_batches(2)))
    rows = controller.status()
    assert [(row["rank"], row["alive"]) for row in rows] == [(0, True), (1, True)]
    assert all("in step 4" in row["at"] for row in rows)
    assert controller._repr_html_().count("<tr>") == 3


def test_closing_twice_and_before_use():
    unused = Controller(ranks=2)
    with pytest.raises(UserError, match="call train"):
        unused.module()
    assert unused.status() == []
    unused.close()
    unused.close()


def test_the_end_of_the_caller_leaves_no_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.runtime.test_controller import *\n"
        "controller = Controller(ranks=2)\n"
        "steps = controller.train(*arguments(catalog.cyclic(2)), models.make_batches(2, 1000))\n"
        "next(steps)\n"
        "print(*controller.processes.process_ids.values(), flush=True)\n"
        "for _ in steps: pass\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        processes = [Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(processes) == 2
        parent.kill()
    assert await_end(processes)


def test_ranks_of_several_machines_act_as_one_job():
    def place():
        return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]

    def machines(n_ranks):
        each = (range(2), range(2, 3))
        return [replace(this_machine(len(ranks))[0], ranks=ranks) for ranks in each]

    with (
        mock.patch.object(processes, "this_machine", machines),
        processes.Processes(3) as made,
    ):
        assert made.call(place) == [["0", "0", "2"], ["1", "1", "2"], ["2", "0", "1"]]
        made.begin(time.sleep, 60)
        os.kill(made.process_ids[2], signal.SIGKILL)
        with pytest.raises(JobFailedError, match="rank 2"):
            list(made.reports())
        assert made.call(place)[2] == ["2", "0", "1"]


def test_other_machines_need_ray(monkeypatch):
    """It is refused before any rank starts."""
    without_package(monkeypatch, "ray")
    with pytest.raises(UserError, match=r"hosts= .* pip install ray"):
        Controller(2, hosts=["10.0.0.1"])
