"""The update rule, written straight from its equation, in the fewest words.

theta^j_{t+1} = optimizer(theta^j_t, 1/M sum_m grad_j f_m(theta_hat_{m,t}))
theta_hat^j_{m,t} = theta^j_v,   v = t - staleness[j][m]

Corrected, with strength c: theta_hat is, with theta_{-1} = theta_0,

extrapolate:     theta^j_v + c (t - v) (theta^j_v - theta^j_{v-1})
optimizer_step:  theta^j_v - c (lr_v + ... + lr_{t-1}) s_v, with the optimizer's direction s_v

compensate:      the gradient g is g + c g g (theta^j_t - theta^j_v)
"""

import copy

import torch
from torch.nn import functional as F

from toolkit.schedule import Correction

NONE = Correction()


def trajectory(
    model,
    stage_of,
    staleness,
    batches,
    make_optimizer,
    correction=NONE,
    loss_of=F.cross_entropy,
):
    """State dict of ``model`` after each step; ``stage_of(name)`` is a parameter's stage.

    ``staleness`` is the same at every step, or a function of it. A ``loss_of`` that returns a sum
    and its count makes each micro-batch's gradient that of its mean, and weighs it by its count.
    """
    late = staleness if callable(staleness) else lambda step: staleness
    n_microbatches = len(late(0)[0])
    past = [copy.deepcopy(model)]  # past[t] holds theta_t
    c = correction.c
    # directions[t] led to theta_t.
    directions = [{name: 0 for name, _ in model.named_parameters()}]
    optimizer, rates = None, []
    for step, (inputs, targets) in enumerate(batches):
        newest = copy.deepcopy(past[-1])
        gradients, buffers, counts = [], [], []
        for m, (x, y) in enumerate(
            zip(
                inputs.chunk(n_microbatches), targets.chunk(n_microbatches), strict=True
            )
        ):
            worker = copy.deepcopy(past[-1])  # its buffers are the newest
            with torch.no_grad():
                for name, parameter in worker.named_parameters():
                    version = max(0, step - late(step)[stage_of(name)][m])
                    read = past[version].get_parameter(name)
                    before = past[max(0, version - 1)].get_parameter(name)
                    if correction.kind == "extrapolate":
                        read = read + c * (step - version) * (read - before)
                    if correction.kind == "optimizer_step":
                        ahead = sum(rates[version:step])
                        read = read - c * ahead * directions[version][name]
                    parameter.copy_(read)
            value = loss_of(worker(x), y)
            total, count = value if isinstance(value, tuple) else (value, 1)
            counts.append(count)
            found = torch.autograd.grad(
                total / max(1, count), list(worker.parameters())
            )
            if correction.kind == "compensate":
                pairs = zip(
                    found, worker.parameters(), past[-1].parameters(), strict=True
                )
                found = [g + c * g * g * (newest - used) for g, used, newest in pairs]
            gradients.append([g.detach() for g in found])
            buffers.append(list(worker.buffers()))
        optimizer = make_optimizer(newest.parameters(), optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        for parameter, *found in zip(newest.parameters(), *gradients, strict=True):
            weighted = [g * count for g, count in zip(found, counts, strict=True)]
            parameter.grad = sum(weighted) / sum(counts)
        optimizer.step()
        named = newest.named_parameters()
        directions.append({name: _direction(optimizer, p) for name, p in named})
        for buffer, *found in zip(newest.buffers(), *buffers, strict=True):
            buffer.copy_(sum(found) / n_microbatches)
        past.append(newest)
    return [model.state_dict() for model in past[1:]]


def sgd(parameters, previous):
    """SGD with momentum and weight decay, continued from ``previous``."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-3)
    return _continued(optimizer, previous)


def adamw(parameters, previous):
    return _continued(
        torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1), previous
    )


def decaying(parameters, previous):
    """SGD whose rate is 0.05, 0.025, 0.0167, ..."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=False)
    _continued(optimizer, previous)
    steps = 0 if previous is None else previous.steps + 1
    optimizer.steps, optimizer.param_groups[0]["lr"] = steps, 0.05 / (1 + steps)
    return optimizer


def _direction(optimizer, parameter):
    """What the optimizer subtracts per unit of rate, apart from decoupled weight decay."""
    state = optimizer.state[parameter]
    if "exp_avg" not in state:
        return state["momentum_buffer"].clone()
    (beta1, beta2), eps = (optimizer.param_groups[0][name] for name in ("betas", "eps"))
    mean = state["exp_avg"] / (1 - beta1 ** state["step"].item())
    square = state["exp_avg_sq"] / (1 - beta2 ** state["step"].item())
    return mean / (square.sqrt() + eps)


def _continued(optimizer, previous):
    if previous is not None:
        optimizer.load_state_dict(previous.state_dict())
    return optimizer
