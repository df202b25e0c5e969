"""Damaged images: refused with their path; or skipped, counted, and all else stays as it is."""

import os

import pytest
import torch
from PIL import Image

from tests.training.test_data import CLASSES, CPU, write_images, write_ten
from tests.training.test_image_folder import batches, write_jpegs
from toolkit.errors import UserError
from toolkit.training.data import cifar10, image_folder
from toolkit.training.data.corrupt_images import Skipped, first_readable
from toolkit.training.data.image_files import ClassFolders, DamagedImageError


def cut(path, kept):
    path.write_bytes(path.read_bytes()[:kept])


def everything(images, epoch=0):
    """Training and test batches."""
    return [*batches(images, epoch=epoch), *images.test(4, CPU)]


# Which image stands in


class Numbers:
    """Two classes of images, of which some are damaged."""

    root, classes = "root", ["cat", "dog"]
    targets = [0, 0, 0, 1, 1, 1, 1]  # noqa: RUF012
    samples = [(f"{k}.jpg", c) for k, c in enumerate(targets)]  # noqa: RUF012

    def __init__(self, *damaged):
        self.damaged = damaged

    def read(self, number):
        if number in self.damaged:
            raise DamagedImageError(f"{number}.jpg")
        return number


@pytest.mark.parametrize(
    ("damaged", "index", "expected", "skipped"),
    [
        ((), 3, 3, []),
        ((4,), 3, 3, []),
        ((3,), 3, 4, ["3.jpg"]),
        ((3, 4), 3, 5, ["3.jpg", "4.jpg"]),
        ((6,), 6, 3, ["6.jpg"]),
        ((6, 3, 5), 5, 4, ["5.jpg", "6.jpg", "3.jpg"]),
        ((2,), 2, 0, ["2.jpg"]),
    ],
)
def test_the_next_of_its_class_stands_in(damaged, index, expected, skipped):
    images = Numbers(*damaged)
    assert first_readable(images, index, True, images.read) == (expected, skipped)


def test_none_of_its_class_can_stand_in():
    images = Numbers(0, 1, 2)
    message = (
        "^root/cat: none of its 3 images can be decoded, and data.damaged=skip needs one: mend"
    )
    with pytest.raises(DamagedImageError, match=message):
        first_readable(images, 1, True, images.read)


def test_refused_unless_asked():
    images = Numbers(1)
    with pytest.raises(DamagedImageError, match=r"^1.jpg$"):
        first_readable(images, 1, False, images.read)


def test_each_is_told_once(capsys):
    skipped = Skipped()
    for paths in (["a", "b"], ["b"], [], ["c", "a"]):
        skipped.add(paths)
    assert skipped.paths == ["a", "b", "c"]
    found, err = capsys.readouterr()
    assert not found
    assert err.splitlines() == [
        f"warning: {path} is damaged: another image of its class stands in for it ({k} so far)"
        for k, path in enumerate("abc", start=1)
    ]


# In class folders


@pytest.fixture
def root(tmp_path):
    write_jpegs(tmp_path / "train")
    write_jpegs(tmp_path / "val", n=2)
    return tmp_path


@pytest.mark.parametrize(("kept", "num_workers"), [(10, 0), (900, 2)])
def test_the_rest_of_a_batch_stays(root, capsys, kept, num_workers):
    """Bit for bit; where the damaged image was is the next of its class."""
    whole = [everything(image_folder(str(root), 16, 0), epoch=e) for e in (0, 1)]
    broken = [root / "train/cat/1.jpg", root / "val/dog/0.jpg"]
    next_ones = [root / "train/cat/2.jpg", root / "val/dog/1.jpg"]
    for path in broken:
        cut(path, kept)
    images = image_folder(str(root), 16, num_workers, damaged="skip")
    found = [everything(images, epoch=e) for e in (0, 1)]
    places = []
    for split, path, other in zip((images._train, images._test), broken, next_ones, strict=True):
        paths = [name for name, _ in split.images.samples]
        places.append((paths.index(str(path)), paths.index(str(other))))
    for epoch, (ours, theirs) in enumerate(zip(found, whole, strict=True)):
        n = len(images._train.images)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(hash((0, epoch))))
        for part, numbers, (place, other) in (
            (slice(0, 3), order.tolist(), places[0]),
            (slice(3, None), range(12), places[1]),
        ):
            x, before = (torch.cat([x for x, _ in each[part]]) for each in (ours, theirs))
            y, labels = (torch.cat([y for _, y in each[part]]) for each in (ours, theirs))
            assert torch.equal(y, labels)
            rows = [other if k == place else k for k in numbers]
            assert place in numbers
            expected = torch.stack([before[[*numbers].index(k)] for k in rows])
            assert torch.equal(x, expected)
    assert sorted(images.damaged) == sorted(map(str, broken))
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2
    for path in broken:
        assert f"warning: {path} is damaged: another image of its class stands in" in err


