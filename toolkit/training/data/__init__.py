"""Sets of training and test samples: images, in memory or in class folders, and text.

A new one is a function in one of these modules that returns ``Datasets``, and a file in conf/data.
"""

from toolkit.training.data.batches import Batch, Batches, Datasets, SampleSet
from toolkit.training.data.class_folders import image_folder
from toolkit.training.data.in_memory import (
    InMemory,
    Labelled,
    cifar10,
    digits,
    fashion_mnist,
    synthetic,
)
from toolkit.training.data.tokens import Tokens, text, token_files

__all__ = [
    "Batch",
    "Batches",
    "Datasets",
    "InMemory",
    "Labelled",
    "SampleSet",
    "Tokens",
    "cifar10",
    "digits",
    "fashion_mnist",
    "image_folder",
    "synthetic",
    "text",
    "token_files",
]
