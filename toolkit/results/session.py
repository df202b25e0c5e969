"""An experiment's run in W&B: how it begins and ends. What goes wrong there is only noted.

    with track(config, folder, ...) as tracker:
        tracker.log({"train/loss": 0.5}, step=10)

Results are written by the experiments themselves; nothing depends on W&B.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from toolkit.errors import UserError
from toolkit.options import AROUND, without
from toolkit.results.provenance import provenance
from toolkit.results.tracker import Tracker, one_line
from toolkit.results.wandb_journal import JOURNAL, Journal
from toolkit.results.wandb_run import WandbRun, needs_key

MODES = ("offline", "online", "disabled")
_INTERRUPTED = 130

_refused: list[str] = []  # why this process sends nothing any more


@contextmanager
def track(
    config: DictConfig,
    folder: Path,
    *,
    device: str,
    name: str,
    job_type: str = "train",
    group: str | None = None,
    resume: bool = False,
    alone: bool = True,
    own: Path | None = None,
    here: bool = True,
) -> Iterator[Tracker]:
    """A run that is tracked as ``config.tracking`` asks for, and finished however it ends.

    Args:
        config: the run's own configuration.
        folder: of its results; what W&B keeps goes to ``folder/wandb``.
        device: what it runs on, in words.
        name: of the run, unless the configuration gives one.
        job_type: the experiment.
        group: of the run, unless the configuration gives one.
        resume: whether to continue the run tracked before in ``folder``, or in ``own``, if any.
        alone: whether ``folder`` is of this run only; then the journal is kept in ``folder``.
        own: if ``folder`` is shared by several runs, a folder of this run alone; the journal by
            which it is resumed is kept there.
        here: whether this process is the one that tracks.

    Raises:
        ValueError: options that cannot be.
    """
    options = config.tracking
    check_tracking(options)
    if not here or options.mode == "disabled":
        yield Tracker()
        return
    home = folder if alone else own
    journal = Journal(home / JOURNAL if home else None, alone=alone, resume=resume)
    source = provenance(config, device, 0)
    content = without(source.pop("config"), AROUND)
    tracker = _begin(
        folder,
        journal,
        mode=options.mode,
        project=options.project,
        entity=options.entity,
        group=options.group or journal.group or group,
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
        if alone and tracker.where:
            print(tracker.where)


def check_tracking(options: DictConfig) -> None:
    """Refuse ``config.tracking`` if it cannot be.

    Raises:
        ValueError: an unknown mode, or no number of steps.
    """
    if options.mode not in MODES:
        raise UserError(f"tracking.mode is one of {', '.join(MODES)}: got {options.mode!r}")
    if options.every < 1:
        raise UserError(f"tracking.every is 1 or more training steps: got {options.every}")


def _begin(folder: Path, journal: Journal, *, mode: str, **options: Any) -> Tracker:
    """A run, online or offline as far as W&B allows; else none."""
    tracker = Tracker()
    try:
        if mode == "online" and not _refused:
            try:
                return WandbRun(folder, journal, online=True, **options)
            except ImportError:
                raise
            except Exception as error:
                _refused.append(
                    "W&B has no key: log in with `wandb login`"
                    if needs_key(error)
                    else f"W&B cannot be reached ({one_line(error)})"
                )
        tracker = WandbRun(folder, journal, online=False, **options)
        if mode == "online":
            tracker.note(f"{_refused[0]}; the run is kept offline")
    except ImportError:
        tracker.note("not tracked: there is no wandb: pip install wandb, or tracking.mode=disabled")
    except Exception as error:
        tracker.note(f"not tracked: W&B has failed ({one_line(error)})")
    return tracker
