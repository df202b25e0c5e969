"""Training loops as scripts have them, run on each rank under torch's DDP and under the wrapper."""

import copy
import io
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import CyclicDataParallel, join, loop_runtime, prepare

STEPS = 8


class Net(nn.Module):
    """What scripts change on it: an attribute, a rate of dropout, a buffer, modes, gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.0)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.scale = 1.0
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x):
        x = self.norm(self.dropout(torch.relu(self.first(x))))
        return self.last(torch.tanh(self.second(x) * self.mask)) * self.scale


def net():
    torch.manual_seed(0)
    return Net().double()


def share(step, size=4, rank=None):
    """The samples of a rank at a step; of this one by default."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(size, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (size,), generator=generator)


def sgd(model):
    return SGD(model.parameters(), lr=0.2, momentum=0.9)


def parameters_of(model):
    """Trained weights; statistics of norms are DDP's rank 0's, and here the mean."""
    state = model.state_dict()
    names = {name for name, _ in net().named_parameters()}
    state = {
        name.removeprefix("module."): x.detach().clone() for name, x in state.items()
    }
    return {name: x for name, x in state.items() if name in names}


def wrapped(rule, make_optimizer=sgd, model=None, **options):
    """A model and its optimizer: with ``rule`` None under DDP."""
    world = join()
    model = net() if model is None else model
    if rule is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the name of an option
            model = DistributedDataParallel(
                model, broadcast_buffers=False, find_unused_parameters=True
            )
        return model, make_optimizer(model)
    return prepare(model, make_optimizer(model), rule=rule, world=world, **options)


def train_step(model, optimizer, step, size=4):
    x, y = share(step, size)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def both(loop, rule="dp", make_optimizer=sgd, **options):
    """What ``loop(model, optimizer)`` leaves under the wrapper and under DDP."""
    found = []
    for of_rule in (rule, None):
        model, optimizer = wrapped(
            of_rule, make_optimizer, **(options if of_rule else {})
        )
        loop(model, optimizer)
        found.append(parameters_of(model))
        if of_rule:
            model.synchronize()
    return found


# What a loop changes between two steps.


def scale(model):
    model.module.scale = 0.5


def drop_everything(model):
    model.module.dropout.p = 1.0


def freeze_first(model):
    model.module.first.requires_grad_(False)


def fill_buffer(model):
    model.module.mask[:4] = 0.0


def replace_buffer(model):
    model.module.mask = torch.zeros(8, dtype=torch.float64)


def hook_second(model):
    model.module.second.register_forward_hook(lambda module, args, output: output * 0.5)


CHANGES = (
    scale,
    drop_everything,
    freeze_first,
    fill_buffer,
    replace_buffer,
    hook_second,
)


def changed():
    """By the change: the weights with it, and with DDP; and that it is undone again."""
    found = {}
    for change in CHANGES:

        def loop(model, optimizer, change=change):
            for step in range(4):
                if step == 2:
                    model.eval()
                    model.train()
                    change(model)
                train_step(model, optimizer, step)

        found[change.__name__] = both(loop)
    found["unfrozen"] = both(_unfreeze)
    found["evaluated norm"] = both(_evaluate_norm)
    return found


def _unfreeze(model, optimizer):
    model.module.first.requires_grad_(False)
    for step in range(5):
        if step == 2:
            model.module.first.requires_grad_(True)
        train_step(model, optimizer, step)


def _evaluate_norm(model, optimizer):
    for step in range(4):
        if step == 2:
            model.eval()  # all updates are complete
            model.train()
            model.module.norm.eval()
            model.module.norm.running_mean.zero_()
            model.module.norm.running_var.fill_(1.0)
        train_step(model, optimizer, step)


# Optimizers.


