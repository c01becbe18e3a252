"""Aggregators by their names, and what is said about wrong names and options."""

import sys
import types

import pytest
import torch
from tests.flatmtl.toys import aggregator

from flatmtl import aggregators
from flatmtl.aggregators import AGGREGATORS, Aggregator, CAGrad, Context, LossWeighting, PCGrad, build


class TestTable:
    def test_names_are_those_of_the_papers_and_of_the_peers(self):
        gradients = (
            "mean sum fixed random mgda pcgrad cagrad imtl_g nash_mtl fairgrad graddrop gradvac aligned_mtl upgrad"
        )
        losses = "ls si uw dwa rlw gls imtl_l famo"
        assert {*gradients.split(), *losses.split()} <= AGGREGATORS.keys()
        kinds = [issubclass(kind, LossWeighting) for kind in AGGREGATORS.values()]
        assert kinds == sorted(kinds)  # gradient aggregators, then loss weightings

    @pytest.mark.parametrize("name", AGGREGATORS)
    def test_every_class_is_exported_documented_and_built_by_its_name(self, name):
        made = aggregator(name)
        assert type(made) is AGGREGATORS[name]
        assert AGGREGATORS[name].__name__ in aggregators.__all__
        for part in ("Cost:", "Scale:", "Shape:", "References:", "Example:"):
            assert part in (AGGREGATORS[name].__doc__ or "")
        assert f"\n{name} " in (aggregators.__doc__ or "")

    @pytest.mark.parametrize("name", AGGREGATORS)
    def test_every_class_declares_its_facts(self, name):
        made = aggregator(name)
        assert isinstance(made, Aggregator)
        assert isinstance(made.degree, float)
        assert isinstance(made.uses_context, bool)
        assert len(list(made.parameters())) == (3 if name in ("uw", "imtl_l") else 0)
        assert made.learns_from_step == (name == "famo")
        made.start_epoch(2, 10)
        made.after_step(torch.ones(3), Context((0, 1, 2), torch.ones(3)))


class TestBuild:
    def test_options_reach_the_class(self):
        assert repr(build("cagrad", c=0.5, rescale="1+c2")) == "CAGrad(c=0.5, rescale='1+c2')"

    def test_an_unknown_name_is_told_the_closest(self):
        with pytest.raises(ValueError, match=r"unknown aggregator 'mgd'\. Did you mean 'mgda'\? Known: mean, .*mgda"):
            build("mgd")

    def test_an_unknown_name_like_no_other(self):
        with pytest.raises(ValueError, match=r"unknown aggregator 'zzz'\. Known: "):
            build("zzz")

    def test_an_unknown_option_is_told_the_accepted_ones(self):
        with pytest.raises(
            TypeError, match=r"cagrad: .*'rescal'.* Did you mean 'rescale'\? Expected: c: .*= 0\.4, rescale"
        ):
            build("cagrad", rescal="1+c")
        with pytest.raises(TypeError, match=r"mean: .*'c'.* Expected: no options\."):
            build("mean", c=1)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("cagrad", {"c": -0.1}, r"c must not be negative, got -0\.1\. c=0 is the mean"),
            ("cagrad", {"c": float("nan")}, "c must be finite, got nan"),
            ("cagrad", {"c": float("inf")}, "c must be finite, got inf"),
            ("cagrad", {"rescale": "1+c3"}, r"rescale is '1\+c3'; expected one of None, '1\+c2', '1\+c'"),
            ("mgda", {"normalise": "l1"}, r"normalise is 'l1'; expected one of 'none', 'l2', 'loss', 'loss\+'"),
            ("pcgrad", {"reduction": "max"}, "reduction is 'max'; expected one of 'sum', 'mean'"),
        ],
    )
    def test_an_impossible_value(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            build(name, **options)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math:pi", r"aggregator 'math:pi' is 3\.14.*; expected a class, or a function that makes an aggregator"),
        (".math:pi", r"there is no module '\.math'\. Expected 'package.module:Class'"),
    ],
)
def test_a_path_that_names_no_class(path, message):
    with pytest.raises(ValueError, match=message):
        build(path)


@pytest.fixture
def plug_in(monkeypatch):
    """A module with an aggregator of the user's own."""
    module = types.ModuleType("my_plug_in")

    class Median(Aggregator):
        def __init__(self, scale: float = 1.0) -> None:
            self.scale = scale

        def __call__(self, jacobian, context: Context | None = None):
            return self.scale * jacobian.median(dim=0).values

    module.Median, module.number = Median, 3
    monkeypatch.setitem(sys.modules, "my_plug_in", module)
    return module


class TestPlugIns:
    def test_a_class_from_elsewhere(self, plug_in):
        aggregator = build("my_plug_in:Median", scale=2.0)
        assert aggregator(torch.tensor([[1.0], [5.0], [2.0]])).tolist() == [4.0]
        assert repr(aggregator) == "Median(scale=2.0)"

    def test_of_this_package(self):
        assert type(build("flatmtl.aggregators.cagrad:CAGrad")) is CAGrad

    def test_wrong_options(self, plug_in):
        with pytest.raises(TypeError, match=r"my_plug_in:Median: .*'scal'.* Did you mean 'scale'\?"):
            build("my_plug_in:Median", scal=2.0)

    def test_a_missing_class(self, plug_in):
        with pytest.raises(ValueError, match=r"module 'my_plug_in' has no class 'Medain'\. Did you mean 'Median'\?"):
            build("my_plug_in:Medain")

    def test_what_is_no_class(self, plug_in):
        with pytest.raises(ValueError, match="'my_plug_in:number' is 3; expected a class"):
            build("my_plug_in:number")

    @pytest.mark.parametrize("module", ["no_such_module", "flatmtl.no_such_module", "no_such_package.inside", ""])
    def test_a_missing_module(self, module):
        with pytest.raises(ValueError, match=f"there is no module '{module}'. Expected 'package.module:Class'"):
            build(f"{module}:Class")

    def test_a_module_that_lacks_what_it_imports_says_so_itself(self, tmp_path, monkeypatch):
        (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            build("needs_more:Class")


def test_order_that_is_no_arrangement_is_refused():
    for order, where in (
        ([[1, 0], [0, 2], [0, 1]], r"order\[0\] is \[1, 0\]; expected each of the other tasks \[1, 2\] once"),
        ([[1, 2], [0, 0], [0, 1]], r"order\[1\] is \[0, 0\]"),
        ([[1, 2], [0, 2], [0]], r"order\[2\] is \[0\]"),
        ([[1, 2], [0, 2], [0, 3]], r"order\[2\] is \[0, 3\]"),
    ):
        with pytest.raises(ValueError, match=where):
            PCGrad(order=order)
