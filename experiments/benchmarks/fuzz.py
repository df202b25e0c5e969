"""Rounds in which something is damaged by chance, by one kind after another; and their table."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from omegaconf import DictConfig
from tqdm import tqdm

from toolkit.cli.validate import check_counts
from toolkit.errors import UserError
from toolkit.files import write_csv


@dataclass
class Round:
    """A mutation, and what came of it."""

    kind: str
    number: int
    target: str = ""
    outcome: str = ""
    message: str = ""


RoundT = TypeVar("RoundT", bound=Round)


def check(config: DictConfig) -> None:
    """Refuse a number of mutations, or a limit of seconds, without sense.

    Raises:
        ValueError: one of them is.
    """
    check_counts(config, "mutations", of="bench.")
    if not config.limit > 0:
        raise UserError(f"bench.limit is a number of seconds above 0: got {config.limit}")


def rounds(
    kinds: Sequence[str],
    n: int,
    seed: int,
    one: Callable[[str, int, Random], RoundT],
    passed: Sequence[str],
    output: Path,
) -> list[RoundT]:
    """``n`` rounds by ``one``, of every kind in turn; kept as ``mutations.csv`` in ``output``."""
    found: list[RoundT] = []
    for number in tqdm(range(n), unit="mutation", leave=False):
        done = one(kinds[number % len(kinds)], number, Random(f"{seed} {number}"))
        found.append(done)
        if done.outcome not in passed:
            tqdm.write(f"mutation {number} fails: {asdict(done)}", file=sys.stderr)
    write_csv(output / "mutations.csv", [asdict(done) for done in found])
    return found


def summary(
    of_kind: Sequence[Round], damaged: str, passed: Sequence[str], failed: Sequence[str]
) -> dict[str, Any]:
    """The row of a kind: how many of what was ``damaged`` ended how, and a message."""
    found = Counter(done.outcome for done in of_kind)
    told = [done.message for done in of_kind if done.outcome not in passed]
    told += [done.message for done in of_kind if done.message]
    return {
        "mutation": of_kind[0].kind,
        damaged: len(of_kind),
        **{name: found[name] for name in (*passed, *failed)},
        "failed": sum(found[name] for name in failed),
        "message": told[0] if told else "",
    }


def by_kind(found: Sequence[RoundT]) -> list[list[RoundT]]:
    """The rounds of each kind, in the order in which kinds came."""
    kinds = dict.fromkeys(done.kind for done in found)
    return [[done for done in found if done.kind == kind] for kind in kinds]
