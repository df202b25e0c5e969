"""A run as W&B's client keeps it. Where that fails, tracking ends and training goes on."""

import io
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.results.tracker import Tracker, one_line
from toolkit.results.wandb_journal import Journal
from toolkit.results.wandb_offline import complete

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 10_000  # of a table, as many as W&B's pages show
_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "init_timeout": 20.0,  # seconds
    "login_timeout": 1.0,
    "finish_timeout": 300.0,  # to send what is left; it stays on disk
    "finish_timeout_raises": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,  # the command line, which may hold secrets; provenance has its own
    "reinit": "create_new",
}


class WandbRun(Tracker):
    """One run, online or offline.

    Args:
        folder: of the job; W&B's files go to ``folder/wandb``.
        journal: of the run.
        online: whether it is sent as it goes.
        group: of the run.
        options: more of ``wandb.init``.

    Raises:
        Exception: whatever W&B raises as the run begins. Nothing is left of the attempt.
    """

    on = True

    def __init__(
        self, folder: Path, journal: Journal, *, online: bool, group: str | None, **options: Any
    ) -> None:
        super().__init__()
        self._home = folder / "wandb"
        self._journal, self._online, self._group = journal, online, group
        self._replays = journal.found
        self.epochs = {point["epoch"] for point in journal.points if "epoch" in point}
        self._sent = -1  # the training step that W&B's server has come to
        self._state: tuple[str, int] | None = None
        self._lost = False
        self._surroundings = _Surroundings(self._home)
        if journal.alone:
            _let_go_of_killed(self._home, journal.id)
        resume = "allow" if online and journal.mode == "online" else None
        if not self._replays:  # before anything is left that only the journal knows
            self._try(lambda: journal.begin(self._mode, group))
        try:
            self._run = _begun(
                *(self._surroundings, self._home, online),
                **{"id": journal.id, "resume": resume, "group": group, **options},
            )
        except BaseException:
            journal.close()
            raise
        self._try(self._settle)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        if "epoch" in values:
            self.epochs.add(values["epoch"])
        self._try(lambda: self._log({"step": step, **values}))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._try(lambda: self._run.log({name: _table(rows)}))

    def figure(self, name: str, figure: "Figure") -> None:
        self._try(lambda: self._run.log({name: _image(figure)}))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._try(lambda: self._run.summary.update(dict(values)))

    def files(self, name: str, paths: Sequence[Path]) -> None:
        self._try(lambda: self._keep(name, paths))

    def end(self, state: str, status: int) -> None:
        if self._state is None:
            self._state = (state, status)

    def close(self) -> None:
        state, status = self._state or ("finished", 0)
        self._try(self._replay)
        self._try(lambda: self._run.summary.update({"state": state}))
        place = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=status)
        except Exception as error:
            self._lose(f"{one_line(error)}; what there is: wandb sync {shlex.quote(str(place))}")
            if not isinstance(error, TimeoutError):
                _let_go_of_service()
        else:
            if not self._online and not complete(place):
                self._lose(f"{place} could not be written to its end")
        self._journal.close()
        self._surroundings.restore()
        if not self._lost:
            self.where = (
                f"tracked online: {self._run.url}"
                if self._online
                else f"tracked offline: wandb sync {shlex.quote(str(place))}"
            )

    def _settle(self) -> None:
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._replays and self._online and self._run.resumed:
            self._sent = int(self._run.summary.get("step", -1))

    @property
    def _mode(self) -> str:
        return "online" if self._online else "offline"

    def _log(self, point: dict[str, Any]) -> None:
        self._replay(before=point["step"])
        self._journal.add(point)
        self._send(point)

    def _send(self, point: Mapping[str, Any]) -> None:
        if point["step"] >= self._sent:
            self._sent = -1
            self._run.log(dict(point))

    def _replay(self, before: int | None = None) -> None:
        """Log what came before the resumed step, and let go of the offline files of then."""
        if not self._replays:
            return
        self._replays = False
        self._journal.begin(self._mode, self._group, before)
        for point in self._journal.points:
            self._send(point)
        mine = Path(self._run.dir).parent
        for old in self._home.glob(f"offline-run-*-{self._journal.id}"):
            if old != mine:
                shutil.rmtree(old, ignore_errors=True)

    def _keep(self, name: str, paths: Sequence[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(f"{name}-{self._journal.id}", type="model")
        for path in paths:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def _try(self, do: Callable[[], object]) -> None:
        """Do it, unless something went wrong before."""
        if self._lost:
            return
        try:
            do()
        except Exception as error:
            self._lose(one_line(error))

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self.note(f"not tracked to the end: W&B has failed ({why})")


def _let_go_of_killed(home: Path, id_: str) -> None:
    """Remove offline files of runs that were killed before anything could go on with them."""
    for old in home.glob("offline-run-*"):
        if not old.name.endswith(id_) and not complete(old, within=0.0):
            shutil.rmtree(old, ignore_errors=True)


def _let_go_of_service() -> None:
    """Have runs that begin later start W&B's own process again, as this one has lost it."""
    import wandb

    with suppress(Exception):
        wandb.teardown()


class _Surroundings:
    """W&B's files below ``home`` in place of the user's, and neither words nor questions."""

    def __init__(self, home: Path) -> None:
        self._cache, self._data = home / "cache", home / "data"
        wanted = {
            "WANDB_SILENT": "true",
            "WANDB_CACHE_DIR": str(self._cache),
            "WANDB_DATA_DIR": str(self._data),  # of artifacts and tables until they are synced
        }
        self._before = {name: os.environ.get(name) for name in wanted}
        os.environ.update({k: v for k, v in wanted.items() if self._before[k] is None})
        self._raised, logging.raiseExceptions = logging.raiseExceptions, False  # as on a full disk

    def restore(self) -> None:
        logging.raiseExceptions = self._raised
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
        shutil.rmtree(self._cache, ignore_errors=True)
        if not any(path.is_file() for path in self._data.rglob("*")):
            shutil.rmtree(self._data, ignore_errors=True)


def needs_key(error: BaseException) -> bool:
    """Whether W&B refused since it knows no key to log in with."""
    return "wandb login" in str(error)


def _begun(surroundings: _Surroundings, home: Path, online: bool, **options: Any) -> Any:
    before: set[Path] = set()
    try:
        import wandb

        home.mkdir(parents=True, exist_ok=True)
        if not os.access(home, os.W_OK):  # W&B would go elsewhere
            raise PermissionError(f"{home} cannot be written to")
        before = {*home.glob("*run-*")}
        while [*home.glob(f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-{options['id']}")]:
            time.sleep(0.05)  # its folder bears the second
        known = wandb.Settings.model_fields
        return wandb.init(
            dir=str(home.parent),
            mode="online" if online else "offline",
            settings=wandb.Settings(**{k: v for k, v in _SETTINGS.items() if k in known}),
            **options,
        )
    except BaseException:
        with suppress(Exception):
            wandb.teardown()  # else the id stays taken
        for path in {*home.glob("*run-*")} - before:
            shutil.rmtree(path, ignore_errors=True)
        surroundings.restore()
        raise


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
