"""Architectures of timm and transformers under CDP-v2 on 2 ranks, against a single process.

Small configurations, in float64. A row says how the model was traced, how the two trainings differ
and, where one is refused, why.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
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
_TOKENS, _VOCABULARY = 12, 99

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
    rows: list[dict[str, Any]] = []

    def keep(rank: int, row: dict[str, Any]) -> None:
        rows.append(row)
        show(f"{len(rows)}/{len(names)} {row['library']} {row['model']}")

    launch(_on_ranks, _N, names, options, seed, on_report=keep)
    return rows


def _chosen(config: DictConfig, library: str) -> list[str]:
    check_choice("bench.libraries", library, LIBRARIES)
    return [
        name for name in LIBRARIES[library]() if not config.only or name in config.only
    ]


def _on_ranks(
    names: list[tuple[str, str]], config: Mapping[str, Any], seed: int
) -> None:
    join(_N, device="cpu")
    for library, name in names:
        try:
            row = _row(*LIBRARIES[library]()[name], config, seed)
        except Exception as error:  # the model's own code may raise anything
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            row = {"failed": True, "reason": kind + first_line(error)}
        empty = {"graph": "", "larger stage": None, "difference": None}
        row = {
            "library": library,
            "model": name,
            **empty,
            "failed": False,
            "reason": "",
        } | row
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
    moved = max(_distance(single[name], initial_weights[name]) for name in single)
    difference = (
        max(_distance(single[name], distributed[name]) for name in single) / moved
    )
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


def _timm() -> dict[str, Case]:
    """Small models of timm's first 20 families in alphabetical order."""
    import timm

    narrow = {"embed_dim": 48, "depth": 3, "num_heads": 3}
    small = {"img_size": 32, "patch_size": 8, **narrow}
    heads = {"embed_dim": 12, "depth": 3, "num_heads": 4, "local_up_to_layer": 2}
    stages = {
        "depths": (1, 1, 1, 1),
        "embed_dims": (24, 48, 96, 192),
        "num_heads": (1, 2, 4, 8),
    }
    # Size of the images, and other arguments.
    models: dict[str, tuple[int, dict[str, Any]]] = {
        "beit_base_patch16_224": (32, small),
        "lambda_resnet26t": (64, {}),
        "test_byobnet": (64, {}),
        "cait_xxs24_224": (32, small),
        "coat_tiny": (64, {"img_size": 64}),
        "convit_tiny": (32, {"img_size": 32, "patch_size": 8, **heads}),
        "convmixer_768_32": (28, {}),
        "test_convnext": (64, {}),
        "cpubone_nano": (64, {}),
        "crossvit_tiny_240": (240, {}),
        "csatv2": (64, {}),
        "cs3darknet_focus_s": (64, {}),
        "cspnext_tiny": (64, {}),
        "davit_tiny": (64, stages),
        "deepseek_vit_412m": (32, small),
        "deit_tiny_patch16_224": (32, small),
        "densenet121": (64, {}),
        "dla46x_c": (64, {}),
        "dpn48b": (64, {}),
        "edgenext_xx_small": (64, {}),
    }

    def case(name: str, size: int, given: dict[str, Any]) -> Case:
        def draw(n: int) -> Tensor:
            return torch.rand(n, 3, size, size, dtype=torch.float64)

        return lambda: timm.create_model(name, num_classes=10, **given), draw

    return {name: case(name, *of) for name, of in models.items()}


def _transformers() -> dict[str, Case]:
    """Common families of transformers, with two layers; weights are not tied over the stages."""
    import transformers

    transformers.logging.set_verbosity_error()
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    wide = {"hidden_size": 32, **layers}
    text = {"vocab_size": _VOCABULARY, "max_position_embeddings": 64}
    alone = {"use_cache": False, "tie_word_embeddings": False}
    rotary = {**wide, **text, **alone, "num_key_value_heads": 2, "head_dim": 8}
    both = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in _PAIRED.items()
    }
    images = {"image_size": 32, "patch_size": 8}
    audio = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
    marks = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    waves: dict[str, Any] = {
        "conv_dim": (16, 16),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
    }
    waves |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16}
    waves |= {
        "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
    }
    opt = {k: n for k, n in wide.items() if k != "intermediate_size"} | {"ffn_dim": 64}
    classes, causal = "ForSequenceClassification", "ForCausalLM"
    generates, image = "ForConditionalGeneration", "ForImageClassification"
    models: dict[str, tuple[str, dict[str, Any], Callable[[int], Example]]] = {
        "Albert": (classes, {**wide, **text, "embedding_size": 16}, _text),
        "Bart": (generates, {"d_model": 32, **both, **text, **alone}, _translation),
        "Bert": (classes, {**wide, **text}, _text),
        "Bloom": (
            causal,
            {
                "hidden_size": 32,
                "n_layer": 2,
                "n_head": 4,
                "vocab_size": _VOCABULARY,
                **alone,
            },
            _text,
        ),
        "ConvNext": (
            image,
            {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]},
            _images,
        ),
        "DeiT": (image, {**wide, **images}, _images),
        "DistilBert": (
            classes,
            {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **text},
            _text,
        ),
        "Electra": (classes, {**wide, **text, "embedding_size": 16}, _text),
        "GPT2": (
            "LMHeadModel",
            {
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                **text,
                **alone,
            },
            _text,
        ),
        "GPTNeoX": (causal, {**wide, **text, **alone}, _text),
        "Llama": (causal, rotary, _text),
        "Mistral": (causal, rotary, _text),
        "OPT": (causal, {**opt, **text, **alone, "word_embed_proj_dim": 32}, _text),
        "Qwen2": (causal, rotary, _text),
        "Roberta": (classes, {**wide, **text}, _text),
        "Swin": (
            image,
            {
                "image_size": 32,
                "patch_size": 4,
                "embed_dim": 16,
                "window_size": 4,
                "depths": [2, 2],
                "num_heads": [2, 4],
            },
            _images,
        ),
        "T5": (
            generates,
            {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
                "vocab_size": _VOCABULARY,
                **alone,
            },
            lambda n: _translation(n) | {"decoder_attention_mask": _mask(n)},
        ),
        "ViT": (image, {**wide, **images}, _images),
        "Wav2Vec2": (classes, {**wide, **waves, "vocab_size": _VOCABULARY}, _waves),
        "Whisper": (
            generates,
            {
                "d_model": 32,
                **both,
                **audio,
                **marks,
                **alone,
                "vocab_size": _VOCABULARY,
            },
            _speech,
        ),
    }

    def case(
        name: str, head: str, given: dict[str, Any], draw: Callable[[int], Example]
    ) -> Case:
        def build() -> nn.Module:
            settings = getattr(transformers, f"{name}Config")(**given)
            settings.tie_word_embeddings = False  # T5's ignores the argument
            model: nn.Module = getattr(transformers, name + head)(settings)
            return model

        return build, draw

    return {name: case(name, *of) for name, of in models.items()}


_PAIRED = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def _ids(n: int) -> Tensor:
    return torch.randint(5, _VOCABULARY - 9, (n, _TOKENS))


def _mask(n: int) -> Tensor:
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


LIBRARIES: dict[str, Callable[[], dict[str, Case]]] = {
    "timm": _timm,
    "transformers": _transformers,
}
