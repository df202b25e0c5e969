"""Sets of training and test samples: images, in memory or in class folders, and text."""

from toolkit.training.data.datasets import Datasets
from toolkit.training.data.in_memory import InMemory, Labelled
from toolkit.training.data.sample_set import Batch, Batches, SampleSet
from toolkit.training.data.sets import cifar10, digits, image_folder, synthetic
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
    "image_folder",
    "synthetic",
    "text",
    "token_files",
]
