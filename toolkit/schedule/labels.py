"""What schedules are called beside each other."""

from collections.abc import Mapping


def labels(names: Mapping[str, str]) -> dict[str, str]:
    """What each schedule is called: its name, and its key, too, where schedules share a name.

    Args:
        names: of schedules, by keys that set them apart, such as the rules of a comparison.
    """
    called = list(names.values())
    return {
        key: name if called.count(name) == 1 else f"{name} ({key})" for key, name in names.items()
    }
