"""Text in sequences: every token once, each with the one after it; and mistakes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick
from toolkit.errors import UserError
from toolkit.training.data import Tokens, text, token_files

CPU = torch.device("cpu")


def counted(n, n_test=20, length=8):
    """A text whose tokens are 0, 1, 2, ...: each is its place."""
    return Tokens(np.arange(n), np.arange(n_test), length, max(n, n_test))


def epoch_of(tokens, batch_size=1, epoch=0):
    batches = [*tokens.train(batch_size, 0, epoch, CPU)]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@given(n=st.integers(2, 60), length=st.integers(1, 9), epoch=st.integers(0, 3))
@quick
def test_sequences_lie_one_after_another_from_a_random_place_on(n, length, epoch):
    n = max(n, 2 * length)
    tokens = counted(n, n_test=length + 1, length=length)
    x, y = epoch_of(tokens, epoch=epoch)
    assert torch.equal(y, x + 1)
    seen = x.flatten().sort().values
    first = int(seen[0])
    assert 0 <= first < length
    assert torch.equal(
        seen, torch.arange(first, first + length * ((n - length) // length))
    )
    assert y.max() < n


def test_epochs_begin_at_other_places_and_in_another_order():
    tokens = counted(100)
    epochs = [epoch_of(tokens, epoch=epoch)[0] for epoch in range(8)]
    firsts = {int(epoch_of(tokens, epoch=epoch)[0].min()) for epoch in range(120)}
    assert firsts == {*range(8)}
    assert len({tuple((x[:, 0] - x.min()).tolist()) for x in epochs}) == 8


def test_the_test_reads_its_text_once():
    tokens = counted(40, n_test=35)
    x, y = next(iter(tokens.test(10, CPU)))
    assert x.tolist() == [[*range(8 * k, 8 * k + 8)] for k in range(4)]
    assert torch.equal(y, x + 1)
    # the last token is an answer only
    assert [len(counted(40, n_test=n).test(1, CPU)) for n in (16, 17)] == [1, 2]


def test_bytes_of_files_in_the_order_of_their_paths(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 200)))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(bytes(range(100)))
    (tmp_path / "other.md").write_bytes(b"nothing")
    found = text(str(tmp_path), length=10, test_share=0.25)
    x, _ = next(iter(found.test(4, CPU)))
    assert x.flatten().tolist() == [*range(150, 190)]
    seen, _ = epoch_of(found)
    assert len(seen) == 14
    assert seen.max() < 150
    monkeypatch.setenv("HOME", str(tmp_path))
    alone = text("~/b.txt", length=10, test_share=0.5)
    assert next(iter(alone.test(4, CPU)))[0].flatten().tolist() == [*range(150, 190)]


def test_without_a_file_it_is_the_reference_of_python():
    found = text(length=512)
    words = bytes(
        torch.cat([x for x, _ in found.train(16, 0, 0, CPU)]).flatten().tolist()
    )
    assert len(words) > 300_000
    assert b"statement" in words
    assert found.form.vocabulary == 256


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_numbers_in_files(tmp_path, dtype):
    for name, first in (("train", 0), ("val", 100)):
        np.arange(first, first + 50).astype(dtype).tofile(tmp_path / f"{name}.bin")
    found = token_files(str(tmp_path), length=7, vocabulary=150, dtype=dtype)
    x, y = next(iter(found.test(7, CPU)))
    assert x.flatten().tolist() == [*range(100, 149)]
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda root: text(str(root / "no.txt")), r"data.root=.*no.txt"),
        (lambda root: text(str(root)), r"data.root=.* \.txt"),
        (lambda root: text(test_share=1.0), r"data.test_share.* 1\.0"),
        (lambda root: text(test_share=0.0), r"data.test_share.* 0\.0"),
        (lambda root: text(length=0), "data.length.* 0"),
        (lambda root: text(length=10**6), "data.length=1000000.* 2000"),
        (lambda root: counted(15), "15 .*training.* data.length=8.* 16"),
        (lambda root: counted(16, n_test=8), "8 .*test .* data.length=8.* 9"),
        (lambda root: token_files(None), "data.root.*train.bin"),
        (lambda root: token_files(str(root)), "data.root.*/train.bin"),
        *[
            (lambda root, k=k: token_files(str(root), dtype=k), f"data.dtype.* '{k}'")
            for k in ("half", "words", "m8")
        ],
    ],
)
def test_refuses(tmp_path, bad, message):
    with pytest.raises(UserError, match=message):
        bad(tmp_path)


@pytest.mark.parametrize("size", [63, 0])
def test_half_a_number_and_an_empty_file(tmp_path, size):
    (tmp_path / "val.bin").write_bytes(bytes(64))
    (tmp_path / "train.bin").write_bytes(bytes(size))
    with pytest.raises(UserError, match=r"train.bin .* data.dtype=uint16"):
        token_files(str(tmp_path), length=4)


@pytest.mark.parametrize("strange", [11, -1])
def test_tokens_beyond_the_vocabulary(strange):
    """Of the test at once; of the training text, which may be long, where they are met."""
    tokens = np.append(np.full(40, 10), strange)
    message = f"text has a token {strange}; data.vocabulary=11 allows 0 to 10"
    with pytest.raises(UserError, match=message):
        Tokens(tokens[:40], tokens, 8, 11)
    found = Tokens(np.resize(tokens[-1:], 40), tokens[:40], 8, 11)
    with pytest.raises(UserError, match=message):
        [*found.train(2, 0, 0, CPU)]


def test_folders_in_the_place_of_files(tmp_path):
    (tmp_path / "chapters.txt").mkdir()
    (tmp_path / "chapters.txt" / "one.txt").write_bytes(bytes(range(100)))
    assert text(str(tmp_path), length=4).form.length == 4
    (tmp_path / "train.bin").mkdir()
    with pytest.raises(UserError, match=r"data.root.*/train.bin"):
        token_files(str(tmp_path))
