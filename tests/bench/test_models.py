import pytest
import torch
from torch import nn

from flatmtl_bench import models
from flatmtl_bench.models import MODELS, MultiHead

HEADS = {"left": 10, "right": 10}
PARAMETERS = {  # encoder, with two heads of ten
    "lenet": (30_890, 31_910),
    "resnet18": (11_170_240, 11_180_500),
    "resnet18_official": (11_221_540, 11_223_560),
}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def pictures():
    return torch.rand(3, 1, 36, 36, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
class TestEveryModel:
    def test_parameters_are_as_published(self, name):
        model = models.build(name, HEADS)
        assert (count(model.encoder), count(model)) == PARAMETERS[name]

    def test_outputs_have_the_size_of_the_head(self, name, pictures):
        outputs = models.build(name, {"digit": 10, "odd": 2})(pictures)
        assert {task: tuple(output.shape) for task, output in outputs.items()} == {"digit": (3, 10), "odd": (3, 2)}

    def test_channels_are_free(self, name):
        outputs = models.build(name, HEADS, in_channels=3)(torch.rand(2, 3, 36, 36))
        assert outputs["left"].shape == (2, 10)

    def test_heads_read_what_the_encoder_writes(self, name, pictures):
        model = models.build(name, HEADS).eval()
        z = model.encoder(pictures)
        for task, output in model(pictures).items():
            head = model.heads[task]
            torch.testing.assert_close(output, z @ head.weight.T + head.bias)

    def test_every_parameter_is_trained_by_some_task(self, name, pictures):
        model = models.build(name, HEADS)
        sum(output.square().sum() for output in model(pictures).values()).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.heads.parameters())
        assert all(p.grad is not None for p in model.encoder.parameters())


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

    def test_there_is_a_head_and_torch_can_name_it(self):
        with pytest.raises(ValueError, match="a model needs a head, got none"):
            MultiHead(nn.Identity(), {})
        for name in ("scene.depth", "keys", ""):
            with pytest.raises(ValueError, match=f"task name '{name}' cannot name a module"):
                MultiHead(nn.Identity(), {name: nn.Identity()})


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

    def test_lenet_takes_its_own_size_only(self):
        with pytest.raises(ValueError, match="lenet takes 36x36 pictures, got 28x28"):
            models.build("lenet", HEADS)(torch.rand(1, 1, 28, 28))
