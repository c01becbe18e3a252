"""TorchJD's aggregators in ``FlatMTL``, and ours as its weightings: every one of either, unchanged."""

import functools
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatmtl import SAM, FlatMTL, TaskParameters, split_parameters
from flatmtl.aggregators import AGGREGATORS, GramianAggregator

theirs = pytest.importorskip("torchjd.aggregation")
PAGE = (Path(__file__).parents[2] / "docs" / "interoperate.md").read_text(encoding="utf-8")
RHO = 0.3


@dataclass(frozen=True)
class Theirs:
    """One of TorchJD's aggregators.

    Attributes:
        code: what makes it.
        degree: A(sJ) = s^degree A(J); None if there is no such law.
        lowest: least |J| from which on this holds.
        highest: largest |J| up to which it holds.
        why: it does not hold beyond these.
        tasks: how many tasks it gets here.
        shows_state: whether later calls depend on earlier ones by more than a solver's tolerance.
    """

    code: str
    degree: Fraction | None = Fraction(1)
    lowest: float = 0.0
    highest: float = math.inf
    why: str = ""
    tasks: int = 3
    shows_state: bool = False

    def build(self):
        """A new one, which draws the same numbers at every call if it draws any."""
        made = eval(self.code, {**vars(theirs), "weights": torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)})
        made.register_forward_pre_hook(seed)
        return made

    def row(self) -> str:
        """The line of the table in the docs."""
        low = f"from {self.lowest:g}" if self.lowest > 0.0 else ""
        high = f"up to {self.highest:.0e}".replace("e+0", "e") if self.highest < math.inf else ""
        degree = "none" if self.degree is None else str(self.degree)
        obeyed = "" if self.degree is None else f"{low} {high}".strip() or "any"
        return f"| `{self.code}` | {degree} | {obeyed} | {self.why} |"


def seed(*_) -> None:
    torch.manual_seed(5)


THEIRS = {
    "AlignedMTL": Theirs("AlignedMTL()"),
    "CAGrad": Theirs("CAGrad(c=0.4)", lowest=0.02, why="returns zero (`norm_eps`)"),
    "ConFIG": Theirs("ConFIG()"),
    "Constant": Theirs("Constant(weights)"),
    "CRMOGMWeighting": Theirs("GramianWeightedAggregator(CRMOGMWeighting(MGDAWeighting()))", shows_state=True),
    "DualProj": Theirs("DualProj()", lowest=0.02, why="returns the mean (`norm_eps`)"),
    "ExcessMTL": Theirs("ExcessMTL()", None, why="a softmax of gradients' sizes", shows_state=True),
    "FairGrad": Theirs("FairGrad(alpha=2.0)", Fraction(-1, 3), 0.1, 1e9, why="its solver stops early"),
    "GradDrop": Theirs("GradDrop()"),
    "GradVac": Theirs("GradVac()", lowest=0.1, why="`eps` outweighs the norms", shows_state=True),
    "IMTLG": Theirs("IMTLG()"),
    "Krum": Theirs("Krum(n_byzantine=1)", tasks=5),
    "Mean": Theirs("Mean()"),
    "MGDA": Theirs("MGDA()"),
    "MoDoWeighting": Theirs(
        "GramianWeightedAggregator(MoDoWeighting())",
        None,
        why="steps of a fixed size; meant for Gramians of two batches",
        shows_state=True,
    ),
    "NashMTL": Theirs("NashMTL(n_tasks=3)", Fraction(0), 0.1, 1e3, why="its solver stops early", shows_state=True),
    "PCD": Theirs("PCD()", lowest=0.1, why="`eps` outweighs the squared norms", shows_state=True),
    "PCGrad": Theirs("PCGrad()"),
    "Random": Theirs("Random()"),
    "SDMGradWeighting": Theirs(
        "GramianWeightedAggregator(SDMGradWeighting())",
        lowest=0.1,
        why="an absolute `1e-8`; meant for Gramians of two batches",
        shows_state=True,
    ),
    "Sum": Theirs("Sum()"),
    "TrimmedMean": Theirs("TrimmedMean(trim_number=1)", tasks=5),
    "UPGrad": Theirs("UPGrad()", lowest=0.02, why="returns the mean (`norm_eps`)"),
}
QUIET = {  # what these say about themselves is theirs to mend
    "NashMTL": (
        "ignore:You are solving a parameterized problem that is not DPP:UserWarning",
        "ignore:Solution may be inaccurate:UserWarning",
        "ignore:divide by zero encountered in divide:RuntimeWarning:cvxpy",
    )
}


