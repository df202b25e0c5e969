"""Damage files at random, one kind after another, and tabulate the outcomes."""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, TypeVar

from omegaconf import DictConfig
from tqdm import tqdm

from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.cli.errors import explain
from toolkit.files import write_csv

T = TypeVar("T")


@dataclass
class Round:
    """A mutation and its outcome."""

    kind: str
    number: int
    subject: str = ""  # what was damaged
    target: str = ""  # its damaged part
    outcome: str = ""
    message: str = ""  # what was reported


def run(
    config: DictConfig,
    seed: int,
    kinds: Sequence[str],
    one: Callable[[Round, Random], None],
    passed: Sequence[str],
    failed: Sequence[str],
) -> list[dict[str, Any]]:
    """Run ``config.mutations`` rounds, of every kind in turn, each completed by ``one``."""
    check_counts(config, "mutations", of="bench.")
    rounds = [Round(kinds[k % len(kinds)], k) for k in range(config.mutations)]
    for done in tqdm(rounds, unit="mutation", leave=False):
        one(done, Random(f"{seed} {done.number}"))
        if done.outcome not in passed:
            tqdm.write(f"mutation {done.number} fails: {asdict(done)}", file=sys.stderr)
    write_csv(output_folder() / "mutations.csv", [asdict(done) for done in rounds])
    by_kind = ([done for done in rounds if done.kind == kind] for kind in kinds[: len(rounds)])
    return [summary(of_kind, passed, failed) for of_kind in by_kind]


def attempt(done: Round, read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns; if it fails, ``done`` says how."""
    try:
        return read()
    except Exception as error:
        message = explain(error, "train")
        done.outcome = "refused" if message and "\n" not in message else "traceback"
        done.message = message if message else traceback.format_exc()
    return None


def summary(
    rounds: Sequence[Round], passed: Sequence[str], failed: Sequence[str]
) -> dict[str, Any]:
    """Return the row of a kind; its message is that of a failure, if there is one."""
    found = Counter(done.outcome for done in rounds)
    messages = [done.message for done in rounds if done.outcome in failed]
    messages += [done.message for done in rounds if done.message]
    return {
        "mutation": rounds[0].kind,
        "rounds": len(rounds),
        **{name: found[name] for name in (*passed, *failed)},
        "failed": sum(found[name] for name in failed),
        "message": messages[0] if messages else "",
    }


# Damage to the bytes of a file


def _flip(content: bytes, random: Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(random.choice([1, 1, 10])):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.choice([0, random.randrange(100), random.randrange(len(content))])]


def _zero(content: bytes, random: Random) -> bytes:
    begin = random.randrange(len(content))
    length = min(random.randrange(1, 4096), len(content) - begin)
    return content[:begin] + bytes(length) + content[begin + length :]


BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "bits flipped": _flip,
    "cut": _cut,
    "grown": lambda content, random: content + random.randbytes(random.randrange(1, 100)),
    "zeroed": _zero,
    "noise": lambda content, random: random.randbytes(len(content)),
}
