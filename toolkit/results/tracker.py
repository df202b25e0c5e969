"""What a run logs to W&B. The first failure there is reported once, and training continues."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from toolkit.errors import first_line
from toolkit.results.record import per_cent

if TYPE_CHECKING:
    from toolkit.training import Epoch, Step

STEP = "step"
"""Name of the axis of training steps in W&B."""

# As shells report it: 128 and the number of SIGINT.
_INTERRUPTED = 130  # exit status
_MOST_ROWS = 10_000  # of a table; W&B's pages show no more
_reported: set[str] = set()  # notes that this process has printed


class Tracker:
    """Logs to a run of W&B, until it fails for the first time; without a run, logs nothing.

    The run ends with the context, as finished, interrupted or failed.

    Args:
        run: as ``wandb.init`` returns it.
        every: training steps from one logged step to the next.
    """

    def __init__(self, run: Any = None, every: int = 1) -> None:
        self.on = run is not None  # whether anything is done with what is logged
        self.notes: list[str] = []  # what went wrong
        self.where = ""  # how to find the run, once it has ended
        self._run = run
        self._every = every
        self._steps_done = 0
        self._end: tuple[str, int] | None = None  # state and exit status

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.end("interrupted", _INTERRUPTED)
        elif error is not None:
            self.end(f"failed: {first_line(error)}", 1)
        self.close()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at a training step; or figures as images, and lists of rows as tables.

        Args:
            values: values by name.
            step: training steps that the run has done; None for values of the whole run.
        """

        def log(run: Any) -> None:
            logged = {name: _logged(value) for name, value in values.items()}
            if step is not None:
                logged[STEP] = step
            run.log(logged)

        # Values are made within, too: a figure that cannot be drawn must not end the run.
        self._try(log)

    def step(self, step: "Step") -> None:
        """Log a training step."""
        if not self.on:
            return
        self._steps_done = step.result.step + 1
        values: dict[str, Any] = {}
        if self._steps_done % self._every == 0:  # reading the loss waits for the device
            values["train/lr"] = step.learning_rate
            if len(step.result.losses):
                values["train/loss"] = float(step.result.loss)
        for delay in step.result.delays:
            for name, value in asdict(delay).items():
                # A measure that this step does not have is NaN.
                if name not in ("step", "stage") and isfinite(value):
                    values[f"delay/{name}_stage_{delay.stage}"] = value
        if values:
            self.log(values, self._steps_done)

    def epoch(self, epoch: "Epoch") -> None:
        """Log an epoch's metrics."""
        # "epoch" is the axis of these curves, and so has no prefix.
        metrics = tracked_metrics(epoch)
        values: dict[str, Any] = {"epoch": metrics.pop("epoch")}
        for name, value in metrics.items():
            values[f"epoch/{name}"] = value
        self.log(values, self._steps_done)

    def last_epoch(self, epoch: "Epoch") -> None:
        """Set the metrics of the last epoch in the summary."""
        self.summary(
            {f"final/{name}": value for name, value in tracked_metrics(epoch).items()}
        )

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set results of the whole run."""
        self._try(lambda run: run.summary.update(dict(values)))

    def config(self, values: Mapping[str, Any]) -> None:
        """Add to the run's options."""
        self._try(lambda run: run.config.update(dict(values)))

    def files(self, name: str, paths: Sequence[Path]) -> None:
        """Upload files as an artifact."""

        def upload(run: Any) -> None:
            import wandb

            # The run's id keeps artifacts of different runs apart, which share a project.
            artifact = wandb.Artifact(f"{name}-{run.id}", type="model")
            for path in paths:
                artifact.add_file(str(path))
            run.log_artifact(artifact)

        self._try(upload)

    def end(self, state: str, status: int) -> None:
        """Set how the run has ended; the first call counts.

        Args:
            state: the end in words, such as finished or ``failed: ...``.
            status: exit status of the run in W&B.
        """
        # The first reason is the cause: the context's own comes later.
        self._end = self._end or (state, status)

    def close(self) -> None:
        """Finish the run, and set :attr:`where` to its URL or its ``wandb sync`` command."""
        if self._run is None:
            return
        # Set before finish(), after which the summary cannot be changed.
        state, status = self._end or ("finished", 0)
        self.summary({"state": state})
        run_folder = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=status)
        except Exception as error:
            sync_hint = f"to send the rest: wandb sync {shlex.quote(str(run_folder))}"
            self._fail(f"{first_line(error)}; {sync_hint}")
        if self.on and self._run.url:
            self.where = f"tracked online: {self._run.url}"
        elif self.on:
            # A resumed run has several folders, which `wandb sync` joins by their id.
            folders = (
                f"{shlex.quote(str(run_folder.parent))}/offline-run-*-{self._run.id}*"
            )
            self.where = f"tracked offline: wandb sync {folders}"

    def note(self, text: str) -> None:
        """Keep a note on what went wrong, and print it once in a process."""
        # Every run keeps the note for its result, but a comparison prints it once.
        self.notes.append(text)
        if text not in _reported:
            _reported.add(text)
            tqdm.write(f"warning: {text}", file=sys.stderr)

    def _try(self, call: Callable[[Any], object]) -> None:
        """Call with the run; W&B's first error is noted, and nothing is tried after it."""
        if self.on:
            try:
                call(self._run)
            except Exception as error:
                self._fail(first_line(error))

    def _fail(self, reason: str) -> None:
        if self.on:
            self.on = False
            self.note(f"not tracked to the end: W&B has failed ({reason})")


def tracked_metrics(epoch: "Epoch") -> dict[str, float]:
    """Return an epoch's metrics as people read them: epochs from 1, accuracies in per cent."""
    metrics = {
        name: value for name, value in asdict(epoch).items() if value is not None
    }
    return per_cent(metrics) | {"epoch": epoch.epoch + 1}


def _logged(value: Any) -> Any:
    """Return a value as W&B logs it: a list of rows as a table, a figure as an image."""
    import wandb

    if isinstance(value, list):
        data = [[*row.values()] for row in value[:_MOST_ROWS]]
        return wandb.Table(columns=[*value[0]] if value else [], data=data)
    if hasattr(value, "savefig"):
        from PIL import Image

        content = BytesIO()
        value.savefig(content, format="png", dpi=150, bbox_inches="tight")
        return wandb.Image(Image.open(content))
    return value


def where_tracked(places: Sequence[str], folder: Path) -> str:
    """Return how to find several runs of a folder in W&B, from where each is tracked."""
    if places[0].startswith("tracked online"):
        return f"{places[0]} and {len(places) - 1} more of its group"
    return f"tracked offline: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
