from collections.abc import Mapping

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.image import imread
from torch.nn.functional import one_hot

from flatmtl_bench.data import sheet
from flatmtl_bench.data.attributes import ATTRIBUTES, rgb
from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.data.faces40 import Faces40
from flatmtl_bench.data.painting import answer, class_colour, paint
from flatmtl_bench.metrics import Attribute, Classification, Depth, Normals, Objective, Segmentation

CLASSES = ("wall", "floor", "window")


class Maps(TaskDataset):
    """Two pictures of 36x36 with a target of each kind; in the second half of each map nothing is valid."""

    split, source = "test", "here"
    classes: Mapping = {"segmentation": CLASSES}
    objectives: Mapping = {"segmentation": Segmentation(CLASSES), "depth": Depth(), "normals": Normals()}

    def __getitem__(self, index):
        stream = np.random.RandomState(index)
        labels = torch.from_numpy(stream.randint(0, 3, (36, 36)))
        depth = torch.from_numpy(stream.uniform(1, 4, (1, 36, 36)).astype(np.float32))
        normals = torch.nn.functional.normalize(torch.from_numpy(stream.standard_normal((3, 36, 36))).float(), dim=0)
        labels[18:], depth[:, 18:], normals[:, 18:] = -1, 0, 0
        return torch.full((3, 36, 36), 0.25 + index / 2), {"segmentation": labels, "depth": depth, "normals": normals}

    def __len__(self):
        return 2

    def __str__(self):
        return "two pictures"


class Faces(TaskDataset):
    """Three pictures with 0, 20 and 40 attributes, and a name."""

    split, source = "test", "here"
    classes: Mapping = {"who": ("Ann", "Bob", "Cy")}
    objectives: Mapping = {"who": Classification(classes["who"]), **{f"Attribute_{i}": Attribute() for i in range(40)}}

    def __getitem__(self, index):
        return torch.rand(3, 64, 64), {"who": index, **{f"Attribute_{i}": int(i < 20 * index) for i in range(40)}}

    def __len__(self):
        return 3

    def __str__(self):
        return "three faces"


@pytest.fixture
def figure(monkeypatch):
    """The figures that were drawn, not written."""
    figures = []
    monkeypatch.setattr(sheet, "_write", lambda figure, _: figures.append(figure))
    return figures


def images(figure):
    """The panels of items, without the swatches of the legend."""
    arrays = [axes.images[0].get_array() for axes in figure.axes]
    return [np.asarray(array) for array in arrays if array.shape[:2] == (36, 36)]


def texts(figure):
    return [text.get_text() for text in (*figure.texts, *(t for axes in figure.axes for t in axes.texts))]


