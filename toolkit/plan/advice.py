"""From a pilot's findings to advice, by a fixed rule."""

from dataclasses import dataclass
from math import isfinite, isnan
from shlex import quote
from typing import TYPE_CHECKING

from toolkit.files import started_by
from toolkit.format import plus_minus, size
from toolkit.plan.candidates import Candidate, late_methods, placeholder_note

if TYPE_CHECKING:
    from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings

WORTH = 0.05  # least share of a training step that justifies stale weights
# Points of accuracy that the interval may reach below 0 without longer runs.
TOLERANCE = 1.0
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
    """What to train next, and why.

    Attributes:
        choice: DP, a rule, a rule on trial, or undecided.
        verdict: the choice as a sentence, without its full stop.
        reasons: sentences with their numbers.
        watch: quantities to look at in later runs.
        roll_back: conditions on which to return to DP.
        command: command line of the next run.
    """

    choice: str
    verdict: str
    reasons: tuple[str, ...]
    watch: tuple[str, ...]
    roll_back: tuple[str, ...]
    command: str

    def text(self) -> str:
        """The verdict, its reasons and the next steps, as lines of text."""
        lines = [self.verdict + ".", *(f"- {reason}" for reason in self.reasons)]
        for title, items in (("Watch:", self.watch), ("Roll back:", self.roll_back)):
            if items:
                lines += [title, *(f"- {line}" for line in items)]
        lines += ["Next command:", self.command]
        note = placeholder_note(self.command)
        if note:
            lines.append(note)
        return "\n".join(lines)


def advise(pilot: "Pilot") -> Advice:
    """Derive the advice from a pilot.

    It is about one rule: the freshest that gains something. With late weights, accuracy decides
    first: the rule is refused if it diverges or loses accuracy. Then it has to gain: either it fits
    in memory and DP does not, or its training step is predicted to be shorter by more than
    :data:`WORTH` over the whole range of computing times. A gain is adopted if the training could
    show a difference in accuracy and excludes a loss of more than :data:`TOLERANCE`; otherwise the
    rule is tried.

    Args:
        pilot: what it measured and predicted.
    """
    choice, reasons = _decide(pilot)
    rule = ""
    watch: tuple[str, ...] = ()
    roll_back: tuple[str, ...] = ()
    if pilot.rules:
        rule = pilot.late.rule
        # A rule that reads no weight late trains as DP does: there is nothing to watch.
        if choice in (ADOPT, TRY) and pilot.late.predicted.staleness > 0:
            watch = _watch(pilot)
            roll_back = _roll_back(pilot, choice)
    return Advice(
        choice={ADOPT: rule, TRY: f"{rule} {TRY}"}.get(choice, choice),
        verdict=_VERDICTS[choice].format(rule),
        reasons=tuple(reasons),
        watch=watch,
        roll_back=roll_back,
        command=_command(pilot, choice),
    )


def _decide(pilot: "Pilot") -> tuple[str, list[str]]:
    """Return the choice and its reasons; the first rule of :func:`advise` that applies decides."""
    training = pilot.training
    # 1. Nothing to stagger, or nothing to compare with.
    if pilot.n_stages < 2:
        return STAY, [
            "the model cannot be cut into two stages, so there is nothing to stagger: write it as"
            " a list of modules, or keep each parameter in one of them"
        ]
    if training and "DP" in training.diverged:
        return UNDECIDED, [
            f"DP diverged within {training.n_steps} training steps: lower the learning rate and run"
            " the pilot again"
        ]
    late_rule = pilot.late
    # 2. A loss of accuracy outweighs any gain.
    gain_reasons = gains(pilot, late_rule)
    remarks = _remarks(pilot)
    loss_reason = ""
    if training and late_rule.rule in training.diverged:
        loss_reason = (
            f"{late_rule.rule} diverged within {training.n_steps} training steps,"
            " and DP did not"
        )
    elif training and training.learned and training.difference.interval[1] < 0:
        loss_reason = (
            f"accuracy: {_difference(pilot, training)}, a loss by its interval"
        )
    if loss_reason:
        reasons = [loss_reason, *gain_reasons, *remarks]
        if not pilot.of("DP").predicted.fits:
            reasons.append(
                "DP does not fit: checkpoint=all keeps almost no activations, but takes longer"
            )
        return STAY, reasons
    # 3. Without a gain on the user's machines, late weights are a risk for nothing.
    if not gain_reasons:
        rules = " and ".join(rule.rule for rule in pilot.rules[1:])
        return STAY, [
            f"{rules} would gain nothing that counts",
            *remarks,
            _accuracy(pilot),
        ]
    reasons = [*gain_reasons, *remarks, _accuracy(pilot)]
    if not late_rule.predicted.staleness:
        return ADOPT, reasons
    # 4. A gain is adopted if the training would have shown a loss, and excludes a large one.
    # A training that learned nothing, or a test that all pass, excludes no loss.
    shows_accuracy = training and training.learned and not training.blind
    if shows_accuracy and training.difference.interval[0] >= -TOLERANCE:  # type: ignore[union-attr]
        return ADOPT, reasons
    return TRY, reasons


