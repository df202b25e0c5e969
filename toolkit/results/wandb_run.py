"""Runs in W&B. A failure there is reported once, and training continues.

    with track(config, folder, ...) as tracker:
        tracker.log({"train/loss": 0.5}, step=10)

Experiments write their own results; nothing depends on W&B.
"""

import io
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from toolkit.files import write_json
from toolkit.options import AROUND, TrackingOptions, without
from toolkit.results.provenance import provenance
from toolkit.results.training_log import STEP, Tracker, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WANDB_RUN = "wandb_run.json"
"""File in a run's folder with its id and group in W&B, which a resumed run keeps."""

_INTERRUPTED = 130  # exit status
_MOST_ROWS = 10_000  # of a table; W&B's pages show no more
_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "init_timeout": 20.0,  # seconds
    "login_timeout": 1.0,
    "finish_timeout": 300.0,  # to send what is left, which stays on disk
    "finish_timeout_raises": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,  # it has the command line, which may hold secrets
    "reinit": "create_new",
}
_why_offline: list[str] = []  # why this process has stopped sending; later runs do not try again


@contextmanager
def track(
    config: Mapping[str, Any],
    folder: Path,
    *,
    device: str,
    name: str,
    job_type: str = "train",
    group: str | None = None,
    resume: bool = False,
    own: Path | None = None,
    here: bool = True,
) -> Iterator[Tracker]:
    """Track a run as its options say, and finish it however it ends.

    Args:
        config: the run's options; their ``tracking`` are those of TrackingOptions.
        folder: folder of its results; W&B's files go to ``folder/wandb``.
        device: the device in words.
        name: name of the run, unless the configuration has one.
        job_type: the experiment.
        group: group of the run, unless the configuration has one.
        resume: continue the run that was tracked before in this folder, if there is one.
        own: the run's own folder, if several runs share ``folder``.
        here: whether this process tracks.

    Raises:
        ValueError: invalid tracking options.
    """
    options = TrackingOptions(**config["tracking"])
    if not here or options.mode == "disabled":
        yield Tracker()
        return
    source = provenance(config, device, 0)
    content = without(source.pop("config"), AROUND)
    identity = (own or folder) / WANDB_RUN
    known = read_identity(identity) if resume else {}
    home = folder / "wandb"
    places = {"WANDB_CACHE_DIR": str(home / "cache"), "WANDB_DATA_DIR": str(home / "data")}
    with environment(WANDB_SILENT="true", **places):
        tracker = _begin(
            identity,
            options.mode,
            dir=str(folder),
            id=known.get("id") or uuid4().hex[:8],
            resume="allow",
            project=options.project,
            entity=options.entity,
            group=options.group or known.get("group") or group,
            name=options.name or name,
            tags=list(options.tags),
            job_type=job_type,
            config=content | {"provenance": source},
        )
        try:
            yield tracker
        except KeyboardInterrupt:
            tracker.end("interrupted", _INTERRUPTED)
            raise
        except BaseException as error:
            tracker.end(f"failed: {one_line(error)}", 1)
            raise
        finally:
            tracker.close()
            shutil.rmtree(home / "cache", ignore_errors=True)


def read_identity(path: Path) -> dict[str, str | None]:
    """Return a run's id and group in W&B; empty if the file is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_text())
        group = content["group"]
        return {"id": str(content["id"]), "group": str(group) if group else None}
    return {}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables that are unset, and unset them at the end."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _begin(identity: Path, mode: str, **options: Any) -> Tracker:
    """Begin a run, online or offline as far as W&B allows; otherwise track nothing."""
    tracker = Tracker()
    try:
        import wandb

        (Path(options["dir"]) / "wandb").mkdir(parents=True, exist_ok=True)
        write_json(identity, {"id": options["id"], "group": options["group"]})
        supported = wandb.Settings.model_fields
        settings = wandb.Settings(**{k: v for k, v in _SETTINGS.items() if k in supported})
        if mode == "online" and not _why_offline:
            try:
                return WandbRun(wandb.init(mode="online", settings=settings, **options), True)
            except Exception as error:
                no_key = "wandb login" in str(error)
                _why_offline.append(
                    "W&B has no key: log in with `wandb login`"
                    if no_key
                    else f"W&B cannot be reached ({one_line(error)})"
                )
                _restart_service()  # else the id stays taken
        tracker = WandbRun(wandb.init(mode="offline", settings=settings, **options), False)
        if mode == "online":
            tracker.note(f"{_why_offline[0]}; the run is kept offline")
    except ImportError:
        tracker.note("not tracked: there is no wandb: pip install wandb, or tracking.mode=disabled")
    except Exception as error:
        tracker.note(f"not tracked: W&B has failed ({one_line(error)})")
        _restart_service()
    return tracker


class WandbRun(Tracker):
    """A run of W&B's client; after its first failure nothing more is logged.

    Args:
        run: as ``wandb.init`` returns it.
        online: whether it is sent at once.
    """

    on = True

    def __init__(self, run: Any, online: bool) -> None:
        super().__init__()
        self._run, self._online = run, online
        self._state: tuple[str, int] | None = None
        self._failed = False
        self._try(lambda: run.define_metric(STEP, hidden=True))
        self._try(lambda: run.define_metric("*", step_metric=STEP))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send numbers at a training step of the run."""
        self._try(lambda: self._run.log({STEP: step, **values}))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send rows as a W&B table; the first 10,000 at most."""
        self._try(lambda: self._run.log({name: _table(rows)}))

    def figure(self, name: str, figure: "Figure") -> None:
        """Send a figure as an image."""
        self._try(lambda: self._run.log({name: _image(figure)}))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set the run's summary."""
        self._try(lambda: self._run.summary.update(dict(values)))

    def files(self, name: str, paths: Sequence[Path]) -> None:
        """Upload files as an artifact."""
        self._try(lambda: self._upload(name, paths))

    def end(self, state: str, status: int) -> None:
        """Set the final state and the exit status; the first call counts."""
        if self._state is None:
            self._state = state, status

    def close(self) -> None:
        """Finish the run, and set :attr:`where` to its URL or its ``wandb sync`` command."""
        state, status = self._state or ("finished", 0)
        self.summary({"state": state})
        place = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=status)
        except Exception as error:
            self._fail(f"{one_line(error)}; to send the rest: wandb sync {shlex.quote(str(place))}")
            if not isinstance(error, TimeoutError):
                _restart_service()
        if self._failed:
            return
        # A resumed run has several folders, which `wandb sync` joins by their id.
        folders = f"{shlex.quote(str(place.parent))}/offline-run-*-{self._run.id}*"
        self.where = (
            f"tracked online: {self._run.url}"
            if self._online
            else f"tracked offline: wandb sync {folders}"
        )

    def _upload(self, name: str, paths: Sequence[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(f"{name}-{self._run.id}", type="model")
        for path in paths:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def _try(self, do: Callable[[], object]) -> None:
        if not self._failed:
            try:
                do()
            except Exception as error:
                self._fail(one_line(error))

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self.note(f"not tracked to the end: W&B has failed ({why})")


def _restart_service() -> None:
    """Let W&B start its own process again with the next run, since this one is lost."""
    with suppress(Exception):
        import wandb

        wandb.teardown()


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    columns: list[str | int] = [*rows[0]] if rows else []
    return wandb.Table(columns=columns, data=[[*row.values()] for row in rows[:_MOST_ROWS]])


def _image(figure: "Figure") -> Any:
    import wandb
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, bbox_inches="tight")
    return wandb.Image(Image.open(drawn))
