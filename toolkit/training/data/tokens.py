"""Text as tokens, cut into sequences."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.input_spec import Sequences
from toolkit.training.data.batches import EpochBatches, Source, SourceSet, send, shuffled
from toolkit.training.data.sample_set import Batch, Batches

BYTES = 256
"""Vocabulary of a text whose bytes are its tokens."""

Numbers = np.ndarray[Any, np.dtype[np.integer]]


class Tokens(SourceSet):
    """Sequences of tokens, each with the next token at every place.

    Training sequences are consecutive, from an offset that is drawn anew for each epoch.

    Args:
        train, test: tokens in the order of the text, whole numbers from 0, ``[n]``; they may be
            mapped from a file and larger than memory.
        length: tokens of a sequence.
        vocabulary: number of different tokens.

    Raises:
        UserError: there are too few tokens for a sequence, or a number is out of its range.
    """

    def __init__(self, train: Numbers, test: Numbers, length: int, vocabulary: int) -> None:
        for name, value in (("length", length), ("vocabulary", vocabulary)):
            if value < 1:
                raise UserError(f"data.{name} is 1 or more: got {value}")
        # The last token is no input; and a training epoch begins up to one sequence later.
        for name, tokens, least in (("training", train, 2 * length), ("test", test, length + 1)):
            if len(tokens) < least:
                raise UserError(
                    f"{len(tokens)} tokens of {name} text are too few for data.length={length},"
                    f" which takes {least}: give more text, or make it shorter"
                )
        form = Sequences(length, vocabulary)
        texts = _Text("training", train, form, len(train) - length), _Text("test", test, form)
        texts[1].check(test)  # the test is small, and read only after a whole epoch
        super().__init__(*texts, form)

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        """Return the batches of one epoch; see :class:`SampleSet`."""
        text = self._train
        assert isinstance(text, _Text)
        order, generator = shuffled(len(text), batch_size, seed, epoch, text.form.samples)
        offset = int(torch.randint(text.form.length, (), generator=generator))
        source = replace(text, offset=offset)
        return EpochBatches(source, order, batch_size, device, generator)


@dataclass(frozen=True)
class _Text(Source):
    """Consecutive sequences of a text, from ``offset`` on."""

    name: str
    tokens: Numbers
    form: Sequences
    usable: int | None = None
    offset: int = 0

    def __len__(self) -> int:
        usable = len(self.tokens) - 1 if self.usable is None else self.usable
        return usable // self.form.length

    def read(
        self, batches: Iterable[tuple[Tensor, Tensor]], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        length = self.form.length
        for chosen, _ in batches:
            places = self.offset + length * chosen.numpy()[:, None] + np.arange(length + 1)
            taken = self.tokens[places].astype(np.int64)
            self.check(taken)
            there = send(torch.from_numpy(taken), device)
            yield there[:, :-1].contiguous(), there[:, 1:].contiguous()

    def check(self, tokens: Numbers) -> None:
        """Raise UserError if a token is outside the vocabulary."""
        for found in (tokens.min(), tokens.max()):
            if not 0 <= found < self.form.vocabulary:
                raise UserError(
                    f"the {self.name} text has a token {found}; data.vocabulary="
                    f"{self.form.vocabulary} allows 0 to {self.form.vocabulary - 1}: change it, or"
                    " data.dtype"
                )


def text(root: str | None = None, length: int = 64, test_share: float = 0.1) -> Tokens:
    """Text whose bytes are its tokens.

    Args:
        root: a file; or a folder, whose ``.txt`` files are joined in the order of their paths.
            None: Python's own reference, as ``help()`` prints it, nearly half a million bytes.
        length: bytes of a sequence.
        test_share: share of the text, at its end, for the test.

    Raises:
        UserError: there is no such text, or an option is out of its range.
    """
    if not 0 < test_share < 1:
        raise UserError(f"data.test_share is a share between 0 and 1: got {test_share}")
    tokens = np.frombuffer(_python_reference() if root is None else _joined(root), dtype=np.uint8)
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
        vocabulary: number of different tokens; GPT-2's by default.
        dtype: numpy's name of the numbers' type.

    Raises:
        UserError: a file is missing or cannot be read, or an option is out of its range.
    """
    if root is None:
        raise UserError("data=tokens reads a folder: set data.root to one with train.bin, val.bin")
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(float)
    if kind.kind not in "iu":
        raise UserError(f"data.dtype is a type of whole numbers, such as uint16: got {dtype!r}")
    train, test = (_mapped(Path(root).expanduser() / f"{n}.bin", kind) for n in ("train", "val"))
    return Tokens(train, test, length, vocabulary)


def _python_reference() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # Debian packs it separately
        raise UserError(f"data.root: {sys.executable} lacks pydoc_data; give a text") from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _joined(root: str) -> bytes:
    path = Path(root).expanduser()
    files = [path]
    if path.is_dir():
        files = sorted(text for text in path.rglob("*.txt") if not text.is_dir())
    if not files:
        raise UserError(f"data.root={root} has no .txt files: give a file, or a folder with some")
    try:
        return b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UserError(f"data.root={root} cannot be read: {error}") from error


def _mapped(path: Path, kind: "np.dtype[np.integer]") -> Numbers:
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise UserError(f"data.root: train.bin or val.bin cannot be read: {error}") from error
    if size % kind.itemsize:
        raise UserError(f"{path} has {size} bytes: data.dtype={kind} takes {kind.itemsize} each")
    return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, kind)
