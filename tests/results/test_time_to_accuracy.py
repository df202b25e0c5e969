"""Simulated step times and trained accuracies, joined."""

import json

import pytest

from toolkit.errors import UserError
from toolkit.figures.time_to_accuracy_figure import draw_time_to_accuracy
from toolkit.results.time_to_accuracy import (
    TrainedMethod,
    accuracy_cells,
    accuracy_table,
    time_to_accuracy,
    trained_methods,
)

DP = {"_target_": "toolkit.schedule.catalog.data_parallel"}
CYCLIC = {"_target_": "toolkit.schedule.catalog.cyclic"}
DDP = {"_target_": "toolkit.runtime.baselines.DDP"}


def comparison(folder, rules, metrics=None):
    """A comparison's result, of rules by name: schedule, runtime of its own, and accuracy."""
    config = {
        "runtime": {
            "_target_": "toolkit.runtime.Distributed",
            "compression": "none",
        },
        "rules": {name: schedule for name, (schedule, _, _) in rules.items()},
        "own": {name: {"runtime": runtime} for name, (_, runtime, _) in rules.items()},
    }
    if metrics is None:
        metrics = [
            {"rule": name, "accuracy": accuracy, "accuracy_sd": 0.5, "verdict": ""}
            for name, (_, _, accuracy) in rules.items()
        ]
    result = {"metrics": metrics, "provenance": {"config": config}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_methods_of_a_comparison(tmp_path):
    powersgd = DDP | {"compression": "powersgd"}
    folder = comparison(
        tmp_path,
        {
            "dp": (DP, {}, 90.0),
            "late": (CYCLIC | {"delay": 1}, {"compression": "topk"}, 89.0),
            "fresh": (CYCLIC | {"delay": "freshest"}, {"compression": "int4"}, 89.5),
            "powersgd": (DP, powersgd | {"low_rank": 2}, 88.0),
            "rank 7": (DP, powersgd | {"low_rank": 7}, 88.5),  # no step time
            "local": (DP, {"_target_": "toolkit.runtime.baselines.LocalSGD"}, 87.0),
            "random": (CYCLIC | {"delay": [0.5]}, {}, 86.0),
            "diverged": (DP, DDP, None),
        },
    )
    methods = [
        (each.rule, each.method, each.accuracy) for each in trained_methods([folder])
    ]
    assert methods == [
        ("ddp", "none", 90.0),
        ("cdp_v1", "topk", 89.0),
        ("cdp_v2", "int4", 89.5),
        ("ddp", "powersgd_2", 88.0),
        ("ddp", "local_sgd", 87.0),
    ]


@pytest.mark.parametrize(
    ("rules", "metrics", "message"),
    [
        ({}, [{"seconds": 1.0}], "no comparison of accuracies"),
        ({"one": (DP, DDP | {"compression": "fp8"}, 90.0)}, None, "study=compression"),
    ],
)
def test_refuses_what_has_no_such_methods(tmp_path, rules, metrics, message):
    with pytest.raises(UserError, match=message):
        trained_methods([comparison(tmp_path, rules, metrics)])


def test_of_a_method_that_several_have_trained_the_first_counts(tmp_path):
    folders = []
    for name, accuracy in (("one", 90.0), ("other", 80.0)):
        (tmp_path / name).mkdir()
        late = (CYCLIC | {"delay": 1}, {"compression": name}, accuracy)
        rules = {"dp": (DP, {}, accuracy), "late": late}
        folders.append(comparison(tmp_path / name, rules))
    (method,) = trained_methods(folders)
    assert (method.rule, method.accuracy) == ("ddp", 90.0)


PLACE = {
    "model": "net",
    "batch": 4,
    "samples": "images",
    "machine": "links",
    "ratio": 2.0,
    "whole_ddp": 2.0,
}
TRAINED = [
    TrainedMethod("ddp", "none", 90.0, 0.5, ""),
    TrainedMethod("cdp_v1", "none", 89.0, 0.5, "equivalent within 1"),
    TrainedMethod("ddp", "topk", 88.0, None, ""),
    TrainedMethod("cdp_v1", "topk", 90.0, 0.2, ""),
    TrainedMethod("cdp_v2", "low_rank", 91.0, 0.2, ""),
]
ROWS = [
    PLACE | {"method": "none", "ddp": 2.0, "cdp_v1": 1.5, "cdp_v2": 1.8},
    PLACE | {"method": "topk", "ddp": 0.5, "cdp_v1": 0.6, "cdp_v2": 0.7},
    PLACE | {"method": "free_links", "ddp": 0.1, "cdp_v1": 0.1, "cdp_v2": 0.1},
]


def test_the_front_has_what_no_other_beats():
    rows = time_to_accuracy(TRAINED, ROWS)
    # What has no step time, low_rank here, is left out.
    assert [(row["name"], row["time"], row["front"]) for row in rows] == [
        ("DDP top-k", 0.25, True),
        ("CDP-v1 top-k", 0.3, True),
        ("CDP-v1 whole", 0.75, False),
        ("DDP whole", 1.0, False),
    ]


def test_each_machine_has_its_own_front():
    slower = [row | {"machine": "slower", "cdp_v1": 9.0} for row in ROWS]
    rows = time_to_accuracy(TRAINED, [*ROWS, *slower])
    fronts = {
        machine: {
            row["name"] for row in rows if row["front"] and row["machine"] == machine
        }
        for machine in ("links", "slower")
    }
    assert fronts == {
        "links": {"DDP top-k", "CDP-v1 top-k"},
        "slower": {"DDP top-k", "DDP whole"},
    }


def test_cells_and_figure():
    rows = time_to_accuracy(TRAINED, ROWS)
    cells = [accuracy_cells(row) for row in rows]
    assert [cell["accuracy (%)"] for cell in cells] == [
        "88.00",
        "90.00 ± 0.20",
        "89.00 ± 0.50",
        "90.00 ± 0.50",
    ]
    assert [cell["on the front"] for cell in cells] == ["yes", "yes", "", ""]
    table = accuracy_table(rows)
    assert [row["net, 4 images, M = 2 C"] for row in table] == [
        "0.250 *",
        "0.300 *",
        "0.750",
        "1.000",
    ]
    figure = draw_time_to_accuracy(rows)
    (axes,) = figure.axes
    front_line = axes.lines[0]
    assert [*front_line.get_xdata()] == [0.25, 0.3]
    assert [*front_line.get_ydata()] == [88.0, 90.0]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [row["name"] for row in rows]
