import csv
import json
import os
from pathlib import Path

import pytest

from toolkit.files import write_csv, write_json

ROWS = [{"rule": "dp", "accuracy": 97.5}, {"rule": 'cdp "v2", new', "accuracy": 0.1}]


def test_json_reads_back(tmp_path):
    content = {"metrics": ROWS, "folder": Path("a")}
    write_json(tmp_path / "result.json", content)
    assert json.loads((tmp_path / "result.json").read_text()) == content | {"folder": "a"}


def test_what_is_not_a_finite_number_is_null(tmp_path):
    """NaN is no JSON."""
    write_json(tmp_path / "a.json", {"a": [float("nan"), {"b": float("inf")}], "c": 1.5})
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert found == {"a": [None, {"b": None}], "c": 1.5}


def test_csv_reads_back(tmp_path):
    write_csv(tmp_path / "rows.csv", ROWS)
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [{**row, "accuracy": float(row["accuracy"])} for row in csv.DictReader(file)] == ROWS


@pytest.mark.parametrize(
    ("write", "content"), [(write_json, {"new": 1}), (write_csv, [{"new": 1}])]
)
def test_a_reader_never_finds_half_a_file(tmp_path, monkeypatch, write, content):
    """Until the new file is whole, the old one stays."""
    path = tmp_path / "file"
    path.write_text("old")

    def power_cut(*_):
        assert path.read_text() == "old"
        raise OSError("power cut")

    monkeypatch.setattr(os, "rename", power_cut)
    monkeypatch.setattr(Path, "replace", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write(path, content)
    assert path.read_text() == "old"


def test_what_cannot_be_written_changes_nothing(tmp_path):
    path = tmp_path / "rows.csv"
    write_csv(path, ROWS)
    before = path.read_text()
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        write_csv(path, [*ROWS, {"rule": "x", "other": 1}])
    assert path.read_text() == before
    assert [found.name for found in tmp_path.iterdir()] == ["rows.csv"]


def test_nothing_is_left_beside(tmp_path):
    write_json(tmp_path / "result.json", {})
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]
