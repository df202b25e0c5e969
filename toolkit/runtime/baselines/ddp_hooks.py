"""Compression of DDP's messages by communication hooks, and the state that they keep.

``powersgd`` is torch's own hook. With the matrix M = gradient + error of each weight::

    P = orthogonal(sum_m M_m Q),  Q = 1/N sum_m M_m^T P,  gradient = P Q^T,  error_m = M_m - P Q^T

``int8``, ``int4`` and ``topk`` send the codes of :mod:`toolkit.runtime.quantization` in two
rounds; each rank averages its
share of the gradient::

    sent_m = Q(gradient_m + error_m),         error_m = gradient_m + error_m - sent_m
    mean   = Q(1/N sum_m sent_m + error'),    error'  = 1/N sum_m sent_m + error' - mean

Each rank sends 2 (N-1)/N of the quantised gradient, whatever N. torch's own quantisation hooks
gather every rank's whole gradient, N-1 times as much, have one scale a bucket or loop over
channels in Python, and keep no error.

Source: PowerSGD, arXiv 1905.13727, algorithms 1 and 2; errors on both ways, arXiv 1905.05957,
algorithm 1.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from toolkit.cost.compression import BLOCK, BLOCK_CODES, SCALE_BYTES
from toolkit.errors import UserError, check_choice, whole
from toolkit.runtime.quantization import dequantize, encode_with_error, quantize

# Newer versions of torch warn of the old name.
_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


@dataclass(frozen=True)
class CompressionOptions:
    """How DDP's gradients travel.

    Args:
        kind: ``none``, ``fp16``, ``bf16``, ``powersgd``, ``int8``, ``int4`` or
            ``topk``.
        low_rank: columns of P and Q with ``powersgd``; torch leaves weights alone that this would
            make less than half as large.
        start: training steps before ``powersgd`` and codes begin, 2 or more; the gradients of these
            are exact.
        warm_start: whether PowerSGD begins with the last step's Q.
        error_feedback: whether ranks add what a message lost to their next one.

    Raises:
        UserError: an option has no such value.
    """

    kind: str = "none"
    low_rank: int = 2
    start: int = 2
    warm_start: bool = True
    error_feedback: bool = True

    def __post_init__(self) -> None:
        check_choice("compression", self.kind, KINDS)
        whole(self.low_rank, "low_rank", 1)
        # DDP forms its final buckets after one step.
        whole(self.start, "compression_start", 2)


class Compressor:
    """The hook of one DDP-wrapped model, and its state."""

    def __init__(
        self, wrapped: DistributedDataParallel, options: CompressionOptions
    ) -> None:
        self._wrapped = wrapped
        self._group: dist.ProcessGroup = wrapped.process_group
        self._memory: _Memory | None = None
        hook = _PLAIN_HOOKS.get(options.kind)
        hook_state: Any = self._group
        if options.kind == "powersgd":
            self._memory = _LowRankMemory(self._group, options)
            hook = powerSGD_hook
            hook_state = self._memory.torch_state
        elif options.kind in BLOCK_CODES:
            self._memory = _QuantizedMemory(self._group, options)
            hook = _quantized_hook
            hook_state = self._memory
        if hook is None:
            return
        # Hooks without a memory are one collective a bucket, which begins in the order of the
        # calls.
        if self._memory is not None and dist.get_backend(self._group) == "gloo":
            hook = _in_turn(hook)
        wrapped.register_comm_hook(hook_state, hook)

    def state(self) -> dict[str, Any] | None:
        """Return what this rank's next messages depend on; None if on nothing. Every rank calls it.

        Buckets are in it by the names of their weights, since errors belong to places in a bucket.
        """
        if self._memory is None:
            return None
        return {"buckets": self._buckets(), **self._memory.state()}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the :meth:`state` of the same rank; None: from the start.

        Raises:
            UserError: the state is of another compression, or of other weights.
        """
        if self._memory is None:
            return
        device = next(self._wrapped.parameters()).device
        if state is None:
            self._memory.load({}, device)
            return
        buckets = state.get("buckets")
        entries = {key: value for key, value in state.items() if key != "buckets"}
        if entries.keys() != self._memory.state().keys():
            raise UserError(
                f"the state has a compression's {sorted(entries)}; expected"
                f" {sorted(self._memory.state())}. Give the runtime.compression that saved it"
            )
        if buckets is not None:
            self._form(buckets)
        self._memory.load(entries, device)

    def _buckets(self) -> list[list[str]] | None:
        """Return the names of weights in each bucket, once DDP has formed its final buckets."""
        reducer = self._wrapped.reducer
        # DDP forms them at the forward that follows its first step; too late for a state.
        reducer._rebuild_buckets()
        if self._memory is None or self._memory.n_steps == 0:
            return None
        names = {
            id(parameter): name for name, parameter in self._wrapped.named_parameters()
        }
        return [
            [names[id(parameter)] for parameter in bucket.parameters()]
            for bucket in reducer._get_zeros_like_grad_buckets()
        ]

    def _form(self, buckets: Sequence[Sequence[str]]) -> None:
        """Let DDP form the given buckets, as it does after a step.

        The order in which gradients come decides on the buckets. A backward through one number of
        each weight gives that order without a computation of the model.
        """
        if self._buckets() != buckets:
            parameters = dict(self._wrapped.named_parameters())
            in_order = [parameters[name] for bucket in buckets for name in bucket]
            model = self._wrapped.module
            # DDP's hooks are on the parameters, so any module that uses them starts the averaging.
            self._wrapped.module = _Touch(in_order)
            try:
                self._wrapped().backward()
            finally:
                self._wrapped.module = model
            for parameter in in_order:
                parameter.grad = None
        if self._buckets() != buckets:
            raise UserError(
                "the state's buckets of gradients are not those of this run: give the model,"
                " bucket_mb and ranks with which it was saved"
            )


