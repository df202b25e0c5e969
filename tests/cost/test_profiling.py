"""Costs of stages: against autograd itself, by hand, and without computing."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from toolkit.cost import Hardware, profile, simulate
from toolkit.cost.stage_seconds import seconds_in_turn
from toolkit.errors import UserError
from toolkit.model import build, partition
from toolkit.model.kernel_work import Work
from toolkit.model.precision import PRECISIONS, autocast
from toolkit.runtime.stage import StageRunner
from toolkit.schedule import catalog

FLOAT = 4
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)
MACHINE = Hardware("hand", flops=2.0, memory_bandwidth=5.0, link_bandwidth=1.0)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.relu(x + self.second(self.relu(self.norm(self.first(x)))))


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Residual(4),
        nn.Dropout(0.5),
        Residual(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


def linears():
    """Stages (3 -> 4, ReLU) and (4 -> 2)."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return partition(model, 2, torch.zeros(5, 3), by=["2"])


def stored(tensor):
    return tensor.untyped_storage()._cdata


def kept_by(stage, received, precision="fp32"):
    """What autograd itself keeps in a forward of ``stage``, and what the stage passes on."""
    own = {stored(x) for x in (*stage.parameters(), *stage.buffers(), *received)}
    kept = {}

    def keep(tensor):
        if stored(tensor) not in own:
            kept[stored(tensor)] = tensor  # alive, so that no address is used twice
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with keeping, autocast(precision, torch.device("cpu")):
        outputs = stage(*received)
    return kept, tuple(
        x.detach().requires_grad_(x.is_floating_point()) for x in outputs
    )


