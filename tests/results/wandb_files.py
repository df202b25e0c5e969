"""What an offline run of W&B holds, read back from its files."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.results.wandb_offline import complete, records


@dataclass
class Found:
    """One offline run."""

    folder: Path
    id: str = ""
    group: str = ""
    job_type: str = ""
    project: str = ""
    name: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, list[str]] = field(default_factory=dict)  # files by type
    exit_code: int | None = None

    def points(self, name):
        """The values of one metric, by step."""
        return {row["step"]: row[name] for row in self.history if name in row}


def found(folder: Path) -> list[Found]:
    """The offline runs below ``folder``, the oldest first."""
    return [_read(path) for path in sorted(folder.glob("**/offline-run-*/run-*.wandb"))]


def _read(path: Path) -> Found:
    found = Found(path.parent)
    assert complete(path.parent)
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found.id, found.group, found.job_type = run.run_id, run.run_group, run.job_type
            found.project, found.name, found.tags = run.project, run.display_name, [*run.tags]
            found.config |= _items(run.config.update)
        elif kind == "config":
            found.config |= _items(record.config.update)
        elif kind == "history":
            found.history.append(_items(record.history.item))
        elif kind == "summary":
            found.summary |= _items(record.summary.update)
        elif kind == "artifact":
            files = [entry.path for entry in record.artifact.manifest.contents]
            found.artifacts.setdefault(record.artifact.type, []).extend(files)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _items(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
