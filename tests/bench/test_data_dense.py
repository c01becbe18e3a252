"""Pictures with a target for each pixel: how they are augmented, and how they are read from folders of .npy files."""

import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.written_data import write_cityscapes, write_nyuv2
from torch.utils.data import DataLoader

from flatmtl_bench.data.augmentation import SCALES, View, augment, item_generator, show
from flatmtl_bench.data.cityscapes import CityScapes, cityscapes
from flatmtl_bench.data.nyuv2 import NYUv2, nyuv2
from flatmtl_bench.metrics import Classification, Depth, Normals, Segmentation

OBJECTIVES = {"segmentation": Segmentation(tuple("abcde")), "depth": Depth(), "normals": Normals()}
TASKS = ["segmentation", "depth", "normals"]


def normals_of(*shape, rng):
    vectors = torch.randn(3, *shape, generator=rng)
    return vectors / vectors.norm(dim=0)


def made_item(size, seed=0):
    """Return a picture and its targets, with holes in all of them."""
    rng = torch.Generator().manual_seed(seed)
    holes = torch.rand(size, generator=rng) < 0.2
    targets = {
        "segmentation": torch.randint(-1, 5, size, generator=rng),
        "depth": torch.rand(1, *size, generator=rng) + 0.5,
        "normals": normals_of(*size, rng=rng),
    }
    targets["depth"][:, holes] = 0
    targets["normals"][:, holes] = 0
    return torch.rand(3, *size, generator=rng), targets


def shown(view, picture, targets, **options):
    """Return an item in a view."""
    parts = {task: target[(..., *view.window)] for task, target in targets.items()}
    return show(view, picture[(..., *view.window)], parts, OBJECTIVES, **options)


def same_items(one, other):
    (x, targets), (y, others) = one, other
    return torch.equal(x, y) and all(torch.equal(targets[task], others[task]) for task in targets)


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))
VIEWS = st.builds(lambda size, seed: View.draw(size, torch.Generator().manual_seed(seed)), SIZES, st.integers(0, 10**6))


