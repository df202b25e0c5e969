"""What each process of the tests of our models' plans does."""

import copy
from functools import partial

import torch
from torch.nn import functional as F

from tests.thorough import THOROUGH
from toolkit.model import gpt, partition
from toolkit.model.tensor_parallel import tensor_parallel
from toolkit.runtime import Distributed, SingleProcess, StepOptions, join
from toolkit.schedule import catalog


def decoder():
    torch.manual_seed(0)
    return gpt(7, 4, layers=2, width=8, heads=2).double()


def vit():
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(8, 4, 2, 2, 8, 16, num_classes=3).double()
    torch.nn.init.normal_(model.heads.head.weight)  # torchvision begins with zeros
    return model


def token_loss(scores, tokens):
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def token_sum(scores, tokens):
    """The sum over tokens that count, and their number."""
    classes = tokens.flatten()
    total = F.cross_entropy(
        scores.flatten(0, 1), classes, ignore_index=3, reduction="sum"
    )
    return total, (classes != 3).sum()


def batch_of(name, n_samples):
    generator = torch.Generator().manual_seed(1)
    if name == "decoder":
        return (
            torch.randint(7, (n_samples, 4), generator=generator),
            torch.randint(7, (n_samples, 4), generator=generator),
        )
    images = torch.randn(n_samples, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (n_samples,), generator=generator)


# Four stages are cut within blocks, also between the projection to heads and their attention.
CASES = {
    ("decoder", "1F1B, shared loss"): (decoder, token_loss, catalog.one_f_one_b(2, 4)),
    ("vit", "CDP-v2"): (vit, F.cross_entropy, catalog.cyclic(2)),
}
if THOROUGH:
    CASES |= {
        ("decoder", "ZB, shared loss"): (decoder, token_sum, catalog.zero_bubble(2, 4)),
        ("decoder", "1F1B"): (decoder, token_loss, catalog.one_f_one_b(2, 4)),
        ("decoder", "interleaved"): (
            decoder,
            token_loss,
            catalog.interleaved_1f1b(4, 4, 2),
        ),
    }


def trained(case, runtime, **options):
    """A runtime that has trained three steps of a case."""
    make, loss, schedule = CASES[case]
    inputs, targets = batch_of(case[0], 2 * schedule.n_microbatches)
    model = make()
    if runtime is Distributed:
        share_loss = case[1].endswith("shared loss")
        parallelize = tensor_parallel(model, 2, share_loss=share_loss)
        options |= {"width": 2, "parallelize": parallelize}
    made = runtime(
        partition(model, schedule.n_stages, inputs[:2]),
        schedule,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        loss,
        options=StepOptions(clip=0.1),
        **options,
    )
    list(made.run([(inputs, targets)] * 3))
    return made


def on_devices():
    """The final weights of each case, on 2 ranks of 2 devices, and elements on a device."""
    world = join(device="cpu")
    found = {}
    for case in CASES:
        runtime = trained(case, Distributed, world=world)
        n_elements = sum(p.numel() for p in runtime.stages.model.parameters())
        found[case] = n_elements, copy.deepcopy(runtime.module().state_dict())
    return found


def in_one_process(case):
    return trained(case, SingleProcess).module().state_dict()
