"""Numbers, units and cells of tables."""

from dataclasses import asdict
from fractions import Fraction
from math import nan

import pytest

from experiments.communication import terminal_cells
from toolkit import format as form
from toolkit.errors import UserError
from toolkit.format import (
    GIB,
    MIB,
    RATES,
    SIZES,
    TIMES,
    counted_cells,
    measured_cells,
    table,
)
from toolkit.metric import ACCURACY, LOSS
from toolkit.schedule.paper_table import compare, each_row


def test_table_aligns_text_left_and_numbers_right():
    rows = [
        {"rule": "dp", "accuracy": 97.5},
        {"rule": 'cdp "v2", new', "accuracy": 0.1},
    ]
    assert table(rows).splitlines() == [
        "rule             accuracy",
        "-------------  ----------",
        "dp                   97.5",
        'cdp "v2", new         0.1',
    ]


def test_table_keeps_formatted_cells():
    found = table(
        [{"a": "+0.90", "b": "1234567.891", "c": 0.5}, {"a": "-", "b": "2", "c": 2.0}]
    )
    assert [line.split() for line in found.splitlines()[2:]] == [
        ["+0.90", "1234567.891", "0.5"],
        ["-", "2", "2"],
    ]
    found = table([{"a": 10, "b": 2}, {"a": None}, {"a": 1e-7}])
    assert [line.rstrip() for line in found.splitlines()[2:]] == [
        "   10    2",
        "",
        "1e-07",
    ]
    assert table([{"a": "63.30"}], "github").splitlines()[-1] == "| 63.30 |"


def test_table_fits_into_a_line():
    rows = [{"rule": "dp", "train_loss": 0.5, "samples per second": 12}]
    assert (
        table(rows, width=42).splitlines()[0]
        == "rule      train_loss    samples per second"
    )
    assert table(rows, width=30).splitlines() == [
        "rule      train_    samples",
        "            loss        per",
        "                     second",
        "------  --------  ---------",
        "dp           0.5         12",
    ]
    many_columns = [{f"column{n}": n for n in range(9)}]
    assert [line.split() for line in table(many_columns, width=20).splitlines()] == [
        ["column0", "0"],
        ["---------", "---"],
        *([f"column{n}", str(n)] for n in range(1, 9)),
    ]
    assert table(rows, "github", 10) == table(rows, "github")
    rows = [{"setting": "with model parallelism", "ranks": 16, "sent": None}]
    assert [line.split() for line in table(rows, width=28).splitlines()] == [
        ["setting", "ranks", "sent"],
        ["---------------", "-----", "----"],
        ["with", "model", "16"],
        ["parallelism"],
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((-0.5, 1.0, "+"), "-0.50 ± 1.00"),
        ((-1e-15, 0.25, "+"), "+0.00 ± 0.25"),  # a difference of equal accuracies
        ((2.0, None), "2.00"),
        ((2.0, nan, "+"), "+2.00"),
        ((1.23456, 0.01234, "+", 3), "+1.235 ± 0.012"),
        ((None, 1.0), "-"),
        ((nan, 1.0), "-"),
    ],
)
def test_plus_minus(arguments, expected):
    assert form.plus_minus(*arguments) == expected


