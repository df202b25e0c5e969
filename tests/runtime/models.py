"""Models and batches on which every runtime is held to the reference."""

from itertools import count

import torch
from torch import nn
from torch.nn import functional as F

from tests import stages
from tests.runtime.reference import sgd
from toolkit.model import partition
from toolkit.runtime import SingleProcess, by_name
from toolkit.schedule import catalog


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + x)


def residual(channels=4):
    """Convolutions, batch norms and residuals, in float64."""
    torch.manual_seed(0)
    blocks = [Residual(channels) for _ in range(4)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)]
    stem = nn.Conv2d(1, channels, 3, bias=False)
    return nn.Sequential(stem, nn.BatchNorm2d(channels), *blocks, *head).double()


def residual_for(compression):
    """A :func:`residual` whose matrices are large enough for the compression."""
    return residual(16 if compression == "low_rank" else 4)


def make_batches(n_microbatches, steps=5):
    """For :func:`residual`: micro-batches of 3 images."""
    generator = torch.Generator().manual_seed(1)
    size = n_microbatches * 3
    return [
        (
            torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def cut(model, schedule):
    """A :func:`residual` as stages."""
    return stages.cut(
        model, schedule.n_stages, torch.zeros(3, 1, 6, 6, dtype=torch.float64)
    )


class Awkward(nn.Module):
    """Whole numbers cross boundaries; dropout, frozen and unused parameters."""

    def __init__(self):
        super().__init__()
        self.near = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.far = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        x = self.dropout(torch.relu(self.first(self.near(ids))))
        x = self.frozen(x) + self.far(ids)
        return self.head(x.mean(1))


def awkward():
    torch.manual_seed(0)
    return Awkward().double()


def id_batches(n_microbatches, steps=5):
    """For :func:`awkward`: micro-batches of 2 rows of 4 ids."""
    generator = torch.Generator().manual_seed(2)
    size = n_microbatches * 2
    return [
        (
            torch.randint(7, (size, 4), generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def cut_awkward(model, schedule):
    return stages.cut(model, schedule.n_stages, torch.zeros(2, 4, dtype=torch.long))


class Encoder(nn.Module):
    """Embeds tokens, and passes a dictionary on."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(7, 6), nn.Linear(6, 6)

    def forward(self, ids, mask):
        if ids.shape[1] != mask.shape[1]:  # control flow that torch.fx cannot trace
            raise ValueError("expected a mask of each token")
        return {"x": torch.tanh(self.layer(self.embed(ids))), "mask": mask}


class Pooler(nn.Module):
    """Attends to the tokens of a mask; a loss does not use its second output."""

    def __init__(self):
        super().__init__()
        self.query, self.head, self.other = (
            nn.Linear(6, 1),
            nn.Linear(6, 3),
            nn.Linear(6, 2),
        )

    def forward(self, x, mask):
        weights = self.query(x).squeeze(2).masked_fill(mask == 0, -torch.inf).softmax(1)
        x = (weights[..., None] * x).sum(1)
        return {"scores": self.head(x), "others": [self.other(x), None]}


class Masked(nn.Module):
    """Takes keyword arguments, also a dictionary, and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.encoder, self.pooler = Encoder(), Pooler()

    def forward(self, *, ids, more):
        return self.pooler(**self.encoder(ids, more["mask"]))


def masked():
    torch.manual_seed(0)
    return Masked().double()


def masked_batches(n_microbatches, steps=5):
    """For :func:`masked`: micro-batches of 2 rows of 4 ids."""
    masks = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).repeat(n_microbatches, 1)
    pairs = id_batches(n_microbatches, steps)
    return [({"more": {"mask": masks}, "ids": ids}, answers) for ids, answers in pairs]


def masked_stages(model, by_hand):
    """A :func:`masked` as two stages: exported, or by hand."""
    (inputs, _), *_ = masked_batches(1)
    if by_hand:
        flat = {"ids": inputs["ids"], "mask": inputs["more"]["mask"]}
        return partition([model.encoder, model.pooler], 2, flat)
    return partition(model, 2, inputs, ["pooler"])


def scores_loss(outputs, targets):
    """A loss of one of the tensors in a dictionary."""
    return F.cross_entropy(outputs["scores"], targets)


def keeping(kept, make):
    """``make`` whose optimizers append (step, weights by name) to ``kept`` after each update."""

    @by_name
    def optimizer(parameters):
        made, steps = make([parameter for _, parameter in parameters]), count()

        def keep(*_):
            weights = {
                name: parameter.detach().clone() for name, parameter in parameters
            }
            kept.append((next(steps), weights))

        made.register_step_post_hook(keep)
        return made

    return optimizer


def assert_updates(kept, states):
    """Every update of a :func:`residual`, by any rank, left the weights of ``states[step]``."""
    for step, weights in kept:
        assert_same(weights, {name: states[step][name] for name in weights})
    trained = [name for name, _ in residual().named_parameters()]
    everything = {(step, name) for step in range(len(states)) for name in trained}
    assert {(step, name) for step, weights in kept for name in weights} == everything


def stage_of(stages):
    stage = {
        name: j for j, part in enumerate(stages) for name, _ in part.named_parameters()
    }
    return stage.__getitem__


def runtime_for(model, schedule, order, optimizer=sgd):
    def make_optimizer(parameters):
        return optimizer(parameters, None)

    return SingleProcess(
        cut(model, schedule), schedule, make_optimizer, F.cross_entropy, order
    )


def learning_rates(runtime):
    """The rates of each stage's next update. Every rank calls it."""
    optimizers = [stage["optimizer"] for stage in runtime.state_dict()["stages"]]
    return [optimizer["param_groups"][0]["lr"] for optimizer in optimizers if optimizer]


def assert_same(found, expected, rtol=1e-10, atol=1e-12):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def differ(found, expected):
    return any(
        not torch.allclose(found[name], expected[name], rtol=1e-6) for name in expected
    )


def name_of(schedule):
    delay = schedule.delay if isinstance(schedule.delay, int | str) else "matrix"
    return (
        f"{schedule.name}-{schedule.n_stages}x{schedule.n_microbatches}-delay={delay}"
        f"-{schedule.layout.name}-{schedule.state}"
    ).replace(" ", "_")


def two_weights(batches, compression, compressors="sums", *, error_feedback=True):
    """Two weights, which are 0 at first, after steps of CDP-v1 on 2 ranks.

    Args:
        batches: inputs ``[4, 2]`` and targets ``[4, 1]`` of each step.
        compression: of messages.
        compressors: ``sums`` or ``weights``, whose error feedback may be switched off.
        error_feedback: whether a message has what those before lost.
    """
    model = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
    nn.init.zeros_(model[0].weight)
    runtime = SingleProcess(
        partition(model, 1, batches[0][0][:2]),
        catalog.cyclic(2, 1, n_stages=1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        F.mse_loss,
        order="scheduled",
        compression=compression,
    )
    for compressor in runtime._compressors.values():
        getattr(compressor, compressors).error_feedback = error_feedback
    list(runtime.run(batches))
    return runtime.module()[0].weight.detach().flatten()
