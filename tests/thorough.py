"""How much is tested: a developer's share, or everything with THOROUGH=1, as in CI."""

import os

import pytest

THOROUGH = bool(os.environ.get("THOROUGH"))
thorough = pytest.mark.skipif(not THOROUGH, reason="takes long: THOROUGH=1 make test")


def more(usual, thorough):
    """Sizes, schedules or numbers of examples: the ``usual`` ones, or ``thorough``."""
    return thorough if THOROUGH else usual
