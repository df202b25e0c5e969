"""Mutated programs and files of rank orders, and Datasets with samples of any kind."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from toolkit.cost.pipeline_table import METHODS, WORKERS
from toolkit.errors import UserError
from toolkit.schedule import Action, Schedule
from toolkit.schedule.instruction import Buffer
from toolkit.schedule.program import Program
from toolkit.training.data import Datasets

Attack = tuple[Any, Callable[[Any], str]]
_PIECES = ("", ",", "\n", "0", "F", "9B9", "-1", "\0", "ü", "1W0", "0I0", '"')
_MADE = {**METHODS, **WORKERS}
_HARMLESS = (Action.UPDATE, Action.PREDICT, Action.FREE)  # may move between their neighbours
_NUMBERS = st.none() | st.integers(-1, 9) | st.just(10**9)
_FIELDS = {
    "tick": st.integers(-1, 60) | st.just(10_000),
    "action": st.sampled_from(Action),
    "stage": st.integers(-1, 9) | st.just(10**9),
    "microbatch": _NUMBERS,
    "step": _NUMBERS,
    "version": _NUMBERS,
    "buffer": st.none() | st.sampled_from(Buffer),
    "peers": st.lists(st.integers(-1, 9), max_size=3).map(tuple),
}
_CHANGES = (*_FIELDS, *_FIELDS, "dropped", "repeated", "moved to rank")


@cache
def _schedule(name: str, n_ranks: int, n_microbatches: int) -> Schedule | None:
    """A method's schedule; None where it refuses the sizes."""
    try:
        return _MADE[name](n_ranks, n_microbatches)
    except UserError:
        return None


@cache
def _program(name: str, n_ranks: int, n_microbatches: int) -> Program | None:
    schedule = _schedule(name, n_ranks, n_microbatches)
    return None if schedule is None else schedule.lower(2)


_SIZES = st.tuples(st.sampled_from([*_MADE]), st.integers(1, 3), st.integers(1, 4))


Change = tuple[tuple[str, int, int], int, int, str, Any]
"""Sizes of a program, rank and place of an instruction, what changes, and its value."""


@st.composite
def _changes(draw: Any) -> Change:
    """One change in a program of the catalogue."""
    sizes = draw(_SIZES.filter(lambda sizes: _program(*sizes) is not None))
    ranks = _program(*sizes).ranks  # type: ignore[union-attr]
    rank = draw(st.sampled_from([k for k, own in enumerate(ranks) if own]))
    place = draw(st.integers(0, len(ranks[rank]) - 1))
    change, value = draw(st.sampled_from(_CHANGES)), None
    if change in _FIELDS:
        now = getattr(ranks[rank][place], change)
        value = draw(_FIELDS[change].filter(lambda value: value != now))
    elif change == "moved to rank":
        value = draw(st.integers(0, len(ranks) - 1).filter(lambda other: other != rank))
    return sizes, rank, place, change, value


def mutations() -> Attack:
    """Verified programs with one change: only UserError, unless nothing changes."""

    def check(example: Change) -> str:
        sizes, rank, place, change, value = example
        program = _program(*sizes)
        assert program is not None
        ranks = [list(own) for own in program.ranks]
        i = ranks[rank].pop(place)
        if change in _FIELDS:
            ranks[rank].insert(place, i._replace(**{change: value}))
        elif change == "repeated":
            ranks[rank][place:place] = [i, i]
        elif change == "moved to rank":
            ranks[value].insert(place, i)
        try:
            replace(program, ranks=tuple(map(tuple, ranks))).verify()
        except UserError:
            return "refused"
        assert change == "tick", f"accepted: {change} of {i}"
        assert i.action in _HARMLESS, f"accepted: another tick of {i}"
        return "harmless"

    return _changes(), check


@st.composite
def _order_files(draw: Any) -> str:
    """The text of a file of rank orders, with pieces removed, repeated or put in."""
    schedule = draw(_SIZES.map(lambda sizes: _schedule(*sizes)).filter(bool))
    try:
        text = schedule.to_csv()
    except UserError:  # not a pipeline
        text = "0F0,0B0\n,1F0,1B0\n"
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = begin + draw(st.integers(0, 6))
        piece = draw(st.sampled_from(_PIECES))
        text = text[:begin] + piece + text[end:]
    return text


def order_files() -> Attack:
    """Mutated files of rank orders: UserError, or a schedule whose program is verified."""

    def check(text: str) -> str:
        try:
            Schedule.from_csv(text).lower(2).verify()
        except UserError:
            return "refused"
        return "valid"

    return _order_files(), check


class _Set(torch.utils.data.Dataset[Any]):
    """Eight good samples; one of them is replaced by another value, or raises it."""

    def __init__(self, number: int, value: Any) -> None:
        self.number, self.value = number, value

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        if number != self.number:
            return torch.zeros(1, 2, 2), number % 3
        if isinstance(self.value, type):
            raise self.value("of the Dataset")
        return self.value


_TENSORS = st.tuples(
    st.lists(st.integers(0, 2), max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.uint8, torch.bool, torch.complex64]),
).map(lambda made: torch.zeros(made[0], dtype=made[1]))
_PARTS: Any = st.one_of(
    _TENSORS,
    st.just(torch.zeros(1, 2, 2)),
    st.integers(-2, 4),
    st.sampled_from([None, 1.5, "cat", {}, float("nan"), 2**70]),
)


def datasets() -> Attack:
    """A user's Datasets with one sample of any kind: UserError that names its number."""
    samples = st.one_of(
        _PARTS,
        st.lists(_PARTS, max_size=3).map(tuple),
        st.sampled_from([ValueError, KeyError, StopIteration, MemoryError, RuntimeError]),
    )

    def check(example: tuple[int, Any]) -> str:
        number, value = example
        cpu = torch.device("cpu")
        try:
            batches = Datasets(_Set(number, value), _Set(-1, 0), 3).train(8, 0, 0, cpu)
            ((inputs, targets),) = batches
        except UserError as error:
            message = str(error)
            named = (f"sample {number} ", "the first sample ")[: 1 + (number == 0)]
            if "\n" in message or not any(name in message for name in named):
                raise AssertionError(message) from error
            return "refused"
        assert inputs.shape[0] == 8, inputs.shape
        assert 0 <= targets.min() <= targets.max() < 3, targets
        return "valid"

    return st.tuples(st.integers(0, 7), samples), check
