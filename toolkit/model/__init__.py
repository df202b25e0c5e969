"""Models, and their partition into contiguous stages."""

from toolkit.model.partition import MEASURES, Boundary, Stages, partition
from toolkit.model.zoo import MODELS, build

__all__ = ["MEASURES", "MODELS", "Boundary", "Stages", "build", "partition"]
