"""Hostile and broken input: random command lines, mutated schedules and folders that attack.

Hypothesis draws the input and, where something fails, finds its shortest reproduction. Each command
line and each folder is read by a forked process, whose time and memory are bounded:

refused  one sentence of at most 3 lines, status 2
ran      status 0
long     it trains at the time limit, and has shown its progress

Anything else is a failure: a traceback, silence at the time limit, a file written outside the
output folder, a process started, or a mutation that is accepted and changes the program.
"""

import importlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import hypothesis
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from omegaconf import DictConfig

from benchmarks import folders, mutated
from benchmarks.forked import TINY, command, judged
from toolkit.cli import schema
from toolkit.cli.check_options import check_counts
from toolkit.cli.help import choices, groups
from toolkit.errors import first_line
from toolkit.files import EXPERIMENTS, conf

_TRAIN = f"{TINY} epochs=1 tracking.mode=disabled"
_MODEL = "model=resnet8 batch=2 shape=[3,8,8]"
BASES = {
    "train": _TRAIN,
    "compare": f"{_TRAIN} seeds=1 ~rules.cdp_v1",
    "simulate": f"{_MODEL} stages=2 microbatches=2",
    "memory": f"{_MODEL} workers=[2]",
    "pipelines": "ranks=2 microbatches=[2]",
    "communication": "workers=2",
    "stability": "stages=2 microbatches=2",
    "plan": f"{_MODEL} batch=8 ranks=2 jobs=1",
    "report": f"runs={EXPERIMENTS / 'results' / 'digits'}",
}
"""Experiments, and options with which each takes a second."""
_WARM = (
    *("matplotlib.pyplot", "pandas", "torchvision", "torch._dynamo", "torch.export"),
    *("toolkit.figures", "toolkit.plan", "toolkit.results.report", "toolkit.training.data"),
)


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each attack: examples by outcome, and the shortest that fails."""
    for name in (*BASES, *_WARM):  # once, for all forked processes
        importlib.import_module(name)
    wanted = [name for name in ATTACKS if config[name]]
    check_counts(config, *wanted, of="bench.")
    with tempfile.TemporaryDirectory() as scratch:
        made = {name: ATTACKS[name](Path(scratch)) for name in wanted}
        return [attacked(name, *attack, config[name], seed) for name, attack in made.items()]


def attacked(
    name: str, strategy: Any, check: Callable[[Any], str | list[str]], n: int, seed: int
) -> dict[str, Any]:
    """Check ``n`` examples; ``check`` returns outcomes, or raises at an example that fails."""
    found, examples, start, failure = Counter[str](), 0, time.perf_counter(), ""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    @hypothesis.given(strategy)
    def attack(example: Any) -> None:
        nonlocal examples
        outcome = check(example)
        examples += 1
        found.update([outcome] if isinstance(outcome, str) else outcome)

    try:
        attack()
    except Exception as error:
        shortest = "\n".join(getattr(error, "__notes__", ()))
        failure = f"{first_line(error)}; {' '.join(shortest.split())}"
        print(f"{name} fails: {error}\n{shortest}", file=sys.stderr)
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(found.items()))
    row = {"attack": name, "examples": examples, "outcomes": outcomes}
    seconds = round(time.perf_counter() - start)
    return row | {"seconds": seconds, "failed": int(bool(failure)), "message": failure[:500]}


# Command lines


def command_lines() -> tuple[Any, Callable[[Any], str]]:
    """Random command lines of the schemas, well-typed and not, on top of tiny ones."""

    def of(name: str) -> Any:
        given = st.lists(_option(name), min_size=1, max_size=2)
        return given.map(lambda options: [name, *BASES[name].split(), *options])

    return st.sampled_from([*BASES, "train", "train", "simulate"]).flatmap(of), _command_line


def _option(experiment: str) -> Any:
    """Strategy of an option of an experiment, often valid: half of all lines can be composed."""
    own = {f.name: f for f in fields(schema.schemas()["experiment"][experiment])}
    kinds = {name: f.type for name, f in own.items()}
    chosen = [group for group in groups(conf()) if group in own or group in schema.PRESETS]
    for name, f in own.items():
        node: Any = f.default_factory
        if is_dataclass(node):
            kinds |= {f"{name}.{inner.name}": inner.type for inner in fields(node)}
    likely = sorted(kinds.keys() - {*_NEVER, *chosen})
    for group in chosen:
        for node in schema.schemas().get(group, {}).values():
            kinds |= {f"{group}.{f.name}": f.type for f in fields(node)}
    names = sorted(kinds.keys() - {*_NEVER})
    picked = [f"{g}={name}" for g in chosen for name in choices([conf()], g) if name not in _SLOW]
    good = st.sampled_from(likely).flatmap(lambda k: _value(k, kinds[k], st.sampled_from([1, 2])))
    typed = st.sampled_from(names).flatmap(lambda k: _value(k, kinds[k], _NUMBERS))
    return st.one_of(
        *[*[good] * 14, typed, typed],
        *[st.sampled_from(picked)] * 2 * bool(picked),
        st.tuples(st.sampled_from(names), _ANY).map("=".join),
        st.tuples(st.sampled_from(["+", "~", "++"]), typed).map("".join),
        st.tuples(st.sampled_from(names), _ANY).map(".x=".join),
        st.tuples(st.sampled_from(chosen or names), _ANY).map("=".join),
        st.sampled_from(_ODD),
    )


_NEVER = ("_target_", "resume", "runtime.interface", "jobs")
_SLOW = ("resnet50", "resnet18", "vit_b_16", "gpt2", "gpt2_xl", "gpt3")
_ODD = ("--foo", "-m", "=", "+", "~epochs", "++", "[", "a=b=c", "--cfg", "", "+a.b=1", "-h=1")
_NUMBERS = st.sampled_from([0, 1, 2, 5, -7, 100, 10**6, 10**12, 2**63])
_FEW = st.sampled_from([0, 1, 2, 3, 4, 8, -1])
_LONG = (
    *("epochs", "seeds", "n_train", "n_test", "image_size", "width", "layers", "steps"),
    *("search_seconds", "pilot_seconds"),
)
"""Options that may well make a run long."""
_TEXT = st.sampled_from(
    [
        *("", "a", "auto", "cpu", "all", "none", "null", "true", "flops", "1F1B", "ü", "../x"),
        *("/dev/zero", "/dev/null", "${seed}", "${nope}", "x" * 3000, "'", "[", "{a:1}"),
        *("nan", "1e400", "0x1", "-0.0", "inf", "1.5", "\udc80"),
    ]
)
_ANY = st.one_of(
    _TEXT,
    _NUMBERS.map(str),
    st.lists(_NUMBERS, max_size=3).map(lambda found: str(found).replace(" ", "")),
    st.sampled_from(["[[]]", "{}", "[null]", "[a,b]", "{x:{y:1}}", "[1,[2]]"]),
)


def _value(name: str, kind: Any, numbers: Any) -> Any:
    """Strategy of ``name=value``, with a value of the type ``kind``."""
    found = next((k for k in get_args(kind) if k is not type(None)), kind)
    whole = (_FEW if name.rpartition(".")[2] in _LONG else numbers).map(str)
    values = {
        bool: st.sampled_from(["true", "false"]),
        int: whole,
        float: st.sampled_from(["0.1", "0.5", "1.0", "2.5", "0.0", "-1.0", "1e-9", "1e9", "nan"]),
        str: _TEXT,
    }
    return values.get(found, st.one_of(_ANY, whole)).map(f"{name}={{}}".format)


def _command_line(line: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        name, *options = line
        dirs = [f"hydra.run.dir={scratch}/out", f"hydra.sweep.dir={scratch}/sweep"]
        return judged(*command(Path(scratch), name, *options, *dirs))


ATTACKS: dict[str, Callable[[Path], tuple[Any, Callable[[Any], Any]]]] = {
    "command_lines": lambda _: command_lines(),
    "mutations": lambda _: mutated.mutations(),
    "order_files": lambda _: mutated.order_files(),
    "datasets": lambda _: mutated.datasets(),
    "folders": folders.folders,
    "kills": folders.kills,
}
"""By name, what returns a strategy of examples, and the check of one, given a scratch folder."""
