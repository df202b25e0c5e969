"""From a pilot's findings to advice, by a fixed rule."""

from dataclasses import dataclass
from math import isfinite, isnan
from shlex import quote

from toolkit.format import size
from toolkit.plan.findings import Findings, RuleFindings, TrainingFindings
from toolkit.training.data.tokens import BYTES

WORTH = 0.05  # least share of a training step that justifies stale weights
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
    """What to do.

    Attributes:
        choice: ``DP``, ``CDP-v2``, ``CDP-v2 on trial`` or ``undecided``.
        reasons: sentences with their numbers.
        watch: what to look at in later runs.
        roll_back: when to return to DP.
        command: command line of the next run.
    """

    choice: str
    reasons: tuple[str, ...]
    watch: tuple[str, ...]
    roll_back: tuple[str, ...]
    command: str

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


def advise(found: Findings) -> Advice:
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


def _decide(found: Findings) -> tuple[str, list[str]]:
    if found.n_stages < 2:
        return STAY, [
            "the model cannot be cut into two stages, so there is nothing to stagger: write it as"
            " a sequence of modules, or keep each parameter in one of them"
        ]
    trained = found.training
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
        lost = (
            f"accuracy: CDP-v2 is {_points(trained)} from DP, a loss by its interval, after"
            f" {trained.n_steps} training steps"
        )
    if lost:
        fits = found.fits(found.of("DP"))
        smaller = "DP does not fit: checkpoint=all keeps almost no activations, but takes longer"
        return STAY, [lost, *gains, *others, *([] if fits else [smaller])]
    if not gains:
        return STAY, ["CDP-v2 would gain nothing that counts", *others, _accuracy(found)]
    sure = (
        trained
        and trained.learned
        and not trained.blind
        and trained.difference.interval[0] >= -TOLERANCE
    )
    return ADOPT if sure else TRY, [*gains, *others, _accuracy(found)]


def _gains(found: Findings) -> tuple[list[str], list[str]]:
    """What CDP-v2 gains on the user's machines, and the remarks where it gains nothing."""
    gains, others = [], []
    dp, v1, v2 = (found.of(rule) for rule in ("DP", "CDP-v1", "CDP-v2"))
    fullest = f"DP needs {_need(found, dp)} on the fullest device, and CDP-v2 {_need(found, v2)}"
    if found.fits(dp):
        if found.placement == "per_microbatch":
            why = "but none on a device of its own: it counts with placement='one' or 'per_stage'"
        else:
            why = "DP fits as well" if found.limited else "give Hardware(memory=...) to judge it"
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
    if most < 1 - WORTH:
        gains.append(
            f"{speed}. Compare other remedies for slow links: runtime.compression=bf16, and an"
            " all-reduce that is a step late (runtime=delayed_allreduce)"
        )
    else:
        others.append(f"{speed}; a gain counts if it is surely more than {WORTH:.0%}")
        if v1.predicted.ratio[2] < 1 - WORTH:
            others.append(
                f"CDP-v1 would take {v1.predicted.ratio[1]:.2f} of DP's time, with every weight a"
                " step late; its accuracy was not measured"
            )
    return gains, others


def _accuracy(found: Findings) -> str:
    trained = found.training
    if trained is None:
        return f"accuracy: not measured, since {found.untrained}"
    after = f"after {trained.n_steps} training steps"
    if not trained.learned:
        dp = trained.accuracy["DP"]
        return (
            f"accuracy: unknown; {after} DP has {sum(dp) / len(dp):.1%} of the {trained.tested}"
            f" right and chance {trained.chance:.1%}, as on random {trained.tested} or after too"
            " few steps"
        )
    if trained.blind:
        return f"accuracy: unknown; {after} {trained.blind}"
    lowest = trained.difference.interval[0]
    excluded = f"a loss of up to {max(0.0, -lowest):.1f} points is not excluded"
    if isnan(lowest):
        excluded = "one run proves nothing"
    return f"accuracy: CDP-v2 is {_points(trained)} from DP {after}; {excluded}"


def _watch(found: Findings) -> tuple[str, ...]:
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


def _roll_back(found: Findings, choice: str) -> tuple[str, ...]:
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


def _guard_factor(found: Findings) -> float:
    """Twice the highest loss ratio of a healthy run, at least 2; 10 where none was seen."""
    trained = found.training
    if trained is None or not trained.learned or not isfinite(trained.highest):
        return 10.0
    return max(2.0, round(2 * trained.highest, 1))


def _command(found: Findings, choice: str) -> str:
    """Command that trains by the advice, or compares where accuracy is not known yet."""
    data = "data=MY_DATA"
    if found.samples == "sequences" and found.n_classes == BYTES:
        data = f"data=text data.root=MY_TEXT data.length={found.shape[0]}"
    elif found.samples == "sequences":
        data = f"data=tokens data.root=MY_TOKENS data.length={found.shape[0]}"
        data += f" data.vocabulary={found.n_classes}"
    elif found.shape[0] == 3:
        data = f"data=image_folder data.root=MY_IMAGES data.image_size={found.shape[-1]}"
    options = [
        f"model.target={found.model or 'MY_PACKAGE.MY_MODEL'}",
        data,
        f"workers={found.n_workers} stages={found.n_stages} batch={found.batch}",
    ]
    if found.partition != "flops":
        options.append(f"partition={found.partition}")
    alone = found.placement == "one"
    if choice == TRY:
        options.append(quote("~rules.cdp_v1") + " seeds=5 ema=0.999")
        options.append(
            # DP in as little memory, and CDP slot by slot
            "schedule@rules.dp=gradient_accumulation rules.cdp_v2.placement=one"
            " runtime.order=scheduled"
            if alone
            else "diagnostics=20"
        )
        return " ".join(["python experiments/compare.py", *options])
    adopt, pipeline = choice == ADOPT, found.placement == "per_stage"
    start = "python experiments/train.py"
    if not alone and (adopt or not pipeline):
        n_ranks = found.n_stages if pipeline else found.n_workers
        start = f"torchrun --nproc-per-node {n_ranks} experiments/train.py runtime=distributed"
    rule = ["schedule=cdp_v2" if adopt else "schedule=dp"]
    if adopt and (alone or pipeline):
        rule.append(f"schedule.placement={found.placement}")
    if adopt and alone:
        rule.append("runtime.order=scheduled")
    if adopt:
        guard = "stop" if pipeline else "rollback"
        rule.append(f"guard={guard} guard_factor={_guard_factor(found):g} ema=0.999")
    return " ".join([start, *rule, *options])


def _points(trained: TrainingFindings) -> str:
    estimate = trained.difference
    width = "" if isnan(estimate.half_width) else f" ± {estimate.half_width:.1f}"
    return f"{estimate.mean:+z.1f}{width} points"


def _need(found: Findings, rule: RuleFindings) -> str:
    peak, memory = found.tightest(rule)
    return f"{size(peak)} of {size(memory)}"