class TestViews:
    @given(VIEWS)
    def test_a_view_lies_within_the_picture_and_fills_its_size(self, view):
        for part, side in zip(view.window, view.size, strict=True):
            assert 0 <= part.start < part.stop <= side
            assert part.stop - part.start == max(1, int(side / view.scale))
        picture, targets = shown(view, *made_item(view.size))
        assert {part.shape[-2:] for part in (picture, *targets.values())} == {view.size}

    def test_scales_and_mirror_images_are_equally_likely_and_every_place_occurs(self):
        rng = torch.Generator().manual_seed(0)
        views = [View.draw((12, 18), rng) for _ in range(3000)]
        for scale in SCALES:
            assert sum(view.scale == scale for view in views) == pytest.approx(1000, abs=100)
        assert sum(view.mirrored for view in views) == pytest.approx(1500, abs=100)
        places = {(view.top, view.left) for view in views if view.scale == 1.5}
        assert places == {(top, left) for top in range(5) for left in range(7)}

    @given(SIZES)
    def test_the_whole_picture_as_it_is_is_an_identity(self, size):
        assert same_items(shown(View(size), *made_item(size)), made_item(size))

    @given(SIZES)
    def test_mirrored_twice_is_an_identity(self, size):
        mirror = View(size, mirrored=True)
        assert same_items(shown(mirror, *shown(mirror, *made_item(size))), made_item(size))

    def test_mirrored_is_the_last_axis_reversed_and_the_first_component_of_normals_negated(self):
        picture, targets = made_item((4, 6))
        mirrored, others = shown(View((4, 6), mirrored=True), picture, targets)
        for part, expected in ((mirrored, picture), *((others[task], targets[task]) for task in TASKS[:2])):
            np.testing.assert_array_equal(part, expected.numpy()[..., ::-1])
        expected = targets["normals"].numpy()[..., ::-1] * np.array([-1, 1, 1], np.float32)[:, None, None]
        np.testing.assert_array_equal(others["normals"], expected)

    @given(VIEWS)
    @settings(max_examples=50)
    def test_labels_and_depths_are_among_those_of_the_part(self, view):
        picture, targets = made_item(view.size)
        _, seen = shown(view, picture, targets)
        assert seen["segmentation"].dtype == torch.int64
        for task, factor in (("segmentation", 1.0), ("depth", 1 / view.scale)):
            known = (targets[task][(..., *view.window)] * factor).unique()
            assert torch.isclose(seen[task].unique()[:, None], known[None].to(seen[task].dtype)).any(dim=1).all()

    @given(VIEWS, st.sampled_from(["divide", "multiply"]))
    @settings(max_examples=50)
    def test_depth_is_divided_by_the_scale_and_disparity_multiplied(self, view, zoom):
        size = view.size
        targets = {"depth": torch.full((1, *size), 3.0)}
        _, seen = show(view, torch.zeros(3, *size)[(..., *view.window)], targets, OBJECTIVES, zoom)
        expected = 3.0 / view.scale if zoom == "divide" else 3.0 * view.scale
        torch.testing.assert_close(seen["depth"], torch.full_like(seen["depth"], expected))

    @given(VIEWS)
    @settings(max_examples=50)
    def test_normals_have_length_one_where_the_nearest_point_is_valid_and_else_zero(self, view):
        picture, targets = made_item(view.size)
        _, seen = shown(view, picture, targets)
        valid = seen["depth"][0] > 0  # holes of made items are where those of depth are
        torch.testing.assert_close(seen["normals"].norm(dim=0), valid.to(torch.float32), atol=1e-5, rtol=0)

    @given(VIEWS)
    @settings(max_examples=50)
    def test_invalid_pixels_have_no_part_in_their_neighbours(self, view):
        picture, targets = made_item(view.size)
        direction = torch.tensor([0.48, -0.6, 0.64])
        targets["normals"] = torch.where(targets["depth"] > 0, direction[:, None, None], 0.0)
        _, seen = shown(view, picture, targets)
        mirrored = direction * torch.tensor([-1.0 if view.mirrored else 1.0, 1.0, 1.0])
        for normal in seen["normals"].flatten(1).T.unique(dim=0):
            assert torch.allclose(normal, mirrored, atol=1e-6) or not normal.any()

    @pytest.mark.parametrize("scale", SCALES)
    def test_pictures_are_interpolated_and_labels_taken_at_the_same_points(self, scale):
        size = (30, 48)
        view = View(size, scale, top=3, left=5) if scale > 1 else View(size)
        rows, columns = view.window
        points = [
            np.linspace(part.start, part.stop - 1, side) for part, side in zip((rows, columns), size, strict=True)
        ]
        picture, targets = made_item(size)
        seen, others = shown(view, picture, targets)
        down = np.apply_along_axis(lambda line: np.interp(points[0], np.arange(size[0]), line), 1, picture.numpy())
        expected = np.apply_along_axis(lambda line: np.interp(points[1], np.arange(size[1]), line), 2, down)
        np.testing.assert_allclose(seen, expected, atol=1e-5)
        nearest = np.ix_(*[np.rint(line).astype(int) for line in points])
        np.testing.assert_array_equal(others["segmentation"], targets["segmentation"].numpy()[nearest])

    @pytest.mark.parametrize("mirrored", [False, True])
    @pytest.mark.parametrize("scale", SCALES)
    def test_normals_and_depth_of_a_plane_stay_those_of_one_plane(self, scale, mirrored):
        """Seen points, put back into space by the lens of the view, lie on a plane with the normal that is shown."""
        (height, width), focal, distance = (96, 128), 100.0, 3.0
        normal = np.array([0.36, 0.48, 0.8])  # x to the right, y up, z towards the viewer
        view = View((height, width), scale, top=9 if scale > 1 else 0, left=17 if scale > 1 else 0, mirrored=mirrored)

        def rays(rows, columns):
            x, y = (columns - (width - 1) / 2) / focal, ((height - 1) / 2 - rows) / focal
            return np.stack(np.broadcast_arrays(x[None, :], y[:, None], np.float64(-1)))

        whole = rays(np.arange(height), np.arange(width))
        depth = -distance / np.tensordot(normal, whole, 1)  # normal . (depth * ray) = -distance
        targets = {
            "depth": torch.from_numpy(depth[None]).float(),
            "normals": torch.from_numpy(np.tile(normal[:, None, None], (1, height, width))).float(),
        }
        _, seen = shown(view, torch.zeros(3, height, width), targets)
        places = [np.linspace(p.start, p.stop - 1, side) for p, side in zip(view.window, (height, width), strict=True)]
        ahead = rays(*places)
        if mirrored:
            ahead = ahead[..., ::-1] * np.array([-1, 1, 1])[:, None, None]
        points = (ahead * seen["depth"].numpy()).reshape(3, -1).T
        fitted = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)[2][-1]
        fitted *= np.sign(fitted[2])
        shown_normal = seen["normals"].double().flatten(1).mean(dim=1).numpy()
        np.testing.assert_allclose(fitted, shown_normal, atol=0.005)
        assert -(points @ fitted).mean() == pytest.approx(distance / scale, rel=0.005)