def quiet(name: str):
    return pytest.param(name, marks=[pytest.mark.filterwarnings(text) for text in QUIET.get(name, ())])


every_one = pytest.mark.parametrize("name", [quiet(name) for name in THEIRS])


class Model(nn.Module):
    """A trunk with any number of heads, and a batch."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(tasks)
        self.tasks = [f"task {i}" for i in range(tasks)]
        self.trunk = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 1) for _ in self.tasks)
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        self.x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randn(tasks, 16, 1, generator=generator, dtype=torch.float64)

    def closure(self, tasks: Sequence[str]) -> dict[str, Tensor]:
        z = torch.tanh(self.trunk(self.x))
        return {t: (self.heads[i](z) - self.y[i]).square().mean() for i, t in enumerate(self.tasks) if t in tasks}

    def split(self) -> TaskParameters:
        return split_parameters(self, self.closure, self.tasks)

    def gradients(self, i: int) -> tuple[Tensor, Tensor]:
        """Task ``i``'s gradients on the trunk and on its head, flattened."""
        shared, own = list(self.trunk.parameters()), list(self.heads[i].parameters())
        found = torch.autograd.grad(self.closure([self.tasks[i]])[self.tasks[i]], [*shared, *own])
        return flat(found[: len(shared)]), flat(found[len(shared) :])

    def worst_case(self, i: int, rho: float) -> tuple[Tensor, Tensor]:
        """The same at the worst case within ``rho``, for trunk and head apart."""
        parts = [list(self.trunk.parameters()), list(self.heads[i].parameters())]
        kept = [flat(part) for part in parts]
        for part, at, g in zip(parts, kept, self.gradients(i), strict=True):
            fill(part, at + rho * g / g.norm())
        found = self.gradients(i)
        for part, at in zip(parts, kept, strict=True):
            fill(part, at)
        return found

    def rows(self) -> tuple[Tensor, Tensor]:
        """Loss gradients and flat gradients."""
        J = torch.stack([self.gradients(i)[0] for i in range(len(self.tasks))])
        return J, torch.stack([self.worst_case(i, RHO)[0] for i in range(len(self.tasks))]) - J

    def step(self, mtl: FlatMTL, parameters: TaskParameters) -> Tensor:
        """The direction on the trunk."""
        self.zero_grad()
        mtl.backward(self.closure, parameters)
        return flat(p.grad for p in self.trunk.parameters())

    def descend(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p -= 0.05 * p.grad / p.grad.norm()


def flat(tensors) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def fill(parameters: Sequence[Tensor], values: Tensor) -> None:
    with torch.no_grad():
        for p, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


def assert_close(actual: Tensor, expected: Tensor, rtol: float = 1e-7) -> None:
    """Equal up to a share of the length of what is expected."""
    size = expected.norm()
    torch.testing.assert_close(actual / size, expected / size, rtol=0.0, atol=rtol)


def conflicting(m: int) -> Tensor:
    """Rows of total norm 1, of which the first conflicts with the others and with their mean."""
    J = torch.randn(m, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    J[0] -= 3.0 * J[1:].mean(dim=0)
    return J / J.norm()


def test_the_table_has_every_aggregator_of_torchjd():
    found = {name: getattr(theirs, name) for name in theirs.__all__}
    aggregators = {name for name, kind in found.items() if issubclass(kind, theirs.Aggregator)}
    weightings = {name for name, kind in found.items() if issubclass(kind, theirs.Weighting)}
    alone = weightings - {f"{name}Weighting" for name in aggregators}
    bases = {"Aggregator", "WeightedAggregator", "GramianWeightedAggregator", "Weighting"}
    assert set(THEIRS) == (aggregators | alone) - bases
    assert all(re.search(rf"\b{name}\b", entry.code) for name, entry in THEIRS.items())


@every_one
class TestTheirsInOurs:
    def test_the_plain_step_is_the_aggregator_of_the_task_gradients(self, name):
        model, reference = Model(THEIRS[name].tasks), THEIRS[name].build()
        mtl, parameters = FlatMTL(THEIRS[name].build()), model.split()
        for _ in range(3):
            J, _ = model.rows()
            expected = reference(J)
            assert_close(model.step(mtl, parameters), expected)
            for i, head in enumerate(model.heads):
                assert_close(flat(p.grad for p in head.parameters()), model.gradients(i)[1])
            model.descend()

    def test_the_flat_step_aggregates_loss_and_flat_gradients_apart(self, name):
        model, reference, copy = Model(THEIRS[name].tasks), THEIRS[name].build(), THEIRS[name].build()
        mtl, parameters = FlatMTL(THEIRS[name].build(), SAM(RHO)), model.split()
        for _ in range(3):
            J, flats = model.rows()
            expected = reference(J) + copy(flats)
            assert_close(model.step(mtl, parameters), expected)
            for i, head in enumerate(model.heads):
                assert_close(flat(p.grad for p in head.parameters()), model.worst_case(i, RHO)[1])
            model.descend()

    def test_state_that_leaked_between_the_branches_would_show(self, name):
        model, one = Model(THEIRS[name].tasks), THEIRS[name].build()
        reference, copy = THEIRS[name].build(), THEIRS[name].build()
        J, flats = model.rows()
        for _ in range(2):
            apart, leaked = reference(J) + copy(flats), one(J) + one(flats)
        shows = bool((apart - leaked).norm() > 1e-3 * apart.norm())
        assert shows == THEIRS[name].shows_state

    def test_degree(self, name):
        entry = THEIRS[name]
        J = conflicting(entry.tasks)
        expected = entry.build()(J)
        degree = 1.0 if entry.degree is None else float(entry.degree)
        lowest, highest = entry.lowest or 1e-12, min(entry.highest, 1e12)

        def miss(size: float) -> float:
            """By which share the direction at this size misses the law."""
            return float((entry.build()(size * J) / size**degree - expected).norm() / expected.norm())

        if entry.degree is None:
            assert min(miss(1e-3), miss(1e3)) > 1e-2
            return
        assert max(miss(lowest * (highest / lowest) ** (i / 6)) for i in range(7)) < 1e-4
        beyond = [entry.lowest / 100] * (entry.lowest > 0.0) + [1000 * entry.highest] * (entry.highest < math.inf)
        assert all(miss(size) > 1e-3 for size in beyond)


class TestRandomStreams:
    RANDOM = ("GradDrop", "GradVac", "PCGrad", "Random")

    @pytest.mark.parametrize("name", RANDOM)
    def test_they_draw_from_where_the_clean_pass_leaves_the_global_stream(self, name):
        model, build = Model(3), getattr(theirs, name)
        torch.manual_seed(7)
        expected = build()(model.rows()[0])
        parameters = model.split()
        torch.manual_seed(7)
        assert_close(model.step(FlatMTL(build()), parameters), expected)

    @pytest.mark.parametrize("perturbation", [None, SAM(RHO)], ids=repr)
    def test_they_draw_anew_at_each_step(self, perturbation):
        model, mtl = Model(3), FlatMTL(theirs.Random(), perturbation)
        parameters = model.split()
        assert not torch.equal(model.step(mtl, parameters), model.step(mtl, parameters))


class TestState:
    @pytest.mark.parametrize("name", [quiet(name) for name, entry in THEIRS.items() if entry.shows_state])
    def test_theirs_does_not_survive_a_checkpoint_of_its_own(self, name):
        used = THEIRS[name].build()
        used(conflicting(THEIRS[name].tasks))
        state = used.state_dict()
        if name == "NashMTL":
            assert state == {}
            return
        with pytest.raises(RuntimeError, match="Unexpected key"):
            THEIRS[name].build().load_state_dict(state)

    @pytest.mark.parametrize("name", ["GradVac", "PCD", "ExcessMTL"])
    def test_a_first_step_that_fails_leaves_the_aggregator_as_it_was(self, name):
        model, aggregator = Model(3), getattr(theirs, name)()
        parameters = model.split()
        before = repr(vars(aggregator))
        mtl = FlatMTL(aggregator, SAM(RHO))

        def closure(tasks):
            if len(tasks) == 1:
                raise ZeroDivisionError
            return model.closure(tasks)

        with pytest.raises(ZeroDivisionError):
            mtl.backward(closure, parameters)
        assert repr(vars(aggregator)) == before
        assert all(buffer is None for m in aggregator.modules() for buffer in m._buffers.values())


class TestDegree:
    @pytest.mark.parametrize("name", [quiet("NashMTL"), "FairGrad"])
    def test_it_is_one_unless_the_user_says(self, name):
        model = Model(3)
        parameters = model.split()
        J, flats = model.rows()
        r = (flats.norm(dim=1) / J.norm(dim=1)).log().mean().exp()
        loss, flat_part = THEIRS[name].build()(J), THEIRS[name].build()(flats)
        aggregator = THEIRS[name].build()
        assert_close(model.step(FlatMTL(aggregator, SAM(RHO)), parameters), loss + flat_part)
        aggregator = THEIRS[name].build()
        aggregator.degree = float(THEIRS[name].degree)
        expected = loss + r ** (1.0 - aggregator.degree) * flat_part
        assert_close(model.step(FlatMTL(aggregator, SAM(RHO)), parameters), expected)
        raw = FlatMTL(THEIRS[name].build(), SAM(RHO), flat_scale="raw")
        assert_close(model.step(raw, parameters), loss + flat_part)

    def test_the_table_in_the_docs_is_the_one_here(self):
        rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
        assert rows == [entry.row() for entry in THEIRS.values()]


class Average(nn.Module):
    def forward(self, J: Tensor) -> Tensor:
        return J.mean(dim=0)

    def method(self, J: Tensor) -> Tensor:
        return self.forward(J)


@pytest.mark.parametrize(
    "function",
    [lambda J: J.mean(dim=0), functools.partial(torch.mean, dim=0), Average(), Average().method, Average.forward],
    ids=["lambda", "partial", "module", "method", "function"],
)
def test_any_function_from_task_gradients_to_a_direction_is_an_aggregator(function):
    if function is Average.forward:
        function = functools.partial(function, None)
    model = Model(3)
    J, flats = model.rows()
    parameters = model.split()
    assert_close(model.step(FlatMTL(function), parameters), J.mean(dim=0))
    assert_close(model.step(FlatMTL(function, SAM(RHO)), parameters), (J + flats).mean(dim=0))


class Net(nn.Module):
    """What the examples of the docs train."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.heads = nn.ModuleDict({"seg": nn.Linear(8, 3), "depth": nn.Linear(8, 1)})


@pytest.fixture
def names():
    """What the blocks of the docs find, and after ``run_blocks`` what they leave."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 6, generator=generator)
    y = {"seg": x[:, :3].argmax(1), "depth": x.sum(1, keepdim=True)}
    loss_fn = {"seg": F.cross_entropy, "depth": F.l1_loss}

    def closure(tasks):
        z = model.encoder(x)
        return {t: loss_fn[t](model.heads[t](z), y[t]) for t in tasks}

    parameters = split_parameters(model, closure, ["seg", "depth"])
    return {"model": model, "x": x, "y": y, "loss_fn": loss_fn, "closure": closure, "parameters": parameters}


def run_blocks(names: dict, tmp_path: Path) -> list[dict]:
    """Run the page's blocks in their order; return what ``.grad`` each leaves."""
    gradients = []
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)):
        names["model"].zero_grad()
        file = tmp_path / f"block{number}.py"
        file.write_text(block, encoding="utf-8")
        exec(compile(block, str(file), "exec"), names)
        gradients.append({n: p.grad.clone() for n, p in names["model"].named_parameters() if p.grad is not None})
    return gradients


