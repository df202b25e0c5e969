"""Rows of tables about timelines: one of a schedule, and one of each rank."""

from typing import Any

from toolkit.cost.hardware import Hardware
from toolkit.cost.slow_link_rivals import Averaging
from toolkit.cost.timeline import ACTIVATIONS, INPUTS, Timeline
from toolkit.format import GIB, MB, digits


def in_gib(n_bytes: float) -> float:
    """Return bytes in GiB with three decimals, or with three digits where the first is a zero."""
    gib = n_bytes / GIB
    return round(gib, 3) if gib >= 0.1 else float(digits(gib))


def summary(
    timeline: Timeline,
    n_samples: int,
    hardware: Hardware,
    *,
    averaging: Averaging | None = None,
) -> dict[str, Any]:
    """Return a row: rates in the steady state, memory of the fullest rank.

    Args:
        timeline: simulated.
        n_samples: of a training step.
        hardware: the machines.
        averaging: of local steps, whose timeline has no messages; None: nothing to add.
    """
    seconds = timeline.step_time
    idle_share = timeline.idle_share
    sent_bytes = max(timeline.bytes_a_step())
    peaks = [timeline.peak_memory(rank) for rank in range(timeline.n_ranks)]
    fullest = max(range(timeline.n_ranks), key=peaks.__getitem__)
    bytes_of_kind = timeline.at_peak(fullest)
    activation_bytes = bytes_of_kind[ACTIVATIONS] + bytes_of_kind[INPUTS]
    if averaging is not None:
        # While ranks average, none of them computes.
        busy_seconds = (1 - idle_share) * seconds
        seconds += averaging.seconds
        idle_share = 1 - busy_seconds / seconds
        sent_bytes += averaging.sent_bytes
        peaks = [max(peak, averaging.peak_bytes) for peak in peaks]
    fits = all(peak <= hardware.memory_of(rank) for rank, peak in enumerate(peaks))
    return {
        "ranks": timeline.n_ranks,
        "ms a step": round(seconds * 1e3, 3),
        "samples/s": round(n_samples / seconds, 1),
        "idle": f"{idle_share:z.1%}",
        "GiB, fullest rank": in_gib(max(peaks)),
        "of it activations": in_gib(activation_bytes),
        "fits": "yes" if fits else "no",
        "MB a step, busiest rank": round(sent_bytes / MB, 2),
    }


def by_rank(name: str, timeline: Timeline) -> list[dict[str, Any]]:
    """Return a row per rank: its memory at the peak, its largest activations, what it sends."""
    rows = []
    for rank, bytes_sent in enumerate(timeline.bytes_a_step()):
        row = {
            "schedule": name,
            "rank": rank,
            "GiB": in_gib(timeline.peak_memory(rank)),
        }
        for kind, n_bytes in timeline.at_peak(rank).items():
            row[f"of it {kind}"] = in_gib(n_bytes)
        row["most activations"] = in_gib(timeline.peak_memory(rank, ACTIVATIONS))
        rows.append(row | {"MB a step": round(bytes_sent / MB, 2)})
    return rows
