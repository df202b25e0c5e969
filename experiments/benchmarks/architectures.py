"""Architectures of timm and transformers under CDP-v2 on 2 ranks, against a single process.

Small configurations, those of architectures.yaml, in float64. A row says how the model was traced,
how the two trainings differ and, where one is refused, why.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError, check_choice, first_line
from toolkit.model import Stages, check_independent, partition
from toolkit.runtime import (
    Distributed,
    SingleProcess,
    StepOptions,
    join,
    launch,
    report,
)
from toolkit.schedule import catalog
from toolkit.terminal import show

_N = 2  # stages, micro-batches and ranks
_TOKENS, _VOCABULARY = 12, 99  # of a sample; as in architectures.yaml

Example = dict[str, Any] | Tensor
Case = tuple[Callable[[], nn.Module], Callable[[int], Example]]
"""A function that builds a model, and one that draws its inputs for a number of samples."""


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each architecture.

    *graph*: what traced it. *larger stage*: its share of the floating-point operations.
    *difference*: largest difference of a weight after ``steps`` training steps, over the largest
    change of a weight; trainings agree if it is below ``tolerance``.
    """
    check_counts(config, "batch", "steps", of="bench.")
    names = [
        (library, name)
        for library in config.libraries
        for name in _chosen(config, library)
    ]
    options = OmegaConf.to_container(config)
    # Rows come as reports, so that progress shows: the result of launch would come at the end.
    rows: list[dict[str, Any]] = []

    def keep(rank: int, row: dict[str, Any]) -> None:
        rows.append(row)
        show(f"{len(rows)}/{len(names)} {row['library']} {row['model']}")

    launch(_on_ranks, _N, names, options, seed, on_report=keep)
    return rows


def _chosen(config: DictConfig, library: str) -> list[str]:
    check_choice("bench.libraries", library, LIBRARIES)
    return [
        name for name in _models()[library] if not config.only or name in config.only
    ]


def _on_ranks(
    names: list[tuple[str, str]], config: Mapping[str, Any], seed: int
) -> None:
    join(_N, device="cpu")
    for library, name in names:
        try:
            build, draw = LIBRARIES[library](name, **_models()[library][name])
            row = _row(build, draw, config, seed)
        except Exception as error:  # the model's own code may raise anything
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            row = {"failed": True, "reason": kind + first_line(error)}
        # All rows have the same columns, in this order.
        empty = {"graph": "", "larger stage": None, "difference": None, "failed": False}
        row = {"library": library, "model": name, **empty, "reason": ""} | row
        if join(_N, device="cpu").rank == 0:
            report(row)


def _row(
    build: Callable[[], nn.Module],
    draw: Callable[[int], Example],
    config: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = build().double()
    initial_weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    example = draw(config["batch"])
    stages = partition(model, _N, example, check=False)
    # With inputs of the model's own kind: partition would draw others, from a normal distribution.
    check_independent(stages, draw(4))
    inputs = [draw(_N * config["batch"]) for _ in range(config["steps"])]
    classes = torch.randint(2, (config["steps"], _N * config["batch"]))
    weights_of_runtime = []
    for runtime_class in (SingleProcess, Distributed):
        runtime = runtime_class(
            copy.deepcopy(stages),
            catalog.cyclic(_N),
            _sgd,
            _loss,
            seed=seed,
            # Clipped, or deep models at their first weights would amplify rounding.
            options=StepOptions(clip=1.0),
        )
        list(runtime.run([*zip(inputs, classes, strict=True)]))
        weights = {name: x.detach() for name, x in runtime.module().named_parameters()}
        weights_of_runtime.append(weights)
    single, distributed = weights_of_runtime
    # Differences count next to what training has changed.
    moved = max(_distance(single[name], initial_weights[name]) for name in single)
    difference = (
        max(_distance(single[name], distributed[name]) for name in single) / moved
    )
    # Also if the difference is NaN.
    failed = not difference < config["tolerance"]
    return {
        "graph": _graph(stages),
        "larger stage": round(max(stages.loads) / sum(stages.loads), 2),
        "difference": difference,
        "failed": failed,
        "reason": f"differs by {difference:.0e}" if failed else "",
    }


def _distance(weights: Tensor, reference_weights: Tensor) -> float:
    return float((weights - reference_weights).abs().max())


def _graph(stages: Stages) -> str:
    targets = (str(node.target) for stage in stages for node in stage.graph.nodes)
    return "torch.export" if any(t.startswith("aten.") for t in targets) else "torch.fx"


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _loss(outputs: Any, targets: Tensor) -> Tensor:
    """Classify a sample by the first scores of it."""
    scores = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    return F.cross_entropy(scores.flatten(1)[:, :10], targets)


@cache
def _models() -> dict[str, dict[str, dict[str, Any]]]:
    """Return by library and name the settings of a model."""
    file = Path(__file__).with_suffix(".yaml")
    return {library: yaml.safe_load(file.read_text())[library] for library in LIBRARIES}


def _timm(name: str, size: int, **arguments: Any) -> Case:
    """Return a model of timm, and its images of ``size`` pixels."""
    import timm

    def draw(n: int) -> Tensor:
        return torch.rand(n, 3, size, size, dtype=torch.float64)

    return partial(timm.create_model, name, num_classes=10, **arguments), draw


def _transformers(name: str, head: str, inputs: str, **arguments: Any) -> Case:
    """Return a model of transformers; the class's name is ``name`` and ``head``."""
    import transformers

    transformers.logging.set_verbosity_error()

    def build() -> nn.Module:
        settings = getattr(transformers, f"{name}Config")(**arguments)
        settings.tie_word_embeddings = False  # T5's ignores the argument
        model: nn.Module = getattr(transformers, name + head)(settings)
        return model

    return build, _INPUTS[inputs]


def _ids(n: int) -> Tensor:
    return torch.randint(5, _VOCABULARY - 9, (n, _TOKENS))


def _mask(n: int) -> Tensor:
    # Sequences of unequal lengths, padded at their ends.
    lengths = torch.randint(_TOKENS // 2, _TOKENS + 1, (n, 1))
    return (torch.arange(_TOKENS) < lengths).long()


def _text(n: int) -> dict[str, Any]:
    return {"input_ids": _ids(n), "attention_mask": _mask(n)}


def _translation(n: int) -> dict[str, Any]:
    return _text(n) | {"decoder_input_ids": _ids(n)}


def _speech(n: int) -> dict[str, Any]:
    features = torch.rand(n, 16, 40, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": _ids(n)}


def _images(n: int) -> dict[str, Any]:
    return {"pixel_values": torch.rand(n, 3, 32, 32, dtype=torch.float64)}


def _waves(n: int) -> dict[str, Any]:
    return {"input_values": torch.rand(n, 400, dtype=torch.float64)}


_INPUTS: dict[str, Callable[[int], Example]] = {
    "text": _text,
    "translation": _translation,
    "masked translation": lambda n: (
        _translation(n) | {"decoder_attention_mask": _mask(n)}
    ),
    "speech": _speech,
    "images": _images,
    "waves": _waves,
}
LIBRARIES: dict[str, Callable[..., Case]] = {
    "timm": _timm,
    "transformers": _transformers,
}
