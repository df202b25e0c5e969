"""Units in which seconds and bytes are shown."""

from collections.abc import Sequence

MB = 1e6
MIB, GIB = 2**20, 2**30

Unit = tuple[float, str]
TIMES: Sequence[Unit] = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES: Sequence[Unit] = ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"))
RATES: Sequence[Unit] = ((1e9, "GB/s"), (MB, "MB/s"), (1e3, "kB/s"))


def unit_for(largest: float, units: Sequence[Unit], at_least: float = 2.0) -> Unit:
    """The largest unit of which there are ``at_least`` so many, or the last."""
    return next((unit for unit in units if largest >= at_least * unit[0]), units[-1])


def duration(seconds: float) -> tuple[str, str]:
    """Seconds as a number of three digits and a unit that suits it."""
    unit, name = unit_for(seconds, TIMES, at_least=1.0)
    return digits(seconds / unit), name


def size(n_bytes: float) -> str:
    """Bytes in MiB, from 1024 of them on in GiB; in one decimal where that tells more."""
    unit, name = unit_for(n_bytes, SIZES[:2], at_least=1.0)
    decimals = 0 if name == "MiB" and n_bytes >= 100 * unit else 1
    return f"{n_bytes / unit:.{decimals}f} {name}"


def digits(value: float) -> str:
    """Three significant digits; of whole numbers, all."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