class TestAugment:
    def test_is_decided_by_its_generator_alone(self):
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        item = made_item((20, 30))
        first, again, other = (
            augment(*item, OBJECTIVES, item_generator(*key)) for key in ((0, 1, 2), (0, 1, 2), (0, 1, 3))
        )
        assert same_items(first, again)
        assert not same_items(first, other)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert random.getstate() == before[2]

    def test_seed_epoch_and_index_give_each_item_its_own_view(self):
        keys = [(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(10)]
        views = {View.draw((1000, 1000), item_generator(*key)) for key in keys}
        assert len(views) > 600  # a third has scale 1, of which there are two views

    def test_shows_the_part_of_the_whole_that_a_view_shows(self):
        item = made_item((20, 30))
        view = View.draw((20, 30), item_generator(0, 1, 2))
        assert same_items(augment(*item, OBJECTIVES, item_generator(0, 1, 2)), shown(view, *item))

    def test_a_target_that_has_no_view_is_named(self):
        with pytest.raises(
            TypeError, match=r"'kind' is of Classification, .*expected Segmentation, Depth, Normals\. Turn"
        ):
            augment(
                torch.zeros(3, 4, 4),
                {"kind": torch.tensor(1)},
                {"kind": Classification(("a", "b"))},
                item_generator(0, 0, 0),
            )


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    return write_nyuv2(tmp_path_factory.mktemp("rooms"))


@pytest.fixture(scope="module")
def streets(tmp_path_factory):
    return write_cityscapes(tmp_path_factory.mktemp("streets"))


def on_disk(root, part, number, folder):
    return np.load(root / part / folder / f"{number}.npy")


class TestItems:
    def test_are_the_arrays_on_disk_with_channels_first(self, rooms):
        dataset = NYUv2("test", rooms)
        assert len(dataset) == 4
        for number in range(4):
            picture, targets = dataset[number]
            assert list(targets) == list(dataset.objectives) == TASKS
            np.testing.assert_array_equal(picture, on_disk(rooms, "val", number, "image").transpose(2, 0, 1))
            np.testing.assert_array_equal(targets["segmentation"], on_disk(rooms, "val", number, "label"))
            np.testing.assert_array_equal(targets["depth"], on_disk(rooms, "val", number, "depth").transpose(2, 0, 1))
            normal = on_disk(rooms, "val", number, "normal").transpose(2, 0, 1)
            np.testing.assert_allclose(targets["normals"], normal, atol=1e-6)
            assert targets["segmentation"].dtype == torch.int64
            assert {part.dtype for part in (picture, targets["depth"], targets["normals"])} == {torch.float32}

    def test_streets_have_labels_of_seven_classes_and_disparities(self, streets):
        dataset = CityScapes("test", streets)
        picture, targets = dataset[1]
        assert list(targets) == ["segmentation", "depth"]
        assert picture.shape == (3, 32, 64)
        np.testing.assert_array_equal(targets["segmentation"], on_disk(streets, "val", 1, "label_7"))
        np.testing.assert_array_equal(targets["depth"][0], on_disk(streets, "val", 1, "depth")[..., 0])
        assert dataset.classes["segmentation"] == dataset.objectives["segmentation"].classes
        assert len(dataset.classes["segmentation"]) == 7

    @pytest.mark.parametrize("dtype", ["float16", "float64", ">f4"])
    def test_any_type_of_floats_is_read(self, rooms, tmp_path, dtype):
        write_nyuv2(tmp_path, dtype=dtype)
        for number in range(4):
            (picture, targets), (expected, others) = NYUv2("test", tmp_path)[number], NYUv2("test", rooms)[number]
            torch.testing.assert_close((picture, targets), (expected, others), atol=1e-3, rtol=1e-3)

    @pytest.mark.parametrize("dtype", [np.int64, np.int8, np.float64])
    def test_labels_may_be_integers(self, rooms, tmp_path, dtype):
        write_nyuv2(tmp_path)
        for path in (tmp_path / "val" / "label").iterdir():
            np.save(path, np.load(path).astype(dtype))
        assert torch.equal(NYUv2("test", tmp_path)[2][1]["segmentation"], NYUv2("test", rooms)[2][1]["segmentation"])

    def test_arrays_may_lie_in_memory_column_by_column(self, rooms, tmp_path):
        write_nyuv2(tmp_path)
        for path in tmp_path.glob("*/*/*.npy"):
            np.save(path, np.asfortranarray(np.load(path)))
        assert same_items(NYUv2("train", tmp_path)[3], NYUv2("train", rooms)[3])

    def test_seven_classes_are_read_from_label_7_or_else_from_label(self, streets, tmp_path):
        write_cityscapes(tmp_path, label="label")
        assert same_items(CityScapes("test", tmp_path)[0], CityScapes("test", streets)[0])
        other = write_cityscapes(tmp_path / "both", label="label", seed=1)
        for part in ("train", "val"):
            shutil.copytree(streets / part / "label_7", other / part / "label_7")
        labels = CityScapes("test", other)[0][1]["segmentation"]
        assert torch.equal(labels, CityScapes("test", streets)[0][1]["segmentation"])

    def test_normals_are_made_unit_vectors(self, tmp_path):
        write_nyuv2(tmp_path)
        path = tmp_path / "val" / "normal" / "0.npy"
        normals = np.load(path)
        normals[:5] *= 0.7  # as between two surfaces in a picture that was resized
        np.save(path, normals)
        lengths = NYUv2("test", tmp_path)[0][1]["normals"].norm(dim=0)
        assert torch.equal(lengths > 0, torch.from_numpy(normals.any(axis=-1)))
        torch.testing.assert_close(lengths[lengths > 0], torch.ones(int((lengths > 0).sum())))


class TestSplits:
    def test_test_is_what_the_files_call_val(self, rooms):
        assert NYUv2("test", rooms).numbers == [0, 1, 2, 3]

    @pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
    def test_train_and_validation_share_no_picture_and_leave_none_out(self, rooms, share):
        train, validation = (NYUv2(split, rooms, validation_share=share).numbers for split in ("train", "validation"))
        assert sorted(train + validation) == list(range(8))
        assert len(validation) == round(share * 8)

    def test_splits_are_the_same_for_every_seed(self, rooms):
        for split in ("train", "validation", "test"):
            assert NYUv2(split, rooms, seed=0).numbers == NYUv2(split, rooms, seed=1).numbers

    def test_without_a_validation_share_all_is_for_training(self, rooms):
        assert NYUv2("train", rooms, validation_share=0).numbers == list(range(8))
        with pytest.raises(ValueError, match=r"no pictures for split 'validation': validation_share=0 divides 8 into"):
            NYUv2("validation", rooms, validation_share=0)

    def test_a_number_of_samples_is_a_fixed_choice_of_a_split(self, rooms):
        chosen = NYUv2("train", rooms, samples=3)
        assert len(chosen) == 3
        assert set(chosen.numbers) < set(NYUv2("train", rooms).numbers)
        assert chosen.numbers == NYUv2("train", rooms, samples=3, seed=9).numbers
        with pytest.raises(ValueError, match="samples=5, but test has 4 pictures"):
            NYUv2("test", rooms, samples=5)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"samples": 0}, "samples must be a whole number from 1, got 0"),
            ({"seed": -1}, "seed must be a whole number from 0"),
            ({"validation_share": 1.0}, "validation_share must be at least 0 and below 1, got 1.0"),
            ({"disparity": "add"}, "unknown disparity 'add'. Known: divide, multiply"),
        ],
        ids=str,
    )
    def test_bad_values_are_quoted(self, streets, option, message):
        with pytest.raises(ValueError, match=message):
            CityScapes("train", streets, **option)


