"""Damaged image folders: a short fuzz, what the fuzz finds fault with, and a run that skips."""

import random
import re
from collections import Counter

import pytest

from tests.experiments.command import refused, rows, run
from tests.thorough import thorough
from toolkit.training.data import image_folder


@pytest.fixture
def fuzz(benchmark_module):
    return benchmark_module("data_fuzz")


@thorough
def test_every_kind_of_damage(tmp_path):
    finished = run("bench", "bench=data_fuzz", "bench.mutations=38", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    found, done = rows(tmp_path / "bench.csv"), rows(tmp_path / "mutations.csv")
    assert len({row["mutation"] for row in found}) == len(found) == 19
    outcomes = Counter(each["outcome"] for each in done)
    assert set(outcomes) == {"refused", "equal", "changed", "skipped"}
    for name, n in outcomes.items():
        assert sum(int(row[name]) for row in found) == n
    assert all(("SET" in each["message"]) == bool(each["message"]) for each in done)


@pytest.fixture
def ended(fuzz, tmp_path, monkeypatch):
    """A round in which the toolkit reads as ``wrong`` does, from what it should have read."""
    whole, read = fuzz.build(tmp_path / "whole"), fuzz.read

    def end(wrong, kind, how):
        monkeypatch.setattr(fuzz, "read", lambda *_: wrong(read(whole)))
        done = fuzz.fuzz.Round(kind, 0)
        fuzz.one_round(done, whole, how, 0, random.Random(0))
        return done

    return end


def bug(read):
    raise KeyError("data")


def no_reason(read):
    image_folder("/no/such")


@pytest.mark.parametrize(
    ("wrong", "kind", "damaged", "outcome", "message"),
    [
        (lambda read: read, "folder with more", "refuse", "equal", ""),
        (lambda read: read, "noise", "refuse", "silent", "read, though SET.* is damaged"),
        (lambda read: read, "noise", "skip", "silent", r"skipped \[\], and \['SET"),
        (lambda read: read._replace(test=read.test + 1), "folder with more", "refuse", "silent",
         r"other pixels, by 1.00"),
        (lambda read: read._replace(labels=[0] * 6), "folder with more", "refuse", "silent",
         r"classes \[0, 0,"),
        (lambda read: read._replace(n_train=1), "folder with more", "refuse", "silent",
         "1 training images for 12"),
        (lambda read: read._replace(damaged=["other"]), "folder with more", "skip", "silent",
         r"skipped \['other'\]"),
        (bug, "noise", "refuse", "traceback", "Traceback"),
        (no_reason, "noise", "refuse", "unclear", "/no/such"),
        (no_reason, "folder with more", "refuse", "needless", "/no/such"),
    ],
)  # fmt: skip
def test_outcomes(fuzz, ended, wrong, kind, damaged, outcome, message):
    done = ended(wrong, kind, damaged)
    assert done.outcome == outcome, done
    assert re.search(message, done.message)
    row = fuzz.fuzz.summary([done], fuzz.PASSED, fuzz.FAILED)
    assert (row["failed"], row[outcome]) == (int(outcome != "equal"), 1)


def test_training_skips_a_damaged_image(fuzz, tmp_path):
    """From the command line; and is refused by default."""
    root = fuzz.build(tmp_path / "set")
    broken = root / "train/class0/0.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    images = ("data=image_folder", f"data.root={root}", "data.image_size=16", "data.num_workers=1")
    tiny = ("model=resnet8", "epochs=2", "batch=3", f"hydra.run.dir={tmp_path}/run")
    message = refused("train", *images, *tiny)
    assert message.startswith(f"{broken} ")
    assert "data.damaged=skip" in message
    finished = run("train", *images, *tiny, "data.damaged=skip")
    assert finished.status == 0, finished.err
    assert finished.err.count("warning: ") == 1
    assert f"warning: {broken} is damaged" in finished.err
