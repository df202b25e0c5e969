"""From a pilot's findings to advice, by a fixed rule."""

from dataclasses import dataclass
from math import isfinite, isnan
from shlex import quote
from typing import TYPE_CHECKING

from toolkit.files import started_by
from toolkit.format import plus_minus, size

if TYPE_CHECKING:
    from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings

WORTH = 0.05  # least share of a training step that justifies stale weights
TOLERANCE = 1.0  # points of accuracy that the interval may reach below 0 without longer runs
COSINE = 0.9  # below it a delayed gradient differs noticeably from the fresh one

STAY, ADOPT, TRY, UNDECIDED = "DP", "use", "on trial", "undecided"
_VERDICTS = {
    STAY: "Stay with data parallelism (DP)",
    ADOPT: "Use {}",
    TRY: "Try {}: it may pay, and its accuracy is not known yet",
    UNDECIDED: "No advice: DP itself does not train here",
}


@dataclass(frozen=True)
class Advice:
    """What to do."""

    choice: str  # DP, a rule, a rule on trial, or undecided
    verdict: str  # the choice as a sentence, without its full stop
    reasons: tuple[str, ...]  # sentences with their numbers
    watch: tuple[str, ...]  # what to look at in later runs
    roll_back: tuple[str, ...]  # when to return to DP
    command: str  # command line of the next run

    def text(self) -> str:
        """The verdict, its reasons and the next steps, as lines of text."""
        lines = [self.verdict + ".", *(f"- {reason}" for reason in self.reasons)]
        for title, found in (("Watch:", self.watch), ("Roll back:", self.roll_back)):
            lines += [title, *(f"- {line}" for line in found)] if found else []
        return "\n".join([*lines, "Next command:", self.command])


def advise(found: "Pilot") -> Advice:
    """Derive the advice from ``found``.

    It is about one rule: the freshest that gains something. With late weights, accuracy decides
    first: the rule is refused if it diverges or loses accuracy. Then it has to gain: either it fits
    in memory and DP does not, or its training step is predicted to be shorter by more than
    :data:`WORTH` over the whole range of computing times. A gain is adopted if the training could
    show a difference in accuracy and excludes a loss of more than :data:`TOLERANCE`; otherwise the
    rule is tried.

    Args:
        found: what a pilot measured and predicted.
    """
    choice, reasons = _decide(found)
    rule = found.late.rule if found.rules else ""
    known = choice in (ADOPT, TRY) and found.late.predicted.staleness > 0
    watch, back = (_watch(found), _roll_back(found, choice)) if known else ((), ())
    name = {ADOPT: rule, TRY: f"{rule} {TRY}"}.get(choice, choice)
    verdict = _VERDICTS[choice].format(rule)
    return Advice(name, verdict, tuple(reasons), watch, back, _command(found, choice))


def _decide(found: "Pilot") -> tuple[str, list[str]]:
    trained = found.training
    if found.n_stages < 2:
        return STAY, [
            "the model cannot be cut into two stages, so there is nothing to stagger: write it as"
            " a sequence of modules, or keep each parameter in one of them"
        ]
    if trained and "DP" in trained.diverged:
        return UNDECIDED, [
            f"DP diverged within {trained.n_steps} training steps: lower the learning rate and run"
            " the pilot again"
        ]
    late = found.late
    gained, others, lost = gains(found, late), _remarks(found), ""
    if trained and late.rule in trained.diverged:
        lost = f"{late.rule} diverged within {trained.n_steps} training steps, and DP did not"
    elif trained and trained.learned and trained.difference.interval[1] < 0:
        lost = f"accuracy: {_difference(found, trained)}, a loss by its interval"
    if lost:
        smaller = "DP does not fit: checkpoint=all keeps almost no activations, but takes longer"
        return STAY, [lost, *gained, *others, *[smaller][: not found.of("DP").predicted.fits]]
    if not gained:
        rules = " and ".join(rule.rule for rule in found.rules[1:])
        return STAY, [f"{rules} would gain nothing that counts", *others, _accuracy(found)]
    if not late.predicted.staleness:
        return ADOPT, [*gained, *others, _accuracy(found)]
    shown = trained and trained.learned and not trained.blind
    sure = shown and trained.difference.interval[0] >= -TOLERANCE  # type: ignore[union-attr]
    return ADOPT if sure else TRY, [*gained, *others, _accuracy(found)]


def gains(found: "Pilot", late: "RuleFindings") -> list[str]:
    """Return what a rule with late weights gains over DP on the user's machines, in sentences.

    Args:
        found: what a pilot measured and predicted.
        late: findings of the rule.
    """
    gained = []
    if late.predicted.fits and not found.of("DP").predicted.fits:
        gained.append(f"memory: {_needs(found, late)}")
    if late.speed[2] < 1 - WORTH:
        others = (
            ". Compare other remedies for slow links: runtime.compression=bf16, and an all-reduce"
            " that is a step late (runtime=delayed_allreduce)"
        )
        gained.append(_speed(found, late) + others * (found.placement == "per_microbatch"))
    return gained


def _remarks(found: "Pilot") -> list[str]:
    """Remarks where the rule gains nothing, and on the others."""
    dp, late, others = found.of("DP"), found.late, []
    if dp.predicted.fits:
        why = "DP fits as well" if found.limited else "give Hardware(memory=...) to judge it"
        if found.placement == "per_microbatch":
            why = "but none on a device of its own: it counts with placement='one' or 'per_stage'"
        share = 1 - late.activations / dp.activations if dp.activations else 0.0
        less = f"{abs(share):.0%} {'more' if share < 0 else 'less'}"
        others.append(f"memory: all workers together keep {less} with {late.rule}; {why}")
    elif not late.predicted.fits:
        others.append(
            f"memory: neither fits: {_needs(found, late)}; lower batch, or try checkpoint=all"
        )
    if late.speed[2] >= 1 - WORTH:
        others.append(f"{_speed(found, late)}; a gain counts if it is surely more than {WORTH:.0%}")
    for rule in found.rules[1:]:
        if rule != late:
            times = f"{rule.speed[1]:.2f} of DP's time"
            weights = f"weights {rule.predicted.staleness:.2f} steps late on average"
            others.append(f"{rule.rule} would take {times}, with {weights}")
    return others


