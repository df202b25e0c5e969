"""DeepSpeed's ZeRO 1, 2 and 3."""

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.errors import UserError
from toolkit.extras import check_installed
from toolkit.runtime.baselines.baseline import ReleasedParameters
from toolkit.runtime.baselines.ddp import Synchronous, WholeModel, check_weights_stay
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.stage import Values
from toolkit.runtime.updater import Updater
from toolkit.schedule import Schedule

# These update each element by itself: the engine's optimizer has flat pieces of the weights.
_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)


@dataclass(eq=False, repr=False, kw_only=True)
class DeepSpeed(Synchronous):
    """Data parallelism by DeepSpeed's ZeRO.

    The optimizer computes in 32 bits, whatever the weights are. While it trains, the model's own
    parameters are empty; :meth:`module` fills them.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, world: as in ``Distributed``. The optimizer is
            one of torch's that updates each element by itself, the same for every stage.
        schedule: ``catalog.data_parallel(n)``, its state sharded or not.
        options: only precision (fp32, tf32) and memory format may be set.
        zero: what the ranks share: optimizer states (1), gradients too (2), weights too (3).
        offload: keep optimizer states, and with ZeRO-3 the shares of weights, in the CPU's memory.

    Raises:
        UserError: the schedule is not data parallelism, an option has no such value, or DeepSpeed
            is not installed.

    Source: Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """

    runtime = "deepspeed"
    states = ("replicated", "sharded")

    zero: int = 3
    offload: bool = False

    def __post_init__(self) -> None:
        if self.zero not in (1, 2, 3):
            raise UserError(f"zero is ZeRO's stage, 1, 2 or 3: got {self.zero}")
        super().__post_init__()

    @classmethod
    def check_installed(cls) -> None:
        """Raise UserError if DeepSpeed is missing."""
        check_installed("deepspeed", f"runtime={cls.runtime}")

    def _check_options(self, schedule: Schedule) -> None:
        super()._check_options(schedule)
        if self.options.autocasts:
            raise UserError(
                f"runtime=deepspeed takes no precision={self.options.precision}: use fp32 or tf32,"
                " or runtime=fsdp"
            )
        self.check_installed()
        # DeepSpeed asks for its device as it is imported.
        devices = {
            parameter.device.type for parameter in self.stages.model.parameters()
        }
        os.environ.setdefault("DS_ACCELERATOR", devices.pop())
        self._deepspeed = import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

    def _build(self) -> Sequence[Updater]:
        self._check_no_gloo_on_gpus()
        if self.zero == 3:
            check_weights_stay(self.stages, self.runtime, "set zero=2")
        if self.world.group is not None:
            raise UserError(
                "runtime=deepspeed sends by torch's first process group, which this script or a"
                " larger job has made: start as many ranks as the schedule has"
            )
        whole_chain = WholeModel(self.stages, self.seed)
        # The engine cuts its parameters up. It shares the buffers with the model.
        self._chain = copy.deepcopy(
            whole_chain, {id(buffer): buffer for buffer in whole_chain.buffers()}
        )
        self._twins = dict(
            zip(whole_chain.parameters(), self._chain.parameters(), strict=True)
        )
        self._released = ReleasedParameters(self._twins)
        updaters = [
            Updater(stage, self.optimizer, self.lr_scheduler)
            for stage in whole_chain.stages
        ]
        # Of the stages. They never step: they have the settings, and the state between runs.
        self._optimizers = [u.optimizer for u in updaters if u.optimizer is not None]
        self._wrapped: Any = self._wrap(self._chain)
        return updaters

    def _wrap(self, model: WholeModel) -> nn.Module:
        # The engine takes one optimizer: its groups are those of all stages, one after another.
        joint_optimizer = _join_optimizers(self._optimizers, self._twins)
        self._group_of: dict[nn.Parameter, int] = {}
        for index, group in enumerate(joint_optimizer.param_groups):
            self._group_of |= dict.fromkeys(group["params"], index)
        with self.world.watch.waiting("DeepSpeed on all ranks", self._everyone):
            engine, *_ = self._deepspeed.initialize(
                model=model,
                optimizer=joint_optimizer,
                config=self._settings(),
                dist_init_required=False,
            )
        return engine

    def _settings(self) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.zero,
            "stage3_param_persistence_threshold": 0,  # shard small weights, too
            # Or it replaces torch's linear for all models.
            "memory_efficient_linear": False,
        }
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self.zero == 3:
                zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,  # only its own log uses it
            "gradient_clipping": 0.0,  # none; unless said, DeepSpeed clips to 1
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        self._released.release()
        # The engine has the state while it trains; a second copy would undo what sharding saves.
        for optimizer in self._optimizers:
            optimizer.state.clear()
        return super()._train(step, inputs, targets)

    def _in_forward(self) -> AbstractContextManager[None]:
        return self.world.watch.waiting("the weights of all ranks", self._everyone)

    def _backward(self, loss: Tensor) -> None:
        self._wrapped.backward(loss)

    def _update(self) -> None:
        groups = chain.from_iterable(
            optimizer.param_groups for optimizer in self._optimizers
        )
        # The stages' schedulers set the rates of their own groups; the engine's follow them.
        engine_groups = self._wrapped.optimizer.optimizer.param_groups
        for engine_group, group in zip(engine_groups, groups, strict=True):
            engine_group |= {
                name: value for name, value in group.items() if name != "params"
            }
        with self.world.watch.waiting(
            "the updated weights of all ranks", self._everyone
        ):
            self._wrapped.step()
        for updater in self._updaters:
            updater.apply()  # has no gradients, and advances the learning rate
            updater.unused = []

    @torch.no_grad()
    def _settle(self) -> None:
        """Gather the shares of all ranks into the model and the optimizers of its stages."""
        super()._settle()
        self._released.restore()
        self._copy_weights(to_engine=False)
        for parameter, piece, optimizer in self._pieces():
            state = optimizer.state[parameter] = {}
            for key, value in self._engine_states[piece.share].items():
                if _shaped_like(piece.share, value):
                    state[key] = self._gather(piece, value, parameter)
                else:
                    # Parameters of a share have one step count.
                    state[key] = copy.deepcopy(value)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; see :meth:`Runtime.load_state_dict`."""
        self._released.restore()  # its form is compared with that of the model
        super().load_state_dict(state)

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._copy_weights(to_engine=True)
        self._engine_states.clear()
        for parameter, piece, optimizer in self._pieces():
            piece.copy_from(parameter, piece.share)
            share_state = self._engine_states[piece.share]
            for key, value in optimizer.state[parameter].items():
                if _shaped_like(parameter, value):
                    shared = share_state.setdefault(key, torch.zeros_like(piece.share))
                    piece.copy_from(value, shared)
                else:
                    share_state[key] = value

    def _copy_weights(self, *, to_engine: bool) -> None:
        """Copy all weights, a stage at a time, from the engine to the model, or back."""
        for stage in self.stages:
            twins = {
                parameter: self._twins[parameter] for parameter in stage.parameters()
            }
            # With a rank, the context spreads what that rank has changed.
            changing_rank = 0 if to_engine else None
            with self._deepspeed.zero.GatheredParameters(
                [*twins.values()], changing_rank
            ):
                for parameter, twin in twins.items():
                    if to_engine:
                        twin.data.copy_(parameter.data)
                    else:
                        parameter.data.copy_(twin.data)

    @property
    def _engine_states(self) -> dict[Tensor, dict[str, Any]]:
        """The state of the engine's optimizer, of each share."""
        return self._wrapped.optimizer.optimizer.state

    def _pieces(self) -> Iterator[tuple[nn.Parameter, "_Piece", Optimizer]]:
        """Yield each trained parameter, this rank's piece of it, and its stage's optimizer."""
        for optimizer in self._optimizers:
            for parameter in chain.from_iterable(
                g["params"] for g in optimizer.param_groups
            ):
                yield parameter, self._piece(self._twins[parameter]), optimizer

    def _piece(self, twin: nn.Parameter) -> "_Piece":
        zero: Any = self._wrapped.optimizer
        # ZeRO-3 cuts each parameter into equal pieces, the last one padded; ZeRO-1 and 2 cut the
        # whole group once, so that a rank may have all of a parameter, some of it or nothing:
        #
        #                share of rank 0          share of rank 1
        #     ZeRO-3     a[:2]  b[:3]             a[2:]  b[3:]
        #     ZeRO-1, 2  a[:4]  b[:1]             b[1:]
        if self.zero == 3:
            index, position, length = zero.grad_position[zero.get_param_id(twin)]
            share = zero.fp32_partitioned_groups_flat[index]
            return _Piece(share, position, self.rank * length, length)
        share = zero.single_partition_of_fp32_groups[self._group_of[twin]]
        mapping = cast(Any, twin)._hp_mapping
        if mapping is None:  # another rank has all of it
            return _Piece(share, 0, 0, 0)
        fragment = mapping.hp_fragment_address
        return _Piece(
            share, fragment.start, mapping.lp_fragment_address.start, fragment.numel
        )

    def _gather(self, piece: "_Piece", values: Tensor, like: Tensor) -> Tensor:
        """Return the values that belong to a parameter, from the pieces of all ranks."""
        flat = torch.zeros(like.numel(), dtype=like.dtype)
        local_elements = flat[piece.start : piece.start + piece.length]
        local_elements.copy_(values[piece.position :][: len(local_elements)])
        # Elsewhere it is 0, so the sum over ranks is the whole.
        return self.total(flat).to(like.device).view_as(like)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Where a rank keeps its piece of a parameter.

    Args:
        share: the rank's weights of a parameter group in 32 bits, ``[elements]``.
        position: of the piece in the share.
        start: of the piece in the flat parameter.
        length: elements of the piece.
    """

    share: Tensor
    position: int
    start: int
    length: int

    def copy_from(self, parameter: Tensor, values: Tensor) -> None:
        """Copy the piece of ``parameter`` to its place in ``values``, laid out as the share."""
        # The last rank's piece may be longer than what is left of the parameter.
        elements = parameter.flatten()[self.start : self.start + self.length]
        values[self.position :][: len(elements)].copy_(elements)


def _shaped_like(tensor: Tensor, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def _join_optimizers(
    optimizers: Sequence[Optimizer], twins: Mapping[nn.Parameter, nn.Parameter]
) -> Optimizer:
    """Return one optimizer of the twins of all parameters, with the same settings."""
    kinds: set[Any] = {type(optimizer) for optimizer in optimizers}
    if len(kinds) > 1 or not kinds <= set(_ELEMENTWISE):
        possible = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise UserError(
            f"runtime=deepspeed takes one of torch's {possible} for all stages: got"
            f" {', '.join(sorted(kind.__name__ for kind in kinds))}; or use runtime=fsdp"
        )
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            groups.append(group | {"params": [twins[p] for p in group["params"]]})
    return kinds.pop()(groups)
