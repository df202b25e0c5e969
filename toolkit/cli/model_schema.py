"""The options of what is trained on what: models and data."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def option(default: Any, description: str) -> Any:
    """A field with the line that ``--help`` prints for it."""
    return field(default=default, metadata={"help": description})


def option_list(default: list[Any], description: str) -> Any:
    """:func:`option` for a list."""
    return field(default_factory=lambda: list(default), metadata={"help": description})


@dataclass
class OwnModel:
    """A model of the user's own, in the place of a named one."""

    target: str | None = option(None, "package.module.function")
    arguments: dict[str, Any] = field(default_factory=dict, metadata={"help": "of that function"})


@dataclass
class Model(OwnModel):
    _target_: str = "toolkit.model.build"
    name: str = MISSING
    width: int | None = option(None, "channels of a ResNet's first layers; null: as published")


@dataclass
class Gpt(OwnModel):
    _target_: str = "toolkit.model.gpt"
    name: str = option(MISSING, "by which it is called")
    layers: int = option(4, "blocks of attention and a perceptron")
    width: int = option(128, "numbers that stand for a token; a multiple of heads")
    heads: int = option(4, "of attention")
    dropout: float = option(0.0, "share of numbers that training leaves out")


@dataclass
class Digits:
    _target_: str = "toolkit.training.data.digits"


@dataclass
class Synthetic:
    _target_: str = "toolkit.training.data.synthetic"
    n_train: int = 512
    n_test: int = 256
    n_classes: int = 10
    image_size: int = 32
    in_channels: int = 3


@dataclass
class Cifar10:
    _target_: str = "toolkit.training.data.cifar10"
    root: str | None = None
    crop_padding: int = 4
    flip: bool = True
    n_train: int | None = option(None, "training images, of all classes alike; null: all")
    n_test: int | None = option(None, "test images, of all classes alike; null: all")
    damaged: str = option("refuse", "refuse or skip images in class folders that are damaged")


@dataclass
class ImageFolder:
    _target_: str = "toolkit.training.data.image_folder"
    root: str | None = None
    image_size: int = 224
    num_workers: int | None = option(None, "processes that read; null: this rank's share of cores")
    prefetch_factor: int = option(2, "batches that each of them reads ahead")
    validation: str = "val"
    damaged: str = option("refuse", "refuse damaged images, or skip: others of the class stand in")


@dataclass
class Text:
    _target_: str = "toolkit.training.data.text"
    root: str | None = option(None, "a file, or a folder of .txt files; null: Python's reference")
    length: int = option(64, "bytes of a sequence, each a token")
    test_share: float = option(0.1, "of the text, at its end")


@dataclass
class TokenFiles:
    _target_: str = "toolkit.training.data.token_files"
    root: str | None = option(None, "a folder with train.bin and val.bin, of numbers")
    length: int = option(1024, "tokens of a sequence")
    vocabulary: int = option(50257, "how many tokens there are")
    dtype: str = option("uint16", "of the numbers, as numpy calls it")
