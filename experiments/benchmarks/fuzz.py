"""Random command lines of all experiments: each runs, or is refused in one sentence.

Hypothesis draws them and, where one fails, finds its shortest reproduction. A forked process runs
each of them. Its time and memory are bounded:

refused  one sentence of at most 3 lines, status 2, and no folder
ran      status 0
long     it trains at the time limit, and has shown its progress

Anything else is a failure: a traceback, a long message, or silence at the time limit. The suite
uses the same process to read folders of runs that attack their readers.
"""

import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck
from hypothesis import strategies as st
from omegaconf import DictConfig

from toolkit.cli import schema
from toolkit.cli.check_options import check_counts
from toolkit.cli.help import choices, groups
from toolkit.errors import first_line
from toolkit.files import EXPERIMENTS, conf

TINY = (
    "model=resnet8 model.width=4 data=synthetic data.n_train=32 data.n_test=8 data.image_size=8"
    " batch=4 stages=2 microbatches=2 stability=false tracking.mode=disabled"
)
MODEL = "model=resnet8 batch=2 shape=[3,8,8]"
QUICK_OPTIONS = {
    "train": f"{TINY} epochs=1",
    "compare": f"{TINY} epochs=1 seeds=1 ~rules.cdp_v1",
    "simulate": f"{MODEL} stages=2 microbatches=2",
    "memory": f"{MODEL} workers=[2]",
    "pipelines": "ranks=2 microbatches=[2]",
    "communication": "workers=2",
    "stability": "stages=2 microbatches=2",
    "plan": f"{MODEL} batch=8 ranks=2 jobs=1",
    "report": f"runs={EXPERIMENTS / 'results' / 'digits'}",
}
"""By experiment, options with which it takes a second."""
PRELOADED = (
    *("matplotlib.pyplot", "pandas", "torchvision", "torch._dynamo", "torch.export"),
    *(
        "toolkit.figures",
        "toolkit.plan",
        "toolkit.results.report",
        "toolkit.training.data",
    ),
)
"""Modules that all forked processes then find in memory."""
_MAX_SECONDS = 60.0
_MAX_MEMORY = 64 * 2**30  # bytes of addresses
_MAX_LINES = 3  # of a message, without the rows of a schedule's grid
_MAX_CHARACTERS = 3000
_PROCESS_STARTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pty.spawn",
)
_ALLOWED_PROGRAMS = ("git", "uname")  # of a result's provenance


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row: the number of command lines by outcome, and the shortest that fails."""
    # Imported once, before the processes are forked: an import takes longer than a command.
    for module in (*QUICK_OPTIONS, *PRELOADED):
        importlib.import_module(module)
    check_counts(config, "command_lines", of="bench.")
    return [
        attack("command_lines", command_lines(), run_line, config.command_lines, seed)
    ]


def attack(
    name: str, strategy: Any, check: Callable[[Any], str], n_examples: int, seed: int
) -> dict[str, Any]:
    """Check ``n_examples``; ``check`` returns an outcome, or raises at an example that fails."""
    outcomes = Counter[str]()
    start = time.perf_counter()
    failure = ""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n_examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    @hypothesis.given(strategy)
    def check_each(example: Any) -> None:
        outcomes[check(example)] += 1

    try:
        check_each()
    except Exception as error:
        shortest_example = "\n".join(getattr(error, "__notes__", ()))
        failure = f"{first_line(error)}; {' '.join(shortest_example.split())}"
        print(f"{name} fails: {error}\n{shortest_example}", file=sys.stderr)
    return {
        "attack": name,
        "examples": outcomes.total(),
        "outcomes": ", ".join(
            f"{n} {outcome}" for outcome, n in sorted(outcomes.items())
        ),
        "seconds": round(time.perf_counter() - start),
        "failed": int(bool(failure)),
        "message": failure[:500],
    }


# Commands in forked processes


def run_command(folder: Path, name: str, *options: str) -> tuple[int | None, str]:
    """Run ``python experiments/<name>.py <options>`` in ``folder``; return status and output.

    The process reuses imported modules. It is killed at the time limit, and its status is then
    None. It prints a line that begins with AUDIT if it starts a program or writes elsewhere.
    """
    log = folder / "log.txt"
    # Or text that waits in the buffers would also come out of the child.
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _run_in_child(folder, log, name, options)

    deadline = time.monotonic() + _MAX_SECONDS
    status = None
    while status is None and time.monotonic() < deadline:
        ended, wait_status = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(wait_status)
        time.sleep(0.005)
    with suppress(ProcessLookupError):  # also what the process has started
        os.killpg(process, signal.SIGKILL)
    # It was killed just now, and stays as a zombie until its status is read.
    if status is None:
        os.waitpid(process, 0)
    return status, log.read_text(errors="replace")


def _run_in_child(folder: Path, log: Path, name: str, options: tuple[str, ...]) -> None:
    """Run the experiment and end this process."""
    status = 1
    try:
        # A group of its own, so that one signal ends it and all that it starts.
        os.setpgid(0, 0)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.argv = [f"experiments/{name}.py", *options]
        GlobalHydra.instance().clear()  # that of this bench
        experiment = importlib.import_module(name)
        sys.addaudithook(_report_escapes(folder))
        experiment.main()
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the handlers and the test session of the parent are in this copy, too.
        os._exit(status)


def _report_escapes(folder: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that prints programs started and files written outside ``folder``."""
    # Python's temporary files are in /tmp/tmp...
    allowed_folders = (f"{folder.resolve()}/", "/dev/", "/proc/", "/tmp/tmp")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _PROCESS_STARTS:
            if os.path.basename(str(arguments[0])) not in _ALLOWED_PROGRAMS:
                print("AUDIT", event, arguments[:2], flush=True)
        elif event == "open" and isinstance(arguments[0], str | bytes | Path):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if writes and not path.startswith(allowed_folders):
                print("AUDIT", event, path, flush=True)

    return hook


