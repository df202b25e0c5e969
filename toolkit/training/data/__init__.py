"""Sets of training and test samples: images, in memory or in class folders, and text."""

from toolkit.training.data.sample_set import Batch, Batches, SampleSet
from toolkit.training.data.sets import cifar10, digits, image_folder, synthetic
from toolkit.training.data.tokens import Tokens, text, token_files

__all__ = [
    "Batch",
    "Batches",
    "SampleSet",
    "Tokens",
    "cifar10",
    "digits",
    "image_folder",
    "synthetic",
    "text",
    "token_files",
]
