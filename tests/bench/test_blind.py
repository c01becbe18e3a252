"""Answers that do not look at the input: no other constant suits the training data better."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.bench.small import small_config

from flatmtl_bench import assembly, recipes
from flatmtl_bench.metrics import Attribute, Classification, Depth, Meter, Normals, Objective, Segmentation
from flatmtl_bench.recipes.config import Data
from flatmtl_bench.reproduce.blind import blind, constant

CLASSES = ("wall", "floor", "window")


def targets(objective):
    """Return targets of 40 items; some pixels have no label, and one has none in any item."""
    stream = torch.Generator().manual_seed(1)
    match objective:
        case Classification() | Attribute():
            return (torch.rand(40, generator=stream) < 0.3).long()
        case Segmentation():
            labels = torch.randint(-1, 3, (40, 4, 5), generator=stream)
            labels[:, 0, 0] = -1
            return labels
    maps = torch.rand(40, 1 if isinstance(objective, Depth) else 3, 4, 5, generator=stream) + 0.5
    maps *= (torch.rand(40, 1, 4, 5, generator=stream) < 0.8).float()
    maps[..., 0, 0] = 0.0
    return maps if isinstance(objective, Depth) else torch.nn.functional.normalize(maps, dim=1)


def score(objective, output, wanted):
    meter = Meter(objective, "pooled")
    meter.update(output.expand(len(wanted), *output.shape), wanted)
    return meter.compute()


OBJECTIVES = [Classification(CLASSES), Attribute(), Attribute(2), Segmentation(CLASSES), Depth(), Normals()]
KINDS = pytest.mark.parametrize("objective", OBJECTIVES, ids=[f"{type(o).__name__}{o.outputs}" for o in OBJECTIVES])


@KINDS
def test_no_other_constant_is_better_where_training_data_are_the_test(objective):
    wanted = targets(objective)
    best = constant(objective, wanted)
    assert best.isfinite().all()
    name = {Classification: "accuracy", Attribute: "error", Segmentation: "pixel_accuracy", Depth: "abs_err"}
    by = name.get(type(objective), "loss")
    found = score(objective, best, wanted)
    sign = -1.0 if by in ("accuracy", "pixel_accuracy") else 1.0
    for seed in range(20):
        other = best + 0.5 * torch.randn(best.shape, generator=torch.Generator().manual_seed(seed))
        assert sign * found[by] <= sign * score(objective, other, wanted)[by] + 1e-6


@KINDS
def test_a_pixel_without_labels_has_the_answer_of_all_pixels_or_any(objective):
    wanted = targets(objective)
    if wanted.ndim < 3:
        return
    found = constant(objective, wanted)[..., 0, 0]
    if isinstance(objective, Depth):
        assert found.item() == wanted[wanted != 0].median()
    elif isinstance(objective, Normals):
        torch.testing.assert_close(found, torch.nn.functional.normalize(wanted.sum(dim=(0, 2, 3)), dim=0))
    else:
        assert found.exp().tolist() == pytest.approx([1 / 3] * 3)


def test_an_unknown_objective_is_named():
    class Mood(Objective):
        better = outputs = loss = metrics = score = None

    with pytest.raises(TypeError, match="nothing is known of a Mood"):
        constant(Mood(), torch.zeros(3))


def test_of_streets_it_is_what_numpy_says():
    data = Data("streets", size=[32, 64], train_samples=9, validation_samples=1, test_samples=5, augment=True)
    config = replace(recipes.build("streets_mgda"), source="streets", data=data)
    found = blind(config)
    plain = replace(config, data=replace(data, augment=False))
    datasets = [assembly.dataset(plain, split) for split in ("train", "test")]
    splits = [[whole[index][1] for index in range(len(whole))] for whole in datasets]
    train, test = ({task: np.stack([np.asarray(t[task]) for t in items]) for task in items[0]} for items in splits)
    modes = np.stack(
        [(train["segmentation"] == k).sum(0) for k in range(len(datasets[0].classes["segmentation"]))]
    ).argmax(0)
    valid = test["segmentation"] >= 0
    assert found["pixel_accuracy/segmentation"] == pytest.approx((modes[None] == test["segmentation"])[valid].mean())
    known = train["depth"].reshape(9, -1).T
    every = np.sort(known[known != 0])
    found_at = [np.sort(values[values != 0]) for values in known]
    middle = np.array([(v if v.size else every)[((v if v.size else every).size - 1) // 2] for v in found_at])
    middle = middle.reshape(train["depth"].shape[1:])
    errors = np.abs(middle[None] - test["depth"])[test["depth"] != 0]
    assert found["abs_err/depth"] == pytest.approx(errors.mean(), rel=1e-5)


def test_random_streams_are_left_alone():
    before = torch.random.get_rng_state()
    found = blind(small_config())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert 0.0 <= found["accuracy"] <= 0.35
