"""Models, and their partition into contiguous stages."""

from toolkit.model.crossings import Boundary
from toolkit.model.gpt import gpt
from toolkit.model.independence import check_independent
from toolkit.model.input_spec import Features, Images, InputSpec, Sequences
from toolkit.model.partition import MEASURES, Stages, partition
from toolkit.model.zoo import MODELS, build

__all__ = [
    "MEASURES",
    "MODELS",
    "Boundary",
    "Features",
    "Images",
    "InputSpec",
    "Sequences",
    "Stages",
    "build",
    "check_independent",
    "gpt",
    "partition",
]
