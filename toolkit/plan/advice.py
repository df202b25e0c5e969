"""From a pilot's findings to advice, by a fixed rule."""

from dataclasses import dataclass
from math import isfinite, isnan
from shlex import quote
from typing import TYPE_CHECKING

from toolkit.format import plus_minus, size
from toolkit.model import Sequences
from toolkit.training.data.tokens import BYTES

if TYPE_CHECKING:
    from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings

WORTH = 0.05  # least share of a training step that justifies stale weights
WITHIN = 0.1  # share of CDP-v1's training step that fresher weights may cost
TOLERANCE = 1.0  # points of accuracy that the interval may reach below 0 without longer runs
COSINE = 0.9  # below it a delayed gradient differs noticeably from the fresh one

STAY, ADOPT, TRY, UNDECIDED = "DP", "CDP-v2", "CDP-v2 on trial", "undecided"
_VERDICTS = {
    STAY: "Stay with data parallelism (DP)",
    ADOPT: "Use CDP-v2",
    TRY: "Try CDP-v2: it may pay, and its accuracy is not known yet",
    UNDECIDED: "No advice: DP itself does not train here",
}


@dataclass(frozen=True)
class Advice:
    """What to do."""

    choice: str  # DP, CDP-v2, CDP-v2 on trial, or undecided
    reasons: tuple[str, ...]  # sentences with their numbers
    watch: tuple[str, ...]  # what to look at in later runs
    roll_back: tuple[str, ...]  # when to return to DP
    command: str  # command line of the next run

    @property
    def verdict(self) -> str:
        """The choice as a sentence, without its full stop."""
        return _VERDICTS[self.choice]

    def text(self) -> str:
        """The verdict, its reasons and the next steps, as lines of text."""
        lines = [self.verdict + ".", *(f"- {reason}" for reason in self.reasons)]
        for title, found in (("Watch:", self.watch), ("Roll back:", self.roll_back)):
            lines += [title, *(f"- {line}" for line in found)] if found else []
        return "\n".join([*lines, "Next command:", self.command])


def advise(found: "Pilot") -> Advice:
    """Derive the advice from ``found``.

    Accuracy decides first: CDP-v2 is refused if it diverges or loses accuracy. Then it has to gain
    something: either it fits in memory and DP does not, or its training step is predicted to be
    shorter by more than :data:`WORTH` over the whole range of computing times. A gain is adopted
    if the training could show a difference in accuracy and excludes a loss of more than
    :data:`TOLERANCE`; otherwise CDP-v2 is tried.

    Args:
        found: what a pilot measured and predicted.
    """
    choice, reasons = _decide(found)
    known = choice in (ADOPT, TRY)
    watch, back = (_watch(found), _roll_back(found, choice)) if known else ((), ())
    return Advice(choice, tuple(reasons), watch, back, _command(found, choice))


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
    gains, others = _gains(found)
    lost = ""
    if trained and "CDP-v2" in trained.diverged:
        lost = f"CDP-v2 diverged within {trained.n_steps} training steps, and DP did not"
    elif trained and trained.learned and trained.difference.interval[1] < 0:
        lost = f"accuracy: {_difference(trained)}, a loss by its interval"
    if lost:
        smaller = "DP does not fit: checkpoint=all keeps almost no activations, but takes longer"
        return STAY, [lost, *gains, *others, *[smaller][: not found.fits(found.of("DP"))]]
    if not gains:
        return STAY, ["CDP-v2 would gain nothing that counts", *others, _accuracy(found)]
    shown = trained and trained.learned and not trained.blind
    sure = shown and trained.difference.interval[0] >= -TOLERANCE  # type: ignore[union-attr]
    return ADOPT if sure else TRY, [*gains, *others, _accuracy(found)]


