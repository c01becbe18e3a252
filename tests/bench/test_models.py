"""What holds for every model, and models from elsewhere."""

import copy
import sys
import types

import pytest
import torch
from torch import nn

from flatmtl import split_parameters
from flatmtl_bench import models
from flatmtl_bench.models import MODELS, MultiHead

HEADS = {"left": 10, "right": 10}
ATTRIBUTES = [f"attribute{i}" for i in range(40)]
NYUV2 = {"segmentation": 13, "depth": 1, "normals": 3}
CITYSCAPES = {"segmentation": 7, "depth": 1}
PUBLISHED = [  # model, heads, input channels, parameters of the encoder, of the whole model
    ("lenet", HEADS, 1, 30_890, 31_910),
    ("resnet18", HEADS, 1, 11_170_240, 11_180_500),
    ("resnet18_official", HEADS, 1, 11_221_540, 11_223_560),
    ("resnet50", dict.fromkeys(ATTRIBUTES, 1), 3, 23_508_032, 23_589_992),
    ("resnet50", dict.fromkeys(ATTRIBUTES, 2), 3, 23_508_032, 23_671_952),
    ("resnet18_celeba", dict.fromkeys(ATTRIBUTES, 2), 3, 11_168_832, 11_332_752),
    ("segnet", NYUV2, 3, 24_943_296, 25_055_185),
    ("segnet", CITYSCAPES, 3, 24_943_296, 25_017_672),
    ("segnet_mtan", NYUV2, 3, 24_943_296, 44_229_073),
    ("segnet_mtan", CITYSCAPES, 3, 24_943_296, 41_206_984),
    ("deeplab_resnet50", NYUV2, 3, 23_508_032, 23_508_032 + 16_128_781 + 16_125_697 + 16_126_211),
    ("deeplab_resnet50", CITYSCAPES, 3, 23_508_032, 23_508_032 + 16_127_239 + 16_125_697),
]
DENSE = ("segnet", "segnet_mtan", "deeplab_resnet50")  # an output per pixel
NARROW = {"segnet": 1 / 16, "segnet_mtan": 1 / 16}
SIZES = {"resnet18_celeba": (64, 64), **dict.fromkeys(DENSE, (32, 64))}  # of the pictures; else 36x36
TASKS = {"seg": 5, "normals": 3, "depth": 1}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def small(name, seed=0):
    torch.manual_seed(seed)
    return models.build(name, TASKS, in_channels=2, width=NARROW.get(name, 1.0))


def pictures(name):
    return torch.rand(2, 2, *SIZES.get(name, (36, 36)), generator=torch.Generator().manual_seed(0))


def gradients(model, x):
    torch.manual_seed(1)  # for dropout
    loss = sum(output.square().mean() for output in model(x).values())
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(("name", "heads", "channels", "encoder", "whole"), PUBLISHED)
def test_parameters_are_as_many_as_published(name, heads, channels, encoder, whole):
    with torch.device("meta"):
        model = models.build(name, heads, in_channels=channels)
    assert (count(model.encoder), count(model)) == (encoder, whole)


def test_every_model_is_published_and_documented():
    assert {name for name, *_ in PUBLISHED} == set(MODELS)
    assert all(f"\n{name} " in models.__doc__ for name in MODELS)


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def built(name):
    return small(name)


@pytest.fixture
def model(built):
    """The model in training, as it is made."""
    return copy.deepcopy(built)


@pytest.fixture(scope="module")
def x(name):
    return pictures(name)


