"""A stand-in for W&B's client that keeps what it is given."""

import time
from pathlib import Path

import wandb


class FakeRun:
    """One run, with the options of ``wandb.init`` as attributes."""

    def __init__(self, *, id, dir, mode, resume, settings, **options):
        vars(self).update(options)
        self.id, self.mode, self.resume = id, mode, resume
        self.dir = str(
            Path(dir) / "wandb" / f"offline-run-20260101_000000-{id}" / "files"
        )
        self.url = f"https://wandb.test/{id}" if mode == "online" else None
        self.history, self.summary, self.media, self.artifacts = [], {}, {}, []
        self.exit_code, self.defined = None, {}

    def define_metric(self, name, **options):
        self.defined[name] = options

    def log(self, values):
        if "step" in values:
            self.history.append(values)
        else:
            self.media |= values

    def log_artifact(self, artifact):
        self.artifacts += artifact.manifest.entries

    def finish(self, exit_code):
        self.exit_code = exit_code

    def points(self, name):
        """The values of one metric, by step."""
        return {row["step"]: row[name] for row in self.history if name in row}


def replace_wandb(monkeypatch):
    """Replace ``wandb.init``; return the list of runs that it will have begun."""
    runs = []

    def init(**options):
        runs.append(FakeRun(**options))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    return runs


def wait_for_offline_run(folder, *names):
    """Wait until W&B's own process has written ``names`` to the one offline run in ``folder``."""
    end = time.monotonic() + 10
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    # It compresses nothing.
    while not all(name.encode() in path.read_bytes() for name in names):
        assert time.monotonic() < end, f"{path} lacks one of {names}"
        time.sleep(0.02)
