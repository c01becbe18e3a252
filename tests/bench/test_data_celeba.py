import csv
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tests.bench.written_data import ATTRIBUTES, CELEBA_COUNTS, CELEBA_LAYOUTS, write_celeba
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.models import ResNet18_Weights

from flatmtl_bench.data.attributes import official
from flatmtl_bench.data.celeba import CelebA, celeba, check_celeba
from flatmtl_bench.data.check import check as check_folder

SPLITS = ["train", "validation", "test"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_celeba(tmp_path_factory.mktemp("celeba"))


@pytest.fixture
def root(written, tmp_path):
    """A copy that may be broken."""
    return shutil.copytree(written, tmp_path / "celeba")


def pictures_of(root):
    return root / "img_align_celeba" / "img_align_celeba"


def items(dataset):
    return [dataset[index] for index in range(len(dataset))]


def content(dataset):
    return [(picture.numpy().tobytes(), *targets.items()) for picture, targets in items(dataset)]


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


class TestItems:
    @pytest.mark.parametrize("split", SPLITS)
    def test_pictures_are_in_the_unit_interval_with_40_labels(self, written, split):
        dataset = celeba(split, root=written)
        assert len(dataset) == CELEBA_COUNTS[split]
        picture, targets = dataset[-1]
        assert (picture.shape, picture.dtype) == ((3, 64, 64), torch.float32)
        assert 0 <= picture.min() < 0.3
        assert 0.7 < picture.max() <= 1
        assert list(targets) == list(dataset.objectives) == ATTRIBUTES
        assert all(type(label) is int and label in (0, 1) for label in targets.values())

    @pytest.mark.parametrize("lists", ["txt", "csv"])
    @pytest.mark.parametrize("layout", CELEBA_LAYOUTS)
    def test_all_layouts_and_lists_give_the_same_items(self, written, tmp_path, layout, lists):
        root = write_celeba(tmp_path, layout=layout, lists=lists)
        for split in SPLITS:
            ours = celeba(split, root=root)
            assert ours.source == "full"
            assert content(ours) == content(celeba(split, root=written))

    def test_lists_and_pictures_may_lie_side_by_side(self, written, tmp_path):
        root = write_celeba(tmp_path, layout="torchvision")
        assert content(celeba("test", root=root / "celeba")) == content(celeba("test", root=written))

    @pytest.mark.parametrize(("split", "theirs"), [("train", "train"), ("validation", "valid"), ("test", "test")])
    def test_they_are_those_of_torchvision(self, tmp_path, monkeypatch, split, theirs):
        root = write_celeba(tmp_path, layout="torchvision")
        names = [line.split()[0] for line in (root / "celeba" / "list_eval_partition.txt").read_text().splitlines()]
        rows = "".join(f"{name} 1 2 3 4\n" for name in names)
        (root / "celeba" / "identity_CelebA.txt").write_text("".join(f"{name} 1\n" for name in names))
        for lacking in ("list_bbox_celeba.txt", "list_landmarks_align_celeba.txt"):
            (root / "celeba" / lacking).write_text(f"{len(names)}\na b c d\n{rows}")
        monkeypatch.setattr(datasets.CelebA, "_check_integrity", lambda _: True)  # of the full files
        reference, ours = datasets.CelebA(root, theirs), celeba(split, root=root)
        assert len(ours) == len(reference)
        for (picture, targets), (expected, labels) in zip(items(ours), items(reference), strict=True):
            assert list(targets.values()) == labels.tolist()
            small = np.asarray(expected.resize((64, 64), Image.Resampling.BILINEAR))
            torch.testing.assert_close(255 * picture.permute(1, 2, 0), torch.tensor(small).float(), atol=1.01, rtol=0.0)

    def test_imagenets_preprocessing_is_that_of_torchvisions_weights(self, written):
        raw, read = (celeba("train", root=written, preprocessing=name) for name in ("rgb", "imagenet"))
        constants = ResNet18_Weights.IMAGENET1K_V1.transforms()  # an independent source of them
        for (plain, _), (picture, _) in zip(items(raw), items(read), strict=True):
            mean, deviation = (np.array(c)[:, None, None] for c in (constants.mean, constants.std))
            np.testing.assert_allclose(picture, (np.asarray(plain, np.float64) - mean) / deviation, atol=1e-6)

    def test_official_preprocessing_is_that_of_the_authors(self, written):
        for index, (picture, _) in enumerate(items(celeba("train", root=written, preprocessing="official"))):
            pixels = np.asarray(Image.open(pictures_of(written) / f"{index + 1:06d}.jpg").convert("RGB"))
            shifted = pixels[:, :, ::-1] - np.array([73.158, 82.909, 72.392])
            scaled = (shifted - shifted.min()) * (255.0 / (shifted.max() - shifted.min()))
            stretched = Image.fromarray((scaled.clip(0, 255) + 0.5).astype(np.uint8))
            expected = np.asarray(stretched.resize((64, 64), Image.Resampling.BILINEAR))
            torch.testing.assert_close(
                255 * picture.permute(1, 2, 0), torch.tensor(expected).float(), atol=1.01, rtol=0.0
            )

    def test_official_preprocessing_stretches_every_picture(self):
        dull = torch.randint(100, 110, (3, 64, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        assert official(dull, (64, 64)).aminmax() == (0, 1)

    def test_a_loader_gives_a_batch_of_labels_for_each_task(self, written):
        pictures, targets = next(iter(DataLoader(celeba("train", root=written), batch_size=8, num_workers=2)))
        assert pictures.shape == (8, 3, 64, 64)
        assert [targets[a].dtype for a in ATTRIBUTES] == [torch.int64] * 40
        assert torch.stack(list(targets.values()), dim=1).tolist() == celeba("train", root=written).labels.tolist()

    @pytest.mark.parametrize("logits", [1, 2])
    def test_each_task_has_the_wanted_number_of_logits(self, written, logits):
        objectives = celeba("train", root=written, logits=logits).objectives
        assert {objective.outputs for objective in objectives.values()} == {logits}

    def test_samples_are_the_same_ones_for_every_seed_and_in_the_order_of_the_list(self, written):
        some, again = (celeba("train", root=written, samples=5, seed=seed) for seed in (0, 1))
        assert some.names == again.names == sorted(some.names)
        assert set(content(some)) < set(content(celeba("train", root=written)))

    def test_it_says_what_it_is_and_where_from(self, written):
        text = f"celeba test: 4 pictures of {pictures_of(written)}, 40 attributes each"
        assert str(celeba("test", root=written)) == text

    def test_the_fingerprint_tells_other_pictures_labels_and_splits(self, written, root):
        prints = {celeba(split, root=written).fingerprint for split in SPLITS}
        assert celeba("test", root=root).fingerprint in prints
        shutil.copy(pictures_of(root) / "000001.jpg", pictures_of(root) / "000013.jpg")
        replace(root / "list_attr_celeba.txt", "000002.jpg", "000002.jpg ")  # blanks do not matter
        prints |= {celeba(split, root=root).fingerprint for split in SPLITS}
        replace(root / "list_attr_celeba.txt", " 1", "-1")
        assert len(prints | {celeba("train", root=root).fingerprint}) == 5


class TestSource:
    def test_auto_draws_faces_where_there_is_nothing_else(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        dataset = celeba("validation", samples=3, preprocessing="official", logits=2)
        assert (dataset.source, len(dataset), dataset.objectives["Young"].outputs) == ("faces40", 3, 2)
        assert str(dataset) == "faces40 validation: 3 drawn faces of 64 x 64 pixels, 40 attributes each"

    def test_faces_are_drawn_if_asked_for(self, written):
        assert celeba("test", root=written, source="faces40", samples=3).source == "faces40"

    @pytest.mark.parametrize("lacking", ["list_attr_celeba.txt", "list_eval_partition.txt", "img_align_celeba"])
    def test_auto_does_not_replace_incomplete_data(self, root, lacking):
        (root / lacking).rename(root / "elsewhere")
        with pytest.raises(
            FileNotFoundError, match=f"no {lacking} in {root}; expected list_attr_celeba and .*data where"
        ):
            celeba("train", root=root)

    def test_full_data_must_be_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no list_attr_celeba.txt and no .* and no img_align_celeba in"):
            celeba("train", root=tmp_path, source="full")
        with pytest.raises(FileNotFoundError, match="nowhere does not exist; expected a folder of data"):
            celeba("train", root=tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": "valid"}, "unknown split 'valid'"),
            ({"source": "half"}, "unknown source 'half'. Known: auto, full, faces40"),
            ({"preprocessing": "bgr"}, "unknown preprocessing 'bgr'. Known: rgb, imagenet, official"),
            ({"logits": 3}, "logits must be a whole number from 1 to 2, got 3"),
            ({"samples": 0}, "samples must be a whole number from 1, got 0"),
            ({"samples": 9}, "samples=9, but train has 8 pictures. Ask for as many, or fewer"),
            ({"seed": -1}, "seed must be a whole number"),
            ({"validation_share": 1.0}, "validation_share must be at least 0 and below 1, got 1.0"),
            ({"split": "validation", "validation_share": 0.0}, "leaves no pictures for split 'validation'"),
        ],
        ids=str,
    )
    def test_bad_options_are_quoted(self, written, options, message):
        with pytest.raises(ValueError, match=message):
            celeba(**{"split": "train", "root": written, **options})

    def test_without_a_validation_split_the_others_are_as_they_were(self, written):
        for split in ("train", "test"):
            some, other = (celeba(split, root=written, validation_share=share) for share in (0.0, 0.1))
            assert some.names == other.names


ATTR, PART = "list_attr_celeba", "list_eval_partition"
BROKEN_LISTS = {
    "count": (f"{ATTR}.txt", "16\n", "17\n", "line 1 says '17'; expected 16, the number of pictures below"),
    "no count": (f"{ATTR}.txt", "16\n", "", "line 2 has other columns; expected 5_o_Clock_Shadow, ..., Young"),
    "columns": (f"{ATTR}.txt", "Bald Bangs", "Bangs Bald", "line 2 has other columns"),
    "a value": (f"{ATTR}.txt", "000002.jpg ", "000002.jpg 0 ", "line 4 has the value '0'; expected -1 or 1"),
    "a row": (f"{ATTR}.txt", "000002.jpg", "000002.jpg 1", "line 4 has 41 values; expected a picture and 40"),
    "an empty line": (f"{ATTR}.txt", "000002.jpg", "\n000002.jpg", "line 4 has 0 values; expected a picture and 40"),
    "a part": (f"{PART}.txt", "000003.jpg 0", "000003.jpg 3", "line 3 has the value '3'; expected 0 or 1 or 2"),
    "no part": (f"{PART}.txt", "000003.jpg 0", "000003.jpg", "line 3 has 0 values; expected a picture and 1"),
    "twice": (f"{PART}.txt", "000003.jpg", "000002.jpg", "line 3 has 000002.jpg again; expected each picture once"),
    "a name": (
        f"{PART}.txt",
        "000003.jpg",
        "000099.jpg",
        "000003.jpg is not in it, though in .*list_attr_celeba.txt; 2",
    ),
    "a short list": (
        f"{PART}.txt",
        "000016.jpg 2\n",
        "",
        "000016.jpg is not in it, though in .*list_attr_celeba.txt; e",
    ),
    "csv titles": (f"{ATTR}.csv", "image_id", "name", "line 1 has other columns; expected image_id, ..., Young"),
    "csv value": (f"{ATTR}.csv", ",1", ",", "line 2 has the value ''; expected -1 or 1"),
    "csv part": (f"{PART}.csv", "partition", "split", "line 1 has other columns; expected image_id, ..., partition"),
}


class TestBrokenData:
    @pytest.mark.parametrize("case", BROKEN_LISTS)
    def test_a_list_is_named_with_the_line(self, tmp_path, case):
        name, old, new, message = BROKEN_LISTS[case]
        path = write_celeba(tmp_path, lists=name[-3:]) / name
        replace(path, old, new)
        with pytest.raises(ValueError, match=f"{path}: {message}.* Fetch (it|both) again") as caught:
            celeba("train", root=tmp_path)
        assert [str(finding) for finding in check_folder(tmp_path, "celeba").findings] == [str(caught.value)]

    @pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff\x00", b"7"])
    @pytest.mark.parametrize("name", [ATTR, PART])
    def test_what_is_no_list_is_named(self, root, name, content):
        (root / f"{name}.txt").write_bytes(content)
        with pytest.raises(ValueError, match=f"{root / name}.txt: "):
            celeba("train", root=root)

    def test_a_split_without_pictures_is_named(self, tmp_path):
        write_celeba(tmp_path, counts={"train": 2, "validation": 0, "test": 1})
        with pytest.raises(ValueError, match="list_eval_partition has no pictures for validation"):
            celeba("validation", root=tmp_path)

    @pytest.mark.parametrize("check", [True, False])
    def test_missing_pictures_are_named_before_any_is_read(self, root, check):
        for number in (2, 5, 16):  # the last is for testing
            (pictures_of(root) / f"{number:06d}.jpg").unlink()
        with pytest.raises(
            FileNotFoundError,
            match="000002.jpg: there is no such file, though the lists have it; .* The same in 1 more file: 000005.jpg",
        ):
            celeba("train", root=root, check=check)
        assert len(celeba("validation", root=root)) == 4
        assert len(check_folder(root, "celeba").findings) == 3

    @pytest.mark.parametrize("size", [0, 1, 2, 500, -100])
    def test_a_cut_picture_is_named_before_training(self, root, size):
        path = pictures_of(root) / "000003.jpg"
        path.write_bytes(path.read_bytes()[:size])
        message = f"{path}: cannot be read .*; expected a whole JPEG file. Unpack it again"
        with pytest.raises(ValueError, match=message):
            celeba("train", root=root)
        dataset = celeba("train", root=root, check=False)
        assert len(dataset[1]) == 2
        with pytest.raises(ValueError, match=message):
            dataset[2]

    def test_a_loader_process_names_the_cut_picture(self, root):
        path = pictures_of(root) / "000003.jpg"
        path.write_bytes(path.read_bytes()[:500])
        loader = DataLoader(celeba("train", root=root, check=False), batch_size=8, num_workers=1)
        with pytest.raises(ValueError, match=f"{path}: cannot be read"):
            next(iter(loader))

    def test_a_check_decodes_every_picture(self, root):
        for number, content in ((1, b"\xff\xd8" + bytes(100) + b"\xff\xd9"), (9, b""), (16, b"GIF89a")):
            (pictures_of(root) / f"{number:06d}.jpg").write_bytes(content)
        report = check_folder(root, "celeba")
        assert report.facts == ["train: 8 pictures", "validation: 4 pictures", "test: 4 pictures"]
        assert [finding.path.name for finding in report.findings] == ["000001.jpg", "000009.jpg", "000016.jpg"]
        assert check_folder(write_celeba(root / "whole"), "celeba").findings == []

    def test_bytes_behind_a_picture_do_no_harm(self, written, root):
        with (pictures_of(root) / "000001.jpg").open("ab") as file:
            file.write(bytes(10))
        assert content(celeba("train", root=root)) == content(celeba("train", root=written))


def test_the_written_lists_can_be_read_as_csv(tmp_path):
    """What the other tests take for Kaggle's lists is what a reader of tables takes for them."""
    root = write_celeba(tmp_path, lists="csv")
    with (root / "list_attr_celeba.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    labels = CelebA("train", root).labels
    assert [[int(row[name] == "1") for name in ATTRIBUTES] for row in rows[:8]] == labels.tolist()


def test_a_partition_without_pictures_is_a_finding(tmp_path):
    root = write_celeba(tmp_path, layout="nested", lists="txt")
    path = root / "list_eval_partition.txt"
    path.write_text(path.read_text().replace(" 2\n", " 0\n"))
    report = str(check_celeba(root))
    assert f"{path}: no picture of partition 2 (test); expected some of each of 0, 1 and 2" in report
