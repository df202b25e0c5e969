"""What each process of the tests of a device's peak memory does."""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.thorough import THOROUGH
from toolkit.model import gpt, partition
from toolkit.model.gathered_weights import GatheredWeight, shard_parameters
from toolkit.model.kernel_work import tensors_in
from toolkit.model.peak_memory import LiveMemory
from toolkit.model.tensor_parallel import tensor_parallel
from toolkit.runtime import Distributed, join
from toolkit.schedule import Schedule, catalog

# Few words: what the loss keeps is in no stage's costs.
WORDS, TOKENS, BATCH = 4, 32, 4
STEPS = 2
PATIENCE = 10  # milliseconds that a higher peak must last

# Name: schedule, devices of a rank. Each case has 4 devices. When weights arrive from other ranks
# depends on the clock, so that here each stage stays on its rank.
CASES: dict[str, tuple[Schedule, int]] = {
    "GPipe": (catalog.gpipe(4, 8), 1),
    "GPipe, width 2": (catalog.gpipe(2, 6), 2),
    "1F1B, shared weights": (catalog.one_f_one_b(2, 6), 2),
}
if THOROUGH:
    CASES |= {
        "1F1B": (catalog.one_f_one_b(4, 8), 1),
        "CDP-v2": (catalog.cyclic(4, placement="per_stage"), 1),
        "1F1B, width 2": (catalog.one_f_one_b(2, 6), 2),
        "CDP-v2, width 2": (catalog.cyclic(2, placement="per_stage"), 2),
        "CDP-v2, shared weights": (catalog.cyclic(2, placement="per_stage"), 2),
    }


def decoder():
    torch.manual_seed(0)
    return gpt(WORDS, TOKENS, layers=4, width=128, heads=4)


def parallelize_of(name, model):
    """How devices share the decoder in a case: by its plan, or its weights alone."""
    if name.endswith("shared weights"):
        return shard_parameters
    return tensor_parallel(model, 2, share_loss=True)


def token_loss(scores, tokens):
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def sgd(parameters):
    # Without a state, which an update makes in its own thread and no op uses.
    return torch.optim.SGD(parameters, lr=0.1)


class DeviceMemory(LiveMemory):
    """Counts the bytes of this process's living tensors, of a DTensor its shard."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor | GatheredWeight) for kind in types):
            return NotImplemented  # kernels on local tensors come here next
        output = func(*args, **(kwargs or {}))
        arguments = tensors_in((args, kwargs))
        if any(
            isinstance(tensor, FakeTensor)
            for tensor in [*arguments, *tensors_in(output)]
        ):
            return output
        if any(tensor.is_meta for tensor in tensors_in(output)):
            return output
        # Messages arrive in another thread: count them where they are used first.
        self._count((arguments, output), ())
        return output

    def _count(self, output: Any, arguments: Sequence[Tensor]) -> None:
        previous_peak = self.most
        super()._count(output, arguments)
        # A backend's thread lets go of a message a moment after the message has arrived, and needs
        # the interpreter's lock for it.
        for _ in range(PATIENCE):
            if self.bytes <= previous_peak:
                break
            time.sleep(0.001)
        self.most = max(previous_peak, self.bytes)


def peaks() -> dict[str, int]:
    """The peak bytes of this device in a training step, by case."""
    world = join(device="cpu")
    found = {}
    for name, (schedule, width) in CASES.items():
        model = decoder()
        tokens = torch.randint(WORDS, (schedule.n_microbatches * BATCH, TOKENS))
        options = {}
        if width > 1:
            options = {"width": width, "parallelize": parallelize_of(name, model)}
        runtime = Distributed(
            partition(model, schedule.n_stages, tokens[:BATCH]),
            schedule,
            sgd,
            token_loss,
            world=world,
            overlap=False,  # all in this thread, which a dispatch mode sees
            **options,
        )
        list(runtime.run([(tokens, tokens)]))
        gc.collect()
        # Weights count from their first use on, hence in full in the second step.
        with DeviceMemory() as memory:
            list(runtime.run([(tokens, tokens)] * STEPS))
        found[name] = memory.most
    return found
