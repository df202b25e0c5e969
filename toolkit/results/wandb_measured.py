"""Log the measured timeline, memory and messages of a run to W&B, and their predictions."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from toolkit.format import MIB
from toolkit.results.tracker import Tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.cost import Timeline

_MESSAGE_COLUMNS = ("rank", "start", "end", "bytes", "slot")


def track_measured(
    tracker: Tracker,
    figure: "Figure",
    ranks: list[dict[str, Any]],
    timeline: "Timeline",
    predicted: "Timeline | None" = None,
) -> None:
    """Log a measured timeline: its figure, memory and messages over time, and a row per rank.

    The summary has the peak of the fullest rank, the mean bytes that ranks send, and the seconds of
    a step; as far as they are known, also the predicted ones.

    Args:
        tracker: tracker of the run.
        figure: drawing of ``timeline``.
        ranks: measurements and what is predicted, a row per rank.
        timeline: measured timeline.
        predicted: simulated timeline of the same schedule, or None.
    """
    messages = []
    for span in timeline.spans:
        if span.lane == "send":
            messages.append(
                {column: getattr(span, column) for column in _MESSAGE_COLUMNS}
            )
    memory = [
        {"seconds": seconds, "bytes": n_bytes} for seconds, n_bytes in timeline.memory()
    ]
    tracker.log(
        {
            "measured/timeline": figure,
            "measured/memory": memory,
            "measured/messages": messages,
            "measured/ranks": ranks,
        }
    )
    peak = max(timeline.peak_memory(rank) for rank in range(timeline.n_ranks))
    scalars = {
        "measured/peak_mib_of_rank": peak / MIB,
        "measured/bytes_sent_a_step": mean(timeline.bytes_a_step()),
        "measured/messages_a_step": len(messages)
        / len(timeline.step_ends)
        / timeline.n_ranks,
        "measured/step_seconds": timeline.step_time,
    }
    if predicted is not None:
        scalars |= _predicted_scalars(ranks, predicted)
    tracker.summary(scalars)


def _predicted_scalars(
    ranks: Sequence[Mapping[str, Any]], predicted: "Timeline"
) -> dict[str, float]:
    """Return what is predicted of the measured scalars, as far as the rows of ranks have it."""
    scalars = {"predicted/step_seconds": predicted.step_time}
    if "predicted_activations" in ranks[0]:
        peak = max(map(predicted.peak_memory, range(predicted.n_ranks)))
        scalars["predicted/peak_mib_of_rank"] = peak / MIB
    if "predicted_bytes_sent" in ranks[0]:
        # Of the steps that were measured, as the measured one is.
        sent_bytes = mean(row["predicted_bytes_sent"] for row in ranks)
        scalars["predicted/bytes_sent_a_step"] = sent_bytes / len(predicted.step_ends)
    return scalars
