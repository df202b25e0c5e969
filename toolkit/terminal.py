"""Text for a terminal: lines that are broken between words, and what is being done."""

import re
import shutil
import sys
import textwrap

from toolkit.torchrun import is_rank_zero


def show_activity(text: str) -> None:
    """Print what begins, such as ``reading the data``, on a terminal; elsewhere nothing.

    It goes to the standard error of rank 0, on a line of its own: a warning may follow.
    """
    if is_rank_zero() and sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def wrapped(text: str) -> str:
    """Return ``text`` with each of its lines in lines of the terminal's width."""
    lines = []
    for line in text.splitlines():
        lines += wrapped_lines(line)
    return "\n".join(lines)


def wrapped_lines(line: str) -> list[str]:
    """Return ``line`` in lines of the terminal's width; 80 columns where there is no terminal.

    A line of a table, which is two spaces, a word and a text, continues below its text. Any other
    indented line is a command, and continues further to the right.
    """
    width = shutil.get_terminal_size().columns
    if len(line) <= width:
        return [line]
    first_column = re.match(r"  \S+ +", line)
    indent = " " * (len(line) - len(line.lstrip()))
    if first_column is not None:
        indent = " " * min(len(first_column[0]), width // 2)
    elif indent:
        indent += "    "
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
