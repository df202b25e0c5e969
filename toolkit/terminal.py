"""Text in the columns of a terminal, broken between words."""

import re
import shutil
import textwrap


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
