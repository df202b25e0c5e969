"""Costs of stages that several devices share: by hand, and at width 1 those of whole stages."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from toolkit.cost import Hardware, profile
from toolkit.cost.tensor_width import Width, profile_width
from toolkit.errors import UserError
from toolkit.model import gpt, partition
from toolkit.model.sharded_work import Exchange, device_works
from toolkit.model.tensor_parallel import default_parallelize, tensor_parallel

FLOAT = 4
BATCH, TOKENS, HIDDEN, WORDS = 2, 8, 16, 32
BOUNDARY = BATCH * TOKENS * HIDDEN * FLOAT  # whole activations between blocks
MACHINE = Hardware(
    "hand",
    flops=1e6,
    memory_bandwidth=1e9,
    link_bandwidth=100.0,
    ranks_per_machine=4,
    local_bandwidth=1000.0,
    local_latency=0.5,
)


@pytest.fixture(scope="module")
def decoder():
    """Stages: the embedding; a block; the norm and the head."""
    with torch.device("meta"):
        model = gpt(WORDS, TOKENS, layers=1, width=HIDDEN, heads=4)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="meta")
    return partition(model, 3, tokens, by=["block_0", "norm"]), tokens


def works_on(decoder, width):
    stages, tokens = decoder
    return device_works(stages, (tokens,), tensor_parallel(stages.model, width), width)


def test_one_device_costs_as_the_whole(decoder):
    """What DTensor does, seen kernel by kernel, is what each operation's analysis has found."""
    stages, tokens = decoder
    for cost, work in zip(profile(stages, tokens), works_on(decoder, 1), strict=True):
        assert sum(kernel.flops for kernel in work.kernels) == cost.flops
        assert sum(kernel.bytes for kernel in work.kernels) == sum(
            k.bytes for k in cost.kernels
        )
        assert (
            sum(kernel.flops for kernel in work.backward_kernels) == cost.backward_flops
        )
        assert not work.exchanges
        assert not work.backward_exchanges
        for name in ("activation", "input", "output", "parameter"):
            assert getattr(work, f"{name}_bytes") == getattr(cost, f"{name}_bytes")
        assert (
            work.forward_working_bytes,
            work.backward_working_bytes,
        ) == cost.working_bytes


def test_devices_of_a_decoder_exchange_tokens(decoder):
    """Around attention and the perceptron: gathered, then summed and scattered."""
    _, block, head = works_on(decoder, 2)
    pair = [Exchange("all_gather", BOUNDARY), Exchange("reduce_scatter", BOUNDARY)]
    assert list(block.exchanges) == 2 * pair
    backward = list(block.backward_exchanges)
    assert backward[:4] == 2 * pair
    # Each device has the gradients of norms for its tokens only.
    assert backward[4:] == 4 * [Exchange("all_reduce", HIDDEN * FLOAT)]
    scores = BATCH * TOKENS * WORDS * FLOAT
    assert list(head.exchanges) == [pair[0], Exchange("all_gather", scores)]


