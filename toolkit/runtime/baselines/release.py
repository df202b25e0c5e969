"""Memory of weights that another rank keeps."""

from collections.abc import Iterable

import torch
from torch import nn


class Released:
    """Parameters whose memory is given back while nobody looks at the model."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shapes = {parameter: parameter.shape for parameter in parameters}

    def release(self) -> None:
        for parameter in self.shapes:
            if parameter.numel():
                parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        """Memory again; its content is arbitrary."""
        for parameter, shape in self.shapes.items():
            if parameter.shape != shape:
                parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
