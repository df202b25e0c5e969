"""Folders of runs that attack who reads or resumes them, and runs that are killed."""

import csv
import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from benchmarks import fuzz
from benchmarks.forked import MOST_SECONDS, TINY, command, judged
from toolkit.files import write_text
from toolkit.training.checkpoint import _MAGIC

Attack = tuple[Any, Callable[[Any], str]]
_GIVEN = f"{TINY} tracking.mode=disabled device=cpu"
_MOST_BYTES = 5_000_000  # of a report


class _Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, outside: Path) -> None:
        self.command = f"touch {outside}/unpickled"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def _options(*options: str) -> Callable[[Path, Path], None]:
    """The run's options, and ``options``, in which OUTSIDE is a folder that is not its own."""

    def change(folder: Path, outside: Path) -> None:
        path = folder / ".hydra" / "hydra.yaml"
        content = yaml.safe_load(path.read_text())
        given = [option.replace("OUTSIDE", str(outside)) for option in options]
        content["hydra"]["overrides"]["task"] += given
        source = {"path": str(outside), "schema": "file", "provider": "command-line"}
        content["hydra"]["runtime"]["config_sources"] += [source] * (not options)
        path.write_text(yaml.safe_dump(content))

    return change


def _sweep(folder: Path, outside: Path) -> None:
    options = ["-m", "seed=0,1", f"hydra.callbacks.x._target_=os.system('touch {outside}/ran')"]
    (folder / "sweep.json").write_text(json.dumps({"options": options}))


def _json(name: str, **more: Any) -> Callable[[Path, Path], None]:
    """A JSON file with more values."""

    def change(folder: Path, outside: Path) -> None:
        content = json.loads((folder / name).read_text()) | more
        (folder / name).write_text(json.dumps(content).replace("OUTSIDE", str(outside)))

    return change


def _text(name: str, text: str) -> Callable[[Path, Path], None]:
    return lambda folder, outside: write_text(folder / name, text)


def _instead(name: str, make: Callable[[Path, Path], Any]) -> Callable[[Path, Path], None]:
    """Something else in the place of a file or folder."""

    def change(folder: Path, outside: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path, outside)

    return change


def _checksummed(content: Callable[[Path], bytes]) -> Callable[[Path, Path], None]:
    """The latest checkpoint: anything under a right checksum."""

    def change(folder: Path, outside: Path) -> None:
        payload = content(outside)
        digest = hashlib.sha256(payload).hexdigest().encode()
        path = max((folder / "checkpoints").glob("step_*"))
        path.write_bytes(_MAGIC + digest + b"\\n" + payload)

    return change


def _saved(outside: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"runtime": _Evil(outside)}, buffer)
    return buffer.getvalue()


def _sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, 20 * 2**30)


_CALLED = {"_target_": "os.system", "command": "touch OUTSIDE/called"}
_BOMB = "\n".join(
    ["a0: &a0 [x]"] + [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)]
)
_LAST = "checkpoints/step_000000008.ckpt"
_FILES = ("result.json", "status.json", "epochs.csv", ".hydra/config.yaml", ".hydra/hydra.yaml")
FOLDERS: dict[str, Callable[[Path, Path], None]] = {
    **{
        f"option {option}": _options(option)
        for option in (
            "+hydra.callbacks.x._target_=subprocess.Popen",
            "hydra.searchpath=[OUTSIDE]",
            "hydra.output_subdir=OUTSIDE",
            "+hydra.job_logging.x=1",
            "model.target=os.system",
            "++optimizer._target_=os.system",
            "++data._target_=toolkit.files.write_text",
            "+lr.x={_target_:os.system}",
            "optimizer=[OUTSIDE/evil]",
            "seed=${oc.env:HOME}",
            "--config-dir=OUTSIDE",
        )
    },
    "a folder of choices": _options(),
    "a sweep": _sweep,
    "a schedule that calls": _json("result.json", provenance={"config": {"schedule": _CALLED}}),
    "delays that call": _json("result.json", delays=[_CALLED], ranks=[_CALLED]),
    "many notes": _json("result.json", notes=[f"{k} {'x' * 300}" for k in range(100_000)]),
    "lone surrogates": _json("result.json", notes=["\ud800"], schedule="\udfff"),
    "a message of surrogates": _json("status.json", message="\ud800", state="failed"),
    "deep JSON": _text("result.json", "[" * 100_000),
    "an alias bomb": _text(".hydra/config.yaml", _BOMB),
    "an alias bomb of Hydra's": _text(".hydra/hydra.yaml", _BOMB),
    "a long table": _text("epochs.csv", "epoch,top1,train_loss\n" + "1,0.5,2.0\n" * 300_000),
    "many epochs": _text(
        "epochs.csv", "epoch,top1,train_loss\n" + "".join(f"{k},0.5,2.0\n" for k in range(100_000))
    ),
    "HTML": _json("result.json", schedule="<script>alert(1)</script>"),
    "a pickle": _checksummed(lambda outside: pickle.dumps(_Evil(outside))),
    "a pickle in a zip": _checksummed(_saved),
    "an empty checkpoint": _checksummed(lambda outside: b""),
    "junk": _checksummed(lambda outside: b"junk"),
    "a sparse file": _instead(_LAST, _sparse),
    "links": _instead("checkpoints", lambda path, outside: path.symlink_to(outside)),
    "a linked option file": _instead(
        ".hydra/config.yaml", lambda path, outside: path.symlink_to(outside / "kept")
    ),
    **{
        f"{name} as a pipe": _instead(name, lambda path, outside: os.mkfifo(path))
        for name in (*_FILES, _LAST)
    },
    **{
        f"{name} without end": _instead(name, lambda p, o: p.symlink_to("/dev/zero"))
        for name in _FILES
    },
}


