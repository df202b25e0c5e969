"""The conformance suite of the distributed runtime over and over: python -m tests.runtime.soak 100

Processes start once, and every round runs every method on as many ranks as are asked for. It ends
with status 1 at the first difference to the single process, and at a rank that does not answer.
Each line has the descriptors, threads and MiB of rank 0, which should not grow after some rounds.
--keep FOLDER writes every fifth line to a result there.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

from tests.runtime import conform
from tests.runtime.models import name_of
from toolkit.files import write_json
from toolkit.results.provenance import describe_cpu, provenance
from toolkit.results.record import RESULT, SCHEMA
from toolkit.runtime import join, launch, report


def rounds(n_rounds: int, n_ranks: int) -> int:
    """Run them all; the number of the rounds without a difference. Every rank compares."""
    world = join(timeout=60)
    expected = [conform.by_itself(schedule) for schedule in conform.schedules(n_ranks)]
    for number in range(1, n_rounds + 1):
        start = time.monotonic()
        trained = [
            conform.train(world, schedule) for schedule in conform.schedules(n_ranks)
        ]
        wrong = [
            name_of(schedule)
            for schedule, found, known in zip(
                conform.schedules(n_ranks), trained, expected, strict=True
            )
            if _differs(found, *known)
        ]
        if any(world.gather(wrong)):
            report((number, wrong, time.monotonic() - start, *_held()))
            return number - 1
        if world.rank == 0:
            report((number, wrong, time.monotonic() - start, *_held()))
    return n_rounds


def _held() -> tuple[int, int, float]:
    """Open descriptors, threads, and resident MiB of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    mebibytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mebibytes


def _differs(found: conform.Trained, states: list[dict], losses: dict) -> bool:
    try:
        found.assert_follows(states, losses)
    except AssertionError:
        return True
    return False


def _say(rank: int, said: tuple[int, list[str], float, int, int, float]) -> None:
    number, wrong, seconds, descriptors, threads, size = said
    result = f"rank {rank} differs: {', '.join(wrong)}" if wrong else "equal"
    held = f"{descriptors} descriptors, {threads} threads, {size:.0f} MiB"
    print(f"round {number}: {result}, {seconds:.1f} s, {held}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int)
    parser.add_argument("ranks", type=int, nargs="?", default=4, choices=(2, 3, 4, 6))
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    wanted = parser.parse_args()
    n_steps = conform.STEPS * len([*conform.schedules(wanted.ranks)])  # of a round
    rows, start = [], time.monotonic()

    def on_report(
        rank: int, said: tuple[int, list[str], float, int, int, float]
    ) -> None:
        _say(rank, said)
        number, wrong, _, descriptors, threads, size = said
        if number % 5 == 1 or number == wanted.rounds:
            row = {"round": number, "steps": number * n_steps, "different": len(wrong)}
            held = {"descriptors": descriptors, "threads": threads, "MiB": round(size)}
            rows.append(row | held)

    done = launch(
        rounds, wanted.ranks, wanted.rounds, wanted.ranks, on_report=on_report
    )
    print(f"{min(done)} of {wanted.rounds} rounds at {wanted.ranks} ranks: all equal")
    if wanted.keep:
        _keep(wanted.keep, rows, time.monotonic() - start)
    sys.exit(min(done) < wanted.rounds)


def _keep(folder: Path, rows: list[dict], seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = " ".join(word for word in sys.argv[1:] if not word.startswith("--keep"))
    source = provenance({}, describe_cpu(), seconds)
    source["command"] = f"python -m tests.runtime.soak {words}"
    write_json(
        folder / RESULT, {"schema": SCHEMA, "metrics": rows, "provenance": source}
    )


if __name__ == "__main__":
    main()
