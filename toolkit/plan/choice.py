"""The choice among predictions: the best of them, and those that deserve another search."""

from collections.abc import Sequence
from operator import attrgetter

from toolkit.cost.worker_forms import NEGLIGIBLE, STALENESS_PRICE, priced_seconds
from toolkit.plan.candidates import Candidate
from toolkit.plan.predictions import Prediction
from toolkit.schedule.plain_options import options_of

# A search simulates tens of delays, and a plan should not wait for it longer than for the rest.
_MAX_DELAY_SEARCHES = 2
_MAX_OPS_OF_SEARCH = 64
"""Stages times micro-batches of a schedule whose affordable delay is searched for, in seconds."""


def choose_prediction(
    predictions: Sequence[Prediction], baseline: Prediction
) -> Prediction | None:
    """Return the best of some predictions; data parallelism if it is nearly as good.

    A step of staleness costs a share :data:`STALENESS_PRICE` of the step time. Of the predictions
    whose cost is nearly the least, those without recomputation come first; of these the one with
    the least memory, and then the one with the least staleness.

    Args:
        predictions: predictions; those within the limits count.
        baseline: data parallelism.
    """
    fitting = [prediction for prediction in predictions if prediction.fits]

    def cost(prediction: Prediction) -> float:
        return priced_seconds(prediction.seconds, prediction.staleness)

    if not fitting:
        return None
    # Predictions are not exact to a few per cent. Within that, what is certain decides: memory,
    # recomputation and staleness.
    cost_limit = (1 + NEGLIGIBLE) * min(map(cost, fitting))
    if baseline.fits and cost(baseline) <= cost_limit:
        return baseline
    # Recomputation takes time for certain, memory decides what else fits on the ranks, and
    # staleness is in the cost already: in this order.
    near_predictions = [
        prediction for prediction in fitting if cost(prediction) <= cost_limit
    ]
    return min(
        near_predictions,
        key=lambda prediction: (
            prediction.candidate.checkpoint != "none",
            prediction.memory,
            prediction.staleness,
        ),
    )


def best_of_classes(
    predictions: Sequence[Prediction], baseline: Prediction
) -> list[Prediction]:
    """Return the best prediction with exact messages, and what coarser messages would gain.

    A prediction with coarser messages is not compared with one with finer messages: of each class
    the best is returned, if it is faster than all before it.

    Args:
        predictions: predictions; those within the limits count.
        baseline: data parallelism, with exact messages.
    """
    best_predictions: list[Prediction] = []
    for level in sorted({prediction.coarseness for prediction in predictions}):
        # Coarser messages may cost accuracy. So a class is shown only if it gains time by them,
        # over data parallelism with exact messages and over all finer classes.
        of_class = [
            prediction for prediction in predictions if prediction.coarseness == level
        ]
        best_prediction = choose_prediction(of_class, baseline)
        if level > 0 and best_prediction == baseline:
            continue
        if best_prediction is not None and all(
            best_prediction.seconds < finer.seconds for finer in best_predictions
        ):
            best_predictions.append(best_prediction)
    return best_predictions


def reason_to_stay(predictions: Sequence[Prediction], baseline: Prediction) -> str:
    """Return why none with exact messages is chosen instead of data parallelism, in words."""
    exact = [prediction for prediction in predictions if prediction.coarseness == 0]
    fitting = [prediction for prediction in exact if prediction.fits]
    fastest = min(fitting, key=lambda prediction: prediction.seconds)
    if fastest.seconds * (1 + NEGLIGIBLE) >= baseline.seconds:
        return f"nothing within the limits is more than {NEGLIGIBLE:.0%} faster"
    return (
        f"the fastest takes {fastest.seconds / baseline.seconds:.2f} of its time, with weights"
        f" {fastest.staleness:.2f} steps late on average, and a step of staleness counts as"
        f" {STALENESS_PRICE:.0%} of the time"
    )


def worth_a_fresher_delay(predictions: Sequence[Prediction]) -> list[Candidate]:
    """Return the fastest candidates with late weights that nothing fresher comes near."""
    late_predictions = []
    for prediction in predictions:
        schedule = prediction.schedule
        is_small = schedule.n_stages * schedule.n_microbatches <= _MAX_OPS_OF_SEARCH
        # Only CDP-v1 has room: the freshest delay is as fresh as the timing allows.
        is_late = options_of(prediction.candidate.spec.method).get("delay") == 1
        is_exact = prediction.coarseness == 0
        if not (prediction.fits and is_small and is_late and is_exact):
            continue
        # A training finds its affordable delay by the costs of whole stages.
        if prediction.candidate.width > 1:
            continue
        # A step of staleness is worth this share of the time. A fresher rival that costs no more
        # than that leaves nothing to search for.
        near_seconds = (1 + STALENESS_PRICE) * prediction.seconds
        has_fresher_rival = any(
            rival.fits
            and rival.staleness < prediction.staleness
            and rival.seconds <= near_seconds
            for rival in predictions
            if rival.coarseness == 0
        )
        if not has_fresher_rival:
            late_predictions.append(prediction)
    # Each search simulates many delays, so only the fastest are worth one.
    fastest = sorted(late_predictions, key=attrgetter("seconds"))[:_MAX_DELAY_SEARCHES]
    return [prediction.candidate for prediction in fastest]
