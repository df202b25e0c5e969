"""The rule by which findings become advice: a pure function of them."""

from dataclasses import dataclass
from math import isfinite, isnan
from shlex import quote

from toolkit.format import size
from toolkit.plan.findings import Findings, RuleFindings, TrainingFindings
from toolkit.training.data.tokens import BYTES

WORTH = 0.05
"""The least share of a training step that is worth stale weights."""
TOLERANCE = 1.0
"""Points of accuracy: where the interval reaches further below, longer runs have to tell."""
COSINE = 0.9
"""Below it a delayed gradient is no longer nearly the fresh one."""

STAY, ADOPT, TRY, UNDECIDED = "DP", "CDP-v2", "CDP-v2 on trial", "undecided"
_TITLES = {
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
        reasons: with their numbers.
        watch: what to look at in the runs to come.
        roll_back: when to go back to DP.
        command: with which to go on.
    """

    choice: str
    reasons: tuple[str, ...]
    watch: tuple[str, ...]
    roll_back: tuple[str, ...]
    command: str

    @property
    def verdict(self) -> str:
        """The choice as a sentence, without its full stop."""
        return _TITLES[self.choice]

    def text(self) -> str:
        """The verdict, its reasons and what to do about it, in lines."""
        lines = [self.verdict + ".", *(f"- {reason}" for reason in self.reasons)]
        for title, found in (("Watch:", self.watch), ("Roll back:", self.roll_back)):
            lines += [title, *(f"- {line}" for line in found)] if found else []
        return "\n".join([*lines, "Go on with:", self.command])


def advise(found: Findings) -> Advice:
    """What follows from ``found``.

    Accuracy decides first: stale weights that cost it, or do not train at all, are refused. Then
    something has to be gained: DP does not fit and CDP-v2 does, or CDP-v2's training step is
    predicted to be shorter by more than :data:`WORTH`, even where computing takes another time than
    it did. What is gained is taken if accuracy was measured, could have shown a difference and is
    sure to :data:`TOLERANCE`, and tried otherwise.
    """
    if found.n_stages < 2:
        why = (
            "torch.fx traces the model, but it cannot be cut into two stages, and there is nothing"
            " to stagger: write the model as a sequence of modules, or keep each parameter in one"
            " of them"
        )
        return _advice(found, STAY, [why])
    trained = found.training
    if trained is not None and "DP" in trained.diverged:
        why = (
            f"DP diverged within {trained.n_steps} training steps, so that nothing can be held"
            " against it: lower the learning rate and run the pilot again"
        )
        return _advice(found, UNDECIDED, [why])
    gains, others = _gains(found)
    if trained is not None and "CDP-v2" in trained.diverged:
        why = f"CDP-v2 diverged within {trained.n_steps} training steps, and DP did not"
        return _advice(found, STAY, [why, *gains, *others, *_instead(found)])
    if trained is not None and trained.learned and trained.difference.interval[1] < 0:
        why = (
            f"CDP-v2 is {_points(trained)} of accuracy from DP: a loss, by its interval, over"
            f" {trained.n_steps} training steps"
        )
        return _advice(found, STAY, [why, *gains, *others, *_instead(found)])
    if not gains:
        why = "CDP-v2 would gain nothing that counts"
        return _advice(found, STAY, [why, *others, *_accuracy(trained, found)])
    known = trained is not None and trained.learned and not trained.blind
    sure = known and trained is not None and trained.difference.interval[0] >= -TOLERANCE
    choice = ADOPT if sure else TRY
    return _advice(found, choice, [*gains, *others, *_accuracy(trained, found)])


def _gains(found: Findings) -> tuple[list[str], list[str]]:
    """What CDP-v2 gains on the user's machines; and what is to be said where it does not."""
    gains, others = [], []
    dp, v1, v2 = (found.of(rule) for rule in ("DP", "CDP-v1", "CDP-v2"))
    if not found.fits(dp) and found.fits(v2):
        gains.append(
            f"memory: DP needs {_need(found, dp)} on the fullest device, and CDP-v2"
            f" {_need(found, v2)}"
        )
    elif not found.fits(dp):
        others.append(
            f"memory: neither DP ({_need(found, dp)} on the fullest device) nor CDP-v2"
            f" ({_need(found, v2)}) fits: lower batch, or take checkpoint=all"
        )
    else:
        others.append(_activations(found, dp, v2))
    least, middle, most = v2.predicted.ratio
    speed = (
        f"speed: {dp.waiting:.0%} of a DP step is predicted to be messages; a CDP-v2 step takes"
        f" {middle:.2f} ({least:.2f} to {most:.2f}) of a DP step's time"
    )
    if most < 1 - WORTH:
        gains.append(
            f"{speed}. Other remedies for slow links, to be compared: runtime.compression=bf16,"
            " and an all-reduce that is a step late (runtime=delayed_allreduce)"
        )
    else:
        others.append(f"{speed}, and a gain counts if it is surely more than {WORTH:.0%}")
        if v1.predicted.ratio[2] < 1 - WORTH:
            others.append(
                f"CDP-v1 would take {v1.predicted.ratio[1]:.2f} of DP's time, with every weight a"
                " step late; its accuracy was not measured"
            )
    return gains, others


def _activations(found: Findings, dp: RuleFindings, v2: RuleFindings) -> str:
    share = 1 - v2.activations / dp.activations
    told = f"memory: all workers together keep {share:.0%} less activations with CDP-v2"
    if found.placement == "per_microbatch":
        return (
            f"{told}, but each has a device of its own, and on that device nothing is saved: it"
            " counts where they share a device (placement='one') or, on its later stages, a"
            " pipeline (placement='per_stage')"
        )
    if found.limited:
        return f"{told}; DP fits as well"
    return f"{told}; whether that is needed only Hardware(memory=...) can tell"


def _accuracy(trained: TrainingFindings | None, found: Findings) -> list[str]:
    if trained is None:
        return [f"accuracy: not measured, since {found.untrained}"]
    if not trained.learned:
        dp = trained.accuracy["DP"]
        return [
            f"accuracy: unknown. After {trained.n_steps} training steps DP names"
            f" {sum(dp) / len(dp):.1%} of the {trained.tested} and chance {trained.chance:.1%}: on"
            f" random {trained.tested}, or after too few steps, rules cannot differ"
        ]
    if trained.blind:
        return [f"accuracy: cannot tell. After {trained.n_steps} training steps {trained.blind}"]
    lowest = trained.difference.interval[0]
    if isnan(lowest):
        return [f"accuracy: CDP-v2 is {_points(trained)} from DP in one run, which proves nothing"]
    return [
        f"accuracy: CDP-v2 is {_points(trained)} from DP after {trained.n_steps} training steps;"
        f" a loss of up to {max(0.0, -lowest):.1f} points is not excluded"
    ]


def _instead(found: Findings) -> list[str]:
    if found.fits(found.of("DP")):
        return []
    return ["DP does not fit: checkpoint=all keeps next to no activations, at the price of time"]


def _advice(found: Findings, choice: str, reasons: list[str]) -> Advice:
    watch = back = tuple[str, ...]()
    if choice in (ADOPT, TRY):
        watch, back = _watch(found), _roll_back(found, choice)
    return Advice(choice, tuple(reasons), watch, back, _command(found, choice))


def _watch(found: Findings) -> tuple[str, ...]:
    cosine = ratio = "not measured here"
    trained = found.training
    if trained is not None and trained.learned:
        cosine, ratio = f"{trained.cosine:.2f} here", f"{trained.loss_ratio:.2f} here"
    return (
        f"the training loss by that of a DP run with the same seed ({ratio}): above 1.1 for"
        " longer than warm-up, compare again",
        f"the cosine of delayed and fresh gradients by stage ({cosine}), with diagnostics=20 in"
        f" one process and runtime.order=grouped: below {COSINE} the delay begins to tell",
        "ema_top1 beside top1, with ema=0.999: an average far better than the weights says"
        " that the learning rate is too high for stale weights",
    )


def _roll_back(found: Findings, choice: str) -> tuple[str, ...]:
    factor = _guard_factor(found.training)
    bound = f"if the loss is not finite, or {factor:g} times that of the first steps"
    guard = f"guard=rollback goes back to the last checkpoint and on with DP {bound}"
    if found.placement == "per_stage":
        guard = f"guard=stop ends the run {bound}: pipelines cannot go on as DP"
    if choice == TRY:
        return (
            "keep DP if the interval of CDP-v2's difference, in this comparison, reaches more than"
            f" {TOLERANCE:g} point below zero",
            f"a comparison has no guard; in a training by CDP-v2 after it, {guard}",
        )
    return (
        guard,
        "go back by hand (resume=FOLDER with schedule=dp) if test accuracy is below a DP run's"
        " by more than its spread over seeds for three epochs",
    )


def _guard_factor(trained: TrainingFindings | None) -> float:
    """Twice as high as a healthy loss has come, and at least 2; 10 where none was seen."""
    if trained is None or not trained.learned or not isfinite(trained.highest):
        return 10.0
    return max(2.0, round(2 * trained.highest, 1))


def _command(found: Findings, choice: str) -> str:
    """To train by the advice; or, where accuracy is to be found out first, to compare."""
    data = "data=MY_DATA"
    if found.samples == "sequences":
        data = f"data=text data.root=MY_TEXT data.length={found.shape[0]}"
        if found.n_classes != BYTES:
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
    if choice == TRY:
        rest = [quote("~rules.cdp_v1"), "seeds=5 diagnostics=20 ema=0.999"]
        if found.placement == "one":  # by its slots, beside what trains as DP in less memory
            rest = [rest[0], "schedule@rules.dp=gradient_accumulation rules.cdp_v2.placement=one"]
            rest += ["runtime.order=scheduled seeds=5 ema=0.999"]
        return " ".join(["python experiments/compare.py", *options, *rest])
    ranks = {"one": 1, "per_microbatch": found.n_workers, "per_stage": found.n_stages}
    n_ranks = ranks[found.placement]
    many = choice == ADOPT or found.placement == "per_microbatch"
    start = ["python experiments/train.py"]
    if n_ranks > 1 and many:
        start = [f"torchrun --nproc-per-node {n_ranks} experiments/train.py runtime=distributed"]
    rule = ["schedule=cdp_v2" if choice == ADOPT else "schedule=dp"]
    if choice == ADOPT:
        if found.placement != "per_microbatch":
            rule.append(f"schedule.placement={found.placement}")
        if n_ranks == 1:
            rule.append("runtime.order=scheduled")
        guard = "stop" if found.placement == "per_stage" else "rollback"
        rule.append(f"guard={guard} guard_factor={_guard_factor(found.training):g} ema=0.999")
    return " ".join([*start, *rule, *options])


def _points(trained: TrainingFindings) -> str:
    estimate = trained.difference
    width = "" if isnan(estimate.half_width) else f" ± {estimate.half_width:.1f}"
    return f"{estimate.mean:+z.1f}{width} points"


def _need(found: Findings, rule: RuleFindings) -> str:
    peak, memory = found.tightest(rule)
    return f"{size(peak)} of {size(memory)}"
