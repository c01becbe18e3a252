import dataclasses
import json
from dataclasses import replace

import pytest

from flatmtl_bench import recipes
from flatmtl_bench.recipes import RECIPES, Config
from flatmtl_bench.recipes.config import Data, Optimizer, Sharpness
from flatmtl_bench.runs import run_name

DATASETS = ("multimnist", "multifashion", "multifashionmnist")
PAPER_METHODS = ("mgda", "pcgrad", "cagrad", "imtl_g")


@pytest.mark.parametrize("name", RECIPES)
class TestEveryRecipe:
    def test_its_config_bears_its_name(self, name):
        assert recipes.build(name).recipe == name

    def test_its_help_is_one_line(self, name):
        text = RECIPES[name].__doc__
        assert text.endswith(").")
        assert "\n" not in text
        assert len(text) < 80

    def test_it_survives_json(self, name):
        config = recipes.build(name)
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    def test_it_cannot_be_changed(self, name):
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipes.build(name).seed = 1

    def test_flat_ones_are_perturbed_and_plain_ones_are_not(self, name):
        config = recipes.build(name)
        flat = "_f_" in name
        assert (config.method.perturbation, config.rho > 0) == (("asam", True) if flat else ("none", False))


class TestTable:
    def test_every_method_of_the_paper_is_there_plain_flat_and_official(self):
        names = {
            f"{d}{f}_{m}{o}" for d in DATASETS for f in ("", "_f") for m in PAPER_METHODS for o in ("", "_official")
        }
        assert names <= set(RECIPES)

    def test_no_two_recipes_share_a_folder(self):
        assert len({run_name(recipe()) for recipe in RECIPES.values()}) == len(RECIPES)

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
        assert recipes.build("multifashionmnist_f_cagrad_official").data.same_label
        assert config.data.validation_share == 0

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
            ({"data": Data(validation_share=0.0)}, "chooses the epoch by validation accuracy"),
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