class TestSources:
    def test_auto_takes_the_files_where_they_are(self, rooms, tmp_path):
        assert nyuv2("test", root=rooms).source == "full"
        shutil.copytree(rooms, tmp_path / "nyuv2")
        inner = nyuv2("test", root=tmp_path)
        assert str(inner) == f"nyuv2 test: 4 pictures of {tmp_path / 'nyuv2' / 'val'}, 32x64"

    @pytest.mark.parametrize(("make", "source"), [(nyuv2, "scenes"), (cityscapes, "streets")])
    def test_auto_renders_pictures_of_the_same_kind_where_there_are_none(self, tmp_path, monkeypatch, make, source):
        monkeypatch.chdir(tmp_path)
        dataset = make("test", samples=2, size=(32, 32))
        assert dataset.source == source
        assert str(dataset).startswith(f"{source} test: 2 ")
        assert dataset[0][0].shape == (3, 32, 32)

    @pytest.mark.parametrize("make", [nyuv2, cityscapes])
    def test_rendered_pictures_have_the_tasks_and_classes_of_the_files(self, rooms, streets, make):
        files = make("test", root={nyuv2: rooms, cityscapes: streets}[make])
        rendered = make("test", source={nyuv2: "scenes", cityscapes: "streets"}[make], samples=1)
        assert rendered.objectives == files.objectives
        assert rendered.classes == files.classes

    def test_files_that_must_be_there_are_named(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"no nyuv2 in .* or .*nyuv2; expected train/ and val/ with the folders"
        ):
            nyuv2("train", root=tmp_path, source="full")
        with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; expected a folder of data"):
            nyuv2("train", root=tmp_path / "nowhere")

    def test_incomplete_files_are_not_replaced(self, rooms, tmp_path):
        shutil.copytree(rooms / "train" / "image", tmp_path / "train" / "image")
        with pytest.raises(
            FileNotFoundError, match=r"train/label: there is no such folder; .*There are 2 more findings"
        ):
            nyuv2("train", root=tmp_path)

    def test_unknown_sources_and_sizes_of_files_are_refused(self, rooms):
        with pytest.raises(ValueError, match="unknown source 'streets'. .*Known: auto, full, scenes"):
            nyuv2("train", root=rooms, source="streets")
        with pytest.raises(ValueError, match=r"size=\(64, 64\) is for rendered pictures"):
            nyuv2("train", root=rooms, size=(64, 64))