def judge(status: int | None, output: str) -> str:
    """Return the outcome of a command; raise AssertionError on a failure."""
    if status is None:
        # A progress bar, such as " 42%|".
        assert re.search(r"\d ?%\|", output), f"silent: {output[-300:]}"
        return "long"
    assert "Traceback" not in output, f"traceback: {output[-600:]}"
    if status == 0:
        return "ran"
    message = output[output.find("error: ") :]
    assert "error: " in output, f"status {status}: {output[-300:]}"
    assert status in (1, 2), f"status {status}: {output[-300:]}"
    lines = [
        line
        for line in message.strip().splitlines()
        # Rows of a schedule's grid, which a refusal may print, are no sentences.
        if not line.startswith(("rank ", " "))
    ]
    assert len(lines) <= _MAX_LINES, f"{len(lines)} lines: {message[:600]}"
    assert len(message) <= _MAX_CHARACTERS, (
        f"{len(message)} characters: {message[:300]}"
    )
    return "refused"


# Command lines

_VALUES = st.one_of(
    st.sampled_from([0, 1, 2, 5, -7, 100, 10**6, 10**12, 2**63]).map(str),
    st.sampled_from(
        ["0.1", "0.5", "2.5", "-1.0", "1e-9", "1e400", "nan", "inf", "0x1"]
    ),
    st.sampled_from(
        ["true", "false", "null", "none", "auto", "cpu", "all", "flops", "1F1B"]
    ),
    st.sampled_from(["", "a", "ü", "\udc80", "'", "x" * 3000, "${seed}", "${nope}"]),
    st.sampled_from(["../x", "/dev/zero", "/dev/null"]),
    st.sampled_from(
        ["[", "[1]", "[1,2]", "[null]", "[[]]", "[1,[2]]", "[a,b]", "{}", "{a:1}"]
    ),
    st.sampled_from(
        ["[dp,{schedule: dp, nope: 1}]", "[{schedule: dp, epochs: 1, nope: 1}]"]
    ),
)
_ODD_OPTIONS = st.one_of(
    st.sampled_from(["", "=", "+", "~epochs", "++", "[", "a=b=c", "+a.b=1", "-h=1"]),
    st.sampled_from(
        ["--foo", "-m", "--cfg", "--cfg=job", "--resolve", "--info", "-c", "-p=a"]
    ),
)
_SLOW_CHOICES = ("resnet50", "resnet18", "vit_b_16", "gpt2", "gpt2_xl", "gpt3")
_NOT_TRIED = ("_target_", "resume", "runtime.interface", "jobs")
_LENGTHS = (  # options that may make a run long
    *("epochs", "seeds", "n_train", "n_test", "image_size", "width", "layers", "steps"),
    *("search_seconds", "pilot_seconds"),
)


def command_lines() -> Any:
    """Strategy of command lines: random values, choices and signs of Hydra, on quick options."""

    def lines_of(experiment: str) -> Any:
        options = st.lists(_option(experiment), min_size=1, max_size=2)
        return options.map(
            lambda drawn: [experiment, *QUICK_OPTIONS[experiment].split(), *drawn]
        )

    return st.sampled_from([*QUICK_OPTIONS, "train", "train", "simulate"]).flatmap(
        lines_of
    )


def _option(experiment: str) -> Any:
    names = [name.replace("NAME", "dp") for name in schema.option_names(experiment)]
    # Options that may make a run long only get the values 0 to 3.
    lengths = [name for name in names if name.rpartition(".")[2] in _LENGTHS]
    drawn_names = [name for name in names if name not in (*lengths, *_NOT_TRIED)]
    values = st.tuples(st.sampled_from(drawn_names), _VALUES)
    group_choices = [
        f"{group}={choice}"
        for group in groups(conf())
        if group in names or group in schema.PRESETS
        for choice in choices([conf()], group)
        if choice not in _SLOW_CHOICES
    ]
    return st.one_of(
        # 12 of 17: Hydra refuses most of the others before the experiment sees them.
        *[values.map("=".join)] * 12,
        st.tuples(st.sampled_from(lengths or drawn_names), st.sampled_from("0123")).map(
            "=".join
        ),
        st.sampled_from(group_choices or drawn_names),
        st.tuples(st.sampled_from(["+", "~", "++"]), values.map("=".join)).map("".join),
        values.map(".x=".join),
        _ODD_OPTIONS,
    )


def run_line(line: list[str]) -> str:
    """Run a command line in an empty folder; return its outcome."""
    experiment, *options = line
    with tempfile.TemporaryDirectory() as scratch:
        places = [f"hydra.run.dir={scratch}/out", f"hydra.sweep.dir={scratch}/sweep"]
        outcome = judge(*run_command(Path(scratch), experiment, *options, *places))
        paths = [
            path.name for path in Path(scratch).iterdir() if path.name != "log.txt"
        ]
        # A command that is refused must not leave a folder that looks like a run.
        assert outcome != "refused" or not paths, f"a refused line left {paths}"
        return outcome
