"""CIFAR-10's batch files: read if they are the published ones, and never trusted."""

import hashlib
import os
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from tests.training.test_data import CPU
from toolkit.training.data import cifar10

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
BATCH = {"data": PIXELS, "labels": [3, 0, 9, 9], "filenames": ["a.png"] * 4}


def of_python_2():
    """The published files are of that time: bytes are strings."""
    raw = PIXELS.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85q\x07U\x01bq"
    )
    array += (
        b"\x08\x87q\x09Rq\x0a(K\x01K\x04M\x00\x0c\x86q\x0bcnumpy\ndtype\nq\x0cU\x02u1q\x0dK\x00"
    )
    array += (
        b"K\x01\x87q\x0eRq\x0f(K\x03U\x01|q\x10NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x11b"
    )
    array += b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"q\x12tq\x13b"
    labels = b"]q\x02(K\x03K\x00K\x09K\x09e"
    return b"\x80\x02}q\x01(U\x06labelsq\x03" + labels + b"U\x04dataq\x04" + array + b"u."


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes the batch files, and publishes them unless they are ``damaged``."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(data, damaged=None, md5=None):
        for name in ("data_batch_1", "test_batch"):
            (folder / name).write_bytes(data)
        if damaged is not None:
            (folder / "test_batch").write_bytes(damaged)
        monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", md5]])
        monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5]])
        return tmp_path

    return write


def refused(root):
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as caught:
        cifar10(str(root))
    message = str(caught.value)
    start = f"data.root={root}: {root}/cifar-10-batches-py/test_batch "
    end = (
        ": cifar-10-batches-py/ is incomplete or damaged; unpack cifar-10-python.tar.gz there again"
    )
    assert message.startswith(start)
    assert message.endswith(end)
    return message.removeprefix(start).removesuffix(end)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_is_read_is_what_pickle_reads(files, protocol):
    data = of_python_2() if protocol == 2 else pickle.dumps(BATCH, protocol)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = pickle.loads(data, encoding="latin1")
    images = cifar10(str(files(data)), 0, False)
    ((x, y),) = images.test(4, CPU)
    pixels = torch.as_tensor(expected["data"]).view(4, 3, 32, 32) / 255
    torch.testing.assert_close(x, (pixels - mean) / std)
    assert y.tolist() == expected["labels"] == [3, 0, 9, 9]
    assert images.damaged == ()


mean, std = (
    torch.tensor(c).view(3, 1, 1) for c in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
)


def test_the_published_sum(files):
    data = pickle.dumps(BATCH)
    md5 = hashlib.md5(data).hexdigest()
    assert cifar10(str(files(data, md5=md5))).form.n_classes == 10
    changed = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    found = hashlib.md5(changed).hexdigest()
    assert refused(files(data, changed, md5)) == (
        f"({len(data)} bytes) has the MD5 sum {found} and the published file {md5}"
    )
    assert refused(files(data, data[:1000], md5)).startswith("(1000 bytes) has the MD5 sum")


class Malicious:
    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", ["alone", "label", "data"])
def test_no_code_is_run(files, tmp_path, where):
    bad = Malicious()
    bad.path = str(tmp_path / "made")
    batch = {"alone": bad, "label": {**BATCH, "labels": [bad]}, "data": {**BATCH, "data": bad}}
    message = refused(files(pickle.dumps(BATCH), pickle.dumps(batch[where])))
    assert "cannot be unpickled (UnpicklingError('it asks for posix.mkdir" in message
    assert not (tmp_path / "made").exists()


def changed(**entries):
    return pickle.dumps({**BATCH, **entries})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cannot be unpickled (EOFError())"),
        (pickle.dumps(BATCH)[:-100], "cannot be unpickled ("),
        (b"<!DOCTYPE html>", "cannot be unpickled ("),
        (pickle.dumps([1, 2]), "holds a list and no batch of images"),
        (pickle.dumps({"labels": [1]}), "holds no data and labels"),
        (changed(data=[1]), "holds no data and labels"),
        (changed(labels="abcd"), "holds no data and labels"),
        (changed(labels=[1, 2, 3]), "holds data of shape (4, 3072) and 3 labels: expected as many"),
        (changed(labels=[1, 2, 3, 10]), "has the label 10: expected 0 to 9"),
        (changed(labels=[1, 2, 3, None]), "has the label None: expected 0 to 9"),
        (changed(data=PIXELS[:, :3000].copy()), "holds data of shape (4, 3000) and 4 labels: exp"),
        (changed(data=PIXELS.astype(np.int16)), "holds data of shape (4, 3072) and 4 labels: exp"),
        (changed(data=np.asfortranarray(PIXELS)), "holds data of shape (4, 3072) and 4 labels: e"),
        (changed(data=PIXELS[:0], labels=[]), "holds data of shape (0, 3072) and 0 labels: expec"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", "cannot be unpickled ("),  # a length of 2**63
        (b"\x80\x04Nr\xff\xff\xff\xff.", "holds a NoneType and no batch"),  # entry 2**32 of a list
    ],
)
def test_what_is_no_batch(files, data, problem):
    assert refused(files(pickle.dumps(BATCH), data)).startswith(problem)


def test_a_file_that_is_missing_or_none(files):
    root = files(pickle.dumps(BATCH))
    path = root / "cifar-10-batches-py/test_batch"
    path.unlink()
    assert refused(root) == "is missing"
    path.mkdir()
    assert refused(root) == "cannot be read (it is no file)"


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "cifar-10-batches-py").touch()
    with pytest.raises(
        ValueError, match=r"data_batch_1 cannot be read \(Not a directory\): cifar-"
    ):
        cifar10(str(tmp_path))


def test_garbled_bytes(files):
    """Either an image or a label is another, as nobody can tell, or one sentence says no."""
    whole = pickle.dumps(BATCH, 4)
    chance = random.Random(0)
    root = files(whole)
    path = root / "cifar-10-batches-py/test_batch"
    n_refused = 0
    for _ in range(100):
        data = bytearray(whole)
        head = chance.random() < 0.7
        place = chance.randrange(200) if head else -1 - chance.randrange(150)
        data[place] ^= chance.randint(1, 255)
        path.write_bytes(data)
        try:
            ((x, y),) = cifar10(str(root)).test(4, CPU)
        except ValueError:
            refused(root)
            n_refused += 1
        else:
            assert x.shape == (4, 3, 32, 32)
            assert 0 <= y.min() <= y.max() <= 9
    assert 20 < n_refused < 100