class TestAugmentation:
    def test_is_for_training_only(self, rooms):
        assert [NYUv2(split, rooms).augment for split in ("train", "validation", "test")] == [True, False, False]
        assert not NYUv2("train", rooms, augment=False).augment
        assert "cropped and mirrored at random" in str(NYUv2("train", rooms))

    def test_an_item_is_the_augmented_clean_one(self, rooms):
        dataset = NYUv2("train", rooms, seed=5)
        dataset.start_epoch(3)
        for index in range(len(dataset)):
            generator = item_generator(5, 3, dataset.numbers[index])
            assert same_items(dataset[index], augment(*dataset.clean[index], dataset.objectives, generator))

    def test_clean_items_are_those_of_the_files(self, rooms):
        dataset = NYUv2("train", rooms)
        assert same_items(dataset.clean[1], NYUv2("train", rooms, augment=False)[1])
        assert dataset.augment
        assert dataset.clean.clean is not dataset
        assert NYUv2("test", rooms).clean[0][0].shape == (3, 32, 64)

    def test_differs_between_epochs_and_seeds_and_comes_back(self, rooms):
        def items(seed, epoch):
            dataset = NYUv2("train", rooms, seed=seed)
            dataset.start_epoch(epoch)
            return torch.stack([dataset[index][0] for index in range(len(dataset))])

        first = items(0, 1)
        assert torch.equal(first, items(0, 1))
        assert not torch.equal(first, items(0, 2))
        assert not torch.equal(first, items(1, 1))

    def test_does_not_depend_on_the_number_of_loader_processes(self, rooms):
        dataset = NYUv2("train", rooms, validation_share=0)
        epochs = {workers: [] for workers in (0, 1, 2)}
        for workers, seen in epochs.items():
            for epoch in (1, 2):
                dataset.start_epoch(epoch)
                loader = DataLoader(dataset, batch_size=2, num_workers=workers)
                seen.append(torch.cat([targets["normals"] for _, targets in loader]))
        assert not torch.equal(*epochs[0])
        for workers in (1, 2):
            assert all(torch.equal(one, other) for one, other in zip(epochs[0], epochs[workers], strict=True))

    @pytest.mark.parametrize(("disparity", "power"), [("multiply", 1), ("divide", -1)])
    def test_zooms_multiply_disparities_unless_they_shall_divide(self, streets, disparity, power):
        dataset = cityscapes("train", root=streets, disparity=disparity)
        for epoch in range(4):
            dataset.start_epoch(epoch)
            for index, number in enumerate(dataset.numbers):
                view = View.draw((32, 64), item_generator(0, epoch, number))
                part = on_disk(streets, "train", number, "depth")[view.window]
                seen = dataset[index][1]["depth"].numpy()
                known = part * np.float32(view.scale) ** power
                assert np.isclose(seen.ravel()[:, None], np.unique(known)).any(axis=1).all()


