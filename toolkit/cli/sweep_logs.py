"""Lines that Hydra, its launchers and its sweepers log, made readable on a terminal."""

import logging
from typing import TextIO

from toolkit.terminal import fitted

_JOBLIB_ARGUMENTS = "Joblib.Parallel("
"""Begins a line of joblib's launcher, which repeats its arguments in a word of 190 characters."""


class _FittedFormatter(logging.Formatter):
    """Breaks the lines of another formatter between words, where the stream is a terminal."""

    def __init__(self, formatter: logging.Formatter, stream: TextIO) -> None:
        super().__init__()
        self._formatter = formatter
        self._stream = stream

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        return fitted(self._formatter.format(record).expandtabs(1), self._stream)


def make_logs_readable() -> None:
    """Fit the lines of the root logger's handlers to their terminals; drop what no user needs."""
    # Optuna's storages log each plugin of their database library, also without a database.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        if not isinstance(handler, logging.StreamHandler):
            continue
        handler.addFilter(
            lambda record: not record.getMessage().startswith(_JOBLIB_ARGUMENTS)
        )
        formatter = handler.formatter or logging.Formatter()
        handler.setFormatter(_FittedFormatter(formatter, handler.stream))