def test_devices_of_a_decoder_hold_shards(decoder):
    embedding, block, head = works_on(decoder, 2)
    places = TOKENS * HIDDEN
    assert embedding.parameter_bytes == FLOAT * (WORDS * HIDDEN // 2 + places)
    sharded = (
        3 * HIDDEN * (HIDDEN + 1) + HIDDEN * HIDDEN + 4 * HIDDEN * (2 * HIDDEN + 1)
    )
    # norms; biases of layers that are sharded by columns.
    replicated = 4 * HIDDEN + 2 * HIDDEN
    assert block.parameter_bytes == FLOAT * (sharded // 2 + replicated)
    assert head.parameter_bytes == FLOAT * (HIDDEN * WORDS // 2 + 2 * HIDDEN)
    assert block.input_bytes == block.output_bytes == BOUNDARY / 2
    whole_block = works_on(decoder, 1)[1]
    assert sum(k.flops for k in whole_block.kernels) == 2 * sum(
        k.flops for k in block.kernels
    )
    # Less than all and more than half: inputs of sharded layers are kept whole.
    assert 0.5 < block.activation_bytes / whole_block.activation_bytes < 1


def test_devices_that_share_the_loss_do_not_gather_scores(decoder):
    """A number for each token travels three times in place of all scores."""
    stages, tokens = decoder
    whole_scores = works_on(decoder, 2)[-1]
    parallelize = tensor_parallel(stages.model, 2, share_loss=True)
    head = device_works(stages, (tokens,), parallelize, 2)[-1]
    assert list(head.exchanges) == [
        Exchange("all_gather", BOUNDARY),
        *3 * [Exchange("all_reduce", BATCH * TOKENS * FLOAT)],
    ]
    assert head.backward_exchanges == whole_scores.backward_exchanges
    assert head.output_bytes == whole_scores.output_bytes / 2
    assert head.backward_working_bytes < whole_scores.backward_working_bytes


def test_devices_of_vit_sum_activations():
    with torch.device("meta"):
        model = VisionTransformer(
            16, 8, 1, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3
        )
    images = torch.empty(2, 3, 16, 16, device="meta")
    stages = partition(model, 1, images)
    (work,) = device_works(stages, (images,), tensor_parallel(model, 2), 2)
    n_bytes = 2 * 5 * 8 * FLOAT  # images, patches and the class, hidden units
    assert list(work.exchanges) == 2 * [Exchange("all_reduce", n_bytes)]
    assert [each for each in work.backward_exchanges if each.bytes == n_bytes] == 2 * [
        Exchange("all_reduce", n_bytes)
    ]


def test_devices_gather_the_weights_that_they_share():
    """Each device computes all; what an op of the backward reads is gathered once more."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Linear(8 * 4 * 4, 5),
        )
    images = torch.empty(BATCH, 3, 6, 6, device="meta")
    stages = partition(model, 2, images, by=["2"])
    whole = profile(stages, images)
    works = device_works(stages, (images,), default_parallelize(model, 2), 2)
    matrices = [8 * 3 * 9 * FLOAT, 5 * 128 * FLOAT]
    vectors = [2 * 8 * FLOAT, 5 * FLOAT]
    for work, cost, matrix, vector in zip(works, whole, matrices, vectors, strict=True):
        gather = Exchange("all_gather", matrix)
        assert list(work.exchanges) == [gather]
        assert list(work.backward_exchanges) == [gather]
        assert work.parameter_bytes == matrix / 2 + vector
        for name in ("activation", "input", "output"):
            assert getattr(work, f"{name}_bytes") == getattr(cost, f"{name}_bytes")
        assert sum(kernel.flops for kernel in work.kernels) == cost.flops
        assert (
            sum(kernel.flops for kernel in work.backward_kernels) == cost.backward_flops
        )


def test_exchanges_take_links_within_a_machine(decoder):
    """A ring of n takes n - 1 rounds of 1/n of the bytes; an all-reduce twice as many."""
    width = Width(4, MACHINE)
    assert width.seconds(Exchange("all_gather", 4000.0)) == pytest.approx(
        3 * (0.5 + 1.0)
    )
    assert width.seconds(Exchange("all_reduce", 4000.0)) == pytest.approx(
        6 * (0.5 + 1.0)
    )

    stages, tokens = decoder
    costs = profile_width(stages, tokens, tensor_parallel(stages.model, 4), width)
    block = costs[1]
    forward, backward = block.seconds(MACHINE)
    compute_forward, compute_backward = block.compute_seconds(MACHINE)
    exchange_seconds = 4 * 3 * (0.5 + BOUNDARY / 4 / 1000)
    assert forward - compute_forward == pytest.approx(exchange_seconds)
    assert backward - compute_backward > exchange_seconds
    assert block.exchange_bytes == pytest.approx(
        8 * 0.75 * BOUNDARY + 4 * 1.5 * HIDDEN * FLOAT
    )
    # A backward's part for weights has kernels only.
    _, _, for_inputs, for_weights = block.op_seconds(MACHINE)
    assert for_inputs + for_weights == pytest.approx(backward)
    assert 0 < for_weights < compute_backward


def test_smaller_products_may_run_slower(decoder):
    stages, tokens = decoder
    machine = replace(MACHINE, memory_bandwidth=1e30)
    parallelize = tensor_parallel(stages.model, 2)
    seconds = []
    for efficiency in (1.0, 0.5):
        width = Width(2, machine, efficiency)
        block = profile_width(stages, tokens, parallelize, width)[1]
        seconds.append(block.compute_seconds(machine)[0])
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_devices_of_a_rank_share_the_port_of_their_machine():
    hardware = Width(2, MACHINE).hardware_of_ranks
    assert (hardware.ranks_per_machine, hardware.link_bandwidth) == (2, 50.0)
    assert hardware.message(10.0, local=True) == MACHINE.message(10.0, local=True)
    alone = Width(4, MACHINE).hardware_of_ranks
    assert (alone.ranks_per_machine, alone.link_bandwidth) == (1, 25.0)
    flat = Hardware("flat", flops=1.0, memory_bandwidth=1.0, link_bandwidth=10.0)
    assert Width(4, flat).hardware_of_ranks == flat


@pytest.mark.parametrize(
    ("devices", "hardware", "efficiency", "words"),
    [
        (3, MACHINE, 1.0, "width=3 .* 4 "),
        (8, MACHINE, 1.0, "width=8 .* 4 "),
        (2, replace(MACHINE, speeds=[1.0, 2.0]), 1.0, "speeds"),
        (2, MACHINE, 0.0, "0.0"),
        (0, MACHINE, 1.0, "width"),
    ],
    ids=["no divisor", "more than a machine", "unlike", "no rate", "none"],
)
def test_refuses_devices_that_cannot_share(devices, hardware, efficiency, words):
    with pytest.raises(UserError, match=words):
        Width(devices, hardware, efficiency)
