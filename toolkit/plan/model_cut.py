"""The user's model in a pilot: made by seed, and cut into stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.model import InputSpec, Stages, partition
from toolkit.plan.candidates import Candidate
from toolkit.plan.measure import Data, OnProgress
from toolkit.training.data import Batch

Model = nn.Module | Callable[[], nn.Module]
"""A model, or a function that makes one."""


@dataclass(frozen=True)
class ModelCut:
    """The user's model in stages, and the samples that it takes.

    Attributes:
        make_model: makes the model of a seed.
        target: the model's name on a command line; empty without one.
        stages: of the first model.
        n_stages: 1 if the model cannot be cut.
        data: samples on the model's device.
        example: inputs and targets of a training step.
    """

    make_model: Callable[[int], nn.Module]
    target: str
    stages: Stages
    n_stages: int
    data: Data
    example: Batch

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.data.device


def cut_model(
    model: Model, samples: Any, plain_candidate: Candidate, on_progress: OnProgress
) -> ModelCut:
    """Cut a model into the stages of a candidate, or the most possible."""
    make_model, target = model_maker(model)
    first_model = make_model(0)
    trained_weights = [
        weights for weights in first_model.parameters() if weights.requires_grad
    ]
    if not trained_weights:
        raise UserError(
            f"{type(first_model).__name__} has no parameter that requires a gradient"
        )
    batch = plain_candidate.batch
    device = trained_weights[0].device
    step_batch = plain_candidate.spec.microbatches * batch
    data = Data(samples, step_batch, device, trained_weights[0].dtype)
    example = next(data.train(0))
    on_progress("cutting the model", 0.0)

    inputs, answers = example
    max_stages = plain_candidate.spec.stages
    stages, n_stages = _cut(
        first_model, max_stages, inputs[:batch], plain_candidate.partition
    )
    _check_output(stages.output.shape, answers[:batch].shape, samples.form)
    return ModelCut(make_model, target, stages, n_stages, data, example)


def _check_output(
    output_shape: Sequence[int], answer_shape: Sequence[int], form: InputSpec
) -> None:
    """Raise UserError unless the model gives a number for each class of each answer."""
    if [*output_shape[:-1]] != [*answer_shape] or output_shape[-1] < form.n_classes:
        raise UserError(
            f"the model's output for {answer_shape[0]} {form.samples} of {form.n_classes} classes"
            f" has shape {list(output_shape)}: expected {[*answer_shape, form.n_classes]} or wider"
        )


def model_maker(model: Model) -> tuple[Callable[[int], nn.Module], str]:
    """Return a function from a seed to the model, and its name on a command line."""
    if isinstance(model, nn.Module):
        return lambda seed: model, ""
    if not callable(model):
        raise UserError(
            f"model is a torch.nn.Module, or a function that makes one: got {model!r}"
        )

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            new_model = model()
        if not isinstance(new_model, nn.Module):
            raise UserError(f"model() returns a torch.nn.Module: got {new_model!r}")
        return new_model

    module = getattr(model, "__module__", "")
    name = getattr(model, "__qualname__", "")
    # It cannot be imported.
    if not module or module == "__main__" or not name or "<" in name:
        return make, ""
    return make, f"{module}.{name}"


def _cut(
    model: nn.Module, max_stages: int, example: Tensor, partition_by: str
) -> tuple[Stages, int]:
    """Cut into ``max_stages``, or the most possible; at least two stages must train."""
    # Raises if the model cannot be traced, or mixes samples.
    uncut_stages = partition(model, 1, example)
    # The most stages first: fewer of them leave less to stagger.
    for n_stages in range(max_stages, 1, -1):
        try:
            stages = partition(model, n_stages, example, partition_by, check=False)
        except ValueError:
            continue
        if sum(map(_trains, stages)) > 1:
            return stages, n_stages
    return uncut_stages, 1


def _trains(stage: nn.Module) -> bool:
    """Whether a stage has weights that train."""
    return any(weights.requires_grad for weights in stage.parameters())
