"""Models, and their partition into contiguous stages."""

from toolkit.model.forms import Form, Images, Sequences
from toolkit.model.gpt import gpt
from toolkit.model.partition import MEASURES, Boundary, Stages, partition
from toolkit.model.zoo import MODELS, build

__all__ = [
    "MEASURES",
    "MODELS",
    "Boundary",
    "Form",
    "Images",
    "Sequences",
    "Stages",
    "build",
    "gpt",
    "partition",
]
