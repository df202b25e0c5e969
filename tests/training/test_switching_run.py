"""Training runs that choose their schedules: they resume across changes, and are repeated."""

from unittest import mock

import pytest

from tests.stages import cut
from tests.training.test_run_with_checkpoints import assert_identical, built, weights
from toolkit.errors import UserError
from toolkit.runtime import SwitchDecision, Switching
from toolkit.schedule.spec_phases import in_order
from toolkit.training import Listeners, StoppedError, run_with_checkpoints
from toolkit.training.stop_signals import Signals

OPTIONS = (
    "schedule=cdp_v1",
    "epochs=2",
    "data.n_train=32",
    "save.steps=1",
    "save.keep=99",
)
CHOOSING = ("switch.candidates=[dp,cdp_v2]", "switch.every=2", "switch.loss_factor=1.5")
LOSSES = [4.0, 7.0, 5.0, 3.0]  # what is seen at each look


@pytest.fixture(autouse=True)
def scripted():
    """Cut models by hand, and let each look see a loss of :data:`LOSSES`."""
    plain = Switching.decide

    def decide(self, seconds: float, loss: float) -> SwitchDecision:
        return plain(self, seconds, LOSSES[len(self.decisions)])

    with (
        mock.patch("toolkit.training.training_run.partition", cut),
        mock.patch.object(Switching, "decide", decide),
    ):
        yield


def test_a_run_resumes_across_changes_and_its_phases_repeat_it(tmp_path):
    whole = run_with_checkpoints(built(*OPTIONS, *CHOOSING), tmp_path / "whole")
    switching = whole.run.switching
    assert switching.phases() == [("CDP-v1", 4), ("DP", 4), ("CDP-v1", 0)]
    for at in (3, 4, 5):
        folder, run = tmp_path / f"stopped {at}", built(*OPTIONS, *CHOOSING)
        with pytest.raises(StoppedError):
            stopped_at(run, folder, at)
        again = run_with_checkpoints(built(*OPTIONS, *CHOOSING), folder, resume=True)
        assert again.resumed_at == at
        assert [k.schedule for k in again.run.switching.decisions] == [
            "CDP-v1",
            "DP",
            "DP",
            "CDP-v1",
        ]
        assert_identical(weights(again), weights(whole))
    parts = [(switching.candidates[name], n) for name, n in switching.phases() if n]
    repeated = in_order(parts).overrides()
    assert repeated == (
        "schedule=dp stages=2 microbatches=2 'schedule.phases=[{schedule:cdp_v1,steps:4}]'"
    )
    given = [word.strip("'") for word in repeated.split(" ")]
    again = run_with_checkpoints(built(*OPTIONS, *given), tmp_path / "repeated")
    assert_identical(weights(again), weights(whole))


def stopped_at(run, folder, at):
    """Train until ``at`` steps are done, and stop there by a signal."""
    signals = Signals()

    def on_step(step):
        if step.result.step + 1 == at:
            signals.number = 15

    run_with_checkpoints(
        run, folder, listeners=Listeners(on_step=on_step), signals=signals
    )


def test_resuming_without_the_candidates_is_refused(tmp_path):
    with pytest.raises(StoppedError):
        stopped_at(built(*OPTIONS, *CHOOSING), tmp_path, 5)
    for options in ((), ("switch.candidates=[cdp_v2]", *CHOOSING[1:])):
        with pytest.raises(UserError, match="candidate"):
            run_with_checkpoints(built(*OPTIONS, *options), tmp_path, resume=True)
