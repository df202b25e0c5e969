"""Runs in W&B. A failure there is reported once, and training continues.

    with track(config, folder, ...) as tracker:
        tracker.log({"train/loss": 0.5}, step=10)

Experiments write their own results; nothing depends on W&B.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tqdm.auto import tqdm

from toolkit.files import write_json
from toolkit.options import AROUND, TrackingOptions, without
from toolkit.results.provenance import one_line, provenance
from toolkit.results.record import DamagedError, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP = "step"
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
_reported: set[str] = set()  # notes that this process has printed


def _until_failure(call: Callable[..., None]) -> Callable[..., None]:
    """Make a tracker's method note the first error of W&B, and do nothing from then on."""

    @wraps(call)
    def tried(self: "Tracker", *arguments: Any) -> None:
        try:
            if self.on:
                call(self, *arguments)
        except Exception as error:
            self._fail(one_line(error))

    return tried


class Tracker:
    """Logs to a run of W&B, until it fails for the first time; without a run, logs nothing.

    Args:
        run: as ``wandb.init`` returns it.
        online: whether it is sent at once.

    Attributes:
        on: whether anything is done with what is logged.
        notes: sentences on what went wrong.
        where: how to find the run, once it has ended.
    """

    def __init__(self, run: Any = None, online: bool = False) -> None:
        self.on = run is not None
        self.notes: list[str] = []
        self.where = ""
        self._run, self._online = run, online
        self._state: tuple[str, int] | None = None

    @_until_failure
    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers at a training step of the run."""
        self._run.log({STEP: step, **values})

    @_until_failure
    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows, all with the same columns, as a table; the first 10,000 at most."""
        import wandb

        columns: list[str | int] = [*rows[0]] if rows else []
        data = [[*row.values()] for row in rows[:_MOST_ROWS]]
        self._run.log({name: wandb.Table(columns=columns, data=data)})

    @_until_failure
    def figure(self, name: str, figure: "Figure") -> None:
        """Log a figure as an image."""
        import wandb
        from PIL import Image

        drawn = BytesIO()
        figure.savefig(drawn, format="png", dpi=150, bbox_inches="tight")
        self._run.log({name: wandb.Image(Image.open(drawn))})

    @_until_failure
    def summary(self, values: Mapping[str, Any]) -> None:
        """Set results of the whole run."""
        self._run.summary.update(dict(values))

    @_until_failure
    def files(self, name: str, paths: Sequence[Path]) -> None:
        """Upload files as an artifact."""
        import wandb

        artifact = wandb.Artifact(f"{name}-{self._run.id}", type="model")
        for path in paths:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def end(self, state: str, status: int) -> None:
        """Set how the run has ended, and its exit status; the first call counts."""
        self._state = self._state or (state, status)

    def close(self) -> None:
        """Finish the run, and set :attr:`where` to its URL or its ``wandb sync`` command."""
        if self._run is None:
            return
        state, status = self._state or ("finished", 0)
        self.summary({"state": state})
        place = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=status)
        except Exception as error:
            self._fail(f"{one_line(error)}; to send the rest: wandb sync {shlex.quote(str(place))}")
            if not isinstance(error, TimeoutError):
                _restart_service()
        if self.on and self._online:
            self.where = f"tracked online: {self._run.url}"
        elif self.on:  # a resumed run has several folders, which `wandb sync` joins by their id
            folders = f"{shlex.quote(str(place.parent))}/offline-run-*-{self._run.id}*"
            self.where = f"tracked offline: wandb sync {folders}"

    def note(self, text: str) -> None:
        """Keep a note on what went wrong, and print it once in a process."""
        self.notes.append(text)
        if text not in _reported:
            _reported.add(text)
            tqdm.write(f"warning: {text}", file=sys.stderr)

    def _fail(self, why: str) -> None:
        if self.on:
            self.on = False
            self.note(f"not tracked to the end: W&B has failed ({why})")


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
        name: name of the run, unless the options have one.
        job_type: the experiment.
        group: group of the run, unless the options have one.
        resume: continue the run that was tracked before in this folder, if there is one.
        own: the run's own folder, if several runs share ``folder``.
        here: whether this process tracks.

    Raises:
        UserError: invalid tracking options.
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


def group_of(folder: Path) -> str:
    """Return the W&B group of a comparison's runs; in a sweep it starts with the sweep's name."""
    folder = folder.resolve()
    swept = (folder.parent / "sweep.json").exists()
    return "/".join(folder.parts[-2:] if swept else folder.parts[-1:])


def read_identity(path: Path) -> dict[str, Any]:
    """Return a run's id and group in W&B; empty if the file is missing or damaged."""
    with suppress(DamagedError):
        return read_json(path)
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
        known = wandb.Settings.model_fields  # of the installed version
        options["settings"] = wandb.Settings(**{k: v for k, v in _SETTINGS.items() if k in known})
        run = None
        if mode == "online" and not _why_offline:
            try:
                run = wandb.init(mode="online", **options)
            except Exception as error:
                _why_offline.append(
                    f"W&B cannot be reached ({one_line(error)}): log in with `wandb login`, or"
                    " check the network; the run is kept offline"
                )
                _restart_service()  # else the id stays taken
        online, run = run is not None, run or wandb.init(mode="offline", **options)
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)
        tracker = Tracker(run, online)
        if mode == "online" and not online:
            tracker.note(_why_offline[0])
    except ImportError:
        tracker.note("not tracked: there is no wandb: pip install wandb, or tracking.mode=disabled")
    except Exception as error:
        tracker.note(f"not tracked: W&B has failed ({one_line(error)})")
        _restart_service()
    return tracker


def _restart_service() -> None:
    """Let W&B start its own process again with the next run, since this one is lost."""
    with suppress(Exception):
        import wandb

        wandb.teardown()
