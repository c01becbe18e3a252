"""The nets that give an output per pixel, against a plain recomputation, published counts and torchvision."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.models import resnet50
from torchvision.models.segmentation import deeplabv3_resnet50

from flatmtl import split_parameters
from flatmtl_bench import models
from flatmtl_bench.models.segnet import widths

NYUV2 = {"segmentation": 13, "depth": 1, "normals": 3}
TASKS = {"seg": 5, "depth": 1}
CONVOLUTIONS = (2, 2, 3, 3, 3)  # of each stage, as in VGG-16


def count(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def small(name, seed=0, width=1 / 16):
    torch.manual_seed(seed)
    return models.build(name, TASKS, in_channels=3, width=width)


def pictures(height=32, width=64, batch=2):
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


class ByHand:
    """The SegNets in evaluation, step by step from their weights, in numpy but for the convolutions."""

    def __init__(self, model):
        self.state = {name: value.numpy() for name, value in model.state_dict().items()}

    def convolve(self, name, x):
        weight, bias = (torch.from_numpy(self.state[f"{name}.{part}"]) for part in ("weight", "bias"))
        return F.conv2d(torch.from_numpy(x), weight, bias, padding=weight.shape[-1] // 2).numpy()

    def normalise(self, name, x):
        mean, var, weight, bias = (
            self.state[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / np.sqrt(var + 1e-5) * weight + bias

    def block(self, name, x):
        return np.maximum(self.normalise(f"{name}.1", self.convolve(f"{name}.0", x)), 0)

    def mask(self, name, x):
        return 1 / (1 + np.exp(-self.normalise(f"{name}.4", self.convolve(f"{name}.3", self.block(name, x)))))

    @staticmethod
    def windows(x):
        b, c, h, w = x.shape
        return x.reshape(b, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(b, c, h // 2, w // 2, 4)

    def unpool(self, x, source):
        """Put each value where the maximum of its window of ``source`` is, the first of equal ones."""
        here = np.eye(4)[self.windows(source).argmax(-1)] * x[..., None]
        b, c, h, w = x.shape
        return here.reshape(b, c, h, w, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(b, c, 2 * h, 2 * w)

    @staticmethod
    def enlarge(x):
        """Twice the size, linear between the old pixels, corners on corners."""

        def along(n):
            places = np.linspace(0, n - 1, 2 * n)
            return np.stack([np.interp(places, np.arange(n), unit) for unit in np.eye(n)], axis=1)

        return np.einsum("ih,jw,bchw->bcij", along(x.shape[2]), along(x.shape[3]), x)

    def shared(self, x):
        """Return first and last feature of each stage down, and unpooled and last of each stage up."""
        down, up = [], []
        for k, convolutions in enumerate(CONVOLUTIONS):
            first = last = self.block(f"encoder.encoder.{k}.first", x)
            for i in range(convolutions - 1):
                last = self.block(f"encoder.encoder.{k}.rest.{i}", last)
            down.append((first, last))
            x = self.windows(last).max(-1)
        for k in range(5):
            unpooled = x = self.unpool(x, down[4 - k][1])
            for i in range(CONVOLUTIONS[4 - k]):
                x = self.block(f"encoder.decoder.{k}.convs.{i}", x)
            up.append((unpooled, x))
        return down, up

    def head(self, task, x):
        return self.convolve(f"heads.{task}.1", self.convolve(f"heads.{task}.0", x))

    def segnet(self, task, x):
        return self.head(task, self.shared(x)[1][-1][1])

    def segnet_mtan(self, task, x):
        down, up = self.shared(x)
        seen = down[0][0][:, :0]  # nothing yet
        for k, (first, last) in enumerate(down):
            mask = self.mask(f"attention.{task}.encoder.{k}", np.concatenate([first, seen], axis=1))
            seen = self.windows(self.block(f"down.{k}.0", mask * last)).max(-1)
        for k, (unpooled, last) in enumerate(up):
            seen = self.block(f"up.{k}.1", self.enlarge(seen))
            seen = self.mask(f"attention.{task}.decoder.{k}", np.concatenate([unpooled, seen], axis=1)) * last
        return self.head(task, seen)


@pytest.mark.parametrize("name", ["segnet", "segnet_mtan"])
def test_outputs_are_those_of_a_plain_recomputation(name):
    model, x = small(name).double(), pictures(64, 96).double()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = 1.0  # statistics of this batch, so that every stage makes a difference
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    model(x)
    model.eval()
    for task, output in model(x).items():
        np.testing.assert_allclose(output.detach(), getattr(ByHand(model), name)(task, x.numpy()), rtol=1e-8)


class TestCounts:
    @pytest.fixture
    def mtan(self):
        with torch.device("meta"):
            return models.build("segnet_mtan", NYUV2, in_channels=3)

    def test_parts_of_the_trunk(self, mtan):
        encoder, decoder = mtan.encoder.encoder, mtan.encoder.decoder
        assert count(*(stage.first for stage in encoder)) == 3_913_728
        assert count(*(stage.rest for stage in encoder)) == 10_809_408
        assert count(*(stage.convs[0] for stage in decoder)) == 3_947_520
        assert count(*(stage.convs[1:] for stage in decoder)) == 6_272_640

    def test_parts_of_the_attention(self, mtan):
        assert {task: count(attention) for task, attention in mtan.attention.items()} == dict.fromkeys(NYUV2, 2_984_576)
        assert count(*(attention.encoder for attention in mtan.attention.values())) == 5_506_944
        assert count(*(attention.decoder for attention in mtan.attention.values())) == 3_446_784
        assert (count(mtan.down), count(mtan.up)) == (6_272_640, 3_947_520)

    def test_heads(self, mtan):
        assert [count(head) for head in mtan.heads.values()] == [37_773, 36_993, 37_123]

    def test_heads_of_deeplab(self):
        with torch.device("meta"):
            heads = models.build("deeplab_resnet50", NYUV2 | {"streets": 7}, in_channels=3).heads
        assert [count(head) for head in heads.values()] == [16_128_781, 16_125_697, 16_126_211, 16_127_239]


class TestSegNets:
    @pytest.mark.parametrize("name", ["segnet", "segnet_mtan"])
    def test_convolutions_begin_as_xavier_says_without_bias(self, name):
        convolutions = [m for m in small(name, width=1 / 4).modules() if isinstance(m, nn.Conv2d)]
        assert all(not conv.bias.any() for conv in convolutions)
        units = torch.cat([conv.weight.detach().flatten() / _xavier(conv) for conv in convolutions])
        assert units.mean().abs() < 0.01
        assert units.std() == pytest.approx(1, abs=0.01)
        assert (units.abs() < 1).float().mean() == pytest.approx(0.683, abs=0.01)  # normal

    def test_values_go_back_to_where_the_maximum_was(self):
        shared = small("segnet").encoder(pictures(64, 96))
        for encoded, decoded in zip(shared.encoder, reversed(shared.decoder), strict=True):
            largest = F.interpolate(encoded.pooled, scale_factor=2)
            assert (encoded.last == largest)[decoded.unpooled != 0].all()
            assert F.max_pool2d(decoded.unpooled.abs(), 2).count_nonzero() == decoded.unpooled.count_nonzero() > 0

    @settings(max_examples=12)
    @given(st.sampled_from(["segnet", "segnet_mtan"]), st.integers(1, 3), st.integers(1, 3), st.floats(1e-3, 0.1))
    def test_outputs_are_as_large_as_the_picture_at_any_width(self, name, rows, columns, share):
        x = pictures(32 * rows, 32 * columns, batch=1)
        output = small(name, width=share)(x, ["seg"])["seg"]
        assert output.shape == (1, 5, 32 * rows, 32 * columns)
        assert output.isfinite().all()

    @given(st.floats(1e-6, 4))
    def test_channels_are_a_share_of_their_own_and_at_least_one(self, share):
        for own, scaled in zip((64, 128, 256, 512, 512), widths(share), strict=True):
            assert abs(scaled - share * own) <= 0.5 or scaled == 1

    @pytest.mark.parametrize("name", ["segnet", "segnet_mtan"])
    @pytest.mark.parametrize(
        ("size", "near"), [((100, 64), "96x64"), ((32, 33), "32x32"), ((8, 8), "32x32"), ((0, 32), "32x32")]
    )
    def test_other_sides_are_refused(self, name, size, near):
        got = "x".join(map(str, size))
        with pytest.raises(ValueError, match=f"multiples of 32, got {got}. Crop or resize them, e.g. to {near}"):
            small(name)(pictures(*size))


def _xavier(convolution):
    """Return the standard deviation by Glorot and Bengio (2010): of 2 / (fan in + fan out) the root."""
    outputs, inputs, height, width = convolution.weight.shape
    return (2 / ((inputs + outputs) * height * width)) ** 0.5


class TestMTAN:
    def test_attention_and_head_are_a_tasks_own_and_all_else_is_shared(self):
        model, x = small("segnet_mtan"), pictures()

        def closure(tasks):
            return {task: output.square().mean() for task, output in model(x, tasks).items()}

        parameters = split_parameters(model, closure, list(TASKS))
        own = {task: {*model.attention[task].parameters(), *model.heads[task].parameters()} for task in TASKS}
        assert {task: set(found) for task, found in parameters.heads.items()} == own
        assert set(parameters.shared) == set(model.parameters()) - own["seg"] - own["depth"]

    def test_the_trunk_runs_once_and_what_leads_on_once_for_each_task(self):
        model, runs = small("segnet_mtan"), []
        for name, module in {"trunk": model.encoder, "down": model.down[0], "up": model.up[0]}.items():
            module.register_forward_hook(lambda *_, name=name: runs.append(name))
        model(pictures(), ["depth"])
        assert runs == ["trunk", "down", "up"]
        model(pictures())
        assert runs == ["trunk", "down", "up", "trunk", "down", "up", "down", "up"]

    def test_a_closed_mask_hides_the_picture(self):
        model = small("segnet_mtan").eval()
        last = model.attention["seg"].decoder[-1][4]  # the batch norm before the last sigmoid
        nn.init.constant_(last.bias, -1e4)
        output = model(pictures())
        assert output["seg"].abs().max() == 0  # heads have no bias yet
        assert output["depth"].abs().max() > 0


class TestDeepLab:
    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return models.build("deeplab_resnet50", {"seg": 13}, in_channels=3).eval()

    def test_outputs_are_those_of_torchvision_with_corners_on_corners(self, model):
        other = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=13).eval()
        other.backbone.load_state_dict(model.encoder.state_dict())
        other.classifier.load_state_dict(model.heads["seg"].state_dict())
        x = pictures(40, 56)
        coarse = other.classifier(other.backbone(x)["out"])
        assert coarse.shape == (2, 13, 5, 7)
        expected = F.interpolate(coarse, (40, 56), mode="bilinear", align_corners=True)
        torch.testing.assert_close(model(x)["seg"], expected)

    def test_the_feature_is_an_eighth_of_the_picture(self):
        with torch.device("meta"):
            encoder = models.build("deeplab_resnet50", {"depth": 1}, in_channels=3).encoder
            assert encoder(torch.empty(1, 3, 288, 384)).shape == (1, 2048, 36, 48)

    def test_pretrained_weights_fit(self, model):
        weights = resnet50(weights=None).state_dict()
        left_out = model.encoder.load_state_dict(weights, strict=False)
        assert left_out.missing_keys == []
        assert left_out.unexpected_keys == ["fc.weight", "fc.bias"]

    def test_one_picture_is_too_few_to_train_on(self, model):
        assert model(pictures(batch=1))["seg"].shape == (1, 13, 32, 64)
        with pytest.raises(ValueError, match="trained on at least two pictures at a time, got 1. Choose another batch"):
            model.train()(pictures(batch=1))
