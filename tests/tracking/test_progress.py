import pytest

from toolkit.tracking import Progress


def test_counts_epochs_in_steps(capsys):
    with Progress(2) as progress:
        progress.run("CDP-v2, seed 0")
        for _ in range(2):
            for step in range(1, 4):
                progress.step(step, 3)
        progress.note("test 97%")
    last = capsys.readouterr().err.split("\r")[-1]
    assert "CDP-v2, seed 0: 100%" in last
    assert "2.0/2 epochs" in last
    assert "test 97%" in last


def test_is_closed_by_an_error(capsys):
    with pytest.raises(KeyError), Progress(1):
        raise KeyError
    assert capsys.readouterr().err.endswith("\n")
