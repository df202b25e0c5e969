"""Steps that are replayed train as those that are computed, bit for bit."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.compiling import counted_graphs
from tests.runtime.tape import emulated_graphs
from tests.thorough import more, thorough
from toolkit.model import build, partition
from toolkit.runtime import SingleProcess, StepOptions, separable
from toolkit.runtime import capture as capture_module
from toolkit.runtime.meters.operations import count_operations
from toolkit.schedule import after, catalog
from toolkit.schedule.staleness import RandomDelay

N_MICROBATCHES = 4
N_STAGES = 2
BATCH = 2
SIZE = 8
N_STEPS = 50

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
adamw = partial(torch.optim.AdamW, lr=1e-3)


def decaying(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + 0.1 * step)
    )


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    shape = N_MICROBATCHES * BATCH, 3, SIZE, SIZE
    return [
        (
            torch.randn(shape, dtype=torch.float64, generator=generator),
            torch.randint(10, shape[:1], generator=generator),
        )
        for _ in range(N_STEPS)
    ]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build("resnet8", 10, SIZE).double()


def make(
    model, schedule, *, optimizer=sgd, loss=F.cross_entropy, scheduler=None, **arguments
):
    example = torch.empty(BATCH, 3, SIZE, SIZE, dtype=torch.float64)
    stages = partition(copy.deepcopy(model), N_STAGES, example)
    return SingleProcess(
        stages, schedule, optimizer, loss, lr_scheduler=scheduler, **arguments
    )


def results_of(runtime, batches):
    """Train; return all losses and outputs."""
    return [
        (result.losses.clone(), result.outputs.clone())
        for result in (runtime.step(*batch) for batch in batches)
    ]


def assert_identical(runtime, expected):
    mine, others = runtime.module().state_dict(), expected.module().state_dict()
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, others[name]), name
    for name, tensor in runtime.averages().items():
        assert torch.equal(tensor, expected.averages()[name]), name


def cyclic(**options):
    return catalog.cyclic(N_MICROBATCHES, n_stages=N_STAGES, **options)


def data_parallel(**options):
    return catalog.data_parallel(N_MICROBATCHES, n_stages=N_STAGES, **options)


CASES = {
    "DP": (data_parallel(), {}),
    "CDP-v1": (cyclic(delay=1), {}),
    "CDP-v2": (cyclic(), {}),
    "delay 2": (data_parallel(delay=2), {}),
    "extrapolated": (cyclic(correction="extrapolate"), {}),
    "extrapolated from two versions": (
        data_parallel(delay=[[2, 1, 1, 0]] * N_STAGES, correction="extrapolate"),
        {},
    ),
    "predicted by the optimizer": (
        cyclic(correction="optimizer_step"),
        {"optimizer": adamw, "scheduler": decaying},
    ),
    "compensated": (cyclic(delay=1, correction="compensate"), {}),
    "AdamW, clipping, average, decay": (
        cyclic(delay=1),
        {
            "optimizer": adamw,
            "scheduler": decaying,
            "options": StepOptions(clip=0.5, clip_by="model", ema=0.9),
        },
    ),
    "clipping by stage": (cyclic(), {"options": StepOptions(clip=0.5)}),
    "recomputed": (cyclic(), {"options": StepOptions(checkpoint="all")}),
    "fused norms": (cyclic(), {"options": StepOptions(norms="fused")}),
    "channels last": (cyclic(), {"options": StepOptions(channels_last=True)}),
    "a delay of each stage and micro-batch": (
        data_parallel(delay=[[0, 1, 2, 1], [1, 0, 0, 2]]),
        {},
    ),
    "recomputed in one stage": (cyclic(), {"options": StepOptions(checkpoint=[0])}),
    "accumulated": (cyclic(accumulate=2), {}),
}
USUAL = (
    "CDP-v2",
    "extrapolated",
    "AdamW, clipping, average, decay",
    "recomputed",
    "accumulated",
)


@pytest.mark.parametrize("case", more(USUAL, CASES))
def test_replayed_steps_train_bit_for_bit_alike(case, model, batches, monkeypatch):
    schedule, arguments = CASES[case]
    expected = make(model, schedule, **arguments)
    with emulated_graphs(monkeypatch):
        runtime = make(model, schedule, **arguments)
    for mine, others in zip(
        results_of(runtime, batches), results_of(expected, batches), strict=True
    ):
        assert torch.equal(mine[0], others[0])
        assert torch.equal(mine[1], others[1])
    assert_identical(runtime, expected)
    capture = runtime._engine.capture
    # All but the first steps: two or three kinds of steps take turns.
    assert capture.n_replayed >= N_STEPS - 12
    assert capture.n_replayed + capture.n_computed == N_STEPS


@pytest.mark.parametrize("schedule", [cyclic(), data_parallel()], ids=["CDP-v2", "DP"])
def test_a_state_taken_in_mid_training_continues_alike(
    schedule, model, batches, monkeypatch
):
    """New versions lie at other addresses, so their steps are recorded anew."""
    expected = make(model, schedule)
    results_of(expected, batches[:40])
    with emulated_graphs(monkeypatch):
        first, second = make(model, schedule), make(model, schedule)
    with emulated_graphs(monkeypatch):
        results_of(first, batches[:20])
        state = first.state_dict()
        results_of(first, batches[20:25])
        for runtime in (first, second):  # one goes back, one begins there
            runtime.load_state_dict(state)
            results_of(runtime, batches[20:40])
            assert runtime._engine.capture.n_replayed > 10
            assert_identical(runtime, expected)


def test_a_state_does_not_change_while_training_goes_on(model, batches, monkeypatch):
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic())
    results_of(runtime, batches[:10])
    state = runtime.state_dict()
    weights = {name: tensor.clone() for name, tensor in state["model"].items()}
    results = results_of(runtime, batches[10:20])
    losses = [losses.clone() for losses, _ in results]
    results_of(runtime, batches[20:30])
    assert all(torch.equal(weights[name], state["model"][name]) for name in weights)
    assert all(
        torch.equal(mine, before)
        for (mine, _), before in zip(results, losses, strict=True)
    )


OPTIMIZERS = {
    "Nesterov": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3, decoupled_weight_decay=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


@pytest.mark.parametrize("name", more(["Nesterov", "NAdam"], OPTIMIZERS))
def test_any_optimizer_updates_replayed_gradients(name, model, batches, monkeypatch):
    expected = make(model, cyclic(), optimizer=OPTIMIZERS[name])
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic(), optimizer=OPTIMIZERS[name])
    results_of(expected, batches)
    results_of(runtime, batches)
    assert runtime._engine.capture.n_replayed >= N_STEPS - 12
    assert_identical(runtime, expected)


@thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracing
def test_compiled_stages_are_replayed(model, batches, monkeypatch):
    """All is compiled before it is recorded: a recording compiles nothing."""
    graphs = counted_graphs(monkeypatch)
    options = StepOptions(compile="default")
    expected = make(model, cyclic(), options=options)
    results_of(expected, batches)
    n_graphs = len(graphs)
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic(), options=options)
    results_of(runtime, batches)
    assert len(graphs) == 2 * n_graphs
    assert runtime._engine.capture.n_replayed >= N_STEPS - 12
    assert_identical(runtime, expected)


class RememberingSGD(torch.optim.SGD):
    """Keeps the last gradients, not copies of them, as plain PyTorch allows."""

    def step(self):
        parameters = self.param_groups[0]["params"]
        for k, parameter in enumerate(parameters):
            before = self.state.get(k, parameter.grad)
            parameter.data.sub_(parameter.grad + before, alpha=0.02)
            self.state[k] = parameter.grad


def test_an_optimizer_may_keep_gradients(model, batches, monkeypatch):
    optimizer = partial(RememberingSGD, lr=0.1)
    expected = make(model, cyclic(), optimizer=optimizer)
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic(), optimizer=optimizer)
    results_of(runtime, batches[:20])
    results_of(expected, batches[:20])
    assert runtime._engine.capture.n_replayed > 10
    assert_identical(runtime, expected)


def test_a_loss_that_changes_is_called_at_each_step(model, batches, monkeypatch):
    """It reads a number of the script's, waits for the device, and counts its calls."""

    class Annealed:
        def __init__(self):
            self.scale = 1.0
            self.values = []

        def __call__(self, outputs, targets):
            loss = self.scale * F.cross_entropy(outputs, targets)
            self.values.append(loss.item())
            return loss

    losses = Annealed(), Annealed()
    expected = make(model, cyclic(), loss=losses[0])
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic(), loss=losses[1])
    for step, batch in enumerate(batches[:30]):
        for each, trained in zip(losses, (expected, runtime), strict=True):
            each.scale = 0.9**step
            trained.step(*batch)
    assert runtime._engine.capture.n_replayed > 20
    assert losses[0].values == losses[1].values
    assert_identical(runtime, expected)


