"""Who owns which parameter in networks as people build them, and what each owner gets from a step."""

from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.flatmtl.toys import EVERY, TASKS, Toy, aggregator, assert_same
from tests.reference import algorithm1
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters, split_parameters
from flatmtl.aggregators import MGDA, CAGrad, LossWeighting, Mean, Sum

PERTURBATIONS = [None, SAM(0.2), ASAM(0.5, norm="joint"), SAM(0.2, local=0.3)]


class Net(Toy):
    """A toy of which ``owners`` says by prefixes of names what differs from: the trunk is shared, a head its task's."""

    owners: ClassVar[dict[str, str | None]] = {}

    def features(self, task: str) -> Tensor:
        return self.trunk(self.x)

    def closure(self, tasks):
        return {t: (self.heads[t](self.features(t)) - 1.0).square().mean() for t in tasks}

    def owner(self, name: str) -> str | None:
        heads = {f"heads.{task}.": task for task in TASKS}
        for prefix, owner in [*self.owners.items(), *heads.items()]:
            if name.startswith(prefix):
                return owner
        return "shared"

    def owned(self, owner: str | None) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if self.owner(name) == owner}


class PartlyShared(Net):
    """Two tasks share a branch, the third goes another way."""

    def __init__(self):
        super().__init__(nn.ModuleDict({"common": nn.Linear(4, 5), "branch": nn.Linear(5, 5)}))

    def features(self, task):
        z = torch.tanh(self.trunk["common"](self.x))
        return z if task == "third" else torch.tanh(self.trunk["branch"](z))


class Attention(Net):
    """Each task attends to the features of the trunk by modules of its own, inside the trunk."""

    owners: ClassVar = {f"trunk.{task}": task for task in TASKS}

    def __init__(self):
        parts = {"first": nn.Linear(4, 5), "last": nn.Linear(5, 5)} | {task: nn.Linear(5, 5) for task in TASKS}
        super().__init__(nn.ModuleDict(parts))

    def features(self, task):
        z = torch.tanh(self.trunk["first"](self.x))
        return torch.tanh(self.trunk["last"](z * torch.sigmoid(self.trunk[task](z))))


class Several(Net):
    """The trunk returns several features in some container."""

    def __init__(self, container):
        super().__init__(nn.ModuleDict({"low": nn.Linear(4, 5), "high": nn.Linear(5, 5)}))
        self.container = container

    def features(self, task):
        low = torch.tanh(self.trunk["low"](self.x))
        found = self.container([("low", low), ("high", torch.tanh(self.trunk["high"](low)))])
        return sum(found.values()) if isinstance(found, dict) else found[0][1] + found[1][1]


class TiedTrunk(Net):
    """Two layers of the trunk have one weight."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
        self.trunk[3].weight = self.trunk[1].weight


class TiedHead(Net):
    """One head decodes with the weight of the embedding, as language models do."""

    def __init__(self):
        super().__init__(nn.Embedding(7, 5))
        self.heads["left"] = nn.Linear(5, 7, bias=False)
        self.heads["left"].weight = self.trunk.weight

    def features(self, task):
        return torch.tanh(self.trunk(torch.tensor([1, 1, 4, 6])))


class TiedHeads(Net):
    """Two heads have one weight, and a bias each."""

    owners: ClassVar = {"heads.left.weight": "shared"}

    def __init__(self):
        super().__init__()
        self.heads["right"].weight = self.heads["left"].weight


class Frozen(Net):
    """A layer of the trunk is frozen, and one whole head."""

    owners: ClassVar = {"trunk.0.": None, "heads.right.": None}

    def __init__(self):
        super().__init__()
        for part in (self.trunk[0], self.heads["right"]):
            part.requires_grad_(False)


class LowRank(nn.Module):
    """A weight plus a product of two thin matrices."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.a = nn.Parameter(torch.full((rows, 1), 0.3, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((1, columns), 0.2, dtype=torch.float64))

    def forward(self, weight):
        return weight + self.a @ self.b


class Parametrized(Net):
    """Weights that are computed from the parameters proper, in the trunk and in a head."""

    def __init__(self):
        super().__init__()
        for layer in (self.trunk[0], self.heads["left"]):
            parametrizations.weight_norm(layer)
        for layer in (self.trunk[2], self.heads["right"]):
            parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))


class Functional(Net):
    """The trunk runs with parameters that are handed to it."""

    def features(self, task):
        return functional_call(self.trunk, dict(self.trunk.named_parameters()), (self.x,))


