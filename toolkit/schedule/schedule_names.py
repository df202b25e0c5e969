"""Names of the catalogue's schedules in tables and figures: a rule, and what differs from it."""

from toolkit.schedule.correction import Correction, correction_of
from toolkit.schedule.staleness import Delay, RandomDelay, in_steps


def schedule_name(
    rule: str,
    state: str = "",
    correction: str | Correction = "none",
    accumulate: int = 1,
) -> str:
    """Return the name of a schedule, such as ``ZeRO-CDP-v2 compensated accumulate 2``.

    Args:
        rule: the method and its delay.
        state: as in :class:`Schedule`; empty if the rule says it.
        correction: as in :class:`Schedule`.
        accumulate: micro-batches of each worker.
    """
    words = [rule]
    if state in ("sharded", "circulating"):
        words[0] = "ZeRO-" + rule
    if state == "circulating":
        words.append(state)
    label = correction_of(correction).label
    if label:
        words.append(label)
    if accumulate > 1:
        words.append(f"accumulate {accumulate}")
    return " ".join(words)


def delay_label(delay: Delay, n_stages: int, n_microbatches: int) -> str:
    """Return the end of a rule that describes the delay, after a space; empty for the freshest."""
    if isinstance(delay, str):
        return ""
    if isinstance(delay, RandomDelay):
        return f" {delay}"
    rows, _ = in_steps(delay, n_stages, n_microbatches)
    smallest = min(map(min, rows))
    largest = max(map(max, rows))
    if smallest == largest:
        return f" delay {largest}"
    label = f" delay {smallest}-{largest}"
    # Every micro-batch of a stage has the same delay.
    if all(len(set(row)) == 1 for row in rows):
        label += " by stage"
    return label
