"""Weights that are trained with the network: UW and IMTL-L."""

import copy

import pytest
import torch
from torch import Tensor

from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings import IMTLL, SI, UW

OBJECTIVES = {
    UW: lambda L, s: (L * torch.exp(-s) + s).sum(),
    IMTLL: lambda L, s: (torch.exp(s) * L - s).sum(),
}
SIGN = {UW: 1.0, IMTLL: -1.0}

both = pytest.mark.parametrize("of", OBJECTIVES, ids=lambda of: of.__name__)


def moved(of, s: list[float]):
    weighting = of(len(s))
    weighting.load_state_dict({"s": torch.tensor(s)})
    return weighting


def step(weighting, optimizer, L: Tensor, context: Context | None = None) -> None:
    optimizer.zero_grad()
    for parameter, gradient in weighting.own_gradients(L, context):
        parameter.grad = gradient
    optimizer.step()


@both
class TestTrained:
    def test_gradients_are_those_of_what_is_trained(self, of):
        s = torch.tensor([-0.5, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
        L = torch.tensor([0.3, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
        to_L, to_s = torch.autograd.grad(OBJECTIVES[of](L, s), (L, s))
        weighting = moved(of, s.tolist())
        torch.testing.assert_close(weighting.weights(L), to_L)
        parameters, gradients = zip(*weighting.own_gradients(L), strict=True)
        assert list(map(id, parameters)) == list(map(id, weighting.parameters()))
        torch.testing.assert_close(torch.stack(gradients), to_s.float())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert (gradient.shape, gradient.dtype, gradient.requires_grad) == ((), parameter.dtype, False)

    def test_weights_are_one_at_first(self, of):
        assert of(3).weights(torch.tensor([0.1, 1.0, 9.0])).tolist() == [1.0, 1.0, 1.0]

    def test_on_constant_losses_it_ends_where_the_objective_is_least(self, of):
        weighting, L = of(3), torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
        optimizer = torch.optim.SGD(weighting.parameters(), lr=0.2)
        for _ in range(200):
            step(weighting, optimizer, L)
        torch.testing.assert_close(weighting.state_dict()["s"].double(), SIGN[of] * L.log(), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(weighting.weights(L), SI().weights(L), rtol=1e-5, atol=0.0)

    def test_absent_tasks_are_not_moved_by_momentum_or_weight_decay(self, of):
        weighting = of(3)
        optimizer = torch.optim.AdamW(weighting.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            step(weighting, optimizer, torch.tensor([0.1, 2.0, 5.0]))
        before = weighting.state_dict()["s"]
        for _ in range(3):
            step(weighting, optimizer, torch.tensor([0.2, 4.0]), Context((0, 2), torch.tensor([0.2, 4.0])))
            assert weighting.parameters()[1].grad is None
        after = weighting.state_dict()["s"]
        assert (after == before).tolist() == [False, True, False]

    def test_each_task_has_its_own_weight(self, of):
        L = torch.tensor([2.0, 3.0], dtype=torch.float64)
        weighting = moved(of, [0.0, 1.0, -1.0])
        w = weighting.weights(L, Context((1, 2), L))
        torch.testing.assert_close(w, (torch.tensor([-1.0, 1.0], dtype=torch.float64) * SIGN[of]).exp())
        parameters = [parameter for parameter, _ in weighting.own_gradients(L, Context((1, 2), L))]
        assert list(map(id, parameters)) == list(map(id, weighting.parameters()[1:]))

    def test_each_parameter_is_a_scalar_that_needs_a_gradient(self, of):
        parameters = list(of(4).parameters())
        assert [(p.shape, p.dtype, p.requires_grad) for p in parameters] == [((), torch.float32, True)] * 4

    def test_loading_keeps_the_parameters_that_an_optimizer_holds(self, of):
        weighting = of(2)
        before = [(id(p), p.data_ptr()) for p in weighting.parameters()]
        weighting.load_state_dict({"s": torch.tensor([1.0, 2.0])})
        assert [(id(p), p.data_ptr()) for p in weighting.parameters()] == before
        assert [p.item() for p in weighting.parameters()] == [1.0, 2.0]
        assert all(p.requires_grad and p.is_leaf for p in weighting.parameters())

    def test_a_copy_has_parameters_of_its_own(self, of):
        weighting = moved(of, [1.0, 2.0])
        twin = copy.deepcopy(weighting)
        step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), torch.ones(2))
        assert weighting.state_dict()["s"].tolist() == [1.0, 2.0]
        assert twin.state_dict()["s"].tolist() != [1.0, 2.0]

    def test_negative_losses_are_refused_for_gradients_too(self, of):
        with pytest.raises(ValueError, match="are negative"):
            of(1).own_gradients(torch.tensor([-1.0]))


def test_uw_by_hand():
    uw = moved(UW, [0.0, 1.0])
    torch.testing.assert_close(uw.weights(torch.tensor([2.0, 3.0])), torch.tensor([1.0, 0.36787944]))
    assert [g.item() for _, g in uw.own_gradients(torch.tensor([2.0, 3.0]))] == pytest.approx([-1.0, -0.10363832])


def test_imtl_l_by_hand():
    imtl_l = moved(IMTLL, [0.0, 1.0])
    torch.testing.assert_close(imtl_l.weights(torch.tensor([2.0, 3.0])), torch.tensor([1.0, 2.7182818]))
    assert [g.item() for _, g in imtl_l.own_gradients(torch.tensor([2.0, 3.0]))] == pytest.approx([1.0, 7.1548455])


def test_uw_and_imtl_l_are_trained_alike():
    """They are one objective, with the sign of the trained number turned around."""
    weightings = UW(2), IMTLL(2)
    optimizers = [torch.optim.Adam(weighting.parameters(), lr=0.1) for weighting in weightings]
    for i in range(20):
        L = torch.tensor([0.2 + 0.1 * i, 3.0 / (1 + i)], dtype=torch.float64)
        for weighting, optimizer in zip(weightings, optimizers, strict=True):
            step(weighting, optimizer, L)
    assert torch.equal(weightings[0].weights(L), weightings[1].weights(L))