def gains(pilot: "Pilot", late_rule: "RuleFindings") -> list[str]:
    """Return what a rule with late weights gains over DP on the user's machines, in sentences."""
    reasons = []
    if late_rule.predicted.fits and not pilot.of("DP").predicted.fits:
        reasons.append(f"memory: {_needs(pilot, late_rule)}")
    # The slowest of the range decides: a gain has to be sure.
    if late_rule.speed[2] < 1 - WORTH:
        reason = _speed(pilot, late_rule)
        if pilot.placement == "per_microbatch":
            reason += (
                ". Compare other remedies for slow links: runtime.compression=bf16, and an"
                " all-reduce that is a step late (runtime=delayed_allreduce)"
            )
        reasons.append(reason)
    return reasons


def _remarks(pilot: "Pilot") -> list[str]:
    """Return remarks on what the compared rule does not gain, and on the other rules."""
    dp_rule = pilot.of("DP")
    late_rule = pilot.late
    remarks = []
    if dp_rule.predicted.fits:
        explanation = "give Hardware(memory=...) to judge it"
        if pilot.limited:
            explanation = "DP fits as well"
        if pilot.placement == "per_microbatch":
            explanation = (
                "but none on a device of its own:"
                " it counts with placement='one' or 'per_stage'"
            )
        # All workers run on one device here, so that this is the sum over them.
        share = (
            1 - late_rule.activations / dp_rule.activations
            if dp_rule.activations
            else 0.0
        )
        difference = f"{abs(share):.0%} {'more' if share < 0 else 'less'}"
        remarks.append(
            f"memory: all workers together keep {difference} with {late_rule.rule}; {explanation}"
        )
    elif not late_rule.predicted.fits:
        remarks.append(
            f"memory: neither fits: {_needs(pilot, late_rule)}; lower batch, or try checkpoint=all"
        )
    if late_rule.speed[2] >= 1 - WORTH:
        remarks.append(
            f"{_speed(pilot, late_rule)}; a gain counts if it is surely more than {WORTH:.0%}"
        )
    for rule in pilot.rules[1:]:
        if rule != late_rule:
            time_words = f"{rule.speed[1]:.2f} of DP's time"
            staleness_words = (
                f"weights {rule.predicted.staleness:.2f} steps late on average"
            )
            remarks.append(
                f"{rule.rule} would take {time_words}, with {staleness_words}"
            )
    return remarks


def _speed(pilot: "Pilot", late_rule: "RuleFindings") -> str:
    lowest, middle, highest = late_rule.speed
    return (
        f"speed: a DP step is predicted to spend {pilot.of('DP').waiting:.0%} on messages; a"
        f" {late_rule.rule} step takes {middle:.2f} ({lowest:.2f} to {highest:.2f}) of a DP step's"
        " time"
    )


def _needs(pilot: "Pilot", late_rule: "RuleFindings") -> str:
    dp_memory = size(pilot.of("DP").predicted.memory)
    late_memory = size(late_rule.predicted.memory)
    return (
        f"DP needs {dp_memory} on the fullest device, and {late_rule.rule} {late_memory}, of"
        f" {pilot.room}"
    )


def _accuracy(pilot: "Pilot") -> str:
    training = pilot.training
    if training is None:
        return f"accuracy: not measured, since {pilot.untrained}"
    if not training.learned:
        dp_accuracy = sum(training.accuracy["DP"]) / len(training.accuracy["DP"])
        return (
            f"accuracy: unknown; after {training.n_steps} training steps DP has {dp_accuracy:.1%}"
            f" of the {training.tested} right, chance {training.chance:.1%} and the most frequent"
            f" class {training.frequent:.1%}, as on random {training.tested} or after too few steps"
        )
    if training.blind:
        return f"accuracy: unknown; after {training.n_steps} training steps {training.blind}"
    lowest = training.difference.interval[0]
    excluded = f"a loss of up to {max(0.0, -lowest):.1f} points is not excluded"
    if isnan(lowest):
        excluded = "one run proves nothing"
    return f"accuracy: {_difference(pilot, training)}; {excluded}"


