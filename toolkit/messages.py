"""What errors say."""

import dis
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

_TOOLKIT = Path(__file__).resolve().parent


def first_line(error: BaseException) -> str:
    """The first line of its message that says anything; else the error as Python shows it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def last_line(error: BaseException) -> str:
    """The last line of its message that says anything; else the error as Python shows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def instead(choice: str, valid: Sequence[str]) -> str:
    """What to choose in the place of ``choice``: the nearest, if one is near, and all there are."""
    near = get_close_matches(choice, valid, n=1, cutoff=0.4)
    return "".join(f"did you mean {name}? " for name in near) + f"choose one of {', '.join(valid)}"


def refused_by(error: BaseException, *folders: Path) -> bool:
    """Whether a ``raise`` in the code of ``folders``, this package unless given, has raised it.

    So it is an error that was foreseen, rather than one of a library, of C code that was called, or
    of Python itself.
    """
    innermost = error.__traceback__
    if innermost is None:
        return False
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    code = innermost.tb_frame.f_code
    raised = Path(code.co_filename).resolve()
    return code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"] and any(
        raised.is_relative_to(folder) for folder in folders or (_TOOLKIT,)
    )