class TestOpenFiles:
    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the list of memory maps is that of Linux")
    def test_no_file_stays_open(self, rooms):
        dataset = NYUv2("train", rooms)
        before = len(os.listdir("/proc/self/fd"))
        items = [dataset[index] for index in range(len(dataset))]
        assert len(os.listdir("/proc/self/fd")) == before
        assert ".npy" not in Path("/proc/self/maps").read_text()
        assert len(items) == 7

    def test_items_are_writable_memory_of_their_own(self, rooms):
        picture, targets = NYUv2("test", rooms)[0]
        for part in (picture, *targets.values()):
            part.zero_()
        assert NYUv2("test", rooms)[0][0].any()


class TestFingerprint:
    def test_is_that_of_the_files_wherever_they_are(self, rooms, tmp_path):
        shutil.copytree(rooms, tmp_path / "copy")
        for split in ("train", "validation", "test"):
            assert NYUv2(split, rooms).fingerprint == NYUv2(split, tmp_path / "copy", seed=3).fingerprint

    def test_differs_between_splits_samples_and_data(self, rooms, tmp_path):
        write_nyuv2(tmp_path, seed=1)
        prints = [NYUv2(split, rooms).fingerprint for split in ("train", "validation", "test")]
        prints += [NYUv2("train", rooms, samples=3).fingerprint, NYUv2("test", tmp_path).fingerprint]
        assert len(set(prints)) == 5


