"""Damaged image sets: a short fuzz, what the fuzz finds fault with, and a run that skips."""

import os
import random
import re
import time
from collections import Counter

import pytest

from tests.experiments.command import EXPERIMENTS, cases, refused, run
from tests.experiments.test_results import rows
from tests.thorough import thorough
from toolkit.training.data import image_folder


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from benchmarks import data_fuzz

    return data_fuzz


@thorough
def test_every_kind_of_damage(tmp_path):
    finished = run("bench", "bench=data_fuzz", "bench.mutations=19", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    found, done = rows(tmp_path / "bench.csv"), rows(tmp_path / "mutations.csv")
    assert len({row["mutation"] for row in found}) == len(found) == len(done) == 19
    outcomes = Counter(each["outcome"] for each in done)
    assert set(outcomes) == {"refused", "equal", "changed", "skipped"}
    for name, n in outcomes.items():
        assert sum(int(row[name]) for row in found) == n
    assert all(("SET" in each["message"]) == bool(each["message"]) for each in done)


@pytest.fixture
def ended(fuzz, tmp_path, monkeypatch):
    """A round in which the toolkit reads as ``read`` does."""
    whole = fuzz.build("folder", tmp_path / "whole")

    def end(read, kind="noise", damaged="refuse", limit=20.0):
        monkeypatch.setattr(fuzz, "_read", lambda *_: read(whole.read))
        done = fuzz.fuzz.Round(kind, 0)
        fuzz.one_round(done, whole, fuzz.Case("folder", damaged), random.Random(0), limit)
        return done

    return end


def test_damage_that_goes_unseen_is_found(ended):
    """By each of its promises."""

    def brighter(whole):
        return whole._replace(train=[(image + 9, label) for image, label in whole.train])

    def relabelled(whole):
        return whole._replace(train=[(image, 0) for image, _ in whole.train])

    def uncounted(whole):
        return whole

    def miscounted(whole):
        return whole._replace(damaged=("other",))

    for read, message in (
        (brighter, "other batches: 9.0 levels"),
        (relabelled, r"other batches: classes \[0, 0,"),
        (miscounted, r"skipped \('other',\), and \(\) are damaged"),
    ):
        done = ended(read, "folder with more")
        assert done.outcome == "silent"
        assert re.match(message, done.message)
    for damaged in ("refuse", "skip"):
        assert ended(uncounted, damaged=damaged).outcome == "silent"
    assert ended(uncounted, "folder with more").outcome == "equal"


def bug(*_):
    raise KeyError("data")


def hang(*_):
    time.sleep(60)


def die(*_):
    os._exit(3)


def no_reason(*_):
    image_folder("/no/such")


@pytest.mark.parametrize(
    ("read", "kind", "outcome"),
    [
        (bug, "noise", "traceback"),
        (hang, "noise", "hang"),
        (die, "noise", "died"),
        (no_reason, "noise", "unclear"),
        (no_reason, "folder with more", "needless"),
    ],
)
def test_what_fails(fuzz, ended, read, kind, outcome):
    done = ended(read, kind, limit=1.0 if read is hang else 20.0)
    assert done.outcome == outcome, done
    row = fuzz.fuzz.summary([done], fuzz.PASSED, fuzz.FAILED)
    assert (row["failed"], row[outcome], row["rounds"]) == (1, 1, 1)


REFUSES = r"""
bench.mutations=0 | bench.mutations .* got 0
bench.limit=0 | bench.limit .* got 0
bench.kinds=[burnt] | bench.kinds 'burnt'
bench.sets=[mnist] | bench.sets 'mnist'
bench.sets=[] | bench.sets
"""


@pytest.mark.parametrize(("arguments", "pattern"), cases(REFUSES))
def test_refuses(tmp_path, arguments, pattern):
    refused("bench", "bench=data_fuzz", *arguments, f"hydra.run.dir={tmp_path}", match=pattern)


def test_training_skips_a_damaged_image(fuzz, tmp_path):
    """From the command line; and is refused by default."""
    root = tmp_path / "set"
    fuzz.build("folder", root)
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
