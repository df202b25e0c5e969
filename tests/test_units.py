"""How seconds and bytes are shown."""

import pytest

from toolkit.units import GIB, MIB, RATES, SIZES, TIMES, digits, duration, size, unit_for


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (4000.0, "4000 s"),
        (12.345, "12.3 s"),
        (1.0, "1 s"),
        (0.25, "250 ms"),
        (0.9996, "1000 ms"),
        (2.5e-3, "2.5 ms"),
        (4e-6, "4 µs"),
        (3e-9, "3 ns"),
        (5e-10, "0.5 ns"),
        (0.0, "0 ns"),
    ],
)
def test_duration(seconds, shown):
    assert " ".join(duration(seconds)) == shown


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0.0 MiB"),
        (1.25 * MIB, "1.2 MiB"),
        (100 * MIB, "100 MiB"),
        (1023 * MIB, "1023 MiB"),
        (GIB, "1.0 GiB"),
        (80e9, "74.5 GiB"),
    ],
)
def test_size(n_bytes, shown):
    assert size(n_bytes) == shown


@pytest.mark.parametrize(
    ("largest", "units", "name"),
    [
        (2.0, TIMES, "s"),
        (1.9, TIMES, "ms"),
        (1e-12, TIMES, "ns"),
        (2 * GIB, SIZES, "GiB"),
        (GIB, SIZES, "MiB"),
        (0, SIZES, "KiB"),
        (5e9, RATES, "GB/s"),
        (5e6, RATES, "MB/s"),
    ],
)
def test_an_axis_has_two_of_its_unit(largest, units, name):
    assert unit_for(largest, units)[1] == name


def test_digits():
    assert [*map(digits, (0.12345, 1.5, 99.94, 123.4, 1500.0))] == [
        "0.123",
        "1.5",
        "99.9",
        "123",
        "1500",
    ]
