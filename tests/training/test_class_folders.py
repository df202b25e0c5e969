"""Class folders: workers that last, damaged images, and random crops that depend on the seed."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from random import Random
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from tests.experiments.command import refused, run
from tests.thorough import more
from tests.training.test_damaged_checkpoints import BYTES
from tests.training.test_data import CLASSES, CPU, write_images, write_ten
from toolkit.errors import UserError
from toolkit.training.data import cifar10, class_folders, image_folder
from toolkit.training.data.class_folders import n_workers, read_image

MEAN, STD = (
    torch.tensor(c).view(3, 1, 1)
    for c in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)


@pytest.fixture
def root(tmp_path):
    """PNGs in colour, and in each split a grey JPEG."""
    write_images(tmp_path / "train", CLASSES, n=6, size=(40, 30))
    write_images(tmp_path / "val", CLASSES, n=4, size=(40, 30), seed=1)
    for path in tmp_path.glob("*/eel/0.png"):
        Image.open(path).convert("L").save(path.with_suffix(".jpg"))
        path.unlink()
    return tmp_path


def batches(images, device=CPU, **order):
    return [*images.train(6, **{"seed": 0, "epoch": 0, **order}, device=device)]


def files_of(images):
    """The training and the test images, as torchvision lists them."""
    return images._train.dataset.images, images._test.dataset.images


def cut(path, kept):
    path.write_bytes(path.read_bytes()[:kept])


# Workers

CHOSEN = [[3, 1], [0, 2], [5, 4]]


class Who(torch.utils.data.Dataset):
    """Each image is the process that reads it, the seed of its epoch and its number."""

    def __getitem__(self, key):
        return torch.tensor([os.getpid(), *key]), 0, []


@pytest.fixture
def begin(monkeypatch):
    """Start to read an epoch by a loader, which is made of a number of workers."""
    monkeypatch.setattr(class_folders, "normalise", lambda pixels, mean, std: pixels)

    def begin(loader, seed, chosen=CHOSEN):
        numbers = [(torch.tensor(batch), None) for batch in chosen]
        return (who for who, _ in loader.read(numbers, seed, CPU))

    return begin


def loader(num_workers):
    return class_folders._Loaded(Who(), [], num_workers, 1)


def assert_read(batches, seed):
    """All in their order; return the processes that have read them."""
    found = torch.stack([*batches])
    assert found[..., 1].unique().tolist() == [seed]
    assert found[..., 2].tolist() == CHOSEN
    return {*found[..., 0].flatten().tolist()}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_last_from_epoch_to_epoch(begin, num_workers):
    """Also if the reader counts batches, and never asks whether there is another one."""
    loaded = loader(num_workers)
    first = assert_read(begin(loaded, 7), 7)
    counted = begin(loaded, 8)
    assert assert_read([next(counted) for _ in CHOSEN], 8) == first
    assert assert_read(begin(loaded, 9), 9) == first
    assert len(first - {os.getpid()}) == num_workers
    assert not [*begin(loaded, 0, [])]


def test_two_epochs_at_once(begin):
    loaded = loader(1)
    assert_read(begin(loaded, 2), 2)
    outer = begin(loaded, 0)
    found = [next(outer)]
    assert_read(begin(loaded, 1), 1)
    assert_read([*found, *outer], 0)


def test_workers_survive_signals_to_all_processes_of_a_job(begin):
    """The run saves a checkpoint first, and reads until then."""
    loaded = loader(2)
    batches = begin(loaded, 0)
    found = [next(batches)]
    for number in ("INT", "TERM", "TERM"):  # a launcher may send it on
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        subprocess.run(["kill", f"-{number}", *pids], check=True)
    assert assert_read([*found, *batches], 0) == assert_read(begin(loaded, 1), 1)


@pytest.mark.parametrize("method", more(["fork"], ["fork", "spawn"]))
def test_workers_end_with_the_run(root, method):
    """Also in the middle of an epoch, while they read on."""
    program = f"""
import multiprocessing, torch
from toolkit.training.data import image_folder
if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    loaded = iter(image_folder({str(root)!r}, 8, 2).train(1, 0, 0, torch.device("cpu")))
    next(loaded)