def _gains(found: "Pilot") -> tuple[list[str], list[str]]:
    """What CDP-v2 gains on the user's machines, and the remarks where it gains nothing."""
    gains, others = [], []
    dp, v2 = found.of("DP"), found.of("CDP-v2")
    fullest = f"DP needs {_need(found, dp)} on the fullest device, and CDP-v2 {_need(found, v2)}"
    if found.fits(dp):
        why = "DP fits as well" if found.limited else "give Hardware(memory=...) to judge it"
        if found.placement == "per_microbatch":
            why = "but none on a device of its own: it counts with placement='one' or 'per_stage'"
        share = 1 - v2.activations / dp.activations
        others.append(f"memory: all workers together keep {share:.0%} less with CDP-v2; {why}")
    elif found.fits(v2):
        gains.append(f"memory: {fullest}")
    else:
        others.append(f"memory: neither fits: {fullest}; lower batch, or try checkpoint=all")
    least, middle, most = v2.predicted.ratio
    speed = (
        f"speed: a DP step is predicted to spend {dp.waiting:.0%} on messages; a CDP-v2 step takes"
        f" {middle:.2f} ({least:.2f} to {most:.2f}) of a DP step's time"
    )
    if found.affordable and (ratio := found.affordable[1]) < min(1, middle) - WORTH:
        late = found.affordable[0]
        others.append(
            f"weights {late.mean_staleness:.2f} steps late on average would take {ratio:.2f} of"
            f" DP's time: schedule=cdp_v1 schedule.chains={late.chains}"
            f" 'schedule.delay={{within: {WITHIN:g}}}', with your hardware"
        )
    if most < 1 - WORTH:
        gains.append(
            f"{speed}. Compare other remedies for slow links: runtime.compression=bf16, and an"
            " all-reduce that is a step late (runtime=delayed_allreduce)"
        )
        return gains, others
    others.append(f"{speed}; a gain counts if it is surely more than {WORTH:.0%}")
    _, middle, most = found.of("CDP-v1").predicted.ratio
    if most < 1 - WORTH:
        others.append(
            f"CDP-v1 would take {middle:.2f} of DP's time, with every weight a step late; its"
            " accuracy was not measured"
        )
    return gains, others


def _accuracy(found: "Pilot") -> str:
    trained = found.training
    if trained is None:
        return f"accuracy: not measured, since {found.untrained}"
    if not trained.learned:
        dp = sum(trained.accuracy["DP"]) / len(trained.accuracy["DP"])
        return (
            f"accuracy: unknown; after {trained.n_steps} training steps DP has {dp:.1%} of the"
            f" {trained.tested} right and chance {trained.chance:.1%}, as on random"
            f" {trained.tested} or after too few steps"
        )
    if trained.blind:
        return f"accuracy: unknown; after {trained.n_steps} training steps {trained.blind}"
    lowest = trained.difference.interval[0]
    excluded = f"a loss of up to {max(0.0, -lowest):.1f} points is not excluded"
    if isnan(lowest):
        excluded = "one run proves nothing"
    return f"accuracy: {_difference(trained)}; {excluded}"


def _difference(trained: "TrainingFindings") -> str:
    estimate = trained.difference
    points = plus_minus(estimate.mean, estimate.half_width, "+", decimals=1)
    return f"CDP-v2 is {points} points from DP after {trained.n_steps} training steps"


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
            "keep DP if the interval of CDP-v2's difference, in this comparison, reaches more than"
            f" {TOLERANCE:g} point below zero",
            f"a comparison has no guard; in a later training by CDP-v2, {guard}",
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
    form, data = found.form, "data=MY_DATA"
    if isinstance(form, Sequences) and form.vocabulary == BYTES:
        data = f"data=text data.root=MY_TEXT data.length={form.length}"
    elif isinstance(form, Sequences):
        data = f"data=tokens data.root=MY_TOKENS data.length={form.length}"
        data += f" data.vocabulary={form.vocabulary}"
    elif form.channels == 3:
        data = f"data=image_folder data.root=MY_IMAGES data.image_size={form.width}"
    options = f"model.target={found.model or 'MY_PACKAGE.MY_MODEL'} {data}"
    options += f" workers={found.n_workers} stages={found.n_stages} batch={found.batch}"
    if found.partition != "flops":
        options += f" partition={found.partition}"
    alone, pipeline = found.placement == "one", found.placement == "per_stage"
    if choice == TRY:
        # On one device DP runs in as little memory, and CDP slot by slot
        more = "diagnostics=20"
        if alone:
            more = "schedule@rules.dp=gradient_accumulation rules.cdp_v2.placement=one"
            more += " runtime.order=scheduled"
        without = quote("~rules.cdp_v1")
        return f"python experiments/compare.py {options} {without} seeds=5 ema=0.999 {more}"
    start, rule = "python experiments/train.py", "schedule=dp"
    if choice == ADOPT:
        rule = f"schedule=cdp_v2 guard={'stop' if pipeline else 'rollback'}"
        rule += f" guard_factor={_guard_factor(found):g} ema=0.999"
        rule += f" schedule.placement={found.placement}" if alone or pipeline else ""
        rule += " runtime.order=scheduled" if alone else ""
    if not alone and (choice == ADOPT or not pipeline):
        n_ranks = found.n_stages if pipeline else found.n_workers
        start = f"torchrun --nproc-per-node {n_ranks} experiments/train.py runtime=distributed"
    return f"{start} {rule} {options}"


def _need(found: "Pilot", rule: "RuleFindings") -> str:
    peak, memory = found.tightest(rule)
    return f"{size(peak)} of {size(memory)}"