def test_parts_are_slices_of_the_whole(root):
    """Whichever rank reads them; it counts what it has read."""
    cut(root / "train/cat/1.jpg", 900)
    whole = image_folder(str(root), 16, 0, damaged="skip")
    expected = batches(whole)
    ranks = [image_folder(str(root), 16, 0, damaged="skip") for _ in range(3)]
    for rank, images in enumerate(ranks):
        parts = images.train(6, 0, 0, CPU).parts(3, lambda k, rank=rank: [rank])
        for (x, y), (part, labels) in zip(expected, parts, strict=True):
            assert torch.equal(part, x.chunk(3)[rank])
            assert torch.equal(labels, y.chunk(3)[rank])
    assert sorted(len(images.damaged) for images in ranks) == [0, 0, 1]
    assert whole.damaged == (str(root / "train/cat/1.jpg"),)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_class_of_which_all_are_damaged(root, num_workers):
    for path in (root / "val/eel").iterdir():
        cut(path, 700 if path.suffix == ".jpg" else 40)
    images = image_folder(str(root), 16, num_workers, damaged="skip")
    with pytest.raises(UserError, match=f"{root}"):
        list(images.test(4, CPU))


@pytest.mark.parametrize("becomes", ["pipe", "missing", "link"])
def test_what_is_no_file(root, becomes):
    """A pipe is not waited for."""
    images = image_folder(str(root), 16, 0)
    path = root / "val/dog/1.jpg"
    path.unlink()
    if becomes == "pipe":
        os.mkfifo(path)
    if becomes == "link":
        path.symlink_to("1.jpg")
    with pytest.raises(UserError, match=f"{path}"):
        list(images.test(4, CPU))
    skipping = image_folder(str(root), 16, 0, damaged="skip")
    list(skipping.test(4, CPU))
    assert skipping.damaged == (() if becomes == "missing" else (str(path),))


def test_whatever_a_decoder_raises(root, monkeypatch):
    """PIL's decoders raise what a garbled file makes of them."""
    images = image_folder(str(root), 16, 0)

    def garbled(file):
        raise IndexError("index out of range")

    monkeypatch.setattr(Image, "open", garbled)
    with pytest.raises(DamagedImageError, match=r"cat/0.jpg cannot be decoded: mend it or take it"):
        list(images.test(4, CPU))


def test_a_line_break_in_a_path(root):
    path = root / "val/dog/a\nb.jpg"
    path.write_bytes(b"none")
    images = image_folder(str(root), 16, 1)
    with pytest.raises(UserError, match=f"{path}"):
        list(images.test(4, CPU))


# In CIFAR-10's


@pytest.fixture
def ten(tmp_path):
    return write_ten(tmp_path)


def test_cifar10_skips(ten, capsys):
    before = cifar10(str(ten))
    cut(ten / "test/class3/1.png", 200)
    cut(ten / "train/class0/0.png", 20)
    images = cifar10(str(ten), damaged="skip")
    ((x, y),) = images.test(20, CPU)
    ((whole, labels),) = before.test(20, CPU)
    assert torch.equal(y, labels)
    assert torch.equal(x, whole[[*range(7), 6, *range(8, 20)]])
    ((x, _),) = cifar10(str(ten), 0, False, damaged="skip").train(30, 0, 0, CPU)
    assert len({image.numpy().tobytes() for image in x}) == 29
    paths = (str(ten / "train/class0/0.png"), str(ten / "test/class3/1.png"))
    assert images.damaged == paths
    assert before.damaged == ()
    assert len(capsys.readouterr().err.splitlines()) >= 4


def test_a_part_of_cifar10_skips_what_it_reads(ten):
    cut(ten / "train/class0/0.png", 20)
    skipped = [len(cifar10(str(ten), n_train=n, damaged="skip").damaged) for n in (10, 20, None)]
    assert skipped == sorted(skipped)
    assert skipped[-1] == 1


def test_one_rank_tells_of_cifar10(ten, capsys, monkeypatch):
    """Each rank reads all of it."""
    cut(ten / "train/class0/0.png", 20)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(cifar10(str(ten), damaged="skip").damaged) == 1
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["refuse", "skip"])
def test_another_size_is_not_damage(ten, damaged):
    Image.new("RGB", (32, 31)).save(ten / "train/class1/2.png")
    message = f"^{ten}/train/class1/2.png is 32x31 pixels: expected 32x32; take data=image_folder"
    with pytest.raises(ValueError, match=message):
        cifar10(str(ten), damaged=damaged)