"""
    (root / "program.py").write_text(program)
    subprocess.run([sys.executable, str(root / "program.py")], check=True, timeout=120)


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "expected"),
    [(None, 8, 4, 2), (None, 2, 4, 1), (None, 64, 2, 16), (3, 8, 4, 3), (30, 8, 1, 8)],
)
def test_number_of_workers(monkeypatch, asked, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert n_workers(asked) == expected


# Decoding


@pytest.mark.parametrize("epoch", [0, 1])
def test_images_are_what_pil_and_torchvision_make_of_them(root, epoch):
    """Training images are drawn by the seed of their epoch and their number."""
    images, seed = image_folder(str(root), 16, 0), hash((5, epoch))
    files, test_files = files_of(images)
    order = torch.randperm(
        len(files), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    random = [v2.RandomResizedCrop(16), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    fixed = [v2.Resize(18), v2.CenterCrop(16), v2.PILToTensor()]
    for found, numbers, these, view in (
        (batches(images, seed=5, epoch=epoch), order, files, v2.Compose(random)),
        ([*images.test(4, CPU)], range(12), test_files, v2.Compose(fixed)),
    ):
        pixels = torch.cat([x for x, _ in found])
        assert len(pixels) == len(numbers) == len(these)
        for x, index in zip(pixels, numbers, strict=True):
            with torch.random.fork_rng([]):
                torch.manual_seed(hash((seed, index)))
                expected = view(these[index][0])
            worst = ((x * STD + MEAN) * 255 - expected).abs().max()
            assert worst < 1.1, these.samples[index]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(root):
    ours = batches(image_folder(str(root), 16, 2), CPU)
    theirs = batches(image_folder(str(root), 16, 2), torch.device("cuda"))
    for (x, y), (other, labels) in zip(ours, theirs, strict=True):
        assert other.device.type == labels.device.type == "cuda"
        assert torch.equal(y, labels.cpu())
        assert ((x - other.cpu()) * STD * 255).abs().mean() < 2


# Damaged images


@pytest.mark.parametrize(
    ("damaged", "index", "tried"),
    [
        ((), 3, [3]),
        ((3, 4), 3, [3, 4, 5]),
        ((6, 3, 5), 5, [5, 6, 3, 4]),
        ((2,), 2, [2, 0]),
    ],
)
def test_the_next_of_its_class_replaces_a_damaged_image(
    tmp_path, damaged, index, tried
):
    """Images 0 to 2 are of one class, 3 to 6 of another; each is an empty file."""
    paths = [str(tmp_path / f"{k}.jpg") for k in range(7)]
    for path in paths:
        open(path, "w").close()

    def loader(path):
        if path in [paths[k] for k in damaged]:
            raise IndexError("index out of range")  # as PIL does on some garbled files
        return path

    targets = [0] * 3 + [1] * 4
    samples = [*zip(paths, targets, strict=True)]
    images = SimpleNamespace(targets=targets, samples=samples, loader=loader)
    *before, found = [paths[k] for k in tried]
    assert read_image(images, index, skip=True) == (found, tried[-1], before)


def whole_epoch(images, epoch):
    """The images and classes for training, and those of the test."""
    parts = batches(images, epoch=epoch), images.test(4, CPU)
    return [tuple(map(torch.cat, zip(*part, strict=True))) for part in parts]


@pytest.mark.parametrize(("kept", "num_workers"), [(10, 0), (900, 2)])
def test_the_rest_of_a_batch_stays(root, capsys, kept, num_workers):
    """Bit for bit; the next image of its class is where the damaged image was."""
    before = [whole_epoch(image_folder(str(root), 16, 0), epoch) for epoch in (0, 1)]
    broken = [root / "train/cat/1.png", root / "val/dog/0.png"]  # of numbers 1 and 4
    for path in broken:
        cut(path, kept)
    images = image_folder(str(root), 16, num_workers, damaged="skip")
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(hash((0, epoch)))
        orders = torch.randperm(18, generator=generator).tolist(), [*range(12)]
        found = zip(
            whole_epoch(images, epoch), before[epoch], orders, (1, 4), strict=True
        )
        for (x, y), (old, labels), order, damaged in found:
            rows = [order.index(k + 1 if k == damaged else k) for k in order]
            assert torch.equal(x, old[rows])
            assert torch.equal(y, labels)
    assert sorted(images.damaged) == sorted(map(str, broken))
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2
    assert all(f"warning: {path}" in err for path in broken)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_name_the_file_in_one_line(root, num_workers):
    """Whichever process reads it; an epoch can be read after the error."""
    broken = root / "val/dog/a b.jpg"
    broken.write_bytes(b"none")
    images = image_folder(str(root), 16, num_workers)
    for _ in range(2):
        with pytest.raises(UserError, match=f"^{broken} .*data.damaged=skip$"):
            list(images.test(4, CPU))
    for path in (root / "val/eel").iterdir():
        path.write_bytes(b"none")
    images = image_folder(str(root), 16, num_workers, damaged="skip")
    with pytest.raises(
        UserError, match=f"^{root}/val/eel: none of its 4 .*data.damaged=skip"
    ):
        list(images.test(4, CPU))


@pytest.mark.parametrize("becomes", ["pipe", "missing", "link"])
def test_what_is_no_file(root, becomes):
    """A pipe does not block."""
    images = image_folder(str(root), 16, 0)
    path = root / "val/dog/1.png"
    path.unlink()
    if becomes == "pipe":
        os.mkfifo(path)
    if becomes == "link":
        path.symlink_to("1.png")
    with pytest.raises(UserError, match=f"{path}"):
        list(images.test(4, CPU))
    skipping = image_folder(str(root), 16, 0, damaged="skip")
    list(skipping.test(4, CPU))
    assert skipping.damaged == ([] if becomes == "missing" else [str(path)])


@pytest.mark.parametrize("damaged", ["refuse", "skip"])
@pytest.mark.parametrize("kind", BYTES)
def test_damaged_bytes_are_named_or_read_as_pil_reads_them(root, kind, damaged):
    random = Random(kind)
    paths = sorted((root / "val").rglob("*.*g"))
    for _ in range(more(3, 20)):
        path = random.choice(paths)
        content = path.read_bytes()
        path.write_bytes(BYTES[kind](content, random))
        images = image_folder(str(root), 16, 0, damaged=damaged)
        try:
            with Image.open(path) as image:
                expected = v2.PILToTensor()(
                    v2.CenterCrop(16)(v2.Resize(18)(image.convert("RGB")))
                )
        except Exception:  # decoders raise anything on garbled bytes
            expected = None
        if expected is not None:
            pixels = torch.cat([x for x, _ in images.test(4, CPU)])[paths.index(path)]
            assert ((pixels * STD + MEAN) * 255 - expected).abs().max() < 1.1
        elif damaged == "refuse":
            with pytest.raises(UserError, match=f"^{path} .*data.damaged=skip$"):
                list(images.test(4, CPU))
        else:
            assert len(torch.cat([x for x, _ in images.test(4, CPU)])) == len(paths)
            assert [*images.damaged] == [str(path)]
        path.write_bytes(content)


def test_training_skips_a_damaged_image(root):
    """From the command line; by default it is refused."""
    broken = root / "train/cat/0.png"
    cut(broken, 300)
    data = (
        "data=image_folder",
        f"data.root={root}",
        "data.image_size=16",
        "data.num_workers=1",
    )
    tiny = ("model=resnet8", "epochs=2", "batch=3")
    message = refused("train", *data, *tiny, f"hydra.run.dir={root}/refused")
    assert message.startswith(f"{broken} ")
    assert "data.damaged=skip" in message
    finished = run(
        "train", *data, *tiny, "data.damaged=skip", f"hydra.run.dir={root}/run"
    )
    assert finished.status == 0, finished.err
    assert finished.err.count("warning: ") == 1
    assert f"warning: {broken} is damaged" in finished.err


# CIFAR-10 in class folders


def test_damaged_images_and_those_of_another_size_are_refused(tmp_path):
    ten = write_ten(tmp_path)
    cut(ten / "test/class3/1.png", 200)
    with pytest.raises(UserError, match=f"{ten}/test/class3/1.png .*data=image_folder"):
        cifar10(str(ten))
    Image.new("RGB", (32, 31)).save(ten / "train/class1/2.png")
    with pytest.raises(
        UserError, match=f"^{ten}/train/class1/2.png is 32x31 .*data=image_folder"
    ):
        cifar10(str(ten))


# Refusals


def empty_class(root):
    (root / "train/bat").mkdir()
    (root / "train/bat/notes.txt").touch()


def no_classes(root):
    for name in CLASSES:
        shutil.rmtree(root / "train" / name)
    Image.new("RGB", (9, 9)).save(root / "train/0.png")


def split_is_file(root):
    shutil.rmtree(root / "val")
    (root / "val").touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (empty_class, "/train .*bat"),
        (no_classes, "/train "),
        (split_is_file, "/val "),
        (lambda root: (root / "train").rename(root / "other"), "/train "),
        (
            lambda root: (root / "val").rename(root / "other"),
            "/val .* has other/, train/$",
        ),
    ],
)
def test_another_layout(root, damage, message):
    damage(root)
    with pytest.raises(UserError, match=f"{root}{message}"):
        image_folder(str(root))
    if (root / "other").exists() and (root / "train").exists():
        assert image_folder(str(root), validation="other").form.n_classes == 3