class Convolution(Net):
    """Weights with four axes."""

    def __init__(self):
        shape = nn.Unflatten(1, (1, 2, 2))
        super().__init__(nn.Sequential(shape, nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 5)))


class Spectrum(Net):
    """Activations that are complex; the parameters are real."""

    def features(self, task):
        z = torch.fft.rfft(self.trunk(self.x))
        return torch.fft.irfft(z * torch.view_as_complex(self.trunk[0].weight[:3, :2].contiguous()), n=5)


NETS = {
    "hard sharing": Net,
    "a branch of two tasks": PartlyShared,
    "attention of each task in the trunk": Attention,
    "features in a list": lambda: Several(list),
    "features in a tuple": lambda: Several(tuple),
    "features in a dict": lambda: Several(dict),
    "tied within the trunk": TiedTrunk,
    "tied between trunk and head": TiedHead,
    "tied between two heads": TiedHeads,
    "frozen parts": Frozen,
    "parametrized weights": Parametrized,
    "functional call": Functional,
    "convolutions": Convolution,
    "complex activations": Spectrum,
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
class TestNetworks:
    def test_each_parameter_has_the_owner_that_the_architecture_says(self, make):
        net = make()
        parameters = split_parameters(net, net.closure, TASKS)
        found = {"shared": parameters.shared, **parameters.heads}
        assert {k: set(own) for k, own in found.items()} == {k: set(net.owned(k).values()) for k in found}

    @pytest.mark.parametrize("perturbation", [None, SAM(0.2)], ids=repr)
    def test_each_owner_gets_what_the_plain_algorithm_gives_it(self, make, perturbation):
        net, rho = make(), 0.0 if perturbation is None else perturbation.rho
        shared, heads = list(net.owned("shared").values()), {t: list(net.owned(t).values()) for t in TASKS}
        expected = algorithm1.step(net.closure, shared, heads, MGDA(), rho_sh=rho, rho_ns=rho)
        parameters = split_parameters(net, net.closure, TASKS)
        FlatMTL(MGDA(), perturbation).backward(net.closure, parameters)
        size = expected["loss_gradients"].norm()
        assert_close(vector(shared) / size, expected["direction"] / size)
        for task, head in heads.items():
            if head:
                assert_close(vector(head), expected["heads"][task])
        assert all(p.grad is None for p in net.owned(None).values())


def vector(parameters) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in parameters])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def rows_of(parameters: TaskParameters, closure) -> list[dict[nn.Parameter, Tensor]]:
    """Return each task's part of the Jacobian by parameter."""
    rows: list[Tensor] = []
    FlatMTL(lambda J: rows.append(J.clone()) or J[0]).backward(closure, parameters)
    sizes = [p.numel() for p in parameters.shared]
    return [dict(zip(parameters.shared, row.split(sizes), strict=True)) for row in rows[0]]


class TestRows:
    def test_a_task_has_zeros_for_a_branch_that_it_does_not_use(self):
        net = PartlyShared()
        left, right, third = rows_of(net.split(), net.closure)
        for p in net.trunk["branch"].parameters():
            assert left[p].norm() > 0 < right[p].norm()
            assert_same(third[p], torch.zeros_like(third[p]))

    def test_one_who_lists_every_parameter_as_shared_gets_the_same_trunk_and_zeros_for_others_heads(self):
        toy = Toy()
        FlatMTL(Sum()).backward(toy.closure, toy.split())
        expected = toy.gradients()
        everything = TaskParameters(toy.parameters(), {task: [] for task in TASKS}, model=toy)
        left, *_ = rows_of(everything, toy.closure)
        assert all(left[p].norm() > 0 for p in toy.heads["left"].parameters())
        assert not any(left[p].any() for task in TASKS[1:] for p in toy.heads[task].parameters())
        toy.zero_grad()
        FlatMTL(Sum()).backward(toy.closure, everything)
        torch.testing.assert_close(toy.gradients(), expected, rtol=1e-12, atol=1e-15)

    @pytest.mark.parametrize("make", [TiedTrunk, TiedHead, TiedHeads])
    def test_a_tied_weight_counts_once_in_the_gramian(self, make):
        net = make()
        shared = list(net.owned("shared").values())
        losses = net.closure(TASKS)
        rows = [torch.autograd.grad(losses[t], shared, retain_graph=True, allow_unused=True) for t in TASKS]
        J = torch.stack([algorithm1.flatten(row, shared) for row in rows])
        twice = TaskParameters([*shared, *shared], {t: net.owned(t).values() for t in TASKS}, model=net)
        for parameters in (net.split(), twice):
            assert_close(FlatMTL(Mean()).backward(net.closure, parameters).gramian_loss, J @ J.T)