COMPARED = {
    "accuracy": 97.5, "accuracy_sd": 0.25, "difference": -0.5, "difference_95": 1.0,
    "loss": 1.25, "loss_sd": nan, "loss_difference": 0.0, "loss_difference_95": nan,
    "staleness_mean": 0.376, "staleness_max": 1, "peak_activations": 2.5, "traffic_max": 4.0,
}  # fmt: skip
TESTED = COMPARED | {
    "margin": 1.5, "equivalence_p": 0.0312, "verdict": "equivalent within 1.5"
}  # fmt: skip
AGAIN = {
    "workers": 8, "recomputed": [0, 2], "extra_time": 0.0926, "peak_bytes_together": 2**33,
    "peak_bytes_shifted": 2**32, "reduction": 0.5, "largest_reduction": 0.6,
    "peak_bytes_in_turn": 2**31,
}  # fmt: skip
RANK = {
    "rank": 1, "peak_activations": 4_863_232, "peak_weights": 1000, "device_peak": None,
    "most_weights": 2000,
    "messages_sent": 12, "bytes_sent": 1_889_136.0, "messages_received": 9, "bytes_received": 0,
}  # fmt: skip
PREDICTED = RANK | {
    "predicted_activations": 5_000_000.0, "optimizer_state": 3000,
    "predicted_optimizer_state": 4000.0, "predicted_bytes_sent": 2_000_000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (form.metric_cells(COMPARED, ACCURACY, "DP"), {
            "test accuracy (%)": "97.50 ± 0.25", "paired difference from DP": "-0.50 ± 1.00",
        }),
        (form.metric_cells(COMPARED, LOSS, "GPipe"), {
            "test loss (nats)": "1.250", "paired difference from GPipe": "+0.000",
        }),
        (form.metric_cells(TESTED, ACCURACY, "DP"), {
            "test accuracy (%)": "97.50 ± 0.25", "paired difference from DP": "-0.50 ± 1.00",
            "at a margin of 1.5": "equivalent within 1.5", "p (equivalence)": "0.031",
        }),
        (form.metric_cells(TESTED | {"equivalence_p": nan, "verdict": ""}, LOSS, "DP"), {
            "test loss (nats)": "1.250", "paired difference from DP": "+0.000",
            "at a margin of 1.5": "-", "p (equivalence)": "-",
        }),
        (form.staleness_cells(COMPARED), {"mean staleness (largest)": "0.38 (1)"}),
        (form.peak_cells(COMPARED), {
            "peak activations": "2.5", "largest traffic in a slot": "4",
        }),
        (form.reduction_cells({4: 0.4021, 32: 0.425}, 0.428), {
            "N = 4": "40.2%", "N = 32": "42.5%", "1 - mean/peak": "42.8%",
        }),
        (form.again_cells(AGAIN), {
            "N": 8, "computed again": "0, 2", "extra time": "9.3%", "together": "8.0 GiB",
            "at once": "4.0 GiB", "below": "50.0%", "limit": "60.0%", "op after op": "2.0 GiB",
            "this below": "75.0%",
        }),
        (form.rank_cells(RANK), {
            "rank": 1, "peak activations (MB)": "4.863", "peak weights (MB)": "0.001",
            "most weights (MB)": "0.002",
            "messages sent": 12, "sent (MB)": "1.889", "messages received": 9,
            "received (MB)": "0.000",
        }),
        (form.rank_cells(PREDICTED), {
            "rank": 1, "peak activations (MB)": "4.863", "predicted activations (MB)": "5.000",
            "peak weights (MB)": "0.001", "most weights (MB)": "0.002",
            "optimizer state (MB)": "0.003", "predicted optimizer state (MB)": "0.004",
            "messages sent": 12, "sent (MB)": "1.889", "predicted sent (MB)": "2.000",
            "messages received": 9, "received (MB)": "0.000",
        }),
    ],
)  # fmt: skip
def test_cells_of_a_row(found, expected):
    assert found == expected


def test_counted_and_measured_cells_are_fractions():
    """Of exact values and of those read from a file, such as 14/9, to which no float is equal."""
    row = compare(8)[7]
    exact = {"setting": row.setting, "rule": row.rule} | asdict(row.counted)
    read = {k: v if isinstance(v, str) else float(v) for k, v in exact.items()}
    assert counted_cells(exact) == counted_cells(read)
    assert counted_cells(read) == {
        "setting": "with model parallelism", "rule": "CDP-v1", "ranks": "36",
        "activations (all)": "1/8 (9/2) A", "weights": "3/8 P", "sent": "7/36 P",
        "messages": "14/9", "kept": "1/8 P", "in a slot": "1/8 P", "rounds": "1",
    }  # fmt: skip
    seen = {k: v for k, v in exact.items() if k in ("setting", "rule")}
    seen |= {f"{k}_measured": v for k, v in exact.items() if k not in seen}
    assert measured_cells(seen) == {
        k: counted_cells(exact)[k] for k in measured_cells(seen)
    }


@pytest.mark.parametrize(
    ("change", "how", "agree"),
    [
        ({}, "_measured", "yes"),
        ({"sent_measured": 1.25}, "_measured", "no"),
        ({"sent_formula": 1.25}, "_measured", "yes"),
        ({"sent_formula": 1.25}, "_formula", "no"),
    ],
)
def test_agreement(change, how, agree):
    row = {
        "rule": "DP",
        "ranks": 4.0,
        "ranks_measured": 4.0,
        "sent": 1.5,
        "sent_measured": 1.5,
    }
    assert form.agreement(row | change, how) == agree


