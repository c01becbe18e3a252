from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flatmtl_bench.data import scenes
from flatmtl_bench.data.rendering.caster import render
from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.rooms import room
from flatmtl_bench.data.rendering.streets import street
from flatmtl_bench.data.scenes import CITYSCAPES_CLASSES, NYUV2_CLASSES, Scenes, Streets

SPLITS = ["train", "validation", "test"]
KINDS = [Scenes, Streets]


def equal(one, other):
    """Whether two items are the same in every bit."""
    (picture, targets), (other_picture, others) = one, other
    return torch.equal(picture, other_picture) and all(torch.equal(targets[task], others[task]) for task in targets)


def fresh(kind, *arguments, **options):
    """Return a data set that shares no pictures with those that were made before."""
    scenes._pictures.cache_clear()
    return kind(*arguments, **options)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def hundred(request):
    """The 100 test pictures of each kind."""
    dataset = request.param("test")
    return dataset, [dataset[index] for index in range(len(dataset))]


class TestHundredPictures:
    def test_items_have_the_shapes_types_and_ranges_of_their_tasks(self, hundred):
        dataset, items = hundred
        height, width = dataset.size
        for picture, targets in items:
            assert picture.shape == (3, height, width)
            assert picture.dtype == torch.float32
            assert 0 <= picture.min() < picture.max() <= 1
            assert list(targets) == list(dataset.objectives)
            labels, depth = targets["segmentation"], targets["depth"]
            assert labels.shape == (height, width)
            assert labels.dtype == torch.int64
            assert -1 <= labels.min() <= labels.max() < len(dataset.classes["segmentation"])
            assert depth.shape == (1, height, width)
            assert depth.dtype == torch.float32
            assert 0 == depth.min() < depth.max() < (8 if dataset.name == "scenes" else 0.4923)

    def test_every_class_occurs_and_none_is_nearly_everything(self, hundred):
        dataset, items = hundred
        labels = torch.stack([targets["segmentation"] for _, targets in items])
        shares = torch.bincount(labels[labels >= 0], minlength=len(dataset.classes["segmentation"])) / labels.numel()
        assert len(shares) == len(dataset.classes["segmentation"])
        assert shares.min() > 0.001
        assert shares.max() < 0.5
        assert shares.max() / shares.min() > 30  # skewed, as in the real data

    def test_labels_are_missing_as_often_as_said(self, hundred):
        dataset, items = hundred
        void = np.mean([(targets["segmentation"] == -1).float().mean() for _, targets in items])
        no_depth = np.mean([(targets["depth"] == 0).float().mean() for _, targets in items])
        assert 0.1 < void < 0.2
        assert (0.05 if dataset.name == "scenes" else 0.2) < no_depth < (0.15 if dataset.name == "scenes" else 0.35)

    def test_no_two_pictures_are_alike(self, hundred):
        _, items = hundred
        assert len({picture.numpy().tobytes() for picture, _ in items}) == len(items)

    def test_pictures_have_eight_bits(self, hundred):
        _, items = hundred
        values = items[0][0] * 255
        torch.testing.assert_close(values, values.round(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
class TestEachKind:
    @pytest.mark.parametrize("split", SPLITS)
    def test_an_item_depends_on_split_and_index_only(self, kind, split):
        both = ((0, 3), (7, 9))
        one, other = (fresh(kind, split, seed=seed, augment=False, samples=samples) for seed, samples in both)
        assert equal(one[2], other[2])
        assert equal(one[-1], one[2])
        assert not equal(one[0], one[1])

    def test_splits_have_pictures_of_their_own(self, kind):
        pictures = {kind(split, augment=False)[0][0].numpy().tobytes() for split in SPLITS}
        assert len(pictures) == 3

    def test_what_is_kept_in_memory_is_what_would_be_rendered(self, kind, monkeypatch):
        kept = kind("test", samples=4)
        first = [kept[index] for index in range(4)]
        again = [kept[index] for index in range(4)]
        monkeypatch.setattr(scenes, "MEMORY", 0)
        forgetful = fresh(kind, "test", samples=4)
        for index in range(4):
            assert equal(first[index], again[index])
            assert equal(first[index], forgetful[index])
        assert not forgetful._kept

    def test_data_sets_of_one_kind_share_what_is_rendered(self, kind, monkeypatch):
        first = fresh(kind, "test", samples=2)[1]
        monkeypatch.setattr(kind, "draw", lambda self, draws: pytest.fail("it is rendered again"))
        assert equal(kind("test", samples=9)[1], first)

    def test_memory_is_bounded(self, kind, monkeypatch):
        probe = fresh(kind, "test", samples=1)
        probe[0]
        each = sum(part.nbytes for part in (probe._kept[0][0], *probe._kept[0][1].values()))
        monkeypatch.setattr(scenes, "MEMORY", 2 * each + 1)
        dataset = fresh(kind, "test", samples=5)
        for index in range(5):
            dataset[index]
        assert list(dataset._kept) == [0, 1]

    def test_nothing_changes_an_item_from_outside(self, kind):
        dataset = kind("test", samples=1)
        before = dataset[0]
        copy = {task: target.clone() for task, target in before[1].items()}
        for target in dataset[0][1].values():
            target.zero_()
        assert equal(dataset[0], (before[0], copy))

    def test_train_pictures_change_with_seed_and_epoch_and_the_others_never_do(self, kind):
        def item(split, seed, epoch):
            dataset = fresh(kind, split, seed=seed, samples=2)
            dataset.start_epoch(epoch)
            return torch.cat([dataset[index][0] for index in range(2)])

        assert torch.equal(item("train", 1, 1), item("train", 1, 1))
        assert not torch.equal(item("train", 1, 1), item("train", 1, 2))
        assert not torch.equal(item("train", 1, 1), item("train", 2, 1))
        for split in ("validation", "test"):
            assert torch.equal(item(split, 1, 1), item(split, 2, 2))

    def test_clean_shows_the_whole_picture(self, kind):
        dataset = kind("train", samples=2)
        assert equal(dataset.clean[1], fresh(kind, "train", samples=2, augment=False)[1])
        assert dataset.augment

    def test_a_loader_stacks_items(self, kind):
        dataset = kind("train", samples=4, size=(32, 64))
        ((pictures, targets),) = DataLoader(dataset, batch_size=4)
        assert pictures.shape == (4, 3, 32, 64)
        assert targets["depth"].shape == (4, 1, 32, 64)
        assert targets["segmentation"].shape == (4, 32, 64)

    def test_a_larger_picture_shows_the_same_world(self, kind):
        size = kind("test").size
        small, large = kind("test", samples=1), kind("test", samples=1, size=(3 * size[0], 3 * size[1]))
        one, other = small[0][1]["depth"][0], large[0][1]["depth"][0, 1::3, 1::3]
        both = (one > 0) & (other > 0)
        assert both.float().mean() > 0.4
        torch.testing.assert_close(one[both], other[both], rtol=1e-3, atol=0)

    def test_the_fingerprint_tells_data_from_other_data_and_not_seeds(self, kind):
        prints = [
            kind("test").fingerprint,
            kind("train").fingerprint,
            kind("test", samples=5).fingerprint,
            kind("test", size=(96, 96)).fingerprint,
        ]
        assert len(set(prints)) == len(prints)
        assert kind("train", seed=1).fingerprint == kind("train", seed=2).fingerprint
        assert Scenes("test", size=(64, 128)).fingerprint != Streets("test", size=(64, 128)).fingerprint

    def test_says_what_it_is(self, kind):
        height, width = kind("validation").size
        assert str(kind("validation")) == f"{kind.name} validation: 50 {kind.kind}, rendered at {height} x {width}"
        assert [len(kind(split)) for split in SPLITS] == [300, 50, 100]
        assert kind("test").source == kind.name

    @pytest.mark.parametrize("size", [(64, 65), (0, 64), (48, 48), (64.0, 64)])
    def test_sides_are_multiples_of_32(self, kind, size):
        with pytest.raises(ValueError, match="each side of size must be a"):
            kind("test", size=size)

    def test_mistakes_are_named(self, kind):
        with pytest.raises(ValueError, match="unknown split 'tset'. Did you mean 'test'"):
            kind("tset")
        with pytest.raises(ValueError, match=f"unknown source of {kind.name} 'full'. Known: auto, {kind.name}"):
            kind("test", source="full")
        with pytest.raises(ValueError, match=f"{kind.name} are rendered and read no files, got root='data'. Omit it"):
            kind("test", root="data")
        with pytest.raises(ValueError, match="validation_share=0 leaves no pictures for split 'validation'"):
            kind("validation", validation_share=0)
        with pytest.raises(ValueError, match="validation_share must be at least 0 and below 1, got 1.5"):
            kind("test", validation_share=1.5)
        with pytest.raises(ValueError, match="samples must be a whole number from 1, got 0"):
            kind("test", samples=0)
        with pytest.raises(ValueError, match="size must be height and width, got"):
            kind("test", size=(64,))
        with pytest.raises(IndexError):
            kind("test", samples=3)[3]


class TestScenes:
    def test_targets_are_those_of_the_rendered_world_where_they_are_valid(self):
        _, targets = Scenes("test")[3]
        world, camera = room(Draws(scenes.FIXED_SEED, 2, 3))
        view = render(world, camera, 64, 64)
        labels = np.array([NYUV2_CLASSES.index(part.label) for part in world.parts])[view.part]
        valid = targets["segmentation"].numpy() >= 0
        np.testing.assert_array_equal(targets["segmentation"].numpy()[valid], labels[valid])
        depth, normals = targets["depth"].numpy()[0], targets["normals"].numpy()
        np.testing.assert_array_equal(depth[depth > 0], view.depth[depth > 0])
        there = normals.any(axis=0)
        np.testing.assert_array_equal(normals[:, there], view.normals[:, there])

    def test_normals_have_unit_length_or_are_missing_at_least_where_the_depth_is(self):
        dataset = Scenes("test", samples=20)
        for _, targets in (dataset[index] for index in range(20)):
            length = targets["normals"].norm(dim=0)
            missing = length == 0
            torch.testing.assert_close(length[~missing], torch.ones_like(length[~missing]), atol=1e-5, rtol=0)
            assert missing[targets["depth"][0] == 0].all()

    def test_the_floor_is_below_and_the_ceiling_above(self):
        dataset = Scenes("test", samples=40)
        up = torch.cat([targets["normals"][1].flatten() for _, targets in (dataset[i] for i in range(40))])
        labels = torch.cat([dataset[i][1]["segmentation"].flatten() for i in range(40)])
        for name, direction in (("floor", 1), ("ceiling", -1)):
            ours = up[(labels == NYUV2_CLASSES.index(name)) & (up != 0)]
            assert len(ours) > 1000
            assert (direction * ours > 0.8).float().mean() > 0.99


class TestStreets:
    def test_disparity_is_inverse_to_depth(self):
        _, targets = Streets("test")[3]
        world, camera = street(Draws(scenes.FIXED_SEED, 2, 3))
        depth = render(world, camera, 64, 128).depth
        disparity = targets["depth"].numpy()[0]
        valid = disparity > 0
        np.testing.assert_allclose(disparity[valid] * depth[valid], 4 * 32257 / 65535, rtol=1e-5)
        assert (depth[valid] >= 4 - 1e-5).all()

    def test_the_sky_is_infinitely_far(self):
        dataset = Streets("test", samples=20)
        sky = [dataset[i][1]["segmentation"] == CITYSCAPES_CLASSES.index("sky") for i in range(20)]
        assert sum(mask.sum() for mask in sky) > 1000
        assert all((dataset[i][1]["depth"][0][mask] == 0).all() for i, mask in enumerate(sky))

    def test_the_bonnet_at_the_lower_border_has_no_label(self):
        dataset = Streets("test", samples=20)
        for _, targets in (dataset[i] for i in range(20)):
            assert (targets["segmentation"][-2:, 56:72] == -1).all()
            assert (targets["depth"][0, -2:, 56:72] == 0).all()

    def test_enlarging_multiplies_the_disparity_unless_told_to_divide(self):
        def largest(**options):
            dataset = Streets("train", samples=20, **options)
            return max(float(dataset[i][1]["depth"].max()) for i in range(20))

        assert largest() > 1.01 * 32257 / 65535
        assert largest(disparity="divide") <= 32257 / 65535
        with pytest.raises(ValueError, match="unknown disparity 'add'. Known: multiply, divide"):
            Streets("train", disparity="add")


class TestVersion:
    """A change of the pictures makes other data of them, which ``scenes.VERSION`` has to say."""

    PICTURES: Mapping = {
        1: {
            "scenes": ([487, 0, 0, 0, 0, 703, 187, 170, 133, 476, 0, 218, 1572, 150], 108.809, 9148.035),
            "streets": ([1614, 2536, 2965, 105, 22, 313, 5, 632], 93.612, 928.671),
        }
    }

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
    def test_the_pictures_of_a_version_stay_what_they_are(self, kind):
        picture, targets = kind("test")[0]
        labels = targets["segmentation"]
        counts = torch.bincount(labels.flatten() + 1, minlength=len(kind.classes["segmentation"]) + 1).tolist()
        brightness, depth = 255 * float(picture.mean()), float(targets["depth"].sum())
        expected = self.PICTURES[scenes.VERSION][kind.name]
        assert (counts, pytest.approx(brightness, abs=0.01), pytest.approx(depth, rel=1e-4)) == expected
