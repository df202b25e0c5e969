"""Text as tokens, cut into sequences."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.errors import UserError
from toolkit.files import check_regular
from toolkit.model.input_spec import Sequences
from toolkit.training.data.batches import Batch, Chosen, SampleSet, Source, send

BYTES = 256
"""Vocabulary of a text whose bytes are its tokens."""

TokenNumbers = np.ndarray[Any, np.dtype[np.integer]]


class Tokens(SampleSet):
    """Sequences of tokens, each with the next token at every place.

    Training sequences are consecutive, from an offset that each epoch draws.

    Args:
        train, test: tokens in the order of the text, whole numbers from 0, ``[n]``; they may be
            mapped from a file and larger than memory.
        length: tokens of a sequence.
        vocabulary: number of different tokens.

    Raises:
        UserError: there are too few tokens for a sequence, or a number is out of its range.
    """

    def __init__(
        self, train: TokenNumbers, test: TokenNumbers, length: int, vocabulary: int
    ) -> None:
        for name, value in (("length", length), ("vocabulary", vocabulary)):
            if value < 1:
                raise UserError(f"data.{name} is 1 or more: got {value}")
        # The last token is no input; and a training epoch begins up to one sequence later.
        for name, tokens, n_needed in (
            ("training", train, 2 * length),
            ("test", test, length + 1),
        ):
            if len(tokens) < n_needed:
                raise UserError(
                    f"{len(tokens)} tokens of {name} text are too few for data.length={length},"
                    f" which takes {n_needed}: give more text, or make it shorter"
                )
        form = Sequences(length, vocabulary)
        # Enough from any offset: the largest, length - 1, leaves one token more than these
        # sequences have, which is the last target.
        training = _Text("training", train, form, (len(train) - length) // length)
        testing = _Text("test", test, form, (len(test) - 1) // length)
        testing.check(test)  # the test is small, and read only after a whole epoch
        super().__init__(training, testing, form)


@dataclass(frozen=True)
class _Text(Source):
    """Consecutive sequences of a text, from ``offset`` on."""

    name: str
    tokens: TokenNumbers
    form: Sequences
    n_sequences: int
    offset: int = 0

    def __len__(self) -> int:
        return self.n_sequences

    def begin(self, generator: torch.Generator) -> "_Text":
        """Return the text of an epoch, from an offset within the first sequence."""
        return replace(
            self, offset=int(torch.randint(self.form.length, (), generator=generator))
        )

    def read(self, batches: Chosen, seed: int, device: torch.device) -> Iterator[Batch]:
        length = self.form.length
        for sequence_numbers, _ in batches:
            # ``[n, length + 1]``: each sequence and the token after it, as inputs and targets one
            # further.
            token_positions = (
                self.offset
                + length * sequence_numbers.numpy()[:, None]
                + np.arange(length + 1)
            )
            # Of a mapped file only these places are read.
            host_tokens = self.tokens[token_positions].astype(np.int64)
            self.check(host_tokens)
            device_tokens = send(torch.from_numpy(host_tokens), device)
            yield device_tokens[:, :-1].contiguous(), device_tokens[:, 1:].contiguous()

    def check(self, tokens: TokenNumbers) -> None:
        """Raise UserError if a token is outside the vocabulary."""
        for token in (tokens.min(), tokens.max()):
            if not 0 <= token < self.form.vocabulary:
                raise UserError(
                    f"the {self.name} text has a token {token}; data.vocabulary="
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
    if root is None:
        from pydoc_data.topics import topics

        content = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        path = Path(root).expanduser()
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        try:
            for file in files:
                check_regular(file, max_bytes=None)
            content = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            raise UserError(f"data.root={root} cannot be read: {error}") from error
        if not files:
            raise UserError(
                f"data.root={root} has no .txt files: give a file, or a folder with some"
            )
    tokens = np.frombuffer(content, dtype=np.uint8)
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
        raise UserError(
            "data=tokens reads a folder: set data.root to one with train.bin, val.bin"
        )
    try:
        is_whole = np.dtype(dtype).kind in "iu"
    except TypeError:
        is_whole = False
    if not is_whole:
        raise UserError(
            f"data.dtype is a type of whole numbers, such as uint16: got {dtype!r}"
        )
    folder = Path(root).expanduser()
    train = _mapped(folder / "train.bin", dtype)
    test = _mapped(folder / "val.bin", dtype)
    return Tokens(train, test, length, vocabulary)


def _mapped(path: Path, dtype: str) -> TokenNumbers:
    """Map a file of numbers into memory; raise UserError if it cannot be read."""
    try:
        # numpy refuses a folder, half a number and, here, an empty file.
        return np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.root: {path} cannot be read as data.dtype={dtype}: {error}"
        ) from error