def folders(scratch: Path) -> Attack:
    """Hostile folders, resumed and reported on: no file outside of them, no process, no code."""
    whole = scratch / "whole"
    status, said = command(scratch, "train", *_GIVEN.split(), "epochs=2", f"hydra.run.dir={whole}")
    assert status == 0, said
    damages = st.tuples(st.sampled_from([*fuzz.BYTES]), st.sampled_from([*_FILES, _LAST]))

    def check(example: tuple[str | tuple[str, str], bool, int]) -> str:
        attack, resumed, seed = example
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            run, outside = Path(place) / "in" / "run", Path(place) / "outside"
            shutil.copytree(whole, run, symlinks=True)
            outside.mkdir()
            (outside / "kept").write_text("kept")
            if isinstance(attack, str):
                FOLDERS[attack](run, outside)
            else:
                kind, name = attack
                content = (run / name).read_bytes()
                (run / name).write_bytes(fuzz.BYTES[kind](content, Random(seed)))
            given = ["train", f"resume={run}", "epochs=3"] if resumed else ["report", f"runs={run}"]
            given += [] if resumed else [f"hydra.run.dir={run.parent}/report"]
            outcome = judged(*(found := command(run.parent, *given, watched=True)))
            assert "AUDIT" not in found[1], found[1]
            assert {path.name: path.read_text() for path in outside.iterdir()} == {"kept": "kept"}
            if (page := run.parent / "report" / "report.html").exists():
                assert page.stat().st_size < _MOST_BYTES, f"{page.stat().st_size} bytes"
        return outcome

    attacks = st.one_of(*[st.sampled_from([*FOLDERS])] * 3, damages)
    return st.tuples(attacks, st.booleans(), st.integers(0, 999)), check


# Kills

_KILLED = {
    "train": ("train", ["epochs=3", "save.steps=2"]),
    "sharded": ("train", ["epochs=3", "save.steps=2", "save.sharded=true", "schedule=cdp_v1"]),
    "compare": ("compare", ["epochs=1", "seeds=2", "~rules.cdp_v1", "save.steps=2"]),
    "sweep": ("train", ["-m", "seed=0,1", "epochs=2", "save.steps=2"]),
}


def kills(scratch: Path) -> tuple[Any, Callable[[Any], list[str]]]:
    """Runs that are killed at random moments and resumed until they end: bit-identical."""
    wholes: dict[str, tuple[float, Any]] = {}

    def start(case: str, folder: Path, seconds: float) -> bool:
        """Start or resume; return whether it was killed after ``seconds``."""
        name, options = _KILLED[case]
        place = "hydra.sweep.dir" if case == "sweep" else "hydra.run.dir"
        begun = {"compare": ".hydra/hydra.yaml", "sweep": "sweep.json"}.get(
            case, "checkpoints/step_*"
        )
        given = [*_GIVEN.split(), *options, f"{place}={folder}"]
        if any(folder.glob(begun)):
            given = ["-m"] * (case == "sweep") + [f"resume={folder}"]
        status, said = command(folder.parent, name, *given, seconds=seconds)
        assert status in (None, 0), f"{given}: status {status}: {said[-600:]}"
        return status is None

    def check(example: tuple[str, list[float]]) -> list[str]:
        case, moments = example
        if case not in wholes:
            begin = time.monotonic()
            folder = scratch / case
            assert not start(case, folder, 10 * MOST_SECONDS)
            wholes[case] = time.monotonic() - begin, _end(folder)
        seconds, expected = wholes[case]
        n_kills = 0
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            folder = Path(place) / "run"
            for moment in moments:
                n_kills += start(case, folder, moment * seconds)
            assert not start(case, folder, 10 * MOST_SECONDS), "it does not end"
            assert _end(folder) == expected, "another end"
        return [f"{case} killed"] * n_kills + ["bit-identical"]

    moments = st.lists(st.floats(0.05, 1), min_size=3, max_size=3)
    return st.tuples(st.sampled_from([*_KILLED]), moments), check


def _end(folder: Path) -> dict[str, Any]:
    """What runs end with: weights, and tables without times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("model.pt")):
        state = torch.load(path, weights_only=True)
        weights = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
        found[str(path.relative_to(folder))] = weights
    for path in sorted((*folder.rglob("runs.csv"), *folder.rglob("epochs.csv"))):
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file)]
        kept = [{k: v for k, v in row.items() if k != "samples_per_second"} for row in rows]
        found[str(path.relative_to(folder))] = kept
    return found
