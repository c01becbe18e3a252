"""Every trace of Algorithm 1 in ``tests/golden/fmtl_steps.json``."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters
from flatmtl.aggregators import IMTLG, MGDA, CAGrad, FairGrad, Mean, NashMTL, PCGrad, Sum

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fmtl_steps.json").read_text())
CASES = {case["id"]: case for case in [*GOLDEN["cases"], *GOLDEN["bn_cases"]]}
AGGREGATORS = {
    "mean": Mean,
    "sum": Sum,
    "mgda": MGDA,
    "pcgrad": lambda: PCGrad(order=[[j for j in range(3) if j != i] for i in range(3)]),
    "cagrad": lambda: CAGrad(c=0.4, rescale="1+c2"),
    "imtl": IMTLG,
    "nash": NashMTL,
    "fairgrad": lambda: FairGrad(alpha=2.0),
}


class GoldenNet(nn.Module):
    """x -> tanh(BN?(W1 x + b1)) -> tanh(W2 . + b2); head i: V_i h + c_i, from the flat vectors of the file."""

    def __init__(self, entry: dict) -> None:
        super().__init__()
        (hidden, inputs), (width, _) = entry["shared_shapes"][0], entry["shared_shapes"][-2]
        batchnorm = entry.get("batchnorm")
        self.first = nn.Linear(inputs, hidden)
        self.norm = nn.BatchNorm1d(hidden, batchnorm["eps"], batchnorm["momentum"]) if batchnorm else nn.Identity()
        self.second = nn.Linear(hidden, width)
        self.heads = nn.ModuleList(nn.Linear(width, task["out_dim"]) for task in entry["tasks"])
        self.double()
        self.shared = [*self.first.parameters(), *self.norm.parameters(), *self.second.parameters()]
        fill(self.shared, entry["shared_init"])
        for head, values in zip(self.heads, entry["heads_init"], strict=True):
            fill(list(head.parameters()), values)
        if batchnorm:
            self.norm.running_mean.copy_(vector(batchnorm["running_mean_init"]))
            self.norm.running_var.copy_(vector(batchnorm["running_var_init"]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.norm(self.first(x)))))


class Run:
    """A model of the file with its batch, stepped by one ``FlatMTL``."""

    def __init__(self, case: dict, aggregator: str, combine: str = "individual") -> None:
        entry = GOLDEN["models"][case["model"]]
        self.net = GoldenNet(entry)
        self.losses = [task["loss"] for task in entry["tasks"]]
        self.x = vector(entry["X"])
        self.y = [torch.tensor(y, dtype=torch.float64) for y in entry["Y"]]
        heads = {str(i): list(head.parameters()) for i, head in enumerate(self.net.heads)}
        self.parameters = TaskParameters(self.net.shared, heads, model=self.net)
        kind = ASAM if case["adaptive"] else SAM
        perturbation = kind(case["rho_sh"], rho_heads=case["rho_ns"], norm=case["norm_scope"])
        self.mtl = FlatMTL(AGGREGATORS[aggregator](), perturbation, combine=combine, flat_scale="raw")

    def closure(self, tasks):
        z = self.net(self.x)
        return {task: self.loss(int(task), self.net.heads[int(task)](z)) for task in tasks}

    def loss(self, i: int, out: Tensor) -> Tensor:
        if self.losses[i] == "classification":
            return F.cross_entropy(out, self.y[i].long())
        return F.mse_loss(out, self.y[i].view_as(out))

    def step(self):
        self.net.zero_grad()
        return self.mtl.backward(self.closure, self.parameters)

    def descend(self, lr: float) -> None:
        with torch.no_grad():
            for p in self.net.parameters():
                p -= lr * p.grad

    def shared_gradient(self) -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in self.net.shared])


def vector(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fill(parameters: list[Tensor], values: list[float]) -> None:
    with torch.no_grad():
        for p, part in zip(parameters, vector(values).split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


def flat(tensors) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def assert_equal(actual: Tensor, expected, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    torch.testing.assert_close(actual, vector(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
class TestTraces:
    def test_every_way_to_combine_gives_the_golden_direction(self, case, aggregator):
        for combine, expected in case["combined"][aggregator].items():
            run = Run(case, aggregator, combine)
            run.step()
            assert_equal(run.shared_gradient(), expected["g_SAM"])

    def test_heads_get_their_own_gradient_at_the_worst_case(self, case, aggregator):
        run = Run(case, aggregator)
        run.step()
        for head, task in zip(run.net.heads, case["tasks"], strict=True):
            assert_equal(flat(p.grad for p in head.parameters()), task["g_SAM_ns"])

    def test_parameters_and_running_statistics_after_one_and_five_steps(self, case, aggregator):
        run = Run(case, aggregator)
        for number in range(1, 6):
            run.step()
            run.descend(GOLDEN["lr"])
            expected = case["params_after_individual"][aggregator].get(str(number))
            if expected is None:
                continue
            assert_equal(flat(run.net.shared), expected["shared"], atol=1e-8)
            for head, values in zip(run.net.heads, expected["heads"], strict=True):
                assert_equal(flat(head.parameters()), values, atol=1e-8)
            if "running_mean" in expected:
                assert_equal(run.net.norm.running_mean, expected["running_mean"])
                assert_equal(run.net.norm.running_var, expected["running_var"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_norms_and_inner_products_are_the_golden_ones(case):
    result = Run(case, "mean").step()
    g = vector([task["g_loss_sh"] for task in case["tasks"]])
    f = vector([task["g_flat_sh"] for task in case["tasks"]])
    assert_equal(result.losses, [task["loss"] for task in case["tasks"]])
    assert_equal(result.perturbed_losses, [task["loss_perturbed"] for task in case["tasks"]])
    assert_equal(result.gramian_loss, (g @ g.T).tolist())
    assert_equal(result.gramian_flat, (f @ f.T).tolist())
    assert_equal(result.intra, (g * f).sum(1).tolist())


@pytest.mark.parametrize("case", GOLDEN["bn_cases"], ids=lambda case: case["id"])
def test_running_statistics_are_updated_by_the_clean_pass_only(case):
    run = Run(case, "mean")
    run.step()
    expected = case["running_stats_after_1_step"]
    assert_equal(run.net.norm.running_mean, expected["running_mean"])
    assert_equal(run.net.norm.running_var, expected["running_var"])
    assert run.net.norm.num_batches_tracked == 1
