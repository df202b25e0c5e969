"""Measurements of a rank's devices agree with predictions that are made before they run."""

import csv
import json
from pathlib import Path

import pytest

from tests.thorough import THOROUGH
from tests.training.test_devices import DEVICES, TEXT, built
from toolkit.results import Tracker
from toolkit.results.measured_tables import write_measured
from toolkit.runtime import join, launch

STEPS = 3
EXACT = "1F1B"
WORKERS = "CDP-v2, AdamW, scores that are whole"
PARTLY = "messages in 16 bits, activations computed again"
STAGES = "four stages, activations in 8 bits"
CASES = {
    EXACT: (),
    WORKERS: (
        "schedule=cdp_v2",
        "microbatches=2",
        "optimizer=adamw",
        "label_smoothing=0.1",
    ),
    PARTLY: ("runtime.compression=bf16", "checkpoint=all"),
}
if THOROUGH:
    CASES[STAGES] = (
        "runtime.width=1",
        "stages=4",
        "runtime.boundary_compression=int8",
    )
WITHIN = 0.02


class Scalars(Tracker):
    """Keeps the summary of a run."""

    def __init__(self):
        super().__init__()
        self.scalars = {}

    def summary(self, values):
        self.scalars |= values

    def log(self, values, step=None):
        pass


def measure(folder):
    """Tables of each case; of the first process, which writes them."""
    join()
    tables = {}
    for name, options in CASES.items():
        # Cut within attention, where what a rank receives has to be copied.
        sizes = ("model.width=64", "model.heads=4", "epochs=1")
        run = built(folder, *DEVICES, *sizes, f"runtime.record={STEPS}", *options)
        run.run()
        measured = run.measurements()
        if run.runtime.writes:
            tracker = Scalars()
            rows, seconds, notes = write_measured(measured, run, Path(folder), tracker)
            with (Path(folder) / "ranks.csv").open() as table:
                headings = next(csv.reader(table))
            assert headings == [*rows[0]]
            tables[name] = json.loads(
                json.dumps((rows, seconds, notes, tracker.scalars))
            )
    return tables


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    (folder / "text.txt").write_text(TEXT)
    return launch(measure, 4, str(folder))[0]


@pytest.mark.parametrize("name", CASES)
def test_devices_hold_and_send_what_is_predicted(measured, name):
    rows, _, notes, _ = measured[name]
    assert notes == []
    assert len(rows) == (4 if name == STAGES else 2)
    # In CDP one rank updates for both.
    assert sum(row["optimizer_state"] for row in rows) > 0
    for row in rows:
        assert 0 < row["peak_weights"] <= row["most_weights"]
        if name == WORKERS:
            # How many versions meet depends on when messages arrive.
            assert row["predicted_weights"] <= row["most_weights"]
        else:
            assert row["predicted_weights"] == row["peak_weights"]
        assert row["predicted_optimizer_state"] == row["optimizer_state"]
        if name != PARTLY:
            assert row["predicted_bytes_sent"] == row["bytes_sent"] > 0
            assert row["predicted_activations"] == pytest.approx(
                row["peak_activations"], rel=WITHIN
            )


@pytest.mark.parametrize("name", CASES)
def test_scalars_are_those_of_the_tables(measured, name):
    rows, seconds, _, scalars = measured[name]
    for origin in ("measured", "predicted"):
        assert scalars[f"{origin}/step_seconds"] == seconds[origin] > 0
    if name != PARTLY:
        sent = scalars["predicted/bytes_sent_a_step"]
        total = sum(row["predicted_bytes_sent"] for row in rows)
        assert sent == pytest.approx(total / len(rows) / STEPS)
        assert sent == pytest.approx(scalars["measured/bytes_sent_a_step"])
        peak = scalars["predicted/peak_mib_of_rank"]
        assert peak == pytest.approx(scalars["measured/peak_mib_of_rank"], rel=0.1)


def test_what_cannot_be_predicted_is_left_out(measured):
    rows, _, _, scalars = measured[PARTLY]
    for row in rows:
        assert not {"predicted_bytes_sent", "predicted_activations"} & row.keys()
    predicted = {name for name in scalars if name.startswith("predicted/")}
    assert predicted == {"predicted/step_seconds"}