def _speed(found: "Pilot", late: "RuleFindings") -> str:
    least, middle, most = late.speed
    return (
        f"speed: a DP step is predicted to spend {found.of('DP').waiting:.0%} on messages; a"
        f" {late.rule} step takes {middle:.2f} ({least:.2f} to {most:.2f}) of a DP step's time"
    )


def _needs(found: "Pilot", late: "RuleFindings") -> str:
    dp, mine = (size(rule.predicted.memory) for rule in (found.of("DP"), late))
    return f"DP needs {dp} on the fullest device, and {late.rule} {mine}, of {found.room}"


def _accuracy(found: "Pilot") -> str:
    trained = found.training
    if trained is None:
        return f"accuracy: not measured, since {found.untrained}"
    if not trained.learned:
        dp = sum(trained.accuracy["DP"]) / len(trained.accuracy["DP"])
        return (
            f"accuracy: unknown; after {trained.n_steps} training steps DP has {dp:.1%} of the"
            f" {trained.tested} right, chance {trained.chance:.1%} and the most frequent class"
            f" {trained.frequent:.1%}, as on random {trained.tested} or after too few steps"
        )
    if trained.blind:
        return f"accuracy: unknown; after {trained.n_steps} training steps {trained.blind}"
    lowest = trained.difference.interval[0]
    excluded = f"a loss of up to {max(0.0, -lowest):.1f} points is not excluded"
    if isnan(lowest):
        excluded = "one run proves nothing"
    return f"accuracy: {_difference(found, trained)}; {excluded}"


def _difference(found: "Pilot", trained: "TrainingFindings") -> str:
    estimate = trained.difference
    points = plus_minus(estimate.mean, estimate.half_width, "+", decimals=1)
    return f"{found.late.rule} is {points} points from DP after {trained.n_steps} training steps"


def _watch(found: "Pilot") -> tuple[str, ...]:
    trained, cosine, ratio = found.training, "not measured here", "not measured here"
    if trained and trained.learned:
        cosine, ratio = f"{trained.cosine:.2f} here", f"{trained.loss_ratio:.2f} here"
    return (
        f"training loss divided by that of a DP run with the same seed ({ratio}): if it stays above"
        " 1.1 after warm-up, compare again",
        f"cosine of delayed and fresh gradients by stage ({cosine}), from diagnostics=20 with"
        f" runtime.order=grouped: below {COSINE} the delay matters",
        "ema_top1 and top1, with ema=0.999: an average far better than the weights means that"
        " the learning rate is too high for stale weights",
    )


def _roll_back(found: "Pilot", choice: str) -> tuple[str, ...]:
    bound = f"if the loss is not finite, or {_guard_factor(found):g} times that of the first steps"
    guard = f"guard=rollback returns to the last checkpoint and continues with DP {bound}"
    if found.placement == "per_stage":
        guard = f"guard=stop ends the run {bound}: pipelines cannot continue as DP"
    if choice == TRY:
        return (
            f"keep DP if the interval of {found.late.rule}'s difference, in this comparison,"
            f" reaches more than {TOLERANCE:g} point below zero",
            f"a comparison has no guard; in a later training by {found.late.rule}, {guard}",
        )
    return (
        guard,
        "return by hand (resume=FOLDER with schedule=dp) if test accuracy is below a DP run's by"
        " more than its spread over seeds for three epochs",
    )


def _guard_factor(found: "Pilot") -> float:
    """Twice the highest loss ratio of a healthy run, at least 2; 10 where none was seen."""
    trained = found.training
    if trained is None or not trained.learned or not isfinite(trained.highest):
        return 10.0
    return max(2.0, round(2 * trained.highest, 1))


def _command(found: "Pilot", choice: str) -> str:
    """Command that trains by the advice, or compares where accuracy is not known yet."""
    if not found.rules:
        return f"{started_by('train')} schedule=dp {found.given}"
    if choice in (STAY, UNDECIDED):
        return found.of("DP").predicted.candidate.command(found.given)
    late = found.late.predicted.candidate
    name, n_rounds = late.choice.schedule, late.choice.accumulate or 1
    if choice == ADOPT and not found.late.predicted.staleness:
        return late.command(found.given)
    if choice == ADOPT:
        guard = f"guard={'stop' if found.placement == 'per_stage' else 'rollback'}"
        guard += f" guard_factor={_guard_factor(found):g} ema=0.999"
        return late.command(f"{guard} {found.given}")
    # The same options, but of a rule of a comparison
    options = late.options().replace(f"schedule={name} ", "").replace("schedule.", f"rules.{name}.")
    usual = ("cdp_v1", "cdp_v2")
    rules = [quote(f"~rules.{other}") for other in usual if other != name]
    rules += [f"+schedule@rules.{name}={name}"] if name not in usual else []
    rules += [f"rules.dp.accumulate={n_rounds}"] if n_rounds > 1 else []
    more = "diagnostics=20"
    if found.placement == "one":
        # On one device DP runs in as little memory, and CDP slot by slot
        more = "schedule@rules.dp=gradient_accumulation runtime.order=scheduled"
    words = [options, found.given, *rules, "seeds=5 ema=0.999", more]
    return f"{started_by('compare')} {' '.join(words)}"