class Counting(SGD):
    """Its rate falls with a count among its options."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = 0.2 / group["k"]
        return super().step(closure)


def with_optimizers():
    """By the optimizer: the weights with it, and with DDP."""
    from prodigyopt import Prodigy
    from schedulefree import SGDScheduleFree

    def groups(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        options = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        return AdamW(options, lr=0.01, weight_decay=0.1)

    def steps(model, optimizer):
        for step in range(STEPS):
            train_step(model, optimizer, step)

    def free_steps(model, optimizer):
        """As its page says: evaluation is of the averages."""
        optimizer.train()
        for step in range(STEPS):
            train_step(model, optimizer, step)
            if step == 4:
                optimizer.eval()
                model.eval()
                evaluated.append(parameters_of(model))
                optimizer.train()
                model.train()
        optimizer.eval()

    evaluated = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Prodigy's model stays one stage
        found = {
            "groups": both(steps, make_optimizer=groups),
            "counting": both(
                steps, make_optimizer=lambda m: Counting(m.parameters(), 0.2)
            ),
            "prodigy": both(steps, make_optimizer=lambda m: Prodigy(m.parameters())),
        }
    found["schedule-free"] = both(
        free_steps, make_optimizer=lambda m: SGDScheduleFree(m.parameters(), lr=0.5)
    )
    return found, evaluated


def continued():
    """An optimizer with state, and a scheduler of it, before either wrapper; a group added."""

    def used(model):
        inner = getattr(model, "module", model)
        optimizer = sgd(inner)
        generator = torch.Generator().manual_seed(7)
        for parameter in inner.parameters():
            momentum = torch.randn(
                parameter.shape, dtype=torch.float64, generator=generator
            )
            optimizer.state[parameter]["momentum_buffer"] = momentum
        return optimizer

    def scheduled(model):
        optimizer = used(model)
        optimizer.scheduler = StepLR(optimizer, 2, 0.5)
        return optimizer

    def loop(model, optimizer):
        scheduler = (
            getattr(optimizer, "scheduler", None) or optimizer._finished.scheduler
        )
        for step in range(STEPS):
            train_step(model, optimizer, step)
            scheduler.step()

    def without_last(model):
        inner = getattr(model, "module", model)
        inner.last.requires_grad_(False)
        return SGD([*inner.first.parameters(), *inner.second.parameters()], lr=0.2)

    def adding(model, optimizer):
        for step in range(4):
            if step == 2:
                model.module.last.requires_grad_(True)
                optimizer.add_param_group(
                    {"params": [*model.module.last.parameters()], "lr": 0.05}
                )
            train_step(model, optimizer, step)

    found = {"state and scheduler": both(loop, make_optimizer=scheduled)}
    ours, optimizer = wrapped("dp", without_last)
    adding(ours, optimizer)
    # DDP itself has to be made anew for weights that were frozen.
    inner = net()
    other = sgd_by_hand(inner, adding_last_at=2)
    found["added group"] = parameters_of(ours), other
    ours.synchronize()
    model = net()
    from_function = CyclicDataParallel(
        model, optimizer=lambda parameters: sgd(model), rule="dp", world=join()
    )
    for step in range(4):
        train_step(from_function, from_function.optimizer, step)
    reference, reference_optimizer = wrapped(None)
    for step in range(4):
        train_step(reference, reference_optimizer, step)
    found["its own parameters"] = parameters_of(from_function), parameters_of(reference)
    return found


def sgd_by_hand(model, adding_last_at):
    """The mean of both ranks' gradients, and plain SGD."""
    for step in range(4):
        x, y = share(step)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                dist.all_reduce(parameter.grad)
                rate = 0.2
                if name.startswith("last"):
                    rate = 0.05 if step >= adding_last_at else 0.0
                parameter -= rate * parameter.grad / dist.get_world_size()
                parameter.grad = None
    return parameters_of(model)


# States.


def resumed(rule):
    """The weights after 9 steps, and after 6 and a new start with a scheduler."""

    def fresh():
        model, optimizer = wrapped(rule)
        return model, optimizer, StepLR(optimizer, 2, 0.5)

    model, optimizer, scheduler = fresh()
    for step in range(9):
        if step == 6:
            parts = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
            torch.save(parts, stream := io.BytesIO())
        train_step(model, optimizer, step)
        scheduler.step()
    expected = parameters_of(model)
    stream.seek(0)
    saved = torch.load(stream)  # of tensors and plain values
    model, optimizer, scheduler = fresh()
    for part, state in zip((model, optimizer, scheduler), saved, strict=True):
        part.load_state_dict(state)
    for step in range(6, 9):
        train_step(model, optimizer, step)
        scheduler.step()
    return parameters_of(model), expected


