from types import SimpleNamespace

from toolkit.results.speed import Speed


def steps(first, last, samples=8):
    return [SimpleNamespace(step=k, samples=samples) for k in range(first, last + 1)]


def trained(speed, seen, start, seconds=1.0):
    """A step of ``seen`` every so many seconds; when the last is done."""
    for k, step in enumerate(seen):
        speed.trained(step, start + k * seconds)
    return start + (len(seen) - 1) * seconds


def test_images_a_second_from_the_first_step_on():
    speed = Speed()
    assert not speed.begun
    assert speed.rate(0.0) is None
    now = trained(speed, steps(1, 5), 0.0, seconds=0.5)
    assert speed.begun
    assert speed.rate(now) == 16
    assert speed.rate(now + 2) == 8


def test_the_first_step_that_is_seen_has_no_time_of_its_own():
    """Not even in mid-epoch, where a run is resumed."""
    for first in (1, 6):
        speed = Speed()
        speed.trained(steps(first, first)[0], 100.0)
        assert speed.rate(101.0) is None
        assert speed.rate(trained(speed, steps(first + 1, 9), 101.0)) == 8


def test_what_passes_between_epochs_is_not_the_time_of_a_step():
    speed = Speed()
    now = trained(speed, steps(1, 3), 0.0)
    assert speed.rate(trained(speed, steps(1, 3), now + 1000)) == 8


def test_restarted_it_counts_what_follows():
    speed = Speed()
    now = trained(speed, steps(1, 5), 0.0)
    speed.restart(now)
    assert speed.rate(now + 1) is None
    assert speed.rate(trained(speed, steps(6, 9, samples=4), now + 0.5, seconds=0.5)) == 8