def test_numbers_with_units():
    seconds = (4000.0, 12.345, 1.0, 0.25, 0.9996, 2.5e-3, 4e-6, 3e-9, 5e-10, 0.0)
    assert [" ".join(form.duration(value)) for value in seconds] == [
        "4000 s", "12.3 s", "1 s", "250 ms", "1000 ms", "2.5 ms", "4 µs", "3 ns", "0.5 ns", "0 ns"
    ]  # fmt: skip
    sizes = (0, 0.26 * MIB, 0.34 * MIB, 1.25 * MIB, 100 * MIB, 1023 * MIB, GIB, 80e9)
    expected = [
        "0.0 KiB",
        "266 KiB",
        "348 KiB",
        "1.2 MiB",
        "100 MiB",
        "1023 MiB",
        "1.0 GiB",
        "74.5 GiB",
    ]
    assert [form.size(n_bytes) for n_bytes in sizes] == expected
    found = [*map(form.digits, (0.12345, 1.5, 99.94, 123.4, 1500.0))]
    assert found == ["0.123", "1.5", "99.9", "123", "1500"]


@pytest.mark.parametrize(
    ("largest", "units", "name"),
    [
        (2.0, TIMES, "s"),
        (1.9, TIMES, "ms"),
        (1e-12, TIMES, "ns"),
        (GIB, SIZES, "MiB"),
        (0, SIZES, "KiB"),
        (5e6, RATES, "MB/s"),
    ],
)
def test_unit_for(largest, units, name):
    assert form.unit_for(largest, units)[1] == name


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("16GiB", 16 * GIB), ("1.5 GB", 1.5e9), ("300", 300), (2e9, 2e9), ("2TB", 2e12)],
)
def test_bytes_of_text(text, n_bytes):
    assert form.bytes_in(text) == n_bytes


@pytest.mark.parametrize("text", ["16GiBs", "GiB", "0", "-1GiB", "1.2.3GB", ""])
def test_bytes_of_other_text(text):
    with pytest.raises(UserError, match="memory"):
        form.bytes_in(text)


@pytest.mark.parametrize("n", [2, 8, 16])
def test_the_counted_table_has_80_columns(n):
    rows = []
    for row in each_row(n):
        counted = {name: float(value) for name, value in asdict(row.counted).items()}
        cells = counted_cells({"setting": row.setting, "rule": row.rule} | counted)
        rows.append(terminal_cells(cells))
    lines = table(rows, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 2 + len(rows) + (3 if n > 8 else 0)
    assert [row["kept"] for row in rows[:7:6]] == ["1", str(Fraction(1, n))]


def test_headings_are_broken_between_words_where_they_are_wider_than_cells():
    row = {"heavy ball / DP": "0.0702", "test_loss_of_all": "0.12345", "rule": "CDP-v2"}
    heading = table([row], width=28).split("--")[0].splitlines()
    words = [["heavy", "test_", "rule"], ["ball", "/", "loss_"], ["DP", "of_all"]]
    assert [line.split() for line in heading] == words


def test_a_table_with_a_column_without_a_heading_is_broken():
    row = {"": 0, "schedule": "CDP-v2 per stage and micro-batch", "memory": "1.0 MiB"}
    lines = table([row], width=30).splitlines()
    assert max(map(len, lines)) <= 30
    assert " ".join(lines[2:]).split() == [
        "0",
        "CDP-v2",
        "per",
        "stage",
        "1.0",
        "MiB",
        "and",
        "micro-batch",
    ]


def test_metrics_of_a_run_are_shares_in_per_cent():
    metrics = {"train_loss": 0.193233, "top1": 0.947222, "ema_top5": 1.0}
    assert form.run_cells(metrics | {"samples_per_second": 239.6}) == {
        "train loss": "0.1932",
        "top-1 (%)": "94.72",
        "ema top-5 (%)": "100.00",
        "samples/s": "239.6",
    }


def test_delays_are_named_by_the_labels_of_rules():
    row = {"rule": "late_2", "stage": 1, "delay": 2.0, "cosine": 0.58593}
    row |= {
        "gradient": 0.70405,
        "fresh_gradient": 0.66921,
        "moved": 123.4,
        "weights": 10.006,
    }
    lines = form.delay_table([row], {"late_2": "DP delay 2"}).splitlines()
    headings = [
        "rule",
        "stage",
        "late",
        "cosine",
        "gradient",
        "fresh",
        "moved",
        "weights",
    ]
    assert lines[0].split() == headings
    assert lines[2].startswith("DP delay 2 ")
    assert lines[2].split()[3:] == ["1", "2", "0.586", "0.704", "0.669", "123", "10"]