class TestMaps:
    def test_stand_beside_their_picture_with_headings_and_a_legend(self, figure, tmp_path):
        sheet.contact_sheet(Maps(), tmp_path / "sheet.png")
        (drawn,) = figure
        assert len(images(drawn)) == 2 * 4
        written = texts(drawn)
        assert written.count("segmentation") == written.count("depth") == written.count("normals") == 2
        assert {*CLASSES, "no label"} <= {*written}
        assert any("depth, or inverse depth" in text for text in written)
        assert any(text.startswith("normals:") for text in written)

    def test_labels_have_the_colours_of_their_classes(self):
        _, targets = Maps()[0]
        painted = paint(Segmentation(CLASSES), targets["segmentation"], 1.0)
        colours = [{tuple(c) for c in painted[:18][targets["segmentation"][:18] == number]} for number in range(3)]
        assert [len(of_class) for of_class in colours] == [1, 1, 1]
        assert len(set.union(*colours)) == 3

    def test_depths_are_on_the_scale_of_the_sheet(self):
        _, targets = Maps()[0]
        painted = paint(Depth(), targets["depth"], 4.0)
        expected = colormaps["viridis"](targets["depth"][0].numpy() / 4.0)[..., :3]
        np.testing.assert_array_equal(painted[:18], expected[:18])

    def test_normals_are_red_green_and_blue(self):
        _, targets = Maps()[0]
        painted = paint(Normals(), targets["normals"], 1.0)
        np.testing.assert_allclose(2 * painted[:18] - 1, targets["normals"][:, :18].permute(1, 2, 0), atol=1e-6)

    @pytest.mark.parametrize("task", Maps.objectives)
    def test_what_has_no_label_is_hatched(self, task):
        painted = paint(Maps.objectives[task], Maps()[0][1][task], 4.0)[18:]
        assert {tuple(colour) for colour in painted.reshape(-1, 3)} == {(1.0,) * 3, (0.35,) * 3}
        assert painted[0, 0, 0] == painted[1, 3, 0] != painted[1, 1, 0]  # along diagonals

    def test_all_colours_of_classes_differ_visibly(self):
        colours = np.array([class_colour(number) for number in range(13)])
        apart = np.abs(colours[:, None] - colours[None]).sum(-1) + 9 * np.eye(13)
        assert apart.min() > 0.2

    def test_are_drawn_into_the_file(self, tmp_path):
        path = sheet.contact_sheet(Maps(), tmp_path / "sheet.png", rows=1, columns=1, seed=0)
        index = int(np.random.RandomState(0).permutation(2)[0])
        labels = Maps()[index][1]["segmentation"]
        expected = paint(Segmentation(CLASSES), labels, 1.0).repeat(3, axis=0).repeat(3, axis=1)
        whole = imread(path)[..., :3]
        (row, column) = next(
            (r, c)
            for r in range(whole.shape[0] - 107)
            for c in range(126, 127)
            if np.allclose(whole[r : r + 108, c : c + 108], expected, atol=2 / 255)
        )
        assert (row, column) > (0, 0)

    def test_wide_pictures_have_wide_places(self, figure, tmp_path):
        wide, square = Maps(), Maps()
        item = wide[0]
        stretched = {task: target.repeat_interleave(2, -1) for task, target in item[1].items()}
        wide.__class__ = type(
            "Wide", (Maps,), {"__getitem__": lambda *_: (item[0].repeat_interleave(2, -1), stretched)}
        )
        for dataset in (square, wide):
            sheet.contact_sheet(dataset, tmp_path / "sheet.png", rows=1, columns=1)
        one, other = (next(axes for axes in drawn.axes).get_window_extent() for drawn in figure)
        assert (one.width, one.height) == pytest.approx((108, 108))
        assert (other.width, other.height) == pytest.approx((216, 108))


class TestAttributes:
    def test_are_listed_below_the_picture_if_it_has_them(self, figure, tmp_path):
        sheet.contact_sheet(Faces(), tmp_path / "sheet.png")
        captions = [text for text in texts(figure[0]) if text[:3] in ("Ann", "Bob", "Cy\n")]
        found = {caption.split("\n", 1)[0]: caption.replace("\n", " ") for caption in captions}
        assert found["Ann"] == "Ann none"
        assert found["Bob"] == "Bob " + ", ".join(f"Attribute {i}" for i in range(20))
        assert found["Cy"] == "Cy " + ", ".join(f"Attribute {i}" for i in range(40))
        assert "below each picture: who, the attributes it has" in texts(figure[0])[0]

    def test_lines_are_short_and_have_room(self, figure, tmp_path):
        sheet.contact_sheet(Faces(), tmp_path / "sheet.png")
        longest = max((text for text in texts(figure[0]) if "Attribute" in text), key=len)
        assert max(map(len, longest.split("\n"))) <= 18
        inches = figure[0].get_size_inches()[1]
        assert inches > 1.28 + len(longest.split("\n")) * 7 * 1.2 / 72