class TestEveryModel:
    def test_outputs_have_the_size_of_the_head_and_of_the_picture(self, name, model, x):
        size = tuple(x.shape[-2:]) if name in DENSE else ()
        shapes = {task: tuple(output.shape) for task, output in model(x).items()}
        assert shapes == {task: (2, outputs, *size) for task, outputs in TASKS.items()}

    def test_a_task_asked_for_alone_has_the_output_that_it_has_among_all(self, model, x):
        every = model.eval()(x)
        assert list(every) == list(TASKS)
        assert all(torch.equal(model(x, [task])[task], every[task]) for task in TASKS)
        assert list(model(x, ["depth", "seg"])) == ["depth", "seg"]

    def test_nothing_runs_for_tasks_that_are_not_asked_for(self, model, x):
        ran = set()
        for path, module in model.named_modules():
            module.register_forward_hook(lambda *_, path=path: ran.update(path.split(".")))
        assert model(x, []) == {}
        assert ran.isdisjoint(TASKS)
        model(x, ["normals"])
        assert ran & TASKS.keys() == {"normals"}

    def test_every_parameter_is_trained(self, model, x):
        for (path, parameter), gradient in zip(model.named_parameters(), gradients(model, x), strict=True):
            assert gradient.isfinite().all(), path
            if parameter.dim() > 1:  # before a batch norm, gradients of biases are zero but for rounding
                assert gradient.abs().sum() > 0, path

    def test_a_seed_decides_weights_outputs_and_gradients(self, name, model, x):
        again = small(name)
        for first, second in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(first, second)
        for first, second in zip(gradients(model, x), gradients(again, x), strict=True):
            assert torch.equal(first, second)

    def test_weights_and_statistics_make_another_the_same(self, name, model, x):
        other = small(name, seed=1).eval()
        model(x)  # moves the statistics
        before = other(x)
        other.load_state_dict(model.eval().state_dict())
        for task, output in other(x).items():
            assert not torch.equal(output, before[task])
            assert torch.equal(output, model(x)[task])

    def test_heads_are_a_tasks_own_and_the_encoder_is_shared(self, model, x):
        def closure(tasks):
            return {task: output.square().mean() for task, output in model(x, tasks).items()}

        parameters = split_parameters(model, closure, list(TASKS))
        assert set(model.encoder.parameters()) <= set(parameters.shared)
        for task in TASKS:
            assert set(model.heads[task].parameters()) <= set(parameters.heads[task])
        assert set(parameters.everything) == set(model.parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DENSE])
def test_linear_heads_read_what_the_encoder_writes(name):
    model, x = small(name).eval(), pictures(name)
    z = model.encoder(x)
    for task, output in model(x).items():
        head = model.heads[task]
        torch.testing.assert_close(output, z @ head.weight.T + head.bias)


def test_the_resnet_of_celeba_keeps_small_pictures_large_and_averages_quarters():
    encoder, after = small("resnet18_celeba").encoder, {}
    for name, module in encoder.trunk.named_children():
        module.register_forward_hook(lambda _, __, out, name=name: after.update({name: out}))
    z = encoder(pictures("resnet18_celeba"))
    assert after["layer1"].shape == (2, 64, 64, 64)
    assert after["layer4"].shape == (2, 512, 8, 8)
    torch.testing.assert_close(z, after["layer4"].reshape(2, 512, 2, 4, 2, 4).mean((3, 5)).flatten(1))


class TestMultiHead:
    @pytest.fixture
    def model(self):
        return MultiHead(nn.Linear(4, 3), {"a": nn.Linear(3, 2), "b": nn.Linear(3, 1), "c": nn.Linear(3, 1)})

    def test_no_other_head_than_asked_for_is_evaluated(self, model):
        evaluated = []
        for task, head in model.heads.items():
            head.register_forward_hook(lambda *_, task=task: evaluated.append(task))
        assert list(model(torch.ones(1, 4), ["c", "a"])) == ["c", "a"]
        assert evaluated == ["c", "a"]
        assert model(torch.ones(1, 4), []) == {}

    def test_outputs_do_not_depend_on_which_are_asked_for(self, model):
        x = torch.ones(1, 4)
        every = model(x)
        assert list(every) == ["a", "b", "c"]
        assert all(torch.equal(model(x, [task])[task], every[task]) for task in every)

    def test_tasks_without_a_head_are_named(self, model):
        with pytest.raises(
            ValueError, match=r"no head for \['d'\] \(asked for: \['a', 'd'\]\). Pass a list of: a, b, c."
        ):
            model(torch.ones(1, 4), ["a", "d"])
        with pytest.raises(ValueError, match=r"asked for: 'left'\). Pass a list of: a, b, c."):
            model(torch.ones(1, 4), "left")

    @pytest.mark.parametrize("name", ["lenet", "segnet_mtan"])
    def test_there_is_a_head_and_torch_can_name_it(self, name):
        with pytest.raises(ValueError, match="a model needs a head, got none"):
            models.build(name, {})
        for task in ("scene.depth", "keys", ""):
            with pytest.raises(ValueError, match=f"task name '{task}' cannot name a module"):
                models.build(name, {task: 1})


