"""The moving average of weights, step by step."""

import torch

from toolkit.runtime.ema import WeightAverage


def newest(value):
    return {"w": torch.full((2,), value, dtype=torch.float64)}


def test_early_updates_have_a_smaller_decay():
    """Decays 1/10 and 2/11; from update 1 on 0.15 is smaller than 2/11."""
    average = WeightAverage(decay=0.15)
    average.begin(newest(1.0))
    average.update(newest(2.0))
    first = 1.0 / 10 + 2.0 * 9 / 10
    torch.testing.assert_close(average.weights, newest(first))
    average.update(newest(5.0))
    torch.testing.assert_close(average.weights, newest(0.15 * first + 0.85 * 5.0))
    assert average.n_updates == 2


def test_it_begins_once_with_a_copy():
    weights = newest(1.0)
    average = WeightAverage(decay=0.9)
    average.begin(weights)
    weights["w"].fill_(7.0)
    average.begin(weights)
    torch.testing.assert_close(average.weights, newest(1.0))


def test_a_loaded_state_stays_the_callers():
    first = WeightAverage(decay=0.9)
    first.begin(newest(1.0))
    first.update(newest(2.0))
    state = first.state()
    kept = state["weights"]["w"].clone()
    second = WeightAverage(decay=0.9)
    second.load(state, None)
    second.update(newest(3.0))
    first.update(newest(3.0))
    torch.testing.assert_close(second.weights, first.weights)
    assert second.n_updates == first.n_updates == 2

    third = WeightAverage(decay=0.9)
    third.load({"weights": {"w": kept}, "n_updates": 1}, None)
    third.update(newest(3.0))
    torch.testing.assert_close(kept, newest(1.9)["w"])
