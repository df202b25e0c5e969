"""Rows of tables about timelines: one of a schedule, and one of each rank."""

from typing import Any

from toolkit.cost.hardware import Hardware
from toolkit.cost.slow_link_rivals import Averaging
from toolkit.cost.timeline import ACTIVATIONS, INPUTS, Timeline
from toolkit.format import GIB, MB


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
        "GiB, fullest rank": round(max(peaks) / GIB, 3),
        "of it activations": round(activation_bytes / GIB, 3),
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
            "GiB": round(timeline.peak_memory(rank) / GIB, 3),
        }
        for kind, n_bytes in timeline.at_peak(rank).items():
            row[f"of it {kind}"] = round(n_bytes / GIB, 3)
        row["most activations"] = round(
            timeline.peak_memory(rank, ACTIVATIONS) / GIB, 3
        )
        rows.append(row | {"MB a step": round(bytes_sent / MB, 2)})
    return rows