class TestHeads:
    @pytest.mark.parametrize("perturbation", [None, SAM(0.2)], ids=repr)
    @pytest.mark.parametrize("name", [n for n in EVERY if not isinstance(aggregator(n), LossWeighting)])
    def test_no_gradient_aggregator_scales_a_head(self, name, perturbation):
        toy, rho = Toy(), 0.0 if perturbation is None else perturbation.rho
        shared, heads = list(toy.trunk.parameters()), {t: list(toy.heads[t].parameters()) for t in TASKS}
        expected = algorithm1.step(toy.closure, shared, heads, Sum(), rho_sh=rho, rho_ns=rho)["heads"]
        FlatMTL(aggregator(name), perturbation).backward(toy.closure, toy.split())
        for task in TASKS:
            assert_close(vector(heads[task]), expected[task])

    @pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=repr)
    @pytest.mark.parametrize("method", [MGDA(), aggregator("ls")], ids=repr)
    def test_what_has_no_data_is_moved_by_neither_momentum_nor_weight_decay(self, method, perturbation):
        net, mtl = PartlyShared(), FlatMTL(method, perturbation)
        parameters = net.split()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        mtl.backward(net.closure, parameters)
        optimizer.step()
        before = net.contents()
        optimizer.zero_grad()
        mtl.backward(lambda tasks: net.closure(tasks) | {"left": None, "right": None}, parameters)
        optimizer.step()
        moved = {name for name, value in net.contents().items() if not torch.equal(value, before[name])}
        assert moved == {name for name in before if name.startswith(("trunk.common", "heads.third"))}
        assert {name for name, p in net.named_parameters() if p.grad is not None} == moved


class TestListed:
    """Parameters named by hand."""

    @pytest.mark.parametrize(
        "wrap",
        [nn.DataParallel, lambda m: torch.compile(m, backend="eager"), lambda m: m],
        ids=["DataParallel", "compiled", "bare"],
    )
    @pytest.mark.parametrize("listed", [list, iter, tuple], ids=lambda f: f.__name__)
    def test_any_iterable_of_a_wrapped_models_parameters_is_accepted(self, wrap, listed):
        toy = Toy()
        trunk = wrap(toy.trunk)
        inner = getattr(trunk, "module", trunk)
        parameters = TaskParameters(
            listed(list(inner.parameters())), {t: listed(list(toy.heads[t].parameters())) for t in TASKS}
        )
        assert parameters.shared == toy.split().shared
        assert parameters.heads == toy.split().heads

    def test_parameters_of_an_optimizer_behind_a_proxy_are_trained_by_it(self):
        """As trainers hand out their optimizers: an object that passes every attribute on."""

        class Proxy:
            def __init__(self, optimizer):
                self._optimizer = optimizer

            def __getattr__(self, name):
                return getattr(self._optimizer, name)

        toy = Toy()
        groups = [{"params": list(toy.trunk.parameters())}, *({"params": h.parameters()} for h in toy.heads.values())]
        optimizer, before = Proxy(torch.optim.SGD(groups, lr=0.1)), toy.contents()
        shared, *heads = (group["params"] for group in optimizer.param_groups)
        parameters = TaskParameters(shared, dict(zip(TASKS, heads, strict=True)))
        optimizer.zero_grad()
        FlatMTL(MGDA(), SAM(0.1)).backward(toy.closure, parameters)
        optimizer.step()
        assert not any(torch.equal(value, before[name]) for name, value in toy.contents().items())

    def test_a_wrapper_that_only_passes_on_is_split_like_the_model_itself(self):
        toy = Toy()
        assert split_parameters(nn.DataParallel(toy), toy.closure, TASKS).shared == toy.split().shared


class Lookup(nn.Module):
    """Embeddings in the trunk and in two of the heads, with sparse gradients or dense ones."""

    def __init__(self, *, sparse: bool):
        super().__init__()
        self.trunk = nn.ModuleList([nn.Embedding(7, 3, sparse=sparse), nn.Linear(3, 3)])
        self.left = nn.Embedding(5, 3, sparse=sparse)
        self.right = nn.EmbeddingBag(5, 3, mode="sum", sparse=sparse)
        self.third = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(0)
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def closure(self, tasks):
        z = torch.tanh(self.trunk[1](self.trunk[0](torch.tensor([1, 1, 4, 6, 0]))))
        item = torch.tensor([0, 2, 2, 2, 4])
        own = {"left": self.left(item), "right": self.right(item[:, None]), "third": self.third(z)}
        return {t: ((z * own[t]).sum(1) - 1.0).square().mean() for t in tasks}


