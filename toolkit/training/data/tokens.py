"""Text as tokens, cut into sequences."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.input_spec import Sequences
from toolkit.training.data.batches import HeldBatches, shuffled
from toolkit.training.data.normalize import send
from toolkit.training.data.sample_set import Batch, Batches

BYTES = 256
"""How many tokens there are if each byte is one."""


class Tokens:
    """Sequences of tokens, each with the token that comes next at every place.

    Training sequences lie one after another from a place on that is drawn anew for each epoch.

    Args:
        train, test: tokens in the order of the text, whole numbers from 0; they may be mapped from
            a file and larger than memory.
        length: tokens of a sequence.
        vocabulary: how many different tokens there are.

    Raises:
        UserError: there are too few tokens for a sequence, or an option has no such value.
    """

    def __init__(
        self,
        train: "np.ndarray[tuple[int], np.dtype[np.integer]]",
        test: "np.ndarray[tuple[int], np.dtype[np.integer]]",
        length: int,
        vocabulary: int,
    ) -> None:
        for name, value in (("length", length), ("vocabulary", vocabulary)):
            if value < 1:
                raise UserError(f"data.{name} is 1 or more: got {value}")
        # The last token is no input; and a training epoch begins up to one sequence later.
        self._n_train, self._n_test = (len(train) - length) // length, (len(test) - 1) // length
        for what, n, tokens, least in (
            ("training", self._n_train, train, 2 * length),
            ("test", self._n_test, test, length + 1),
        ):
            if n < 1:
                raise UserError(
                    f"{len(tokens)} tokens of {what} text are too few for data.length={length},"
                    f" which takes {least}: give more text, or make it shorter"
                )
        self.form = Sequences(length, vocabulary)
        self._train = _Text("training", train, self.form)
        self._test = _Text("test", test, self.form)
        self._test.check(test)  # it is met after a whole epoch, and short

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        """The batches of one epoch; see :class:`SampleSet`."""
        order, generator = shuffled(self._n_train, batch_size, seed, epoch, self.form.samples)
        length = self.form.length
        first = int(torch.randint(length, (), generator=generator))
        return HeldBatches(self._train, first + length * order, batch_size, device, generator)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        """Every ``n_ranks``-th test sequence from number ``rank`` on."""
        order = torch.arange(self._n_test)[rank::n_ranks] * self.form.length
        return HeldBatches(self._test, order, batch_size, device, None)


@dataclass(frozen=True)
class _Text:
    """The training or the test text; a sample's number is the place at which it begins."""

    name: str
    tokens: "np.ndarray[tuple[int], np.dtype[np.integer]]"
    form: Sequences

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        return torch.empty(0, n, dtype=torch.long)

    def take(self, chosen: Tensor, drawn: Tensor, device: torch.device) -> Batch:
        places = chosen.numpy()[:, None] + np.arange(self.form.length + 1)
        taken = self.tokens[places].astype(np.int64)
        self.check(taken)
        there = send(torch.from_numpy(taken), device)
        return there[:, :-1].contiguous(), there[:, 1:].contiguous()

    def check(self, tokens: "np.ndarray[Any, np.dtype[np.integer]]") -> None:
        """Refuse tokens that the vocabulary does not have."""
        vocabulary = self.form.vocabulary
        for found in (tokens.min(), tokens.max()):
            if not 0 <= found < vocabulary:
                raise UserError(
                    f"the {self.name} text has a token {found}, and data.vocabulary={vocabulary}"
                    f" knows 0 to {vocabulary - 1}: change it, or data.dtype"
                )


def text(root: str | None = None, length: int = 64, test_share: float = 0.1) -> Tokens:
    """Text of which each byte is a token.

    Args:
        root: a file; or a folder, whose ``.txt`` files are taken one after another, by their
            paths. None: the reference of the Python language, as the interpreter has it for
            ``help()``, nearly half a million bytes.
        length: bytes of a sequence.
        test_share: of the text, at its end.

    Raises:
        UserError: there is no such text, or an option has no such value.
    """
    if not 0 < test_share < 1:
        raise UserError(f"data.test_share is a share between 0 and 1: got {test_share}")
    found = _of_python() if root is None else b"".join(_read(path) for path in _texts(root))
    tokens = np.frombuffer(found, dtype=np.uint8)
    n_train = round(len(tokens) * (1 - test_share))
    return Tokens(tokens[:n_train], tokens[n_train:], length, BYTES)


def token_files(
    root: str | None, length: int = 1024, vocabulary: int = 50257, dtype: str = "uint16"
) -> Tokens:
    """Text that is tokens already: the numbers in ``root/train.bin`` and ``root/val.bin``.

    The files are mapped into memory, and may be larger than that.

    Args:
        root: the folder.
        length: tokens of a sequence.
        vocabulary: how many different tokens there are; GPT-2's unless given.
        dtype: of the numbers in the files, as numpy calls it.

    Raises:
        UserError: the folder is missing or holds something else, or an option has no such value.
    """
    if root is None:
        raise UserError("data=tokens reads a folder: set data.root to one with train.bin, val.bin")
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(float)
    if kind.kind not in "iu":
        raise UserError(f"data.dtype is a type of whole numbers, such as uint16: got {dtype!r}")
    train, test = (_mapped(Path(root).expanduser() / f"{name}.bin", kind) for name in _SPLITS)
    return Tokens(train, test, length, vocabulary)


_SPLITS = ("train", "val")


def _of_python() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some systems pack it apart
        raise UserError(
            "this Python comes without its reference (pydoc_data): set data.root to a text"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _texts(root: str) -> Sequence[Path]:
    path = Path(root).expanduser()
    found = [path]
    if path.is_dir():
        found = sorted(text for text in path.rglob("*.txt") if not text.is_dir())
    if not found:
        raise UserError(f"data.root={root} has no .txt files: give a file, or a folder with some")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"data.root: {path} cannot be read: {error.strerror}") from error


def _mapped(
    path: Path, kind: "np.dtype[np.integer]"
) -> "np.ndarray[tuple[int], np.dtype[np.integer]]":
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UserError(
            f"data.root: {path} cannot be read: {error.strerror}; a folder of tokens holds"
            " train.bin and val.bin"
        ) from error
    if size % kind.itemsize:
        raise UserError(f"{path} has {size} bytes, which are no whole number of data.dtype={kind}")
    if size == 0:
        return np.empty(0, kind)
    return np.memmap(path, dtype=kind, mode="r")
