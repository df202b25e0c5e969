"""The update rule, written straight from its equation, in the fewest words.

theta^j_{t+1} = optimizer(theta^j_t, 1/M sum_m grad_j f_m(theta_hat_{m,t}))
theta_hat^j_{m,t} = theta^j_v,   v = t - staleness[j][m]

Predicted: theta^j_v + (t - v) (theta^j_v - theta^j_{v-1}) instead, theta_{-1} = theta_0
"""

import copy

import torch
from torch.nn import functional as F


def trajectory(model, stage_of, staleness, batches, make_optimizer, predict=False):
    """State dict of ``model`` after each step; ``stage_of(name)`` is a parameter's stage.

    ``staleness`` is the same at every step, or a function of it.
    """
    late = staleness if callable(staleness) else lambda step: staleness
    n_microbatches = len(late(0)[0])
    past = [copy.deepcopy(model)]  # past[t] holds theta_t
    optimizer = None
    for step, (inputs, targets) in enumerate(batches):
        newest = copy.deepcopy(past[-1])
        gradients, buffers = [], []
        for m, (x, y) in enumerate(
            zip(inputs.chunk(n_microbatches), targets.chunk(n_microbatches), strict=True)
        ):
            worker = copy.deepcopy(past[-1])  # its buffers are the newest
            with torch.no_grad():
                for name, parameter in worker.named_parameters():
                    version = max(0, step - late(step)[stage_of(name)][m])
                    read = past[version].get_parameter(name)
                    before = past[max(0, version - 1)].get_parameter(name)
                    ahead = step - version if predict else 0
                    parameter.copy_(read + ahead * (read - before))
            loss = F.cross_entropy(worker(x), y)
            gradients.append(torch.autograd.grad(loss, list(worker.parameters())))
            buffers.append(list(worker.buffers()))
        optimizer = make_optimizer(newest.parameters(), optimizer)
        for parameter, *found in zip(newest.parameters(), *gradients, strict=True):
            parameter.grad = sum(found) / n_microbatches
        optimizer.step()
        for buffer, *found in zip(newest.buffers(), *buffers, strict=True):
            buffer.copy_(sum(found) / n_microbatches)
        past.append(newest)
    return [model.state_dict() for model in past[1:]]


def sgd(parameters, previous):
    """SGD with momentum and weight decay, continued from ``previous``."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-3)
    return _continued(optimizer, previous)


def adamw(parameters, previous):
    return _continued(torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1), previous)


def _continued(optimizer, previous):
    if previous is not None:
        optimizer.load_state_dict(previous.state_dict())
    return optimizer
