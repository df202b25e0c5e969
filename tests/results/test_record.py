"""Tables that are on disk while a run trains."""

from math import isnan, nan

import pytest

from toolkit.results import Ledger
from toolkit.results.record import DamagedError, read_csv

KEYS = ["step", "stage"]


def rows(*numbers, of=1.0):
    return [
        {"step": n, "stage": stage, "x": of * n} for n in numbers for stage in (0, 1)
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.csv"


@pytest.mark.parametrize("resumed", [False, True])
def test_rows_are_on_disk_at_once_and_replace_those_before(path, resumed):
    """Of a run that was rolled back, or resumed."""
    ledger = Ledger(path, KEYS)
    for n in range(3):
        ledger.put(rows(n))
        assert read_csv(path) == ledger.rows() == rows(*range(n + 1))
    if resumed:
        ledger = Ledger(path, KEYS, resume=True)
    for part in (rows(1, of=7), rows(3), []):
        ledger.put(part)
    assert read_csv(path) == ledger.rows() == [*rows(0), *rows(1, of=7), *rows(2, 3)]
    Ledger(path, KEYS).put(rows(0))
    assert read_csv(path) == rows(0)


def test_columns_may_come_and_go(path):
    """As of a run that is resumed with or without the average of its weights."""
    Ledger(path, ["step"]).put([{"step": 0, "x": 1.0, "ema": 2.0}])
    ledger = Ledger(path, ["step"], resume=True)
    ledger.put([{"step": 1, "x": 1.0}])
    ledger.put([{"step": 2, "new": 5.0, "x": 1.0}])
    ledger.put([{"step": 3, "x": 1.0, "new": 5.0}])
    assert path.read_text().split() == [
        "step,x,ema,new", "0,1.0,2.0,", "1,1.0,,", "2,1.0,,5.0", "3,1.0,,5.0",
    ]  # fmt: skip


@pytest.mark.parametrize("bad", ["1,0,oops", "1,0", "1,0,1.0,2.0"])
@pytest.mark.parametrize("last", [False, True])
def test_a_resumed_table_skips_rows_that_cannot_be_read(path, bad, last):
    Ledger(path, KEYS).put(rows(0, 1, 2))
    lines = path.read_text().splitlines()
    lines[3:4] = [bad]
    path.write_text("\n".join(lines[:4] if last else lines))
    found = Ledger(path, KEYS, resume=True).rows()
    assert found == [*rows(0), *(() if last else rows(1, 2)[1:])]
    with pytest.raises(
        DamagedError, match=r"a\.csv cannot be read: (line 4|could not convert)"
    ):
        read_csv(path)


def test_cells_are_read_as_they_were(path):
    Ledger(path, ["epoch"]).put(
        [{"epoch": 0, "ema": None, "loss": nan, "few": -3, "x": 1e-9}]
    )
    (row,) = read_csv(path)
    assert isnan(row.pop("loss"))
    assert row == {"epoch": 0, "ema": None, "few": -3, "x": 1e-9}
    path.write_bytes(b"\xff\x00")
    assert Ledger(path, ["epoch"], resume=True).rows() == []


def test_rows_that_could_not_be_written_are_written_later(path):
    ledger = Ledger(path, KEYS)
    path.mkdir()
    ledger.put(rows(0, 1))
    path.rmdir()
    ledger.put(rows(2))
    assert read_csv(path) == rows(0, 1, 2)


def test_another_rank_writes_nothing(path):
    Ledger(path, KEYS, writes=False).put(rows(0))
    assert not path.exists()
