"""Lines that a sweep logs fit into a terminal."""

import io
import logging

import pytest

from toolkit.cli.sweep_logs import make_logs_readable


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def make_root(monkeypatch):
    """Give the root logger one handler, as Hydra does, whatever tests before have configured."""
    root = logging.getLogger()
    monkeypatch.setattr(root.manager, "disable", logging.NOTSET)
    for logger in (
        root,
        logging.getLogger("launcher"),
        logging.getLogger("alembic.plugins"),
    ):
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "propagate", True)
    level = root.level
    root.setLevel(logging.INFO)

    def make(stream):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("[HYDRA] %(message)s"))
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        make_logs_readable()

    monkeypatch.setenv("COLUMNS", "40")
    yield make
    root.setLevel(level)


@pytest.mark.parametrize(("stream", "n_lines"), [(Terminal(), 2), (io.StringIO(), 1)])
def test_lines_end_between_words_on_a_terminal(make_root, stream, n_lines):
    make_root(stream)
    words = "#0 : optimizer.lr=0.125 workers=2 model=resnet6"
    logging.getLogger("launcher").warning(words)
    lines = stream.getvalue().splitlines()
    assert len(lines) == n_lines
    assert " ".join(" ".join(lines).split()) == f"[HYDRA] {words}"


def test_plugins_of_databases_and_arguments_of_joblib_are_left_out(make_root):
    stream = Terminal()
    make_root(stream)
    logging.getLogger("alembic.plugins").info("setup plugin")
    logging.getLogger("launcher").warning(
        "Joblib.Parallel(n_jobs=2) is launching 2 jobs"
    )
    assert stream.getvalue() == ""
    logging.getLogger("launcher").warning("jobs")
    assert stream.getvalue() == "[HYDRA] jobs\n"