class TestPredictions:
    def outputs(self, index):
        """What a model would say that knows the truth."""
        _, targets = Maps()[index]
        logits = 5.0 * one_hot(targets["segmentation"].clamp(min=0), 3).movedim(-1, 0)
        return {"segmentation": logits, "depth": targets["depth"], "normals": 3 * targets["normals"]}

    def test_stand_beside_the_truth(self, figure, tmp_path):
        sheet.prediction_sheet(Maps(), {1: self.outputs(1), 0: self.outputs(0)}, tmp_path / "sheet.png")
        panels = images(figure[0])
        assert len(panels) == 2 * 7
        assert texts(figure[0]).count("predicted") == 3
        for start, brightness in ((0, 0.75), (7, 0.25)):  # in the order given
            assert panels[start].mean() == pytest.approx(brightness)
            for truth, predicted in ((1, 2), (3, 4), (5, 6)):
                np.testing.assert_allclose(panels[start + truth][:18], panels[start + predicted][:18], atol=1e-6)

    def test_labels_that_are_predicted_stand_below_the_true_ones(self, figure, tmp_path):
        yes_no = {f"Attribute_{i}": torch.tensor([1.0 if i == 7 else -1.0]) for i in range(40)}
        sheet.prediction_sheet(Faces(), {0: {"who": torch.tensor([0.0, 9.0, 1.0]), **yes_no}}, tmp_path / "sheet.png")
        assert "Ann\nnone\npredicted:\nBob\nAttribute 7" in texts(figure[0])

    def test_two_logits_say_no_and_yes(self):
        assert [answer(Attribute(2), torch.tensor(logits)) for logits in ([0.0, 1.0], [1.0, 0.0])] == [1, 0]

    def test_each_task_needs_an_output(self, tmp_path):
        outputs = self.outputs(0)
        del outputs["depth"]
        with pytest.raises(ValueError, match=r"item 0 has no output for \['depth'\]; expected one for each task"):
            sheet.prediction_sheet(Maps(), {0: outputs}, tmp_path / "sheet.png")
        with pytest.raises(ValueError, match="nothing to show: 1 columns, 0 items"):
            sheet.prediction_sheet(Maps(), {}, tmp_path / "sheet.png")

    def test_replace_no_file_unless_told_to(self, tmp_path):
        path = tmp_path / "sheet.png"
        path.write_text("mine")
        with pytest.raises(FileExistsError, match="sheet.png exists"):
            sheet.prediction_sheet(Maps(), {0: self.outputs(0)}, path)
        sheet.prediction_sheet(Maps(), {0: self.outputs(0)}, path, overwrite=True)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_an_objective_of_a_new_kind_is_named(self):
        class Other(Depth):
            pass

        class New(Objective):
            better: Mapping = {}
            outputs = 1

            def loss(self, output, target):
                return None

            def metrics(self, averaging):
                return None

            def score(self, values):
                return 0.0

        assert answer(Other(), torch.ones(1, 2, 2)).shape == (1, 2, 2)
        with pytest.raises(TypeError, match="no sheet shows a New"):
            answer(New(), torch.ones(1))


class TestPreprocessed:
    """Whatever a model is given, people are shown the picture."""

    @pytest.mark.parametrize("name", ["rgb", "imagenet"])
    def test_faces_are_drawn_in_their_own_colours(self, figure, tmp_path, name):
        faces = Faces40("test", samples=2, size=(36, 36), preprocessing=name)
        sheet.contact_sheet(faces, tmp_path / "sheet.png", seed=3)
        sheet.prediction_sheet(
            faces, dict.fromkeys(range(2), dict.fromkeys(ATTRIBUTES, torch.zeros(1))), tmp_path / "p.png"
        )
        own = [np.asarray(rgb(faces.picture(index), (36, 36)).permute(1, 2, 0)) for index in range(2)]
        for drawn in figure:
            shown = images(drawn)
            assert len(shown) == 2
            assert all(min(np.abs(picture - other).max() for other in shown) < 1e-6 for picture in own)

    def test_blue_green_red_is_drawn_as_red_green_blue(self, figure, tmp_path):
        faces = Faces40("test", samples=1, size=(36, 36), preprocessing="official")
        sheet.contact_sheet(faces, tmp_path / "sheet.png")
        assert np.array_equal(images(figure[0])[0], np.asarray(faces[0][0].flip(0).permute(1, 2, 0)))
