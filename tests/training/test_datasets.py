"""Datasets of torch's are trained on like any other set."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from tests.training.test_run_with_checkpoints import configured, weights
from toolkit.cli import build_run
from toolkit.errors import UserError
from toolkit.model import Images
from toolkit.training import run_with_checkpoints
from toolkit.training.data import Datasets, batches

pytestmark = pytest.mark.usefixtures("analysed_once")
CPU = torch.device("cpu")


class Noisy(Dataset):
    """Its samples are varied by torch's generator."""

    def __init__(self, n):
        self.images = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number] + 0.1 * torch.randn(3, 8, 8), number % 10


def inputs(batches):
    return torch.cat([x for x, _ in batches])


def test_samples_follow_from_seed_and_epoch():
    samples = Datasets(Noisy(20), Noisy(6), 10)
    assert samples.form == Images(3, 8, 8, 10)
    batches = samples.train(4, 1, 2, CPU)
    assert len(batches) == 5
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = inputs(batches)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inputs(samples.train(4, 1, 2, CPU)), first)
    assert torch.equal(inputs(batches.between(2, 4)), first[8:16])
    assert torch.equal(inputs(batches.parts(4, lambda batch: [1])), first[1::4])
    for other in (samples.train(4, 2, 2, CPU), samples.train(4, 1, 3, CPU)):
        assert not torch.equal(inputs(other), first)


def test_batches_are_sent_without_waiting_for_the_device(monkeypatch):
    sent = []
    monkeypatch.setattr(batches, "send", lambda tensor, device: sent.append(device) or tensor)
    list(Datasets(Noisy(8), Noisy(2), 10).train(4, 0, 0, torch.device("cuda")))
    assert sent == [torch.device("cuda")] * 4  # inputs and targets of two batches


def test_the_test_is_whole_and_shared_out():
    samples = Datasets(Noisy(20), Noisy(6), 10)
    whole = [(x, y) for x, y in samples.test(4, CPU)]
    assert [len(y) for _, y in whole] == [4, 2]
    assert torch.cat([y for _, y in whole]).tolist() == [0, 1, 2, 3, 4, 5]
    share = torch.cat([y for _, y in samples.test(4, CPU, 1, 2)])
    assert share.tolist() == [1, 3, 5]


def test_a_resumed_run_sees_the_same_samples(tmp_path):
    samples = Datasets(Noisy(32), Noisy(8), 10)
    whole = run_with_checkpoints(
        build_run(configured("epochs=2", "lr=constant"), samples), tmp_path / "whole"
    )
    expected = weights(whole)
    run_with_checkpoints(
        build_run(configured("epochs=1", "lr=constant"), samples), tmp_path / "again"
    )
    again = run_with_checkpoints(
        build_run(configured("epochs=2", "lr=constant"), samples), tmp_path / "again", resume=True
    )
    found = weights(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Noisy(4))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Stream(), "^train: got a Stream"),
        (TensorDataset(torch.zeros(4, 3, 8, 8)), r"the first sample is \(Tensor \[3, 8, 8\]\);"),
        (TensorDataset(torch.zeros(4, 3), torch.zeros(4)), r"\(Tensor \[3\], Tensor \[\]\);"),
    ],
)
def test_refuses(train, message):
    with pytest.raises(UserError, match=message):
        Datasets(train, Noisy(4), 10)


def test_other_batches_are_refused():
    samples = Datasets(Noisy(32), Noisy(8), 10)
    samples.train = lambda *_: torch.utils.data.DataLoader(Noisy(32), 8)
    with pytest.raises(UserError):
        build_run(configured(), samples)