def size(kept):
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize(
    "make",
    [
        network,
        lambda: build("resnet8", n_classes=3, image_size=16),
        lambda: VisionTransformer(16, 4, 2, 2, hidden_dim=8, mlp_dim=16, num_classes=3),
    ],
    ids=["small", "ResNet", "ViT"],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_are_those_that_autograd_keeps(make, precision):
    """And what crosses the cuts, in 16 bits under autocast."""
    torch.manual_seed(0)
    example = torch.randn(2, 3, 16, 16)
    stages = partition(make(), 3, example)
    costs = profile(stages, example, repeats=1, precision=precision)
    values = (example,)
    for stage, cost in zip(stages, costs, strict=True):
        kept, values = kept_by(stage.train(), values, precision)
        assert cost.activation_bytes == size(kept)
        assert cost.output_bytes == sum(x.nbytes for x in values)


def test_a_linear_by_hand():
    """5 x 3 in, 4 out, ReLU; 2 out. Backwards: nothing for the input of the whole."""
    first, second = profile(linears(), torch.empty(5, 3, device="meta"))
    kernels = (Work(120, (5 * 3 + 16 + 5 * 4) * FLOAT), Work(0, 2 * 5 * 4 * FLOAT))
    expected = {
        "flops": 120,
        "backward_flops": 120,
        "input_bytes": 60,
        "output_bytes": 80,
    }
    expected |= {
        "parameter_bytes": 16 * FLOAT,
        "activation_bytes": 80,
        "kernels": kernels,
    }
    expected |= {"forward_seconds": None, "backward_seconds": None}
    assert vars(first) | expected == vars(first)
    expected = {
        "flops": 80,
        "backward_flops": 160,
        "input_bytes": 80,
        "output_bytes": 40,
    }
    expected |= {"parameter_bytes": 10 * FLOAT, "activation_bytes": 0}
    assert vars(second) | expected == vars(second)
    stages = linears()
    stages.model.bfloat16()[0].requires_grad_(False)
    first, _ = profile(stages, torch.empty(5, 3, device="meta", dtype=torch.bfloat16))
    assert (first.input_bytes, first.output_bytes, first.parameter_bytes) == (30, 40, 0)


def test_statistics_of_batch_norms():
    """A mean and a variance a channel; not where they are not kept, nor of other norms."""
    model = nn.Sequential(
        nn.BatchNorm1d(4),
        nn.Linear(4, 6),
        nn.BatchNorm1d(6, affine=False),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.LayerNorm(3),
    )
    for first, frozen in ((2 * 4 * FLOAT, False), (0, True)):
        model[0].train(not frozen)
        stages = partition(model, 3, torch.zeros(5, 4), by=["1", "4"])
        costs = profile(stages, torch.empty(5, 4, device="meta"))
        assert [c.statistics_bytes for c in costs] == [first, 2 * (6 + 6) * FLOAT, 0]
        for c in costs:  # kept with the activations, and sent with the gradients
            assert c.kept_bytes == c.activation_bytes + c.statistics_bytes
            assert c.gradient_bytes == c.parameter_bytes + c.statistics_bytes


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_sums_are_of_the_bytes_that_a_run_adds_up(n_stages):
    """Gradients of what is trained, and the statistics that the runtime's norms leave."""
    example = torch.randn(2, 3, 8, 8)
    stages = partition(network(), n_stages, example)
    costs = profile(stages, example.to("meta"))
    values = (example,)
    for j, (stage, cost) in enumerate(zip(stages, costs, strict=True)):
        runner = StageRunner(stage, j, lambda p: torch.optim.SGD(p, 0.1), None, 0)
        values = runner.forward(runner.newest(), values, (0,), 0)
        statistics = sum(x.nbytes for x in runner.take_statistics().values())
        weights = sum(x.nbytes for x in runner.newest().values())
        assert cost.statistics_bytes == statistics
        assert cost.gradient_bytes == weights + statistics


@pytest.mark.parametrize("n_stages", [2, 3, 5])
def test_stages_do_the_work_of_the_whole(n_stages):
    """Forwards; and backwards, where each stage but the first finds its input's gradient."""
    model, example = network(), torch.empty(2, 3, 8, 8, device="meta")
    whole = profile(partition(model, 1, example), example)[0]
    stages = profile(partition(model, n_stages, example), example)
    for name in ("flops", "backward_flops", "parameter_bytes"):
        assert sum(getattr(stage, name) for stage in stages) == getattr(whole, name) > 0
    assert [s.output_bytes for s in stages[:-1]] == [s.input_bytes for s in stages[1:]]


class Classes(nn.Module):
    """Classes are looked up behind the first layer, and so cross a cut."""

    def __init__(self):
        super().__init__()
        self.first, self.looked_up = nn.Linear(3, 5), nn.Embedding(7, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x, classes):
        return self.last(self.first(x) + self.looked_up(classes))


def test_integers_that_cross_a_cut_are_sent_and_have_no_gradient():
    x, classes = torch.empty(4, 3), torch.zeros(4, dtype=torch.int64)
    stages = partition(Classes(), 2, (x, classes), by=["looked_up"])
    first, second = profile(stages, (x.to("meta"), classes.to("meta")))
    assert second.input_bytes == 4 * 5 * FLOAT + 4 * 8
    assert second.input_gradient_bytes == 4 * 5 * FLOAT
    timeline = simulate(catalog.gpipe(2, 1).lower(1), (first, second), MACHINE)
    assert timeline.bytes_sent() == (second.input_bytes, second.input_gradient_bytes)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_a_real_device_differs_in_seconds_only(device):
    torch.manual_seed(0)
    example = torch.randn(2, 3, 8, 8, device=device)
    stages = partition(network().to(device), 3, example)
    before = {name: value.clone() for name, value in stages.model.state_dict().items()}
    generator = torch.get_rng_state()  # the model draws
    real, meta = (
        profile(stages, example, repeats=1),
        profile(stages, example.to("meta")),
    )
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(cost.forward_seconds > 0 and cost.backward_seconds > 0 for cost in real)
    for name, value in stages.model.state_dict().items():
        assert torch.equal(value, before[name]), f"profiling changed {name}"
    if device == "cpu":
        timeless = {
            "forward_seconds": None,
            "backward_seconds": None,
            "weight_share": None,
        }
        assert tuple(replace(cost, **timeless) for cost in real) == meta
    assert [cost.activation_bytes for cost in real] == [
        cost.activation_bytes for cost in meta
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("stages", "shape", "options", "value"),
    [
        (nn.Linear(3, 2), (5, 3), {}, "Linear"),
        (linears(), (5, 7), {}, r"\[5, 7\]"),
        (linears(), (), {}, r"\[\]"),
        (linears(), (5, 3), {"precision": "int8"}, "'int8'"),
    ],
)
def test_rejects_what_it_cannot_run(stages, shape, options, value, device):
    with pytest.raises(UserError, match=value) as error:
        profile(stages, torch.zeros(shape, device=device), **options)
    assert len(str(error.value).splitlines()) == 1


class Skips(nn.Module):
    """A residual crosses cuts; some of what crosses is kept by the ops before, and some is not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = first = self.layers[0](x)
        x = torch.tanh(self.layers[1](x))
        x = self.layers[2](x) * 2
        return self.layers[3](torch.relu(x + first))


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [Skips, network])
def test_one_rank_keeps_what_is_saved_and_what_crosses(make, n_stages):
    """Shared memory once: by real tensors, stage after stage."""
    example = torch.randn(5, 6) if make is Skips else torch.randn(2, 3, 8, 8)
    stages = partition(make(), n_stages, example)
    costs = profile(stages, example.to("meta"))
    values, kept = (example,), {}
    for stage in stages:
        saved, values = kept_by(stage, values)
        kept |= saved | {stored(x): x for x in values}
    del kept[stored(values[0])]  # the last stage's output crosses no cut
    assert sum(
        cost.activation_bytes + cost.extra_input_bytes for cost in costs
    ) == size(kept)


def test_gradients_of_weights_take_their_share_of_a_backward():
    """Of a linear layer half of the arithmetic; of the first, which has no other, all of it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("meta")
    example = torch.empty(256, 64, device="meta")
    first, last = profile(partition(model, 2, example, ["2"], check=False), example)
    arithmetic = Hardware(
        "arithmetic", flops=1e9, memory_bandwidth=1e30, link_bandwidth=1e9
    )
    assert first.weight_seconds(arithmetic) == pytest.approx(
        first.seconds(arithmetic)[1]
    )
    forward, backward, of_inputs, of_weights = last.op_seconds(arithmetic)
    assert of_weights == pytest.approx(backward / 2)
    assert of_inputs + of_weights == pytest.approx(backward)
    assert forward == pytest.approx(of_inputs)


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_what_arrives_by_a_message_is_contiguous():
    """A stage that transposes back what another has transposed gets a view, or has to copy it."""
    model = nn.Sequential(
        nn.Linear(4, 4), Transposed(), Transposed(), nn.Flatten(), nn.Linear(12, 5)
    )
    example = torch.empty(2, 3, 4, device="meta")
    stages = partition(model, 2, example, by=["2"])
    for by_message, copied_bytes in ((False, 0), (True, 2 * 3 * 4 * 4)):
        _, second = profile(stages, example, by_message=by_message)
        assert second.activation_bytes == copied_bytes


def test_stages_run_in_turn():
    """Forwards from the first stage to the last, then backwards from the last to the first."""
    runs = []

    class Noted(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.name = name

        def forward(self, x):
            runs.append(f"F{self.name}")
            output = self.linear(x)
            output.register_hook(lambda _: runs.append(f"B{self.name}"))
            return (output,)

    inputs = (torch.zeros(2, 3, requires_grad=True),)
    measured = seconds_in_turn([Noted("0"), Noted("1")], inputs, 1, "fp32")
    assert runs[:4] == ["F0", "F1", "B1", "B0"]
    assert all(each.forward > 0 and each.backward > 0 for each in measured)


def test_timing_in_turn_changes_seconds_alone():
    torch.manual_seed(0)
    stages = partition(network(), 3, torch.randn(2, 3, 8, 8))
    before = {name: value.clone() for name, value in stages.model.state_dict().items()}
    alone = profile(stages, torch.randn(2, 3, 8, 8), repeats=1)
    in_turn = profile(stages, torch.randn(2, 3, 8, 8), repeats=1, in_turn=True)
    for one, other in zip(alone, in_turn, strict=True):
        assert other.forward_seconds > 0
        assert other.backward_seconds > 0
        assert 0 <= other.weight_share < 1
        for name in ("forward_seconds", "backward_seconds", "weight_share"):
            one = replace(one, **{name: getattr(other, name)})
        assert one == other
    after = stages.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(weight.grad is None for weight in stages.model.parameters())


def test_backwards_of_tokens_have_no_share_of_weights_in_turn():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    tokens = torch.zeros(2, 4, dtype=torch.long)
    costs = profile(partition(model, 2, tokens), tokens, repeats=1, in_turn=True)
    embedding, linear = costs
    assert embedding.weight_share is None
    assert 0 <= linear.weight_share < 1
