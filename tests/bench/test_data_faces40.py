import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.bench import written_data

from flatmtl_bench.data import faces40
from flatmtl_bench.data.attributes import ATTRIBUTES
from flatmtl_bench.data.faces.canvas import Canvas, box, ellipse, mix, ring
from flatmtl_bench.data.faces.distribution import DISTRIBUTION, EXCLUDED, draw_margins
from flatmtl_bench.data.faces.face import CHANCE, Face
from flatmtl_bench.data.faces40 import WRONG, Faces40

SPLITS = ["train", "validation", "test"]
HAIR_COLOURS = ("Black_Hair", "Brown_Hair", "Blond_Hair")  # seen by the lightness of the hair


def pictures(dataset):
    return np.stack([dataset.picture(index).numpy() for index in range(len(dataset))])


@pytest.fixture(scope="module")
def margins():
    return draw_margins(20_000, np.random.RandomState(0))


def correlation(margins, one, other):
    return np.corrcoef(margins[one] > 0, margins[other] > 0)[0, 1]


class TestItems:
    @pytest.mark.parametrize(("split", "count"), [("train", 4000), ("validation", 500), ("test", 1000)])
    def test_there_are_4000_500_and_1000_faces(self, split, count):
        dataset = Faces40(split)
        assert len(dataset) == count
        assert str(dataset) == f"faces40 {split}: {count:,} drawn faces of 64 x 64 pixels, 40 attributes each"

    def test_pictures_are_in_the_unit_interval_with_40_labels_in_the_order_of_celeba(self):
        dataset = Faces40("test", samples=20)
        for index in (0, 7, -1):
            picture, targets = dataset[index]
            assert (picture.shape, picture.dtype) == ((3, 64, 64), torch.float32)
            assert 0 <= picture.min() < 0.4 < picture.max() <= 1
            assert list(targets) == list(dataset.objectives) == written_data.ATTRIBUTES
            assert all(type(label) is int and label in (0, 1) for label in targets.values())
        with pytest.raises(IndexError):
            dataset[20]

    @pytest.mark.parametrize("size", [(16, 16), (33, 47), (96, 64)], ids=str)
    def test_faces_have_any_size(self, size):
        picture, _ = Faces40("test", samples=1, size=size)[0]
        assert picture.shape == (3, *size)

    def test_a_face_looks_the_same_at_any_size(self):
        small, large = (torch.from_numpy(pictures(Faces40("test", samples=20, size=(n, n)))) for n in (32, 128))
        shrunk = torch.nn.functional.avg_pool2d(large.float(), 4)
        assert (small - shrunk).abs().mean() < 8  # of 255; the noise of the pixels differs

    def test_official_preprocessing_stretches_every_picture(self):
        picture, _ = Faces40("test", samples=1, preprocessing="official")[0]
        assert picture.aminmax() == (0, 1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": "val"}, "unknown split 'val'"),
            ({"source": "full"}, "unknown source of faces40 'full'. Known: auto, faces40"),
            ({"root": "data"}, "faces40 are drawn and read no files, got root='data'. Omit it"),
            ({"samples": 0}, "samples must be a whole number from 1, got 0"),
            ({"size": (64,)}, r"size must be a height and a width, e.g. \(64, 64\), got \(64,\)"),
            ({"size": (64, 15)}, "width must be a whole number from 16, got 15"),
            ({"size": (64.0, 64)}, "height must be a whole number from 16, got 64.0"),
            ({"seed": -1}, "seed must be a whole number"),
            ({"logits": 0}, "logits must be a whole number from 1 to 2, got 0"),
            ({"split": "validation", "validation_share": 0.0}, "leaves no pictures for split 'validation'"),
        ],
        ids=str,
    )
    def test_bad_options_are_quoted(self, options, message):
        with pytest.raises(ValueError, match=message):
            Faces40(**{"split": "train", **options})


class TestDeterminism:
    def test_the_faces_are_the_same_for_ever(self):
        assert [Faces40(split, samples=8).fingerprint for split in SPLITS] == [
            "4c67b9328d688ece",
            "81c378fc4a28a971",
            "793bb5b20ddc03d4",
        ]

    def test_a_face_depends_on_nothing_but_split_index_and_size(self):
        some, more = Faces40("train", samples=5, seed=0), Faces40("train", samples=9, seed=1)
        for index in (4, 0, 2):
            assert torch.equal(some[index][0], more[index][0])
            assert some[index][1] == more[index][1]

    def test_no_two_faces_are_the_same(self):
        faces = np.concatenate([pictures(Faces40(split, samples=20)) for split in SPLITS])
        assert len({face.tobytes() for face in faces}) == 60

    def test_what_is_kept_makes_no_difference(self, monkeypatch):
        expected = pictures(Faces40("test", samples=6))
        monkeypatch.setattr(faces40, "MEMORY", 2 * expected[0].nbytes)
        dataset = Faces40("test", samples=6)
        for _ in range(2):
            assert np.array_equal(pictures(dataset), expected)

    def test_another_process_draws_the_same(self):
        dataset = Faces40("test", samples=6)
        dataset.picture(3)
        assert np.array_equal(pictures(pickle.loads(pickle.dumps(dataset))), pictures(dataset))

    def test_global_random_states_are_left_alone(self):
        before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        Faces40("train", samples=2)[0]
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert random.getstate() == before[2]


