"""How much is tried: what a developer waits for; with THOROUGH=1, as CI has it too, all of it."""

import os

THOROUGH = bool(os.environ.get("THOROUGH"))


def more(usual, thorough):
    """Sizes, schedules or numbers of examples: the ``usual`` ones, or ``thorough``."""
    return thorough if THOROUGH else usual
