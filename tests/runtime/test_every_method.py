"""Every method of the catalogue is put through both conformance suites."""

from functools import wraps

import pytest

from tests.runtime import conform, test_single_process
from toolkit.schedule import catalog

METHODS = catalog.FACTORIES
LISTS = {
    "one process": test_single_process._schedules,
    "many processes": lambda: [s for size in (1, 2, 3, 4) for s in conform.schedules(size)],
}


@pytest.mark.parametrize("suite", LISTS)
def test_every_method_is_conformant(monkeypatch, suite):
    made = set()

    def noting(name):
        @wraps(METHODS[name])
        def make(*args, **kwargs):
            made.add(name)
            return METHODS[name](*args, **kwargs)

        return make

    for name in METHODS:
        monkeypatch.setattr(catalog, name, noting(name))
    assert [*LISTS[suite]()]
    assert made == {*METHODS}