class TestSparseGradients:
    @pytest.mark.parametrize("micro", [1, 2])
    @pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=repr)
    @pytest.mark.parametrize("name", ["mgda", "ls", "uw"])
    def test_they_give_the_step_of_dense_ones(self, name, perturbation, micro):
        found = []
        for sparse in (False, True):
            model = Lookup(sparse=sparse)
            parameters = split_parameters(model, model.closure, TASKS)
            FlatMTL(aggregator(name), perturbation).backward([model.closure] * micro, parameters)
            found.append({name: p.grad for name, p in model.named_parameters()})
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-15)

    def test_what_is_left_in_grad_is_dense(self):
        model = Lookup(sparse=True)
        FlatMTL(Mean(), SAM(0.1)).backward(model.closure, split_parameters(model, model.closure, TASKS))
        assert {p.grad.layout for p in model.parameters()} == {torch.strided}


class Adapted(nn.Module):
    """Something to adapt: two layers, one that is not used, and two heads."""

    def __init__(self, reentrant: bool | None = None):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second, self.pooler = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 5)
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 2)

    def body(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x):
        z = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return {"left": self.left(z), "right": self.right(z)}


ADAPTERS = LoraConfig(
    target_modules=["first", "second", "pooler"], modules_to_save=["left", "right"], r=2, init_lora_weights=False
)


def adapted(model: nn.Module, x: Tensor | None = None):
    x = torch.linspace(-1.0, 1.0, 20).view(5, 4) if x is None else x

    def closure(tasks):
        out = model(x)
        return {t: (out[t] - 1.0).square().mean() for t in tasks}

    return closure


class TestAdapters:
    @pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "checkpointed"])
    def test_adapters_of_the_trunk_are_shared_and_those_of_an_unused_layer_left_alone(self, reentrant):
        model = get_peft_model(Adapted(reentrant), ADAPTERS)
        closure = adapted(model)
        with pytest.warns(UserWarning, match="no loss reaches 'base_model.model.pooler.lora_A.default.weight', 'base"):
            parameters = split_parameters(model, closure, ["left", "right"])
        FlatMTL(CAGrad(), SAM(0.1)).backward(closure, parameters)
        names = {p: name for name, p in model.named_parameters()}
        assert all("first.lora" in names[p] or "second.lora" in names[p] for p in parameters.shared)
        assert len(parameters.shared) == 4
        assert all("left.modules_to_save" in names[p] for p in parameters.heads["left"])
        reached = {p for p in model.parameters() if p.grad is not None}
        assert reached == set(parameters.everything)

    def test_another_adapter_needs_another_split(self):
        model = get_peft_model(Adapted(), ADAPTERS)
        closure = adapted(model)
        with pytest.warns(UserWarning, match="pooler"):
            parameters = split_parameters(model, closure, ["left", "right"])
        model.add_adapter("other", ADAPTERS)
        model.set_adapter("other")
        with pytest.raises(ValueError, match="lora_A.default.weight' no longer requires a gradient.*split_parameters"):
            FlatMTL(Mean()).backward(closure, parameters)


class TestCheckpointing:
    def test_reentrant_is_refused_where_the_graph_shows_it(self):
        model = Adapted(reentrant=True)
        x = torch.ones(5, 4, requires_grad=True)
        with pytest.raises(ValueError, match="'left' passes through activation checkpointing.*use_reentrant=False"):
            split_parameters(model, adapted(model, x), ["left", "right"])

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_reentrant_that_detaches_everything_shared_is_an_error_with_the_remedy(self):
        model = get_peft_model(Adapted(reentrant=True), ADAPTERS)
        with pytest.raises(ValueError, match="'left' reaches any shared parameter.*use_reentrant=True: pass False"):
            split_parameters(model, adapted(model), ["left", "right"])

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_reentrant_that_detaches_a_part_is_warned_of_with_the_remedy(self):
        model = Adapted(reentrant=True)
        scale = nn.Parameter(torch.ones(5))

        def closure(tasks):
            z = checkpoint(model.body, torch.ones(5, 4), use_reentrant=True) * scale
            return {"left": model.left(z).sum(), "right": model.right(z).sum()}

        model.scale = scale
        with pytest.warns(UserWarning, match="no loss reaches 'first.weight'.*use_reentrant=True: pass False"):
            split_parameters(model, closure, ["left", "right"])
