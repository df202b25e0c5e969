"""Text for a terminal: lines that are broken between words, and what is being done."""

import multiprocessing
import re
import shutil
import sys
import textwrap
from typing import TextIO

from toolkit.torchrun import is_rank_zero

# An environment variable or a label may precede a command.
_COMMAND = re.compile(
    r"\s*(?:[\w ,]+: )?(?:[A-Z_]+=\S+ )*"
    r"(?:cyclic-dp|torchrun|srun|(?:\S*/)?python[\d.]*|wandb sync) "
)
_CLEAR_LINE = "\r\x1b[K"
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")


def show_activity(text: str) -> None:
    """Print what begins, such as ``reading the data``, on a terminal; elsewhere nothing.

    It goes to the standard error of rank 0, on a line of its own: a warning may follow.
    """
    if is_rank_zero() and sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def show_import() -> None:
    """Show that torch is imported, which takes seconds, unless it has been."""
    if "torch" not in sys.modules:
        show_activity("importing torch")


def show(text: str = "", file: TextIO | None = None) -> None:
    """Print ``text``; on a terminal, its lines end between words, and commands can be copied.

    Args:
        text: any number of lines.
        file: standard output by default.
    """
    stream = file or sys.stdout
    line_begin = ""
    if stream.isatty() and multiprocessing.parent_process() is not None:
        line_begin = _CLEAR_LINE  # it may hold the bar of another process of a sweep
    print(f"{line_begin}{fitted(text, stream)}", file=stream, flush=True)


def fitted(text: str, stream: TextIO) -> str:
    """Return ``text`` as :func:`show` prints it on ``stream``."""
    return wrapped(text) if stream.isatty() else text


def wrapped(text: str) -> str:
    """Return ``text`` with each of its lines in lines of the terminal's width."""
    lines = []
    for line in text.splitlines():
        lines += wrapped_lines(line)
    return "\n".join(lines)


def wrapped_lines(line: str) -> list[str]:
    """Return ``line`` in lines of the terminal's width; 80 columns where there is no terminal.

    A line of a table, which is two spaces, a word and a text, continues below its text. Any other
    indented line is a command, and continues further to the right. A command continues after a
    backslash, so that it can be copied with its line ends.
    """
    width = shutil.get_terminal_size().columns
    if len(line) <= width:
        return [line]
    if _COMMAND.match(line):
        return _command_lines(line, width)
    first_column = re.match(r"  \S+ +", line)
    indent = " " * (len(line) - len(line.lstrip()))
    if first_column is not None:
        indent = " " * min(len(first_column[0]), width // 2)
    elif indent:
        indent += "    "
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _command_lines(line: str, width: int) -> list[str]:
    """Return a command in lines that end with backslashes, between words of the shell."""
    indent = " " * (len(line) - len(line.lstrip()))
    lines = [indent.removesuffix(" ")]
    for word in _SHELL_WORD.findall(line):
        if (
            # Room for the backslash, which follows a space.
            len(lines[-1]) + len(word) + len(" ") > width - len(" \\")
            and lines[-1].strip()
        ):
            lines[-1] += " \\"
            lines.append(f"{indent}   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines
