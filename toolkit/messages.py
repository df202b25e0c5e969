"""What errors say."""


def first_line(error: BaseException) -> str:
    """The first line of its message that says anything; else the error as Python shows it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