class MakesAFile:
    """What makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def changed(folder, change):
    """Return what changes the array in a file."""
    return folder, lambda path: np.save(path, change(np.load(path)))


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def save_archive(path):
    with path.open("wb") as file:
        np.savez(file, depth=np.ones(3))


def with_number(value):
    """Return what puts a number into an array."""

    def put(array):
        array[3, 4] = value
        return array

    return put


BROKEN = {
    "missing file": ("depth", Path.unlink, FileNotFoundError, "there is no such file, though other folders have it"),
    "wrong shape": (*changed("normal", lambda a: a.transpose(2, 0, 1)), ValueError, r"shape \(3, 32, 64\); expected"),
    "flat depth": (*changed("depth", lambda a: a[..., 0]), ValueError, r"shape \(32, 64\); expected .height, width, 1"),
    "another size": (*changed("image", lambda a: a[:16]), ValueError, "height and width are 16 x 64; expected 32 x 64"),
    "bytes as pictures": (
        *changed("image", lambda a: (255 * a).astype(np.uint8)),
        ValueError,
        r"dtype uint8; expected floats in \[0, 1\]",
    ),
    "complex depth": (*changed("depth", lambda a: a + 0j), ValueError, "dtype complex64; expected floats"),
    "pictures to 255": (
        *changed("image", lambda a: 255 * a),
        ValueError,
        "values from .* to 2[0-9.]*; expected floats in",
    ),
    "NaN in a picture": (*changed("image", with_number(np.nan)), ValueError, "3 of 6,144 numbers are NaN or infinite"),
    "NaN depth": (*changed("depth", with_number(np.nan)), ValueError, "1 of 2,048 numbers are NaN or infinite"),
    "infinite depth": (*changed("depth", with_number(np.inf)), ValueError, "1 of 2,048 numbers are NaN or infinite"),
    "negative depth": (*changed("depth", with_number(-1)), ValueError, "values from -1 to .*; expected floats from 0"),
    "millimetres": (*changed("depth", lambda a: 1000 * a), ValueError, "values from 0 to .*; expected .* metres"),
    "no depth": (*changed("depth", np.zeros_like), ValueError, "every pixel is 0, so none is valid"),
    "label 13": (*changed("label", with_number(13)), ValueError, "labels from -1 to 13; expected whole numbers 0..12"),
    "label -2": (
        *changed("label", with_number(-2)),
        ValueError,
        "labels from -2 to [0-9]+; expected whole numbers 0..12",
    ),
    "label 1.5": (*changed("label", with_number(1.5)), ValueError, "labels that are no whole numbers"),
    "integer label 255": (
        *changed("label", lambda a: np.where(a < 0, 255, a).astype(np.uint8)),
        ValueError,
        "labels from 0 to 255; expected .* -1 for void",
    ),
    "no label": (*changed("label", lambda a: np.full_like(a, -1)), ValueError, "every pixel is void"),
    "zero normals": (*changed("normal", np.zeros_like), ValueError, r"every normal is \(0, 0, 0\), so none is valid"),
    "long normals": (*changed("normal", with_number([3, 0, 0])), ValueError, "normals of length up to 3; expected"),
    "short normals": (
        *changed("normal", lambda a: a / 2),
        ValueError,
        "half of the normals no longer than 0.5; expected",
    ),
    "cut": ("image", cut, ValueError, r"cannot be read \(mmap length is greater than file size"),
    "cut header": ("label", lambda path: path.write_bytes(path.read_bytes()[:20]), ValueError, "cannot be read"),
    "too long": ("label", lambda path: path.write_bytes(path.read_bytes() + b"0"), ValueError, "its header announces"),
    "empty": ("image", lambda path: path.write_bytes(b""), ValueError, "cannot be read"),
    "an archive": ("depth", save_archive, ValueError, "cannot be read"),
    "a text": ("depth", lambda path: path.write_text("1.5"), ValueError, "cannot be read"),
    "no entries": (*changed("depth", lambda a: a[:0]), ValueError, r"shape \(0, 64, 1\); expected"),
}


class TestBrokenFiles:
    @pytest.fixture
    def root(self, rooms, tmp_path):
        return shutil.copytree(rooms, tmp_path / "rooms")

    @pytest.mark.parametrize("case", BROKEN)
    def test_each_is_named_with_what_is_wrong_and_what_to_do(self, root, case):
        folder, damage, error, message = BROKEN[case]
        path = root / "train" / folder / "3.npy"
        damage(path)
        with pytest.raises(error, match=message) as caught:
            NYUv2("train", root, validation_share=0)
        told = str(caught.value)
        assert told.startswith(f"{path}: ")
        assert "; expected " in told
        assert told.endswith(".")
        assert "more" not in told
        assert len(NYUv2("test", root)) == 4

    @pytest.mark.parametrize("how", ["object array", "pickle"])
    def test_code_in_a_file_is_not_run(self, root, tmp_path, how):
        path, made = root / "train" / "label" / "3.npy", tmp_path / "made"
        content = MakesAFile(made)
        if how == "pickle":
            path.write_bytes(pickle.dumps(content))
        else:
            np.save(path, np.array([content], object), allow_pickle=True)
        for check in (True, False):
            with pytest.raises(ValueError, match=f"{path}: cannot be read"):
                NYUv2("train", root, check=check)
        assert not made.exists()
        np.load(path, allow_pickle=True)
        assert made.exists()  # it would have been

    def test_without_the_check_numbers_are_not_read_but_headers_are(self, root):
        np.save(root / "train" / "depth" / "3.npy", np.full((32, 64, 1), np.nan, np.float32))
        assert len(NYUv2("train", root, check=False)) == 7
        cut(root / "train" / "image" / "5.npy")
        with pytest.raises(ValueError, match=r"image/5.npy: cannot be read"):
            NYUv2("train", root, check=False)

    def test_only_the_files_of_the_split_are_read(self, root):
        held_out = NYUv2("validation", root).numbers[0]
        np.save(root / "train" / "depth" / f"{held_out}.npy", np.zeros((32, 64, 1), np.float32))
        assert len(NYUv2("train", root)) == 7
        with pytest.raises(ValueError, match="none is valid"):
            NYUv2("validation", root)

    def test_a_number_that_is_nowhere_is_named(self, root):
        for folder in ("image", "label", "depth", "normal"):
            (root / "train" / folder / "3.npy").unlink()
        with pytest.raises(
            FileNotFoundError, match=r"train/image/3.npy: there is no such file in any folder, though 4 higher"
        ):
            NYUv2("train", root)

    @pytest.mark.parametrize("name", ["3 (copy).npy", "03.npy", "3.npz", "notes.txt"])
    def test_a_file_that_is_no_sample_is_named(self, root, name):
        (root / "train" / "label" / name).touch()
        with pytest.raises(ValueError, match=r"it is no sample; expected files 0.npy, 1.npy, .*Move it away") as caught:
            NYUv2("train", root)
        assert str(root / "train" / "label" / name) in str(caught.value)

    def test_hidden_files_are_no_fault(self, root):
        (root / "train" / "label" / ".DS_Store").touch()
        assert len(NYUv2("train", root)) == 7

    def test_an_empty_folder_is_named(self, root):
        for path in (root / "train" / "depth").iterdir():
            path.unlink()
        with pytest.raises(FileNotFoundError, match=r"train/depth: there are no samples; expected files 0.npy"):
            NYUv2("train", root)

    def test_a_file_that_is_broken_later_is_named_by_the_loader(self, root):
        dataset = NYUv2("train", root, validation_share=0)
        cut(root / "train" / "image" / "3.npy")
        for workers in (0, 1):
            with pytest.raises(ValueError, match=r"image/3.npy: cannot be read"):
                list(DataLoader(dataset, num_workers=workers))
