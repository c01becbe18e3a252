"""The paper's four benchmarks, from files in exactly their formats, with every method."""

import math
from dataclasses import replace

import pytest
from tests.bench.written_data import write_celeba, write_cityscapes, write_nyuv2, write_pairs

from flatmtl_bench import recipes
from flatmtl_bench.recipes import METHODS
from flatmtl_bench.recipes.config import Sharpness
from flatmtl_bench.runs import RunFolder
from flatmtl_bench.trainer import Trainer


def write_multimnist(root):
    write_pairs(root, "multimnist")
    return root


WRITERS = {
    "multimnist": write_multimnist,
    "celeba": write_celeba,
    "nyuv2": write_nyuv2,
    "cityscapes": write_cityscapes,
}
METRICS = {
    "multimnist": {"accuracy/left", "accuracy/right"},
    "celeba": {"error/Young", "accuracy/Smiling", "f1/5_o_Clock_Shadow"},
    "nyuv2": {"miou/segmentation", "pixel_accuracy/segmentation", "abs_err/depth", "rel_err/depth", "mean/normals"},
    "cityscapes": {"miou/segmentation", "pixel_accuracy/segmentation", "abs_err/depth", "rel_err/depth"},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The folder of each data set."""
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


def config(recipe, root, **changes):
    """Return a recipe at the size of a moment."""
    found = recipes.build(recipe)
    source = "pickle" if recipe.startswith("multi") else "auto"
    small = {"epochs": 1, "batch_size": 4, "device": "cpu", "loggers": [], "sharpness": Sharpness(samples=2)}
    data = replace(found.data, validation_share=0.25) if found.data.validation_share else found.data
    return replace(found, root=str(root), source=source, data=data, **{**small, **changes})


def train(chosen, out):
    with RunFolder(out, chosen) as folder:
        return Trainer(chosen).fit(folder)


@pytest.mark.filterwarnings("ignore:.*the weights are not exact")  # forty gradients of a trunk this small nearly cancel
@pytest.mark.parametrize("form", ["", "f_"], ids=["plain", "flat"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("benchmark", WRITERS)
def test_every_method_trains_an_epoch_and_is_evaluated(roots, tmp_path, benchmark, method, form):
    chosen = config(f"{benchmark}_{form}{method}", roots[benchmark], model="tests.bench.tiny:Tiny")
    summary = train(chosen, tmp_path)
    wanted = {name for name in METRICS[benchmark] if method != "stl" or name.endswith(f"/{chosen.task}")}
    assert wanted <= set(summary["test"])
    assert all(value is not None and math.isfinite(value) for value in summary["test"].values())
    assert set(summary["sharpness"]) == (
        {chosen.task} if method == "stl" else {n.split("/")[1] for n in summary["better"]}
    )


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("multimnist_f_cagrad_official", {}),
        pytest.param("celeba_f_ls_paper", {}, marks=pytest.mark.slow),
        ("nyuv2_f_imtl_g_paper", {"width": 0.0625}),
        ("nyuv2_f_mgda_official", {"width": 0.0625}),
        ("cityscapes_f_cagrad_official", {"width": 0.0625}),
        ("cityscapes_f_ls", {"model": "segnet", "width": 0.0625}),
    ],
)
def test_the_recipes_own_models_do_too(roots, tmp_path, recipe, changes):
    benchmark = recipe.partition("_")[0]
    summary = train(config(recipe, roots[benchmark], **changes), tmp_path)
    assert METRICS[benchmark] <= set(summary["test"])
    assert all(value is not None for value in summary["test"].values())