class TestDistribution:
    @pytest.mark.parametrize("attribute", ATTRIBUTES)
    def test_attributes_are_about_as_frequent_as_they_should_be(self, margins, attribute):
        share = DISTRIBUTION[attribute][0]
        assert (margins[attribute] > 0).mean() == pytest.approx(share, rel=0.3, abs=0.01)

    @pytest.mark.parametrize(
        ("one", "other", "low", "high"),
        [
            ("Wearing_Lipstick", "Heavy_Makeup", 0.5, 0.9),
            ("Male", "Wearing_Lipstick", -0.9, -0.5),
            ("Male", "No_Beard", -0.7, -0.3),
            ("Smiling", "High_Cheekbones", 0.4, 0.8),
            ("Smiling", "Mouth_Slightly_Open", 0.3, 0.7),
            ("Young", "Gray_Hair", -0.5, -0.2),
            ("Chubby", "Double_Chin", 0.3, 0.8),
            ("Blurry", "Smiling", -0.05, 0.05),
            ("Eyeglasses", "Narrow_Eyes", -0.05, 0.05),
        ],
    )
    def test_attributes_depend_on_each_other_as_those_of_people_do(self, margins, one, other, low, high):
        assert low < correlation(margins, one, other) < high

    @pytest.mark.parametrize(("attributes", "others"), EXCLUDED, ids=str)
    def test_what_excludes_each_other_never_occurs_together(self, margins, attributes, others):
        both = [(margins[a] > 0) & (margins[b] > 0) for a in attributes for b in others]
        assert not np.any(both)

    def test_a_head_has_one_colour_of_hair(self, margins):
        assert sum((margins[name] > 0).astype(int) for name in (*HAIR_COLOURS, "Gray_Hair")).max() == 1

    def test_the_first_faces_are_the_same_for_any_count(self, margins):
        few = draw_margins(10, np.random.RandomState(0))
        assert all(np.array_equal(few[name], margins[name][:10]) for name in few)

    def test_few_labels_say_nothing_about_the_face(self, margins):
        true = np.stack([margins[attribute] > 0 for attribute in ATTRIBUTES], axis=1)
        labels = faces40.draw_labels(margins, np.random.RandomState(1))
        shares = np.array([DISTRIBUTION[attribute][0] for attribute in ATTRIBUTES])
        rates = np.where(true, 1 - shares, shares)  # of labels by chance that are wrong
        assert (labels != true).mean() == pytest.approx(WRONG * rates.mean(), rel=0.03)
        assert labels.mean(axis=0) == pytest.approx(true.mean(axis=0), abs=0.005)


def drawn(chance, **seen):
    """The face of someone with nothing to see, but for what is given; 64x64 without noise."""
    plain = dict.fromkeys(ATTRIBUTES, 0.2) | {"No_Beard": 1.0, "Young": 1.0, "Hair": 0.5} | seen
    return Face(plain, dict(zip(CHANCE, chance, strict=True)), 64, 64).draw(np.zeros((3, 64, 64), np.float32))


CHANCES = np.random.RandomState(0).random_sample((10, len(CHANCE)))


