"""Costs of stages from a file: what is read, and what is refused."""

import pytest
import yaml

from toolkit.cost import UNIT
from toolkit.cost.cost_file import BATCH, COLUMNS, read_costs
from toolkit.cost.worker_forms import BUCKETS
from toolkit.errors import UserError

ROWS = ("10,8,12,100,5,40", "20,16,4,50,1,80")
CSV = "\n".join([",".join(COLUMNS), *ROWS])
YAML = yaml.safe_dump(
    [dict(zip(COLUMNS, map(float, row.split(",")), strict=True)) for row in ROWS]
)


@pytest.mark.parametrize(("name", "text"), [("mine.csv", CSV), ("mine.yaml", YAML)])
def test_each_row_is_a_stage(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    first, second = read_costs(path)(2)
    assert first.op_seconds(UNIT) == pytest.approx([0.01, 0.02, 0.008, 0.012])
    assert second.op_seconds(UNIT) == pytest.approx([0.02, 0.02, 0.016, 0.004])
    assert (first.activation_bytes, first.output_bytes, first.parameter_bytes) == (
        1e8,
        5e6,
        4e7,
    )
    assert (first.input_bytes, second.input_bytes) == (0, 5e6)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "a row per stage"),
        ("forward_ms\n1", "columns, between commas, are"),
        (CSV.replace(",", ";"), "columns, between commas, are"),
        (
            CSV.replace("12,100", "fast,100"),
            "stage 0: backward_weights_ms .* got 'fast'",
        ),
        (CSV.replace("20,16", "20,-16"), "stage 1: backward_inputs_ms .* got '-16'"),
        (CSV.replace("20,16", "nan,16"), "stage 1: forward_ms .* got 'nan'"),
        (CSV + ",7", "columns, between commas, are"),
        (f"{','.join(COLUMNS)}\n0,0,0,1,1,1", "no stage takes any time"),
    ],
)
def test_other_files_are_refused(text, wrong, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=wrong):
        read_costs(path)


def test_consecutive_rows_are_merged(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([CSV, "30,20,40,10,2,8", "10,8,12,30,3,4"]))
    file_costs = read_costs(path)
    assert file_costs.batch is None
    (whole,) = file_costs(1)
    assert whole.op_seconds(UNIT) == pytest.approx([0.07, 0.12, 0.052, 0.068])
    assert (whole.activation_bytes, whole.parameter_bytes) == pytest.approx(
        (1.9e8, 1.32e8)
    )
    assert (whole.input_bytes, whole.output_bytes) == (0, 3e6)

    # Rows take 30, 40, 90 and 30 ms; they have 40, 80, 8 and 4 MB of parameters.
    first, second = file_costs(2)
    assert (first.forward_seconds, second.forward_seconds) == pytest.approx(
        (0.03, 0.04)
    )
    assert second.input_bytes == first.output_bytes == 1e6
    by_parameters = file_costs(2, "parameters")
    assert [cost.parameter_bytes for cost in by_parameters] == [4e7, 9.2e7]
    assert [cost.parameter_bytes for cost in file_costs(1, BUCKETS)] == [
        4e7,
        8.8e7,
        4e6,
    ]
    with pytest.raises(UserError, match=r"4 rows.* 5 stages.* stages=4"):
        file_costs(5)
    with pytest.raises(UserError, match=r"\['layer'\]"):
        file_costs(2, ["layer"])


def test_a_file_says_its_micro_batch(tmp_path):
    path = tmp_path / "mine.csv"
    lines = CSV.splitlines()
    path.write_text(
        "\n".join([f"{lines[0]},{BATCH}", *[f"{line},8" for line in lines[1:]]])
    )
    file_costs = read_costs(path)
    assert file_costs.batch == 8
    assert "micro-batches of 8" in file_costs.in_words
    file_costs.check_batch(8)
    with pytest.raises(UserError, match=r"batch=4.* batch=8"):
        file_costs.check_batch(4)
    for values, wrong in (("8", "4"), r"\[8, 4\]"), (("8", "x"), "1 or more: got 'x'"):
        rows = [
            f"{line},{value}" for line, value in zip(lines[1:], values, strict=True)
        ]
        path.write_text("\n".join([f"{lines[0]},{BATCH}", *rows]))
        with pytest.raises(UserError, match=wrong):
            read_costs(path)


@pytest.mark.parametrize("name", ["mine.csv", "mine.yaml"])
def test_files_that_are_no_tables_are_refused(name, tmp_path):
    path = tmp_path / name
    for content in (b"\xff\xfe\x00", b"\x00", b"[{a: 1", b"[1, 2]"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=name):
            read_costs(path)
    with path.open("wb") as file:
        file.truncate(20 * 2**30)  # which takes no room on the disk
    with pytest.raises(UserError, match=f"{20 * 2**30} bytes"):
        read_costs(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        read_costs(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"costs=.*none\.csv cannot be read"):
        read_costs(tmp_path / "none.csv")