def test_an_option_of_a_loss_that_changes_is_seen(model, batches, monkeypatch):
    losses = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    expected = make(model, cyclic(), loss=losses[0])
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic(), loss=losses[1])
    for step, batch in enumerate(batches[:30]):
        for loss, trained in zip(losses, (expected, runtime), strict=True):
            loss.label_smoothing = 0.1 * (step >= 15)
            trained.step(*batch)
    assert runtime._engine.capture.n_replayed > 20
    assert_identical(runtime, expected)


def test_counted_losses_of_texts_are_replayed(model, monkeypatch, batches):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum"), (targets > 3).sum()

    for schedule in (cyclic(), cyclic(delay=1, correction="compensate")):
        expected = make(model, schedule, loss=loss)
        with emulated_graphs(monkeypatch):
            runtime = make(model, schedule, loss=loss)
        for batch in batches[:20]:
            mine, other = runtime.step(*batch), expected.step(*batch)
            assert torch.equal(mine.counts, other.counts)
            assert torch.equal(mine.loss, other.loss)
        assert runtime._engine.capture.n_replayed > 10
        assert_identical(runtime, expected)


def test_what_waits_for_the_device_is_computed_and_says_so_once(
    model, batches, monkeypatch
):
    def of_all(outputs, targets, n_microbatches):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses.view(n_microbatches, -1).mean(1) * (
            1.0 if losses.sum().item() > 0 else 2.0
        )

    @separable(of_all)
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets)

    expected = make(model, cyclic(), loss=loss)
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic(), loss=loss)
    with pytest.warns(UserWarning, match="capture") as warned:
        results_of(runtime, batches[:12])
    assert len(warned) == 1
    results_of(expected, batches[:12])
    assert runtime._engine.capture.n_replayed == 0
    assert_identical(runtime, expected)


