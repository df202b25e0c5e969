import csv
import hashlib
import json
import os
from pathlib import Path

import pytest

from toolkit.files import digest_of, write_csv, write_json

ROWS = [{"rule": "dp", "accuracy": 97.5}, {"rule": 'cdp "v2", new', "accuracy": 0.1}]


def test_write_json(tmp_path):
    """Numbers that are not finite become null, since JSON has no NaN."""
    content = {
        "metrics": ROWS,
        "a": [float("nan"), {"b": float("inf")}],
        "folder": Path("a"),
    }
    write_json(tmp_path / "result.json", content)
    found = json.loads(
        (tmp_path / "result.json").read_text(), parse_constant=pytest.fail
    )
    assert found == {"metrics": ROWS, "a": [None, {"b": None}], "folder": "a"}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_write_csv(tmp_path):
    write_csv(tmp_path / "rows.csv", ROWS)
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [
            {**row, "accuracy": float(row["accuracy"])} for row in csv.DictReader(file)
        ] == ROWS


@pytest.mark.parametrize(
    ("write", "content"), [(write_json, {"new": 1}), (write_csv, [{"new": 1}])]
)
def test_old_file_stays_until_the_new_one_is_complete(
    tmp_path, monkeypatch, write, content
):
    path = tmp_path / "file"
    path.write_text("old")

    def power_cut(*_):
        assert path.read_text() == "old"
        raise OSError("power cut")

    monkeypatch.setattr(Path, "replace", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write(path, content)
    assert path.read_text() == "old"


def test_rows_that_cannot_be_written_change_nothing(tmp_path):
    path = tmp_path / "rows.csv"
    write_csv(path, ROWS)
    before = path.read_text()
    with pytest.raises(ValueError, match="other"):
        write_csv(path, [*ROWS, {"rule": "x", "other": 1}])
    assert path.read_text() == before
    assert [found.name for found in tmp_path.iterdir()] == ["rows.csv"]


def test_digest_is_of_a_regular_file_of_moderate_size(tmp_path):
    path = tmp_path / "orders.csv"
    path.write_bytes(b"0F0,0B0\r\n")
    assert digest_of(path) == hashlib.sha256(b"0F0,0B0\r\n").hexdigest()
    os.truncate(path, 2**26 + 1)  # without blocks on the disk
    with pytest.raises(OSError, match="67108864"):
        digest_of(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular"):
        digest_of(tmp_path / "pipe")
