"""Image sets, in memory or in class folders."""

from toolkit.training.data.images import Batch, Batches, ImageSet
from toolkit.training.data.sets import cifar10, digits, image_folder, synthetic

__all__ = ["Batch", "Batches", "ImageSet", "cifar10", "digits", "image_folder", "synthetic"]
