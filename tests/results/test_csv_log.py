"""Tables that are on disk while a run goes on."""

import csv
from math import isnan, nan

import pytest

from toolkit.results.csv_log import Ledger, read_csv


def rows(*numbers, of=1.0):
    return [{"step": n, "stage": stage, "x": of * n} for n in numbers for stage in (0, 1)]


def on_disk(path):
    with path.open() as file:
        return [
            (int(row["step"]), int(row["stage"]), float(row["x"])) for row in csv.DictReader(file)
        ]


def told(found):
    return [(row["step"], row["stage"], row["x"]) for row in found]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.csv"


def test_rows_are_there_as_soon_as_they_are_known(path):
    ledger = Ledger(path, ["step", "stage"])
    for n in range(3):
        ledger.put(rows(n))
        assert on_disk(path) == told(ledger.rows()) == told(rows(*range(n + 1)))
    ledger.put([])
    assert len(on_disk(path)) == 6


def test_a_new_run_begins_anew_and_a_resumed_one_goes_on(path):
    Ledger(path, ["step", "stage"]).put(rows(0, 1, 2))
    resumed = Ledger(path, ["step", "stage"], resume=True)
    assert told(resumed.rows()) == told(rows(0, 1, 2))
    resumed.put(rows(2, of=7))  # done again
    resumed.put(rows(3))
    expected = told([*rows(0, 1), *rows(2, of=7), *rows(3)])
    assert on_disk(path) == told(resumed.rows()) == expected
    new = Ledger(path, ["step", "stage"])
    new.put(rows(0))
    assert on_disk(path) == told(rows(0))


def test_columns_may_come_and_go(path):
    """As where a run is resumed without the average of the weights, or with one."""
    Ledger(path, ["step"]).put([{"step": 0, "x": 1.0, "ema": 2.0}])
    ledger = Ledger(path, ["step"], resume=True)
    for step in (1, 2):
        ledger.put([{"step": step, "x": 1.0}])
    ledger.put([{"step": 3, "new": 5.0, "x": 1.0}])
    ledger.put([{"step": 4, "x": 1.0, "new": 5.0}])
    assert path.read_text().split() == [
        "step,x,ema,new", "0,1.0,2.0,", "1,1.0,,", "2,1.0,,", "3,1.0,,5.0", "4,1.0,,5.0",
    ]  # fmt: skip
    assert len(read_csv(path)) == 5


def test_half_a_row_is_left_out(path):
    Ledger(path, ["step", "stage"]).put(rows(0, 1))
    path.write_text(path.read_text().rstrip()[:-4])
    assert told(Ledger(path, ["step", "stage"], resume=True).rows()) == told(rows(0, 1)[:3])
    path.write_bytes(b"\xff\x00")
    assert Ledger(path, ["step", "stage"], resume=True).rows() == []


@pytest.mark.parametrize("bad", ["1,0,oops", "1,0", "1,0,1.0,2.0"])
def test_a_row_that_cannot_be_read_takes_no_other_with_it(path, bad):
    Ledger(path, ["step", "stage"]).put(rows(0, 1, 2))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], bad, *lines[4:]]))
    found = Ledger(path, ["step", "stage"], resume=True).rows()
    assert told(found) == told(
        [row for row in rows(0, 1, 2) if (row["step"], row["stage"]) != (1, 0)]
    )


def test_what_is_not_known_stays_so(path):
    Ledger(path, ["epoch"]).put([{"epoch": 0, "ema": None, "loss": nan, "few": -3, "x": 1e-9}])
    (row,) = Ledger(path, ["epoch"], resume=True).rows()
    assert isnan(row.pop("loss"))
    assert row == {"epoch": 0, "ema": None, "few": -3, "x": 1e-9}


def test_where_nothing_can_be_written_rows_are_kept_and_written_later(path):
    path.mkdir()
    ledger = Ledger(path, ["step", "stage"])
    ledger.put(rows(0))
    path.rmdir()
    ledger.put(rows(1))
    assert on_disk(path) == told(rows(0, 1))


def test_another_rank_writes_nothing(path):
    Ledger(path, ["step", "stage"], here=False).put(rows(0))
    assert not path.exists()


def test_what_a_rolled_back_run_does_again_takes_its_place(tmp_path):
    ledger = Ledger(tmp_path / "a.csv", ["step", "stage"])
    for part in (rows(0), rows(1), rows(2), rows(1, of=7), rows(3)):
        ledger.put(part)
    expected = [*rows(0), *rows(1, of=7), *rows(2, 3)]
    assert on_disk(ledger.path) == told(ledger.rows()) == told(expected)


def test_what_could_not_be_appended_is_written_later(tmp_path):
    ledger = Ledger(tmp_path / "a.csv", ["step", "stage"])
    ledger.put(rows(0))
    ledger.path.unlink()
    ledger.path.mkdir()
    ledger.put(rows(1))
    ledger.path.rmdir()
    ledger.put(rows(2))
    assert on_disk(ledger.path) == told(rows(0, 1, 2))
