"""Build a model from options of the group ``model``, and the form of its samples."""

from collections.abc import Sequence
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import get_method
from omegaconf import DictConfig

from toolkit.cli.check_options import check_counts
from toolkit.cli.instantiate import import_from_here, load_samples, make
from toolkit.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from toolkit.model import InputSpec
    from toolkit.training.data import SampleSet


def build_model(config: DictConfig, form: "InputSpec") -> "nn.Module":
    """Build the model of a group's options: a named one, or the user's.

    Args:
        config: options of the group ``model``.
        form: shape of the samples and of the answers.

    Raises:
        UserError: there is no such model, it takes other samples, or it cannot be built.
    """
    from torch import nn

    target = config.get("target")
    if target is None:
        if config.get("arguments"):
            names = ", ".join(map(str, config.arguments))
            raise UserError(
                f"model.arguments are those of model.target: got {names} for the model"
                f" {model_name(config)}, whose options are model.OPTION; leave them out"
            )
        options = _named(config, form)
        form_arguments = form.arguments
    else:
        _check_target(str(target))
        options = {"_target_": target, **config.arguments}
        form_arguments = {}
    model = make(options, "model", "toolkit.model.build", **form_arguments)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{options['_target_']} gives a {type(model).__name__}: expected a torch.nn.Module, or"
            " a function that returns one"
        )
    return model


def _check_target(target: str) -> None:
    """Raise UserError if ``model.target`` is a path instead of a dotted name."""
    if "/" in target or target.endswith(".py"):
        module = Path(target).stem
        raise UserError(
            f"model.target={target} is a path: give a function or a class in that file by the name"
            f" of its module, such as model.target={module}.NAME, from the folder of the file"
        )


def _named(config: DictConfig, form: "InputSpec") -> dict[str, Any]:
    """Return the options of a catalogue model; raise UserError if it does not take ``form``."""
    excluded_options = {"target", "arguments"}
    parameters = _parameters(config)
    # A function that takes any arguments refuses none before it is called.
    if parameters is not None:
        excluded_options |= {"name"} - parameters
        missing_arguments = sorted(form.arguments.keys() - parameters)
        if missing_arguments:
            example = {"images": "resnet18"}.get(form.samples, "gpt")
            raise UserError(
                f"model={model_name(config)} takes no {form.samples}, since {config._target_} has"
                f" no {', '.join(missing_arguments)}: choose other data (or shape), or another"
                f" model, such as {example}; in a file of your own, write target instead of"
                " _target_"
            )
    return {str(name): config[name] for name in config if name not in excluded_options}


def model_name(config: DictConfig) -> str:
    """Return the name of a model: the user's ``target``, or the name in the catalogue.

    Args:
        config: options of the group ``model``.
    """
    return str(
        config.get("target") or config.get("name") or config._target_.rpartition(".")[2]
    )


def _parameters(config: DictConfig) -> set[str] | None:
    """Return the parameters of the function that builds a model; None if it takes any."""
    import_from_here()
    function = get_method(config._target_)
    try:
        parameters = signature(function).parameters
    except ValueError:  # of some functions of C
        return None
    if any(
        parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return None
    return {*parameters}


def described_samples(config: DictConfig) -> "SampleSet | None":
    """Return the samples of ``data=...``, for which a model is analysed; None without them.

    Args:
        config: with ``data``, ``shape`` and ``classes``.

    Raises:
        UserError: ``shape`` or ``classes`` is given, too.
    """
    if not config.get("data"):
        return None
    if (config.shape, config.classes) != (None, None):
        raise UserError("shape and classes are those of data=...: leave them out")
    return load_samples(config.data)


def analysed_form(config: DictConfig) -> "InputSpec":
    """Return the form of the samples for which a model is analysed.

    Args:
        config: options of experiments/memory.py or simulate.py: ``model``, ``shape``, ``classes``,
            and perhaps ``data``.

    Raises:
        UserError: an impossible shape or number of classes, or both these and data.
    """
    from toolkit.model import Images, Sequences

    samples = described_samples(config)
    if samples is not None:
        return samples.form
    is_user_model = config.model.get("target") is not None
    is_language_model = not is_user_model and "length" in (
        _parameters(config.model) or ()
    )
    shape = config.shape
    # The usual sizes: 1,024 tokens, or ImageNet's images.
    if shape is None and is_language_model:
        shape = [1024]
    elif shape is None:
        shape = [3, 224, 224]
    are_positive = isinstance(shape, Sequence) and all(
        type(size) is int and size > 0 for size in shape
    )
    if not are_positive or len(shape) not in (1, 3):
        raise UserError(
            "shape is channels, height, width of an image, such as [3,224,224], or the length of a"
            f" sample of tokens or of features, such as [1024]: got {shape}"
        )
    if config.classes is not None:
        check_counts(config, "classes")
    form: InputSpec
    if len(shape) == 1:
        form = Sequences(shape[0], config.classes or 50257)
    else:
        channels, height, width = shape
        form = Images(channels, height, width, config.classes or 1000)
    if is_user_model:
        form = _form_of_user_model(config, form)
    return form


def _form_of_user_model(config: DictConfig, form: "InputSpec") -> "InputSpec":
    """Return the samples that the user's model takes, and as many classes as it has scores.

    A vector is one of features if the model takes floating-point numbers, or else one of tokens.
    """
    import torch

    from toolkit.model import Features, Sequences

    with torch.device("meta"):
        model = build_model(config.model, form)
    possible_forms: list[InputSpec] = [form]
    if isinstance(form, Sequences):
        # Features first: an embedding refuses floating-point numbers, so that only a model of
        # features takes them.
        possible_forms.insert(0, Features(form.length, config.classes or 1000))
    for possible_form in possible_forms:
        try:
            with torch.no_grad():
                scores = model(possible_form.example(2, "meta"))
        except Exception:
            # Of the user's code; the analysis reports why it takes no samples.
            continue
        has_scores = isinstance(scores, torch.Tensor) and scores.dim() == len(
            possible_form.output(2)
        )
        if has_scores and config.classes is None:
            classes_field = (
                "vocabulary" if isinstance(possible_form, Sequences) else "n_classes"
            )
            possible_form = replace(possible_form, **{classes_field: scores.shape[-1]})
        return possible_form
    return form
