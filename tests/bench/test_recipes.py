import dataclasses
import json
import re
from dataclasses import replace

import pytest

from flatmtl.aggregators import AGGREGATORS, LossWeighting
from flatmtl_bench import recipes
from flatmtl_bench.recipes import FAMILIES, METHODS, RECIPES, Config
from flatmtl_bench.recipes.config import Data, Method, Optimizer, Schedule, Sharpness
from flatmtl_bench.runs import run_name
from flatmtl_bench.sweep.grid import axes, combinations

DATASETS = ("multimnist", "multifashion", "multifashionmnist", "celeba", "nyuv2", "cityscapes")
PAPER_METHODS = ("mgda", "pcgrad", "cagrad", "imtl_g")


class TestEveryRecipe:
    """The laws of all recipes; each test tells the recipes that break one."""

    def test_its_config_bears_its_name(self):
        assert [name for name in RECIPES if recipes.build(name).recipe != name] == []

    def test_its_help_is_one_short_line(self):
        texts = {name: recipe.text for name, recipe in RECIPES.items()}
        good = re.compile(r"[^\n]{1,77}\)\.")
        assert {name: text for name, text in texts.items() if not good.fullmatch(text)} == {}

    def test_it_survives_json(self):
        configs = {name: recipe.config for name, recipe in RECIPES.items()}
        again = {name: Config.from_dict(json.loads(json.dumps(c.to_dict()))) for name, c in configs.items()}
        assert [name for name in RECIPES if again[name] != configs[name]] == []

    def test_it_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipes.build("multimnist_mean").seed = 1

    def test_flat_ones_are_perturbed_and_plain_ones_are_not(self):
        forms = {True: ("sam", "asam"), False: ("none",)}
        configs = {name: (recipe.config, "_f_" in name) for name, recipe in RECIPES.items()}
        assert [name for name, (c, flat) in configs.items() if c.method.perturbation not in forms[flat]] == []
        assert [name for name, (c, flat) in configs.items() if (c.rho > 0) != flat] == []