def is_weighting(kind: type) -> bool:
    """Whether its weights depend on the Gramian only, and it needs no arguments."""
    arguments = inspect.signature(kind).parameters.values()
    return issubclass(kind, GramianAggregator) and all(a.default is not a.empty for a in arguments)


class TestOursInTheirs:
    @pytest.mark.filterwarnings(*QUIET["NashMTL"])
    def test_the_blocks_of_the_docs_run_as_they_stand(self, names, tmp_path):
        gradients = run_blocks(names, tmp_path)
        names["model"].zero_grad()
        FlatMTL(names["MGDA"]()).backward(names["closure"], names["parameters"])
        ours = {n: p.grad for n, p in names["model"].named_parameters()}
        by_jacobian, by_gramian = gradients[-2:]
        for name, expected in ours.items():
            torch.testing.assert_close(by_jacobian[name], expected)
            if name.startswith("encoder"):
                torch.testing.assert_close(by_gramian[name], expected)

    @pytest.mark.parametrize("m", [2, 4])
    @pytest.mark.parametrize("name", [name for name, kind in AGGREGATORS.items() if is_weighting(kind)])
    @pytest.mark.filterwarnings(*QUIET["NashMTL"])
    def test_as_a_weighting_it_gives_the_same_direction(self, name, m, names, tmp_path):
        run_blocks(names, tmp_path)
        ours, same = AGGREGATORS[name](), AGGREGATORS[name]()
        J = conflicting(m)
        adapted = names["GramianWeightedAggregator"](names["FromFlatMTL"](same))
        for _ in range(2):
            assert_close(adapted(J), ours(J))
