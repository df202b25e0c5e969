"""Image files read and decoded: JPEG by torchvision, on the CPU or on a GPU, the rest by PIL."""

import io
import warnings
from functools import cache
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional

from toolkit.errors import UserError, first_line
from toolkit.training.data.image_files import check_file, naming
from toolkit.training.data.readers import Key
from toolkit.training.data.transforms import Cut, View


class Encoded(NamedTuple):
    """An image that has been read, and not decoded yet if it can be decoded elsewhere.

    Attributes:
        data: the bytes of a JPEG file ``[n]``; or pixels ``[3, height, width]`` of what PIL has
            decoded, such as PNG, grey or CMYK.
        cut: what is seen of it.
        label: its class.
        path: of its file.
        key: the epoch's seed and its number.
    """

    data: Tensor
    cut: Cut | None
    label: int
    path: str
    key: Key


def read_encoded(images: ImageFolder, key: Key, view: View) -> Encoded:
    """The image of ``key``; what is seen of it is drawn from its size, at the head of its file.

    Raises:
        DamagedImageError: it cannot be decoded; the message names its path.
    """
    path, label = images.samples[key[1]]
    with naming(path):
        check_file(path)
        with open(path, "rb") as file:
            data = bytearray(file.read())
        image = Image.open(io.BytesIO(data))
        cut = view.draw(image, hash(key))
        if image.format == "JPEG" and image.mode == "RGB":
            return Encoded(torch.frombuffer(data, dtype=torch.uint8), cut, label, path, key)
        return Encoded(functional.pil_to_tensor(image.convert("RGB")), cut, label, path, key)


def decode(images: list[Encoded], device: torch.device) -> list[Tensor]:
    """Pixels ``[3, height, width]`` of each image, on ``device``.

    Raises:
        DamagedImageError: one cannot be decoded; the message names its path.
    """
    files = [image for image in images if image.data.dim() == 1]
    try:
        decoded = iter(decode_jpegs([file.data for file in files], device))
    except (RuntimeError, ImportError):
        decoded = iter([_decoded_alone(file, device) for file in files])
    return [next(decoded) if x.data.dim() == 1 else x.data.to(device) for x in images]


def _decoded_alone(file: Encoded, device: torch.device) -> Tensor:
    """Whatever is beside it in a batch, an image is decoded alike."""
    try:
        return decode_jpegs([file.data], device)[0]
    except (RuntimeError, ImportError):  # PIL says which file it is, or can decode it
        with naming(file.path):
            image = Image.open(io.BytesIO(file.data.numpy().tobytes()))
            return functional.pil_to_tensor(image.convert("RGB")).to(device)


def decode_jpegs(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """Pixels ``[3, height, width]`` on ``device`` of the bytes of each file, on the CPU.

    Raises:
        RuntimeError: one of them cannot be decoded, or there is no decoder for ``device``.
        ImportError: torchvision decodes no JPEG any more.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    if not files:
        return []
    if device.type == "cuda":
        # The decoder writes from a stream of its own, which does not wait until others have done
        # with the memory that it is given.
        torch.cuda.current_stream(device).synchronize()
    with warnings.catch_warnings():  # torchvision 0.29 announces that its decoders will go
        warnings.simplefilter("ignore", DeprecationWarning)
        return decode_jpeg(files, ImageReadMode.RGB, device)


@cache
def check_gpu(device: torch.device) -> None:
    """Refuse a device that is no GPU, or on which no JPEG can be decoded.

    Raises:
        ValueError: it is one.
    """
    if device.type != "cuda":
        raise UserError(
            f"data.decode=gpu decodes on a CUDA device and this run is on {device}: choose"
            " data.decode=cpu, or device=cuda"
        )
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        decode_jpegs([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except (RuntimeError, ImportError) as error:
        raise UserError(
            "data.decode=gpu needs a torchvision that decodes JPEG on CUDA, and this one does not"
            f" ({first_line(error)}): choose data.decode=cpu"
        ) from error
