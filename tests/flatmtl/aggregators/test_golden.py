"""The gradient matrices of ``tests/golden/aggregators.json``, with answers computed in 400-bit arithmetic."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flatmtl.aggregators import IMTLG, MGDA, CAGrad, Mean, PCGrad, Sum

MATRICES = json.loads((Path(__file__).parents[2] / "golden" / "aggregators.json").read_text())["matrices"]
every_matrix = pytest.mark.parametrize("entry", MATRICES, ids=[entry["id"] for entry in MATRICES])


def vector(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_agrees(aggregator, entry: dict, expected: list[float], rtol: float) -> None:
    """Equal up to ``rtol`` of the largest entry; where the answer is 0, of the longest row."""
    d, g = aggregator(vector(entry["G"])), vector(expected)
    size = float(g.abs().max()) or max(entry["row_norms"]) or 1.0
    torch.testing.assert_close(d / size, g / size, atol=rtol, rtol=0.0)


def closed_form_rtol(entry: dict) -> float:
    return 1e-6 if entry["category"] == "nearly_opposite" else 1e-9


def solver_rtol(entry: dict, gramian_error: float) -> float:
    """Nearly opposite rows: what is left when the Gramian is rounded to float64 before an exact solution."""
    return max(1e-7, 100 * gramian_error) if entry["category"] == "nearly_opposite" else 1e-10


@every_matrix
class TestGolden:
    def test_mean(self, entry):
        assert_agrees(Mean(), entry, entry["ops"]["mean"]["g"], rtol=1e-9)

    def test_sum(self, entry):
        assert_agrees(Sum(), entry, entry["ops"]["sum"]["g"], rtol=1e-9)

    def test_mgda(self, entry):
        exact = entry["ops"]["mgda"]["exact"]
        assert_agrees(MGDA(), entry, exact["g"], rtol=solver_rtol(entry, exact["float64_gram_error"]))

    def test_mgda_weights_are_optimal(self, entry):
        J = vector(entry["G"])
        w = MGDA().weights(J @ J.T)
        d = J.T @ w
        assert bool((w >= 0).all())
        assert float(w.sum()) == pytest.approx(1.0, abs=1e-14)
        assert float(d @ d - (J @ d).min()) <= 1e-12 * max(entry["row_norms"]) ** 2

    def test_mgda_of_unit_rows(self, entry):
        exact = entry["ops"]["mgda"]["unit_rows"]["exact"]
        if exact is None:
            assert entry["category"] == "zero_row"
            return
        J, norms = vector(entry["G"]), vector(entry["row_norms"])
        w = MGDA(normalise="l2").weights(J @ J.T)
        unit = (J / norms[:, None]).T @ w
        torch.testing.assert_close(unit, vector(exact["g_from_unit_rows"]), atol=1e-7, rtol=0.0)

    def test_pcgrad(self, entry):
        op = entry["ops"]["pcgrad"]
        rtol = closed_form_rtol(entry)
        assert_agrees(PCGrad(order=op["order"]), entry, op["exact"]["g"], rtol)
        assert_agrees(PCGrad("mean", order=op["order"]), entry, op["exact"]["g_mean"], rtol)

    @pytest.mark.parametrize("c", ["0.2", "0.4", "0.5", "0.8"])
    def test_cagrad(self, entry, c):
        exact = entry["ops"]["cagrad"][c]["exact"]
        if exact is None:
            assert entry["category"] == "zero_row", "the optimum is not unique there; see the class for the choice"
            return
        rtol = solver_rtol(entry, exact["float64_gram_error"])
        for rescale, field in ((None, "g"), ("1+c2", "g_over_1_plus_c2"), ("1+c", "g_over_1_plus_c")):
            assert_agrees(CAGrad(float(c), rescale), entry, exact[field], rtol)

    def test_imtl_g(self, entry):
        op = entry["ops"]["imtl_g"]
        if op["exact"] is not None:
            assert_agrees(IMTLG(), entry, op["exact"]["g"], closed_form_rtol(entry))
        elif "singular_case" in op:
            shortest = vector(op["singular_case"]["min_norm_weights"])
            g = op["singular_case"]["g_unique"] or (vector(entry["G"]).T @ shortest).tolist()
            assert_agrees(IMTLG(), entry, g, rtol=1e-9)
            J = vector(entry["G"])
            torch.testing.assert_close(IMTLG().weights(J @ J.T), shortest, atol=1e-9, rtol=0.0)
        else:
            assert entry["category"] == "zero_row", "no unit row there; see the class for the choice"