@pytest.mark.parametrize(
    ("layer", "schedule", "options"),
    [
        (nn.Dropout(0.5), cyclic(), StepOptions()),
        (
            nn.Tanh(),
            catalog.data_parallel(4, delay=RandomDelay(most=2), n_stages=2),
            StepOptions(),
        ),
        (nn.Tanh(), cyclic(), StepOptions(compile="reduce-overhead")),
    ],
    ids=["dropout", "random delays", "own graphs"],
)
def test_what_is_not_replayed_says_so(layer, schedule, options, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3))
    stages = partition(model, 2, torch.randn(2, 4))
    with emulated_graphs(monkeypatch), pytest.warns(UserWarning, match="capture"):
        runtime = SingleProcess(stages, schedule, sgd, F.cross_entropy, options=options)
    assert runtime._engine.capture is None
    with emulated_graphs(monkeypatch):
        arguments = stages, schedule, sgd, F.cross_entropy
        assert (
            SingleProcess(*arguments, capture="off", options=options)._engine.capture
            is None
        )


def test_batches_of_many_sizes_keep_few_recordings(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    stages = partition(model, 2, torch.randn(2, 4))
    with emulated_graphs(monkeypatch):
        runtime = SingleProcess(stages, data_parallel(), sgd, F.cross_entropy)
    sizes = [*range(1, 40)]
    for size in [*sizes, *sizes, *sizes]:
        runtime.step(torch.randn(4 * size, 4), torch.randint(3, (4 * size,)))
    assert len(runtime._engine.capture._captured) == 16


def test_phases_and_groups_of_workers_are_replayed(model, batches, monkeypatch):
    schedule = after([(data_parallel(), 10)], cyclic(groups=2))
    expected = make(model, schedule)
    with emulated_graphs(monkeypatch):
        runtime = make(model, schedule)
        results_of(runtime, batches[:30])
    results_of(expected, batches[:30])
    assert runtime._engine.capture.n_replayed > 10
    assert_identical(runtime, expected)


def small(layers, schedule, monkeypatch, *, loss=F.mse_loss, example=None, **arguments):
    """Two runtimes of the same small model; the first replays."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    example = torch.randn(2, 4).double() if example is None else example
    made = []
    for _ in range(2):
        stages = partition(copy.deepcopy(model), schedule.n_stages, example)
        with emulated_graphs(monkeypatch) if not made else nullcontext():
            made.append(SingleProcess(stages, schedule, sgd, loss, **arguments))
    return made


def vectors(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_a_script_may_keep_results(monkeypatch):
    def loss(outputs, targets):
        return (outputs - targets).square().sum(), targets.square().sum()

    @separable(
        lambda x, y, n: tuple(z.square().view(n, -1).sum(1) for z in (x - y, y)),
    )
    def together(outputs, targets):
        return loss(outputs, targets)

    runtimes = small(
        [nn.Linear(4, 4), nn.Linear(4, 3)], cyclic(), monkeypatch, loss=together
    )
    batches = [(vectors(8, 4), vectors(8, 3)) for _ in range(20)]
    kept = [[runtime.step(*batch) for batch in batches] for runtime in runtimes]
    assert runtimes[0]._engine.capture.n_replayed > 10
    for mine, other in zip(*kept, strict=True):
        assert torch.equal(mine.losses, other.losses)
        assert torch.equal(mine.outputs, other.outputs)
        assert torch.equal(mine.counts, other.counts)


def test_other_microbatches_that_read_the_same_versions_are_other_steps(monkeypatch):
    one, two = (
        data_parallel(delay=[[int(m < late) for m in range(N_MICROBATCHES)]] * N_STAGES)
        for late in (1, 2)
    )
    schedule = after([(one, 12)], two)
    runtime, expected = small([nn.Linear(4, 4), nn.Linear(4, 3)], schedule, monkeypatch)
    for _ in range(24):
        batch = vectors(8, 4), vectors(8, 3)
        runtime.step(*batch), expected.step(*batch)
    assert_identical(runtime, expected)


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, y):
        return self.last(self.first(x) + y)


def test_every_input_is_read(monkeypatch):
    torch.manual_seed(0)
    model, runtimes = Added().double(), []
    for emulated in (True, False):
        stages = partition(
            copy.deepcopy(model), N_STAGES, (vectors(2, 4), vectors(2, 4))
        )
        with emulated_graphs(monkeypatch) if emulated else nullcontext():
            runtimes.append(SingleProcess(stages, cyclic(), sgd, F.mse_loss))
    for _ in range(12):
        batch = (vectors(8, 4), vectors(8, 4)), vectors(8, 3)
        for runtime in runtimes:
            runtime.step(*batch)
    assert runtimes[0]._engine.capture.n_replayed > 6
    assert_identical(*runtimes)


class AsDouble(nn.Module):
    def forward(self, x):
        return x.double()


def test_batches_of_another_type_are_other_steps(monkeypatch):
    """Copied to memory of integers, they would be rounded."""
    example = torch.zeros(2, 4, dtype=torch.int64)
    layers = [AsDouble(), nn.Linear(4, 4), nn.Linear(4, 3)]
    runtime, expected = small(layers, cyclic(), monkeypatch, example=example)
    for step in range(20):
        inputs = torch.randint(2, (8, 4)) if step < 10 else vectors(8, 4)
        batch = inputs, vectors(8, 3)
        runtime.step(*batch), expected.step(*batch)
    assert runtime._engine.capture.n_replayed > 8
    assert_identical(runtime, expected)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        return x * self.factor + self.shift


@pytest.mark.parametrize("name", ["factor", "shift"])
def test_constants_in_other_memory_are_read(name, monkeypatch):
    layers = [nn.Linear(4, 4), Shifted(), nn.Linear(4, 3)]
    runtime, expected = small(layers, cyclic(), monkeypatch)
    for step in range(20):
        if step == 10:
            for each in (runtime, expected):
                constant = getattr(each.stages.model[1], name)
                constant.data = constant.data + 1
        batch = vectors(8, 4), vectors(8, 3)
        runtime.step(*batch), expected.step(*batch)
    assert runtime._engine.capture.n_replayed > 8
    assert_identical(runtime, expected)


def test_more_kinds_of_steps_than_are_kept_are_not_recorded_again_and_again(
    monkeypatch,
):
    """Stages of PipeDream have 1 to 5 versions, so 60 kinds of steps take turns."""
    schedule = catalog.pipedream(5, 1)
    runtime, expected = small(
        [nn.Linear(4, 4) for _ in range(5)], schedule, monkeypatch
    )
    capture = runtime._engine.capture
    for _ in range(150):
        batch = vectors(2, 4), vectors(2, 4)
        runtime.step(*batch), expected.step(*batch)
    assert len(capture.recorder.tapes) == 3 * 16
    assert capture.n_replayed == 2 * 16
    assert_identical(runtime, expected)


def test_recordings_without_use_make_room(monkeypatch):
    monkeypatch.setattr(capture_module, "_IDLE", 20)
    runtime, _ = small([nn.Linear(4, 4), nn.Linear(4, 3)], data_parallel(), monkeypatch)
    for size in [*range(1, 18)] * 2 + [30] * 40:
        runtime.step(vectors(4 * size, 4), vectors(4 * size, 3))
    capture = runtime._engine.capture
    assert len(capture._captured) == 16
    (key,) = [key for key in capture._captured if key[1][0][0][0] == 4 * 30]
    assert capture._captured[key].last_step > 60


def test_a_model_that_cannot_be_recorded_is_soon_left_alone(monkeypatch):
    @separable(
        lambda x, y, n: (x - y).square().view(n, -1).mean(1) * (x.sum().item() > -9e9)
    )
    def loss(outputs, targets):
        return (outputs - targets).square().mean()

    runtime, _ = small(
        [nn.Linear(4, 4), nn.Linear(4, 3)], data_parallel(), monkeypatch, loss=loss
    )
    batches = [(vectors(4 * n, 4), vectors(4 * n, 3)) for n in range(1, 30)]
    with pytest.warns(UserWarning, match="capture"):
        results_of(runtime, batches * 2)
    assert len(runtime._engine.capture._refused) == 8


def tensor_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def test_a_captured_step_holds_at_most_one_more_version(model, batches, monkeypatch):
    """Besides versions, optimizer and the memory of activations: the sums of gradients."""
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic())
    results_of(runtime, batches[:20])
    capture = runtime._engine.capture
    weights = tensor_bytes(runtime.stages.model.parameters())
    buffers = tensor_bytes(runtime.stages.model.buffers())
    assert tensor_bytes(capture._sums.values()) <= weights + buffers
    addresses = set()
    for runner, versions in zip(runtime._runners, runtime._versions, strict=True):
        held = [*versions.values(), *runner._spare]
        addresses |= {
            tensor.data_ptr() for weights_of in held for tensor in weights_of.values()
        }
        # Two versions are read, and the memory of the third is that of a version that has ended.
        assert len(held) <= 2
    for captured in capture._captured.values():
        assert len(captured.outputs) == 1


def test_a_replayed_step_dispatches_nothing_but_copies_and_updates(
    model, batches, monkeypatch
):
    """No synchronisation: every operation of the host is one that a GPU runs later."""
    with emulated_graphs(monkeypatch):
        runtime = make(model, cyclic(), optimizer=partial(sgd, foreach=True))
    results_of(runtime, batches[:20])
    for captured in runtime._engine.capture._captured.values():
        captured.replay_forward = captured.replay_losses = captured.replay_backward = (
            lambda: None
        )
    found = count_operations(lambda: runtime.step(*batches[20]))
    assert not any("scalar" in name or "item" in name for name in found)
    assert found.total() <= 8 + 8 * N_STAGES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_cuda_graphs_train_as_operations_do(case, model, batches):
    schedule, arguments = CASES[case]
    runtimes = []
    for capture in ("auto", "off"):
        stages = partition(
            copy.deepcopy(model).cuda(),
            N_STAGES,
            torch.empty_like(batches[0][0][:BATCH]).cuda(),
        )
        made = {"optimizer": sgd, "loss": F.cross_entropy} | arguments
        scheduler = made.pop("scheduler", None)
        runtimes.append(
            SingleProcess(
                stages, schedule, **made, lr_scheduler=scheduler, capture=capture
            )
        )
    for inputs, targets in batches:
        losses = [
            runtime.step(inputs.cuda(), targets.cuda()).losses for runtime in runtimes
        ]
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    assert runtimes[0]._engine.capture.n_replayed >= N_STEPS - 12
    states = [runtime.module().state_dict() for runtime in runtimes]
    torch.testing.assert_close(*states, rtol=1e-8, atol=1e-8)