def of_ddp():
    """A training that DDP began: DDP's weights, ours, and DDP's again from our state."""
    model, optimizer = wrapped(None)
    for step in range(3):
        train_step(model, optimizer, step)
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    ours, our_optimizer = wrapped("dp")
    ours.module.load_state_dict(saved[0])
    our_optimizer.load_state_dict(saved[1])
    for step in range(3, 5):
        train_step(model, optimizer, step)
        train_step(ours, our_optimizer, step)
    found = parameters_of(ours), parameters_of(model)
    other, other_optimizer = wrapped(None)
    other.load_state_dict(ours.state_dict())
    other_optimizer.load_state_dict(our_optimizer.state_dict())
    for step in range(5, 7):
        train_step(model, optimizer, step)
        train_step(other, other_optimizer, step)
    refused = ""
    try:
        our_optimizer.load_state_dict({"state": {}, "param_groups": []})
    except UserError as error:
        refused = str(error)
    return found, parameters_of(other), parameters_of(model), refused


def alone(rule, **options):
    """Rank 0 alone reads the model in every way, at every step; the others go on."""
    model, optimizer = wrapped(rule, **options)
    seen = []
    for step in range(4):
        train_step(model, optimizer, step)
        if dist.get_rank() == 0:
            seen.append(_read(model, optimizer))
    final = parameters_of(model)
    undisturbed, optimizer = wrapped(rule, **options)
    newest = []
    for step in range(4):
        train_step(undisturbed, optimizer, step)
        newest.append(parameters_of(undisturbed))
    return seen, newest, final


def alone_between_programs():
    """Rank 0 reads at every other step, rank 1 evaluates once; programs are of two steps."""
    found = {}
    with mock.patch.multiple(loop_runtime, FIRST_WINDOW=16, WINDOW=16):
        for rule, options in (("cdp_v2", {}), ("cdp_v1", {"chains": "rotated"})):
            model, optimizer = wrapped(rule, **options)
            seen = {}
            for step in range(7):
                train_step(model, optimizer, step)
                if dist.get_rank() == 0 and step % 2:
                    seen[step] = parameters_of(model)
                if dist.get_rank() == 1 and step == 4:
                    model.eval()
                    model.train()
            found[rule] = seen
            model.synchronize()
    return found


def _read(model, optimizer):
    """The weights of a model in several ways."""
    names = {name for name, _ in net().named_parameters()}
    ways = {
        "state": parameters_of(model),
        "module": parameters_of(model.module),
        "copy": parameters_of(copy.deepcopy(model.module)),
        "average": dict(AveragedModel(model.module).module.named_parameters()),
        "parameters": dict(model.module.named_parameters()),
        "own": dict(model.named_parameters()),
    }
    torch.save(model.module, stream := io.BytesIO())
    stream.seek(0)
    ways["file"] = parameters_of(torch.load(stream, weights_only=False))
    optimizer.state_dict()
    found = {}
    for way, weights in ways.items():
        clean = {
            k.removeprefix("module."): x.detach().clone() for k, x in weights.items()
        }
        found[way] = {k: x for k, x in clean.items() if k in names}
    model.eval()
    found["output"] = model(torch.ones(1, 6, dtype=torch.float64)).detach()
    found["called"] = model.module(torch.ones(1, 6, dtype=torch.float64)).detach()
    assert type(copy.deepcopy(model.module)) is Net
    model.train()
    return found


# Gradients.