class TestTable:
    def test_every_method_of_the_paper_is_there_plain_flat_and_official(self):
        names = {
            f"{d}{f}_{m}{o}"
            for d in DATASETS
            for f in ("", "_f")
            for m in PAPER_METHODS
            for o in ("", "_paper", "_official")
        }
        assert names <= set(RECIPES)

    def test_no_two_recipes_share_a_folder(self):
        assert len({run_name(recipe.config) for recipe in RECIPES.values()}) == len(RECIPES)

    def test_plain_and_flat_differ_in_the_perturbation_only(self):
        plain, flat = recipes.build("multimnist_mgda"), recipes.build("multimnist_f_mgda")
        method = replace(flat.method, perturbation="none")
        assert replace(flat, recipe=plain.recipe, rho=plain.rho, method=method) == plain

    def test_the_plain_name_is_the_papers_text(self):
        config = recipes.build("multifashion_f_cagrad")
        assert (config.model, config.epochs, config.batch_size) == ("resnet18", 200, 256)
        assert (config.optimizer, config.method.norm) == (Optimizer("adam", lr=1e-3), "separate")
        assert (config.method.options, config.protocol) == ({"c": 0.4}, "honest")

    def test_official_is_the_authors_code(self):
        config = recipes.build("multimnist_f_cagrad_official")
        assert (config.model, config.rho, config.method.norm) == ("resnet18_official", 2.0, "joint")
        assert (config.method.options, config.protocol) == ({"c": 0.4, "rescale": "1+c2"}, "official")
        assert (config.data.placement, config.data.same_label) == ("jitter", False)
        assert recipes.build("multifashionmnist_f_cagrad_official").data.same_label is None
        assert config.data.validation_share == 0

    def test_celeba_is_the_papers_text(self):
        config = recipes.build("celeba_f_mgda")
        assert (config.model, config.epochs, config.batch_size) == ("resnet50", 50, 256)
        assert config.optimizer == Optimizer("adam", lr=5e-4)
        assert config.schedule == Schedule("step", every=10, factor=0.85)

    @pytest.mark.parametrize(("benchmark", "batch"), [("nyuv2", 2), ("cityscapes", 8)])
    def test_scenes_are_the_papers_text(self, benchmark, batch):
        config = recipes.build(f"{benchmark}_f_imtl_g_paper")
        assert (config.model, config.width, config.epochs) == ("segnet_mtan", 1.0, 200)
        assert (config.batch_size, config.optimizer) == (batch, Optimizer("adam", lr=1e-4))
        assert config.schedule == Schedule("step", every=100, factor=0.5)
        assert (config.protocol, config.averaging, config.data.validation_share) == ("paper", "batches", 0)

    @pytest.mark.parametrize("name", ["scenes_f_cagrad", "nyuv2_f_cagrad_paper", "cityscapes_f_cagrad"])
    def test_of_scenes_validation_chooses_the_form_of_the_perturbation_too(self, name):
        assert dict(RECIPES[name].grid) == {
            "method.options.c": ("0.2", "0.4", "0.6", "0.8"),
            "rho": ("0.005", "0.01", "0.05", "0.1", "0.5", "1.0", "2.0", "5.0"),
            "method.perturbation": ("sam", "asam"),
        }

    @pytest.mark.parametrize("name", ["multimnist_f_cagrad", "nyuv2_f_fairgrad_paper", "scenes_nash_mtl"])
    def test_what_is_left_open_are_flags_of_a_run(self, name):
        grid = axes([f"{flag}={','.join(values[-1:])}" for flag, values in RECIPES[name].grid.items()])
        ((run,), config) = combinations({name: grid}, 1, []), recipes.build(name)
        chosen = {**run.config.method.options, "rho": run.config.rho}
        assert chosen != {**config.method.options, "rho": config.rho}

    def test_the_authors_code_leaves_nothing_open_but_for_celeba(self):
        for name, recipe in RECIPES.items():
            if name.endswith("_official"):
                assert bool(recipe.grid) == name.startswith(("celeba_f_", "celeba_cagrad"))

    def test_all_of_a_family_but_the_method_is_equal(self):
        for family in FAMILIES:
            for dataset in family.datasets:
                plain = [r.config for r in family.recipes() if r.config.data.name == dataset and not r.config.rho]
                settings = {str(replace(c, recipe="", method=Method(), task=None)) for c in plain}
                assert len(plain) == len(family.methods)
                assert len(settings) == 1

    def test_every_gradient_aggregator_has_the_ablations_and_nothing_else_has(self):
        aggregators = [
            name
            for name, method in METHODS.items()
            if name != "stl" and not issubclass(AGGREGATORS[method.aggregator], LossWeighting)
        ]
        places = [(data, end) for data in DATASETS for end in ("", "_paper")]
        places += [(data, "") for data in ("scenes", "streets", "faces40")]
        expected = {
            f"{data}_f_{name}_{combine}{end}"
            for data, end in places
            for name in aggregators
            for combine in ("direct", "second", "each")
        }
        assert {name for name, r in RECIPES.items() if r.config.method.combine != "individual"} == expected

    @pytest.mark.parametrize("combine", ["direct", "second", "each"])
    @pytest.mark.parametrize(
        ("data", "method", "end"),
        [
            ("cityscapes", "mgda", ""),
            ("cityscapes", "mgda", "_paper"),
            ("multimnist", "cagrad", ""),
            ("streets", "fairgrad", ""),
        ],
    )
    def test_an_ablation_is_the_flat_method_but_for_how_gradients_are_combined(self, data, method, end, combine):
        ablation, flat = RECIPES[f"{data}_f_{method}_{combine}{end}"], RECIPES[f"{data}_f_{method}{end}"]
        form = replace(flat.config.method, combine=combine)
        assert ablation.config == replace(flat.config, recipe=f"{data}_f_{method}_{combine}{end}", method=form)
        assert ablation.grid == flat.grid

    def test_an_unknown_name_gets_a_guess(self):
        with pytest.raises(ValueError, match="unknown recipe 'multimnist_mgd'. Did you mean 'multimnist_mgda'?"):
            recipes.build("multimnist_mgd")


class TestBadValues:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"epochs": 0}, "the number of epochs must be at least 1, got 0"),
            ({"seed": -1}, "the seed must be at least 0, got -1"),
            ({"batch_size": 0}, "the batch size must be at least 1, got 0"),
            ({"rho": -0.5}, "rho must not be negative, got -0.5"),
            ({"sharpness": Sharpness(rho=-1.0)}, "sharpness.rho must not be negative, got -1.0"),
            ({"rho": 0.5}, "multimnist_mean is a plain method .* Choose its flat form"),
            ({"data": Data(validation_share=0.0)}, "chooses the epoch by the score on validation data"),
        ],
    )
    def test_they_are_named(self, values, message):
        with pytest.raises(ValueError, match=message):
            Config(**values)

    def test_a_config_of_another_version_is_refused(self):
        values = {**Config().to_dict(), "colour": "red"}
        del values["rho"]
        with pytest.raises(ValueError, match=r"unknown \['colour'\], missing \['rho'\]"):
            Config.from_dict(values)