class _Touch(nn.Module):
    """A model whose backward reaches its parameters in the given order."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._in_order = tuple(parameters)

    def forward(self) -> Tensor:
        """Return zero."""
        # Autograd goes from the last operation to the first.
        numbers = [parameter.flatten()[0] for parameter in reversed(self._in_order)]
        return sum(
            (0 * number.double() for number in numbers),
            torch.zeros((), dtype=torch.float64),
        )


def _in_turn(hook: Hook) -> Hook:
    """Return ``hook`` with messages of one bucket that end before those of the next begin.

    With gloo, collectives match by the order of their calls. The rounds of several buckets would
    begin in another order on each rank, since callbacks run on any of gloo's threads.
    """
    thread = ThreadPoolExecutor(1, "compression")

    def hook_in_turn(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        mean: Future[Tensor] = Future()

        def average() -> None:
            try:
                mean.set_result(hook(state, bucket).wait())
            except Exception as error:
                mean.set_exception(error)  # type: ignore[arg-type]  # its annotation is wrong

        thread.submit(average)
        return mean

    return hook_in_turn


class _LowRankMemory:
    """The state of torch's PowerSGD as tensors and plain values, which torch's own is not."""

    def __init__(self, group: dist.ProcessGroup, options: CompressionOptions) -> None:
        self.torch_state = PowerSGDState(
            group,
            matrix_approximation_rank=options.low_rank,
            start_powerSGD_iter=options.start,
            use_error_feedback=options.error_feedback,
            warm_start=options.warm_start,
        )

    @property
    def n_steps(self) -> int:
        """Number of steps so far."""
        return self.torch_state.iter

    def state(self) -> dict[str, Any]:
        # NumPy's Mersenne twister: its name, 624 numbers of type uint32, and plain values. As
        # int64, since torch does little with uint32.
        generator: Any = self.torch_state.rng.get_state()
        _, keys, *position = generator
        return {
            "n_steps": self.torch_state.iter,
            "errors": dict(self.torch_state.error_dict),
            "p": dict(self.torch_state.p_memory_dict),
            "q": dict(self.torch_state.q_memory_dict),
            "generator": [torch.from_numpy(keys.astype(np.int64)), *position],
        }

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        torch_state = self.torch_state
        torch_state.iter = state.get("n_steps", 0)
        torch_state.error_dict = _copies(state.get("errors", {}), device)
        torch_state.p_memory_dict = _copies(state.get("p", {}), device)
        torch_state.q_memory_dict = _copies(state.get("q", {}), device)
        if "generator" in state:
            keys, *position = state["generator"]
            torch_state.rng.set_state(
                ("MT19937", keys.numpy().astype(np.uint32), *position)
            )


class _QuantizedMemory:
    """What the ranks have not sent yet of each bucket."""

    def __init__(self, group: dist.ProcessGroup, options: CompressionOptions) -> None:
        self.group = group
        self.code = BLOCK_CODES[options.kind]
        self.start = options.start
        self.error_feedback = options.error_feedback
        self.n_steps = 0
        self.errors: dict[int, Tensor] = {}  # of this rank's gradient, by bucket
        self.errors_of_mean: dict[int, Tensor] = {}  # of this rank's share of the mean

    def state(self) -> dict[str, Any]:
        return {
            "n_steps": self.n_steps,
            "errors": dict(self.errors),
            "errors_of_mean": dict(self.errors_of_mean),
        }

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.n_steps = state.get("n_steps", 0)
        self.errors = _copies(state.get("errors", {}), device)
        self.errors_of_mean = _copies(state.get("errors_of_mean", {}), device)

    def quantized(
        self, errors: dict[int, Tensor], index: int, numbers: Tensor
    ) -> Tensor:
        """Return the bytes of ``numbers`` plus their entry of ``errors``, which is renewed."""
        if not self.error_feedback:
            return quantize(numbers, self.code)
        content, errors[index] = encode_with_error(
            numbers,
            errors.get(index),
            encode=lambda numbers: quantize(numbers, self.code),
            decode=lambda content: dequantize(
                content, len(numbers), self.code, numbers.dtype
            ),
        )
        return content


_Memory = _LowRankMemory | _QuantizedMemory


def _copies(tensors: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    return {index: tensor.to(device, copy=True) for index, tensor in tensors.items()}


def _quantized_hook(
    memory: _QuantizedMemory, bucket: dist.GradBucket
) -> Future[Tensor]:
    """Average a bucket's gradients over the ranks in two rounds of messages."""
    gradient = bucket.buffer()
    world = memory.group.size()
    code = memory.code
    is_exact = memory.n_steps < memory.start
    # Once a step, however many buckets there are.
    if bucket.is_last():
        memory.n_steps += 1
    if is_exact:
        return default_hooks.allreduce_hook(memory.group, bucket)
    # Equal shares of whole blocks: each rank averages one of them.
    # Rounded up to whole blocks: -(-a // b) is a / b, rounded up.
    n_share = -(-len(gradient) // (world * BLOCK)) * BLOCK
    n_bytes = code.n_bytes(n_share)
    padded = torch.nn.functional.pad(gradient, (0, world * n_share - len(gradient)))

    # 1. Every rank sends each share to the rank that averages it.
    #    content     scales of share 0 | of share 1 | .. | codes of share 0 | of share 1 | ..
    #    sent[m]     scales of share m | codes of share m        to rank m
    content = memory.quantized(memory.errors, bucket.index(), padded)
    n_scale_bytes = world * n_share // BLOCK * SCALE_BYTES
    scales = content[:n_scale_bytes].view(world, -1)
    codes = content[n_scale_bytes:].view(world, -1)
    sent = torch.cat([scales, codes], 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=memory.group)

    # 2. It sends the average to all.
    total = torch.zeros(n_share, dtype=gradient.dtype, device=gradient.device)
    for share in received:
        total += dequantize(share, n_share, code, gradient.dtype)
    mean = memory.quantized(memory.errors_of_mean, bucket.index(), total / world)
    means = torch.empty(world * n_bytes, dtype=torch.uint8, device=gradient.device)
    _all_gather(means, mean, group=memory.group)
    shares = [
        dequantize(share, n_share, code, gradient.dtype)
        for share in means.view(world, n_bytes)
    ]
    gradient.copy_(torch.cat(shares)[: len(gradient)])
    averaged: Future[Tensor] = Future()
    averaged.set_result(gradient)
    return averaged


_PLAIN_HOOKS: dict[str, Hook] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}

KINDS = ("none", *_PLAIN_HOOKS, "powersgd", *BLOCK_CODES)
"""The values of ``runtime.compression``."""
