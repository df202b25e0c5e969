"""What errors say."""


def first_line(error: BaseException) -> str:
    """The first line of its message that says anything; else the error as Python shows it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def last_line(error: BaseException) -> str:
    """The last line of its message that says anything; else the error as Python shows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