def clipped(rule):
    """The weights, norms and warnings of a loop that clips; by which way it has the parameters."""
    found = {}
    for way in ("wrapper", "module"):
        model, optimizer = wrapped(rule)
        norms = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                x, y = share(step)
                F.cross_entropy(model(x), y).backward()
                source = model if way == "wrapper" else model.module
                norms.append(float(nn.utils.clip_grad_norm_(source.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
        n_warned = sum("clip_grad_norm_" in str(warning.message) for warning in caught)
        found[way] = parameters_of(model), norms, n_warned
    return found


def refusals():
    """The first words of what is refused, within a step and with arguments of DDP."""
    model, optimizer = wrapped("cdp_v2", find_unused_parameters=True, device_ids=None)
    refused = []

    def refuse(call):
        try:
            call()
        except UserError as error:
            refused.append(str(error).split(":")[0])

    x, y = share(0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    out = model(x)
    refuse(lambda: list(model.parameters()))
    refuse(lambda: list(model.module.parameters()))
    scaler.scale(F.cross_entropy(out, y)).backward()
    scaler.unscale_(optimizer)
    gradients = [parameter.grad for parameter in model.parameters()]
    refuse(lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1))
    refuse(lambda: gradients[0].add_(1.0))
    refuse(model.module.state_dict)
    scaler.step(optimizer)
    scaler.update()
    refuse(lambda: model.module(x))
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    refuse(lambda: scaler.step(optimizer))
    optimizer.step()
    model.synchronize()
    refuse(lambda: wrapped("dp", process_group=dist.group.WORLD))
    refuse(lambda: wrapped("dp", device_ids=[0]))
    refuse(lambda: wrapped("dp", lambda model: SGD(net().parameters(), lr=0.1)))
    refuse(lambda: model.backward(torch.zeros(()), 1))
    stages = partition(inner := net(), 2, x)
    model, optimizer = wrapped("dp", model=inner, stages=stages)
    train_step(model, optimizer, 0)
    model.synchronize()
    model.module.scale = 0.5
    refuse(lambda: train_step(model, optimizer, 1))
    return refused


# Inputs.


def uneven(rule, **options):
    """Ranks with 3 and 5 batches; under DDP with ``rule`` None."""
    model, optimizer = wrapped(rule, **options)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            train_step(model, optimizer, step)
    if rule is None:
        return parameters_of(model)
    return parameters_of(model), model.steps_done


def counted_shares():
    """Three ranks with shares of 1, 2 and 4 sequences, of which one rank's has no token."""
    from tests.runtime import token_losses

    world = join()
    rank = world.rank
    found = {}
    for rule in ("dp", "cdp_v1", "cdp_v2"):
        model = CyclicDataParallel(
            token_losses.model(),
            optimizer=token_losses.sgd,
            rule=rule,
            world=world,
            counted=True,
        )
        for inputs, targets in token_shares():
            outputs = model(inputs[rank])
            loss, count = token_losses.token_loss(outputs, targets[rank])
            model.backward(loss, count)
            model.optimizer.step()
        state = model.state_dict()
        found[rule] = {
            name.removeprefix("module."): x.clone() for name, x in state.items()
        }
    return found


def token_shares():
    """The inputs and targets of each step and rank."""
    from tests.runtime import token_losses

    generator = torch.Generator().manual_seed(4)
    steps = []
    for step in range(4):
        inputs, targets = [], []
        for rank, size in enumerate((1, 2, 4)):
            shape = (size, token_losses.LENGTH)
            inputs.append(
                torch.randint(token_losses.VOCABULARY, shape, generator=generator)
            )
            answers = torch.randint(token_losses.VOCABULARY, shape, generator=generator)
            masked = torch.rand(shape, generator=generator) < 0.5
            if rank == step % 3:
                masked[:] = True
            targets.append(answers.masked_fill(masked, token_losses.IGNORED))
        steps.append((inputs, targets))
    return steps


def two_processes():
    """All jobs of two ranks."""
    join()
    jobs = {
        "changed": changed,
        "optimizers": with_optimizers,
        "continued": continued,
        "of_ddp": of_ddp,
        "between programs": alone_between_programs,
        "refusals": refusals,
        "uneven": lambda: {
            rule: uneven(rule) for rule in ("dp", "cdp_v1", "cdp_v2", None)
        },
        "resumed": lambda: {rule: resumed(rule) for rule in ("dp", "cdp_v1", "cdp_v2")},
        "clipped": lambda: {
            rule: clipped(rule) for rule in ("dp", "cdp_v1", "cdp_v2", None)
        },
        "alone": lambda: {
            "dp": alone("dp"),
            "cdp_v1": alone("cdp_v1"),
            "cdp_v2": alone("cdp_v2"),
            "sharded": alone("cdp_v2", state="sharded"),
        },
    }
    return {name: job() for name, job in jobs.items()}
