"""What all figures have in common: legends and labels find their place, however long they are."""

from itertools import pairwise

import pytest

from flatmtl_bench.figures.style import grid, legend, style

LONG = "F-CAGrad (c=0.4, rho 0.02, train-samples 4000, batch 64)"


def drawn(columns, labels):
    """Return a drawing of three rows in which each panel has a curve for each label."""
    with style():
        drawing, axes = grid(["test pixel accuracy of segmentation, %\nhigher is better"] * 3, ["digits"] * columns)
        for axis in axes.flat:
            for label in labels:
                axis.plot([0, 1], [0, 1], label=label)
        legend(drawing, axes)
        drawing.draw_without_rendering()
    return drawing, axes


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
@pytest.mark.parametrize("label", ["MGDA", LONG, f"{LONG}, and much more that is told of it"])
class TestLegend:
    def test_it_lies_within_the_drawing_with_every_label(self, columns, count, label):
        drawing, _ = drawn(columns, [f"{label} {k}" for k in range(count)])
        (box,) = drawing.legends
        place = box.get_window_extent()
        assert place.x0 >= 0
        assert place.x1 <= drawing.bbox.width
        assert place.y0 >= 0
        assert [" ".join(t.get_text().split()) for t in box.get_texts()] == [f"{label} {k}" for k in range(count)]

    def test_panels_keep_their_height(self, columns, count, label):
        _, axes = drawn(columns, [f"{label} {k}" for k in range(count)])
        assert all(axis.get_window_extent().height > 150 for axis in axes.flat)  # of 250 pixels, labels included


def test_labels_of_rows_do_not_touch():
    _, axes = drawn(1, ["MGDA"])
    boxes = [axis.yaxis.label.get_window_extent() for axis in axes[:, 0]]
    assert all(below.y1 < above.y0 for above, below in pairwise(boxes))
