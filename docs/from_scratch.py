"""Cyclic data parallelism (CDP) from scratch, in plain PyTorch.

In data parallelism (DP), n workers train one model. Each computes the gradient of one micro-batch.
The mean of the gradients updates the model. CDP starts the workers one after another. Some then use
weights that are one update old. Source: arXiv 2403.08837. It counts from 1, this file from 0.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


# 1. The schedule. The model is cut into n stages, and a training step has n micro-batches. A slot
# is the time of one forward (F) or one backward (B) of one stage. A training step starts every 2n
# slots. Micro-batch m starts `stagger * m` slots later: the stagger is 0 in DP and 2 in CDP. CDP:
#
#   slot            0  1  2  3  4  5  6  7  8  9 10 11 12 13
#   micro-batch 0  F0 F1 F2 F3 B3 B2 B1 B0 F0 F1 F2 F3 B3 B2   F0: forward of stage 0
#   micro-batch 1        F0 F1 F2 F3 B3 B2 B1 B0 F0 F1 F2 F3   B3: backward of stage 3
#   micro-batch 2              F0 F1 F2 F3 B3 B2 B1 B0 F0 F1
#   micro-batch 3                    F0 F1 F2 F3 B3 B2 B1 B0
def schedule(n: int, stagger: int) -> dict[tuple[str, int, int], int]:
    """Map (kind, stage, microbatch) to its slot, counted from the start of the training step."""
    slots = {}
    for microbatch in range(n):
        for stage in range(n):
            slots["F", stage, microbatch] = stagger * microbatch + stage
            slots["B", stage, microbatch] = stagger * microbatch + 2 * n - 1 - stage
    return slots


# 2. The delays. With delay d, step t uses weights t - d. Step t - d - 1 makes them, and starts
# 2n (d + 1) slots before step t. They are ready when its last backward of the stage has ended.
# CDP-v2 uses the freshest weights that are ready at a forward; CDP-v1 uses one delay everywhere.
def freshest_delays(n: int, stagger: int) -> list[list[int]]:
    """Return the smallest possible delays, [stage][microbatch]. For DP all are 0."""
    slots = schedule(n, stagger)
    delays = [[0] * n for _ in range(n)]
    for stage in range(n):
        last_backward = max(slots["B", stage, microbatch] for microbatch in range(n))
        for microbatch in range(n):
            delay = 0
            while slots["F", stage, microbatch] + 2 * n * (delay + 1) <= last_backward:
                delay += 1
            delays[stage][microbatch] = delay
    return delays


def uniform_delays(n: int, stagger: int) -> list[list[int]]:
    """Return the smallest delay that is possible for all stages and micro-batches at once."""
    largest = max(max(row) for row in freshest_delays(n, stagger))
    return [[largest] * n for _ in range(n)]


# 3. The memory. A stage stores its activations from the start of its forward to the end of its
# backward. In DP all workers store the most at the same moment: n times the activations of one
# micro-batch. In CDP one worker fills while another empties: the sum stays at (n + 1) / 2.
def memory_curve(n: int, stagger: int, n_steps: int) -> list[float]:
    """Return what all workers store in each slot. 1 is one micro-batch in all n stages."""
    slots = schedule(n, stagger)
    n_stored = [0] * (2 * n * n_steps + stagger * (n - 1))
    for (kind, stage, microbatch), slot in slots.items():
        if kind == "F":
            end = slots["B", stage, microbatch]
            for step in range(n_steps):
                for stored_slot in range(slot, end + 1):
                    n_stored[2 * n * step + stored_slot] += 1
    return [count / n for count in n_stored]


def print_picture(n: int, stagger: int, n_steps: int = 2) -> None:
    """Print when each micro-batch runs its stages, and below it the memory curve."""
    curve = memory_curve(n, stagger, n_steps)
    grid = [["  "] * len(curve) for _ in range(n)]
    for (kind, stage, microbatch), slot in schedule(n, stagger).items():
        for step in range(n_steps):
            grid[microbatch][2 * n * step + slot] = f"{kind}{stage}"
    for microbatch in range(n):
        print(f"micro-batch {microbatch}  {' '.join(grid[microbatch])}".rstrip())
    for level in range(2 * n, 0, -1):  # in halves of a micro-batch
        bars = ["##" if stored >= level / 2 else "  " for stored in curve]
        print(f"memory {level / 2:6.1f}  {' '.join(bars)}".rstrip())


# 4. The training. versions[d] holds the weights of d updates ago, by name. They are separate
# tensors, never changed in place: the backward of a micro-batch needs the weights of its forward.
# functional_call runs the model on any mixture of versions. One process suffices: only delays
# change what is learned. Late weights need a lower learning rate: with lr=0.1 CDP-v1 fails.
def make_model(n: int) -> nn.Sequential:
    """Return a network of n stages for 8x8 images. Stage 2 has the parameters 2.0.weight, ..."""
    hidden = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(n - 1)]
    return nn.Sequential(*hidden, nn.Sequential(nn.Linear(64, 10)))


def train_step(model, versions, momenta, delays, inputs, targets, lr=0.02, mu=0.9):
    """Return the versions and the momenta after one step of SGD."""
    n = len(delays)
    microbatches = zip(inputs.chunk(n), targets.chunk(n), strict=True)
    mean_gradients = {name: torch.zeros_like(w) for name, w in versions[0].items()}
    for microbatch, (images, labels) in enumerate(microbatches):
        weights = {}
        for name in momenta:
            version = versions[delays[int(name.split(".")[0])][microbatch]]
            weights[name] = version[name].detach().requires_grad_()
        loss = F.cross_entropy(functional_call(model, weights, (images,)), labels)
        gradients = torch.autograd.grad(loss, tuple(weights.values()))
        for name, gradient in zip(weights, gradients, strict=True):
            mean_gradients[name] += gradient / n
    momenta = {name: mu * momenta[name] + mean_gradients[name] for name in momenta}
    newest = {name: versions[0][name] - lr * momenta[name] for name in momenta}
    return [newest, *versions[:-1]], momenta


def train(delays: list[list[int]], n_epochs: int, seed: int = 0) -> float:
    """Train on scikit-learn's digits; return the accuracy on 360 test images."""
    torch.manual_seed(seed)  # the same first weights and batches for every rule
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.float() - 5) / 6  # a mean of about 0, a deviation of about 1
    test, training = torch.randperm(len(images)).tensor_split([360])
    model = make_model(len(delays))
    first = {name: parameter.detach() for name, parameter in model.named_parameters()}
    versions = [first, first]  # the same before the first update
    momenta = {name: torch.zeros_like(weight) for name, weight in first.items()}
    for _ in range(n_epochs):
        order = training[torch.randperm(len(training))]
        for batch in order.split(32)[:-1]:  # the last batch is smaller
            data = images[batch], labels[batch]
            versions, momenta = train_step(model, versions, momenta, delays, *data)
    predictions = functional_call(model, versions[0], (images[test],)).argmax(dim=1)
    return (predictions == labels[test]).float().mean().item()


def main(n: int = 4, n_epochs: int = 15) -> None:
    """Print the schedules of DP and CDP, then train with each rule."""
    for name, stagger in {"DP": 0, "CDP": 2}.items():
        print(f"{name}, two training steps")
        print_picture(n, stagger)
    rules = {
        "DP": freshest_delays(n, stagger=0),
        "CDP-v1": uniform_delays(n, stagger=2),
        "CDP-v2": freshest_delays(n, stagger=2),
    }
    for name, delays in rules.items():
        print(f"{name:7} test accuracy {train(delays, n_epochs):.1%}, delays {delays}")


if __name__ == "__main__":
    main()