# Folders


def test_the_images_are_torchvisions(root):
    """In its order, from folders within the classes and through links as well."""
    from torchvision.datasets import ImageFolder

    inner = root / "train/dog/b/c"
    inner.mkdir(parents=True)
    (root / "train/dog/b.c").mkdir()  # its path comes before that of b/c
    (root / "train/dog/0.jpg").rename(root / "train/dog/b.c/0.jpg")
    (root / "train/dog/1.jpg").rename(inner / "Z.JPG")
    (root / "train/dog/2.jpg").rename(root / "train/dog/B.jpg")
    (root / "train/dog/linked").symlink_to(root / "val/eel")
    (root / "train/notes.txt").write_text("no class")
    (root / "train/cat/notes.txt").write_text("no image")
    ours, theirs = ClassFolders(str(root / "train")), ImageFolder(str(root / "train"))
    assert ours.samples == theirs.samples
    assert ours.targets == theirs.targets
    assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)


def test_an_empty_class(root):
    (root / "train/bat").mkdir()
    (root / "train/bat/notes.txt").touch()
    message = f"^{root}/train/bat has no images: it holds notes.txt; put files there that end with"
    with pytest.raises(UserError, match=f"{message}"):
        image_folder(str(root))


def test_images_without_classes(tmp_path):
    write_jpegs(tmp_path / "val")
    (tmp_path / "train").mkdir()
    for k in range(7):
        Image.new("RGB", (9, 9)).save(tmp_path / f"train/{k}.png")
    message = (
        f"^{tmp_path}/train does not hold one folder of images a class: it holds 0.png, 1.png,"
        " 2.png, 3.png, 4.png and 2 more; put the images of each class into a folder named after it"
    )
    with pytest.raises(ValueError, match=message):
        image_folder(str(tmp_path))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_missing_split(root, split):
    (root / split).rename(root / "other")
    held = sorted({"train/", "val/", "other/"} - {f"{split}/"})
    message = (
        f"^data.root={root} does not hold train/ and val/ with one folder of images a class:"
        f" {split} does not exist; it holds {', '.join(held)}$"
    )
    with pytest.raises(ValueError, match=message):
        image_folder(str(root))
    (root / split).touch()
    with pytest.raises(UserError, match=f"{split}"):
        image_folder(str(root))


def test_another_name_of_the_test_images(root):
    (root / "val").rename(root / "holdout")
    assert image_folder(str(root), validation="holdout").form.n_classes == 3
    with pytest.raises(UserError):
        image_folder(str(root), validation="no")


@pytest.mark.parametrize("folder", ["train/dog", "train/dog/inner", "val"])
def test_a_folder_that_cannot_be_read(root, folder, monkeypatch):
    """What lies deep is not left out either."""
    (root / "train/dog/inner").mkdir()
    stat = os.stat

    def refuse(path, **options):
        if str(path) == os.path.join(root, folder, "."):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError, match=f"{folder}"):
        image_folder(str(root))


def test_a_folder_that_holds_itself(root):
    (root / "train/dog/again").symlink_to("../dog")
    message = "^.*/train/dog/again is a link to a folder that holds it: take the link out$"
    with pytest.raises(ValueError, match=message):
        image_folder(str(root))


@pytest.mark.parametrize("only", ["train", "val"])
def test_a_class_of_one_split(root, only):
    (root / only / "zebra").mkdir()
    Image.new("RGB", (9, 9)).save(root / only / "zebra/0.png")
    with pytest.raises(UserError, match=f"{root}"):
        image_folder(str(root))


# Options


@pytest.mark.parametrize(
    ("load", "options", "message"),
    [
        (image_folder, {"damaged": "skp"}, "unknown data.damaged 'skp': choose refuse or skip"),
        (image_folder, {"image_size": 0}, "data.image_size is 1 or more: got 0"),
        (
            image_folder,
            {"validation": ""},
            "data.validation is the name of a folder, such as val: got nothing",
        ),
        (cifar10, {"damaged": "skp"}, "unknown data.damaged 'skp': choose refuse or skip"),
        (cifar10, {"crop_padding": -1}, "data.crop_padding is 0 or more pixels: got -1"),
    ],
)
def test_refuses(root, load, options, message):
    with pytest.raises(UserError, match=f"{message}"):
        load(str(root), **options)


def test_three_classes_are_no_cifar10(tmp_path):
    for split in ("train", "test"):
        write_images(tmp_path / split, CLASSES)
    with pytest.raises(UserError, match="image_folder"):
        cifar10(str(tmp_path))
