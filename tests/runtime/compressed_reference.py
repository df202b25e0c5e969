"""The update rule with messages of codes, written straight from its equations, in float64.

Sum of stage j, from rank to rank:   v = sum + e;   the next rank adds Q(v);   e = v - Q(v)
Weights, replicated:                 hat_{t+1} = hat_t + Q(theta_{t+1} - hat_t),   hat_0 = theta_0
Weights, sharded or circulating:     hat_t = Q8(theta_t)
Passes:                              theta_hat^j_{m,t} = hat^j_{t - staleness[j][m]}
"""

import copy
from math import prod

import torch
from torch.nn import functional as F

from toolkit.schedule import Action, Buffer


def coded(numbers, compression, shapes):
    """What the numbers of tensors are read as that travel as codes."""
    if compression != "low_rank":
        return quantised(numbers, compression)
    pieces = numbers.split([prod(shape) for shape in shapes])
    return torch.cat([low_rank(*pair) for pair in zip(pieces, shapes, strict=True)])


def low_rank(piece, shape, rank=4):
    """P Q^T of a tensor, P and Q in 32 bits; the tensor in 32 bits where that is no half of it."""
    matrix = piece.reshape(shape[0], -1)
    rows, columns = matrix.shape
    rank = min(rank, rows, columns)
    if 2 * rank * (rows + columns) >= rows * columns:
        return piece.float().double()
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(columns, rank, generator=draw, dtype=torch.float64)
    for _ in range(2):
        p = torch.linalg.qr(matrix @ q).Q
        q = matrix.T @ p
    return (p.float().double() @ q.float().double().T).flatten()


def quantised(numbers, compression):
    """Blocks of 256 numbers, each rounded to a grid of its own; of topk the 16 largest alone."""
    largest = 7 if compression == "int4" else 127
    blocks = []
    for block in numbers.split(256):
        if compression == "topk" and len(block) > 16:
            least = block.abs().sort(descending=True).values[15]
            block = torch.where(block.abs() >= least, block, 0.0)
        scale = (block.abs().max() / largest).float().double()
        codes = (
            (block / scale).round().clamp(-largest, largest) if scale > 0 else 0 * block
        )
        blocks.append(scale * codes)
    return torch.cat(blocks)


def chain_of(program, stage, step):
    """The ranks that hand a stage's sum on, its owner last, each with its micro-batches."""
    following, microbatches = {}, {}
    for rank, instructions in enumerate(program.ranks):
        ours = [i for i in instructions if (i.stage, i.step) == (stage, step)]
        ops = [i for i in ours if i.action == Action.BACKWARD]
        if ops:
            microbatches[rank] = [i.microbatch for i in ops]
        for i in ours:
            if i.action == Action.SEND and i.buffer == Buffer.GRADIENT:
                following[rank] = i.peers[0]
    (rank,) = microbatches.keys() - set(following.values())
    chain = [rank]
    while rank in following:
        rank = following[rank]
        chain.append(rank)
    assert chain[-1] == program.schedule.owners[stage]
    return [(rank, microbatches.get(rank, [])) for rank in chain]


def flat(tensors, names):
    """The numbers of the tensors of a stage, sorted by name."""
    return torch.cat([tensors[name].detach().flatten() for name in names])


def shaped(numbers, like, names):
    """Tensors by name, of the numbers of :func:`flat`."""
    tensors = {}
    for name in names:
        size = like[name].numel()
        piece, numbers = numbers[:size], numbers[size:]
        tensors[name] = piece.reshape(like[name].shape)
    return tensors


def sent(theta, hat, schedule, names, compression):
    """The weights that travel once the optimizer has made ``theta``; ``hat`` went before."""
    following = {}
    for stage, stage_names in names.items():
        exact, base = flat(theta, stage_names), flat(hat, stage_names)
        if schedule.layout.ranks(stage) == [schedule.owners[stage]]:
            numbers = exact
        elif schedule.state == "replicated":
            shapes = [theta[name].shape for name in stage_names]
            numbers = base + coded(exact - base, compression, shapes)
        else:
            numbers = quantised(exact, "int8")
        following |= shaped(numbers, theta, stage_names)
    return following


def gradients_at(worker, weights, x, y, n_microbatches):
    """The gradients of a micro-batch by name; ``worker`` also advances its statistics."""
    with torch.no_grad():
        for name, parameter in worker.named_parameters():
            parameter.copy_(weights[name])
    loss = F.cross_entropy(worker(x), y) / n_microbatches
    found = torch.autograd.grad(loss, list(worker.parameters()))
    return dict(zip(dict(worker.named_parameters()), found, strict=True))


def summed(gradients, chain, names, errors, compression):
    """The owner's sum; ``errors`` of the hops change."""
    shapes = [gradients[0][name].shape for name in names]
    total = 0
    for rank, microbatches in chain:
        total = total + sum(flat(gradients[m], names) for m in microbatches)
        if rank != chain[-1][0]:
            whole = total + errors.get(rank, 0)
            total = coded(whole, compression, shapes)
            errors[rank] = whole - total
    return total


def trajectory(model, stage_of, schedule, batches, make_optimizer, compression):
    """State dict of ``model`` after each step; ``stage_of(name)`` is a parameter's stage."""
    n_microbatches = schedule.n_microbatches
    program = schedule.lower(len(batches))
    names = {}
    for name, _ in sorted(model.named_parameters()):
        names.setdefault(stage_of(name), []).append(name)
    errors = {stage: {} for stage in names}
    newest = copy.deepcopy(model)
    theta = {name: x.detach().clone() for name, x in model.named_parameters()}
    hats = [sent(theta, theta, schedule, names, compression)]  # hats[t] holds hat_t
    optimizer, states = None, []
    for step, (inputs, targets) in enumerate(batches):
        gradients, workers = [], []
        micro = zip(
            inputs.chunk(n_microbatches), targets.chunk(n_microbatches), strict=True
        )
        for m, (x, y) in enumerate(micro):
            weights = {}
            for name in theta:
                late = schedule.staleness[stage_of(name)][m]
                weights[name] = hats[max(0, step - late)][name]
            workers.append(copy.deepcopy(newest))
            gradients.append(gradients_at(workers[-1], weights, x, y, n_microbatches))
        newest = copy.deepcopy(newest)
        optimizer = make_optimizer(newest.parameters(), optimizer)
        for stage, stage_names in names.items():
            chain = chain_of(program, stage, step)
            total = summed(gradients, chain, stage_names, errors[stage], compression)
            for name, gradient in shaped(total, theta, stage_names).items():
                newest.get_parameter(name).grad = gradient
        optimizer.step()
        theta = {name: x.detach().clone() for name, x in newest.named_parameters()}
        hats.append(sent(theta, hats[-1], schedule, names, compression))
        of_workers = zip(*(worker.buffers() for worker in workers), strict=True)
        for buffer, found in zip(newest.buffers(), of_workers, strict=True):
            buffer.copy_(sum(found) / n_microbatches)
        states.append(copy.deepcopy(newest.state_dict()))
    return states
