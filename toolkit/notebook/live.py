"""Live progress in a notebook's cell."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from toolkit.errors import UserError, first_line
from toolkit.runtime import JobFailedError, RankError, launch

if TYPE_CHECKING:
    from toolkit.cost import Timeline
    from toolkit.runtime.meters.measurements import Measurements

_FORMAT = "{desc} {percentage:3.0f}% {bar} {elapsed}{postfix}"


class Live:
    """Progress bars that a cell shows while it runs; without a terminal or a notebook, nothing.

    A user's mistake or a failed rank within ends the cell with one sentence instead of a traceback.

    Args:
        title: name of the bars.
        total: number of messages that each rank reports, unless it reports steps.

    Attributes:
        bars: one for each rank, or one in all.
    """

    def __init__(self, title: str, total: int = 1) -> None:
        self.bars: list[tqdm] = []
        self._title = title
        self._total = total

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for bar in self.bars:
            bar.close()
        if isinstance(error, RankError | JobFailedError | UserError):
            message = f"{type(error).__name__}: {first_line(error)}"
            # IPython shows what this method of an exception returns, in place of a traceback.
            error._render_traceback_ = lambda: [message]  # type: ignore[union-attr]

    def say(self, activity: str, share: float) -> None:
        """Show an activity and its completed share, from 0 to 1."""
        if not self.bars:
            self._add(self._title, total=1.0)
        # One bar in all: ranks report by `report`, a process without ranks by `say`.
        (bar,) = self.bars
        bar.set_postfix_str(activity, refresh=False)
        bar.n = share  # not by update, since the next activity starts at 0 again
        bar.refresh()

    def report(self, rank: int, value: Any) -> None:
        """Show what a rank reports.

        Args:
            rank: its number.
            value: one of ``total`` messages; or a mapping with ``step``, ``n_steps`` and metrics.
        """
        while len(self.bars) <= rank:  # bars stand in the order of ranks
            self._add(f"{self._title}, rank {len(self.bars)}", total=self._total)
        bar = self.bars[rank]
        if isinstance(value, Mapping):
            metrics = dict(value)
            step = metrics.pop("step")
            bar.total = metrics.pop("n_steps")
            bar.set_postfix(metrics, refresh=False)
            # update() takes an increment, and a report has the step.
            bar.update(step - bar.n)
        else:
            bar.set_postfix_str(str(value), refresh=False)
            bar.update()

    def _add(self, title: str, total: float) -> None:
        # disable=None: silent where the output is neither a terminal nor a notebook.
        self.bars.append(
            tqdm(desc=title, total=total, bar_format=_FORMAT, disable=None)
        )


def watched(
    function: Callable[..., Any],
    n_ranks: int,
    *args: Any,
    title: str = "",
    total: int = 1,
    **options: Any,
) -> list[Any]:
    """Call :func:`toolkit.runtime.launch` and show what the ranks report, live in the cell.

    Args:
        function: what each rank calls.
        n_ranks: number of processes.
        args: arguments of ``function``.
        title: name of the bars.
        total: number of messages that a rank reports.
        options: options of ``launch``.

    Returns:
        what ``function`` returned, by rank.
    """
    with Live(title or f"{n_ranks} processes", total) as live:
        return launch(function, n_ranks, *args, on_report=live.report, **options)


def train_on_ranks(config: Any) -> "Measurements | None":
    """Train on this rank and report every step; return what all ranks have measured, if anything.

    Args:
        config: options, as ``settings("train", ...)`` gives them.
    """
    from toolkit.cli import build_run
    from toolkit.runtime import report
    from toolkit.training import Step

    # Only the training: a notebook needs neither checkpoints nor a folder of results.
    run = build_run(config)

    def report_step(step: Step) -> None:
        message: dict[str, float] = {
            "step": step.result.step + 1,
            "n_steps": step.n_steps * run.options.epochs,
        }
        # In a pipeline only the rank of the last stage has losses.
        if len(step.result.losses):
            message["loss"] = float(step.result.loss)
        message["lr"] = step.learning_rate
        report(message)

    run.run(on_step=report_step)
    return run.measurements()


def beside_prediction(
    measurements: "Measurements", config: Any
) -> tuple["Timeline", "Timeline"]:
    """Return the measured timeline, and the simulated one of ops and messages that take as long.

    Args:
        measurements: measured with the options ``config``.
        config: options, from which the stages are built again, without ranks.
    """
    from toolkit.cli import build_model, load_samples
    from toolkit.cli.check_options import check_training
    from toolkit.training import run_prediction

    # Built again in this process: the ranks have ended, and their stages with them.
    form = load_samples(config.data).form
    model = build_model(config.model, form)
    _, costs = run_prediction.stages_and_costs(
        model,
        measurements.schedule,
        form,
        check_training(config),
        width=config.runtime.get("width", 1),
    )
    return run_prediction.beside_prediction(measurements, costs)