class TestFaces:
    @pytest.mark.parametrize("attribute", [a for a in ATTRIBUTES if a not in HAIR_COLOURS])
    def test_every_attribute_can_be_seen(self, attribute):
        for chance in CHANCES:
            without, having = (drawn(chance, **{attribute: amount}).astype(int) for amount in (0.0, 1.0))
            changed = np.abs(without - having).max(axis=0) > 15
            assert changed.sum() >= 6, "pixels"
            if attribute not in ("Blurry", "Male"):
                assert changed.mean() < 0.6  # the rest of the picture stays

    def test_lighter_hair_is_brighter(self):
        for chance in CHANCES:
            top = [drawn(chance, Hair=lightness)[:, 12:20, 24:40].mean() for lightness in (0.0, 0.3, 0.6, 1.0)]
            assert top == sorted(top)

    @pytest.mark.parametrize(
        ("attribute", "rows"),
        [("Wearing_Hat", (0, 32)), ("Wearing_Necktie", (40, 64)), ("Smiling", (26, 64)), ("Arched_Eyebrows", (8, 40))],
    )
    def test_attributes_are_seen_where_they_belong(self, attribute, rows):
        for chance in CHANCES:
            without, having = (drawn(chance, **{attribute: amount}).astype(int) for amount in (0.0, 1.0))
            changed = np.flatnonzero((without != having).any(axis=(0, 2)))
            assert rows[0] <= changed.min() <= changed.max() < rows[1]

    def test_attributes_can_be_learned_each_to_another_degree(self):
        """Ridge regression on the pixels beats the frequency of some attributes clearly, and of others hardly."""
        sets = [Faces40(split, samples=count, size=(24, 24)) for split, count in (("train", 1500), ("test", 500))]
        inputs = [np.c_[pictures(part).reshape(len(part), -1) / 255.0, np.ones(len(part))] for part in sets]
        gram = inputs[0].T @ inputs[0] + 10 * np.eye(inputs[0].shape[1])
        weights = np.linalg.solve(gram, inputs[0].T @ (2.0 * sets[0].labels - 1))
        errors = ((inputs[1] @ weights > 0) != sets[1].labels).mean(axis=0)
        gain = dict(
            zip(ATTRIBUTES, 1 - errors / np.minimum(sets[1].labels.mean(0), 1 - sets[1].labels.mean(0)), strict=True)
        )
        assert min(gain[attribute] for attribute in ("Male", "Wearing_Lipstick")) > 0.3
        assert max(gain[attribute] for attribute in ("Big_Lips", "Narrow_Eyes", "Mustache")) < 0.2


class TestCanvas:
    @given(st.floats(0.2, 0.6), st.floats(0.2, 0.6), st.floats(-0.2, 0.2), st.floats(-0.2, 0.2))
    def test_a_shape_covers_its_area_wherever_it_lies(self, across, down, x, y):
        shapes = {ellipse: np.pi * across * down, box: 4 * across * down}
        for shape, area in shapes.items():
            canvas = Canvas.blank(64, 80, (0.0, 0.0, 0.0))
            canvas.paint(shape(canvas.x - x, canvas.y - y, across, down), (1.0, 1.0, 1.0))
            assert canvas.picture[0].sum() / canvas.scale**2 == pytest.approx(area, rel=0.02)

    def test_a_ring_covers_a_line_along_the_edge(self):
        canvas = Canvas.blank(64, 64, (0.0, 0.0, 0.0))
        canvas.paint(ring(ellipse(canvas.x, canvas.y, 0.5, 0.5), 0.1), (1.0, 1.0, 1.0))
        assert canvas.picture[0].sum() / canvas.scale**2 == pytest.approx(2 * np.pi * 0.5 * 0.1, rel=0.02)

    @given(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5), st.floats(0.4, 1.0), st.floats(-0.2, 0.2))
    def test_coordinates_are_shifted_scaled_and_turned(self, x, y, scale, tilt):
        page = Canvas.blank(20, 30, (0.0, 0.0, 0.0))
        head = page.placed(x, y, scale, tilt)
        expected = ((page.x - x) + 1j * (page.y - y)) / scale * np.exp(-2j * np.arctan(tilt))
        assert np.abs(head.x + 1j * head.y - expected).max() < 1e-5
        assert head.scale == pytest.approx(page.scale * scale)

    @pytest.mark.parametrize("tilt", [0.0, 0.2])
    def test_painting_on_a_part_is_painting_on_the_whole(self, tilt):
        whole, parted = (Canvas.blank(40, 40, (9.0, 9.0, 9.0)).placed(0.1, 0.1, 0.5, tilt) for _ in range(2))
        part = parted.part(-0.7, 0.7, -0.5, 0.5)
        for canvas in (whole, part):
            canvas.paint(ellipse(canvas.x, canvas.y, 0.5, 0.3), (200.0, 100.0, 50.0), opacity=0.7)
        assert part.picture.size < parted.picture.size
        assert np.array_equal(whole.picture, parted.picture)
        assert parted.part(9.0, 9.1, 0.0, 0.1).picture.size == 0

    def test_opacity_mixes_colours(self):
        canvas = Canvas.blank(4, 4, (0.0, 100.0, 200.0))
        canvas.paint(canvas.x - 9, (100.0, 100.0, 100.0), opacity=0.25)
        assert canvas.picture[:, 0, 0] == pytest.approx(mix((0.0, 100.0, 200.0), (100.0, 100.0, 100.0), 0.25))