class TestMessages:
    def test_unknown_models_are_answered_with_the_likeliest_and_all_known_ones(self):
        with pytest.raises(
            ValueError, match=r"unknown model 'resnet81'. Did you mean 'resnet18'\? Known: lenet, resnet18, "
        ):
            models.build("resnet81", HEADS)

    def test_sizes_must_be_positive(self):
        with pytest.raises(ValueError, match="head of task 'left' must have at least one output, got 0"):
            models.build("lenet", {"left": 0})
        with pytest.raises(ValueError, match="in_channels must be a whole number from 1, got 0"):
            models.build("lenet", HEADS, in_channels=0)
        for width in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"width must be a number above 0, got {width}"):
                models.build("segnet", HEADS, width=width)

    @pytest.mark.parametrize("name", [name for name in MODELS if name not in NARROW])
    def test_models_of_one_width_say_which_offer_others(self, name):
        with pytest.raises(
            ValueError, match=f"'{name}' has one width only, got width 0.5. .* or use segnet, segnet_mtan."
        ):
            models.build(name, HEADS, width=0.5)

    def test_models_of_one_size_say_so(self):
        with pytest.raises(ValueError, match="lenet takes 36x36 pictures, got 28x28"):
            models.build("lenet", HEADS)(torch.rand(1, 1, 28, 28))
        with pytest.raises(ValueError, match="resnet18_celeba takes 64x64 pictures, got 64x32"):
            models.build("resnet18_celeba", HEADS)(torch.rand(1, 1, 64, 32))


class Own(nn.Module):
    """A user's model."""

    def __init__(self, heads, in_channels):
        super().__init__()
        self.heads = nn.ModuleDict({task: nn.Conv2d(in_channels, outputs, 1) for task, outputs in heads.items()})

    def forward(self, x, tasks=None):
        return {task: self.heads[task](x) for task in tasks or self.heads}


@pytest.fixture
def plug_in(monkeypatch):
    """A module of the user's own."""
    module = types.ModuleType("my_models")
    module.Own, module.width = Own, 64
    module.without_channels = lambda heads: Own(heads, 1)
    module.no_module = lambda heads, in_channels: "a net"
    module.no_tasks = lambda heads, in_channels: nn.Linear(in_channels, 1)
    monkeypatch.setitem(sys.modules, "my_models", module)


@pytest.mark.usefixtures("plug_in")
class TestModelsFromElsewhere:
    def test_a_factory_is_called_with_heads_and_channels(self):
        model = models.build("my_models:Own", {"a": 2, "b": 1}, in_channels=3)
        assert {task: output.shape[1] for task, output in model(torch.ones(1, 3, 4, 4)).items()} == {"a": 2, "b": 1}

    def test_of_this_package(self):
        assert isinstance(models.build("flatmtl_bench.models.segnet:SegNet", {"a": 1}), MODELS["segnet"])

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("no_such_module:make", "there is no module 'no_such_module'. Expected 'package.module:factory'"),
            ("flatmtl_bench.no_such:make", "there is no module 'flatmtl_bench.no_such'"),
            (":make", "there is no module ''"),
            (".own:make", "there is no module '.own'"),
            ("my_models:own", r"module 'my_models' has no 'own'. Did you mean 'Own'\?"),
            ("my_models:width", "'my_models:width' is 64; expected a function or a class that makes a model"),
            ("my_models:without_channels", r"called as factory\(heads, in_channels\): .* It takes \(heads\)"),
            ("my_models:no_module", r"made a str; expected a torch.nn.Module whose forward\(x, tasks=None\)"),
            ("my_models:no_tasks", r"made a Linear that cannot be called as model\(x\) and as model\(x, tasks\)"),
        ],
    )
    def test_what_is_no_model_is_refused(self, path, message):
        with pytest.raises(ValueError, match=message):
            models.build(path, HEADS)

    def test_a_name_with_a_dot_wants_a_colon(self):
        with pytest.raises(
            ValueError, match="'my_models.Own' is none of ours; .* 'package.module:factory', with a colon"
        ):
            models.build("my_models.Own", HEADS)

    def test_an_error_of_the_factory_is_told_as_its_own(self, monkeypatch):
        def broken(heads, in_channels):
            raise ValueError("my own fault")

        monkeypatch.setattr(sys.modules["my_models"], "Own", broken)
        with pytest.raises(RuntimeError, match="the factory of model my_models:Own raised ValueError: my own fault"):
            models.build("my_models:Own", HEADS)

    def test_they_come_in_their_own_width(self):
        with pytest.raises(ValueError, match="'my_models:Own' has one width only, got width 0.5"):
            models.build("my_models:Own", HEADS, width=0.5)

    def test_a_module_that_lacks_what_it_imports_says_so_itself(self, tmp_path, monkeypatch):
        (tmp_path / "model_needs_more.py").write_text("import no_such_dependency\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            models.build("model_needs_more:make", HEADS)