def _difference(pilot: "Pilot", training: "TrainingFindings") -> str:
    estimate = training.difference
    points = plus_minus(estimate.mean, estimate.half_width, "+", decimals=1)
    return f"{pilot.late.rule} is {points} points from DP after {training.n_steps} training steps"


def _watch(pilot: "Pilot") -> tuple[str, ...]:
    training = pilot.training
    cosine = "not measured here"
    ratio = "not measured here"
    if training and training.learned:
        cosine = f"{training.cosine:.2f} here"
        ratio = f"{training.loss_ratio:.2f} here"
    return (
        f"training loss divided by that of a DP run with the same seed ({ratio}): if it stays above"
        " 1.1 after warm-up, compare again",
        f"cosine of delayed and fresh gradients by stage ({cosine}), from diagnostics=20 with"
        f" runtime.order=grouped: below {COSINE} the delay matters",
        "ema_top1 and top1, with ema=0.999: an average far better than the weights means that"
        " the learning rate is too high for stale weights",
    )


def _roll_back(pilot: "Pilot", choice: str) -> tuple[str, ...]:
    bound = f"if the loss is not finite, or {_guard_factor(pilot):g} times that of the first steps"
    guard = (
        f"guard=rollback returns to the last checkpoint and continues with DP {bound}"
    )
    if pilot.placement == "per_stage":
        guard = f"guard=stop ends the run {bound}: pipelines cannot continue as DP"
    if choice == TRY:
        return (
            f"keep DP if the interval of {pilot.late.rule}'s difference, in this comparison,"
            f" reaches more than {TOLERANCE:g} point below zero",
            f"a comparison has no guard; in a later training by {pilot.late.rule}, {guard}",
        )
    return (
        guard,
        "return by hand (resume=FOLDER with schedule=dp) if test accuracy is below a DP run's by"
        " more than its spread over seeds for three epochs",
    )


def _guard_factor(pilot: "Pilot") -> float:
    """Return the loss ratio at which a guard acts.

    Twice the highest ratio of a healthy run, at least 2; 10 if there was no such run.
    """
    training = pilot.training
    if training is None or not training.learned or not isfinite(training.highest):
        return 10.0
    return max(2.0, round(2 * training.highest, 1))


def _command(pilot: "Pilot", choice: str) -> str:
    """Return a command that trains by the advice, or compares if accuracy is not known yet."""
    command_options = pilot.command_options
    if not pilot.rules:
        return f"{started_by('train')} schedule=dp {command_options}"
    if choice in (STAY, UNDECIDED):
        return pilot.of("DP").predicted.candidate.command(command_options)
    late_candidate = pilot.late.predicted.candidate
    if choice == TRY:
        return _comparison_command(late_candidate, pilot)
    if not pilot.late.predicted.staleness:
        return late_candidate.command(command_options)
    guard = "guard=rollback"
    if pilot.placement == "per_stage":
        guard = "guard=stop"
    guard += f" guard_factor={_guard_factor(pilot):g} ema=0.999"
    return late_candidate.command(f"{guard} {command_options}")


def _comparison_command(late_candidate: Candidate, pilot: "Pilot") -> str:
    """Return a command that compares DP with the late candidate, over seeds."""
    name = late_candidate.spec.method
    # ``schedule=cdp_v2 schedule.delay=1`` becomes ``rules.cdp_v2.delay=1``.
    # A comparison takes the options of a training, but as those of one of its rules.
    options = late_candidate.options().replace(f"schedule={name} ", "")
    options = options.replace("schedule.", f"rules.{name}.")
    arguments = [options, pilot.command_options]
    usual_rules = late_methods()
    for usual_rule in usual_rules:
        if usual_rule != name:
            arguments.append(quote(f"~rules.{usual_rule}"))
    if name not in usual_rules:
        arguments.append(f"+schedule@rules.{name}={name}")
    # DP must see as many samples in a step as the rule that it is compared with.
    n_rounds = late_candidate.spec.accumulate or 1
    if n_rounds > 1:
        arguments.append(f"rules.dp.accumulate={n_rounds}")
    arguments.append("seeds=5 ema=0.999")
    if pilot.placement == "one":
        # On one device DP accumulates gradients, which takes as little memory, and CDP runs slot
        # by slot.
        arguments.append(
            "schedule@rules.dp=gradient_accumulation runtime.order=scheduled"
        )
    else:
        arguments.append("diagnostics=20")
    return f"{started_by('compare')} {' '.join(arguments)}"
