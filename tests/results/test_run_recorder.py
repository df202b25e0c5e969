"""A run is recorded: its result is written once, when W&B's run is closed, however that ends."""

import json
from contextlib import contextmanager

import pytest

from tests.training.test_run_with_checkpoints import built
from toolkit.files import write_json
from toolkit.results import Progress, Tracker, run_recorder
from toolkit.results.run_recorder import RunRecorder

pytestmark = pytest.mark.usefixtures("analysed_once")


@pytest.fixture
def written(monkeypatch):
    """Names of the JSON files that are written."""
    names = []

    def write(path, content):
        names.append(path.name)
        write_json(path, content)

    monkeypatch.setattr(run_recorder, "write_json", write)
    return names


def record(folder, conclude=True):
    run = built("epochs=1")
    with RunRecorder(run, folder, resume=False) as recorder:
        with (
            Progress(1, visible=False) as progress,
            recorder.training(progress, resume=False) as train,
        ):
            outcome = train()
        assert not (folder / "result.json").exists()
        if conclude:
            recorder.conclude(outcome, None, 0.0)
    return recorder


def closing(monkeypatch, close):
    @contextmanager
    def track(*arguments, **options):
        tracker = Tracker()
        yield tracker
        close(tracker)

    monkeypatch.setattr(run_recorder, "track", track)


def test_the_result_has_the_notes_of_closing(tmp_path, monkeypatch, written):
    closing(monkeypatch, lambda tracker: tracker.notes.append("W&B has failed"))
    recorder = record(tmp_path)
    assert written == ["result.json"]
    assert recorder.unwritten == []
    assert json.loads((tmp_path / "result.json").read_text())["notes"] == [
        "W&B has failed"
    ]
    assert recorder.result["notes"] == []


def test_an_interrupted_upload_does_not_lose_the_result(tmp_path, monkeypatch, written):
    def interrupt(tracker):
        raise KeyboardInterrupt

    closing(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path)
    assert written == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text())["metrics"]["epoch"] == 0


def test_a_run_that_was_not_concluded_has_no_result(tmp_path, written):
    record(tmp_path, conclude=False)
    assert written == []
    assert (tmp_path / "epochs.csv").exists()
