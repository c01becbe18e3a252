"""Worst-case steps, against their formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatmtl import ASAM, SAM
from flatmtl.perturbations import Part, ascend, kept


def moved(perturbation: SAM, weights, gradients, radii=(0.3, 0.7)):
    """Return by how much each part's weights move, one vector a part."""
    parts = [Part([w], [g], rho) for w, g, rho in zip(weights, gradients, radii, strict=True)]
    before = [w.clone() for w in weights]
    places = [torch.empty_like(w) for w in weights]
    with kept(weights, places):
        ascend(perturbation, parts, [[place] for place in places])
        steps = [w - b for w, b in zip(weights, before, strict=True)]
    for w, b in zip(weights, before, strict=True):
        assert torch.equal(w, b)
    return steps


def vectors(seed: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(k, generator=generator, dtype=torch.float64) for k in (5, 3)]


@given(seed=st.integers(0, 1000), scale=st.floats(-12, 12))
def test_sam_moves_each_part_along_its_gradient_by_its_radius(seed, scale):
    weights, (g, h) = vectors(seed), vectors(seed + 1, 10.0**scale)
    sh, ns = moved(SAM(0.3), weights, [g, h])
    torch.testing.assert_close(sh, 0.3 * g / g.norm())
    torch.testing.assert_close(ns, 0.7 * h / h.norm())


@given(seed=st.integers(0, 1000))
def test_joint_norm_is_over_both_parts(seed):
    weights, (g, h) = vectors(seed), vectors(seed + 1)
    sh, ns = moved(SAM(0.3, norm="joint"), weights, [g, h])
    both = torch.cat([g, h]).norm()
    torch.testing.assert_close(sh, 0.3 * g / both)
    torch.testing.assert_close(ns, 0.7 * h / both)


@given(seed=st.integers(0, 1000))
def test_asam_scales_by_the_weights(seed):
    (w, v), (g, h) = vectors(seed), vectors(seed + 1)
    sh, ns = moved(ASAM(0.3), [w.clone(), v.clone()], [g, h])
    torch.testing.assert_close(sh, 0.3 * w**2 * g / (w * g).norm())
    torch.testing.assert_close(ns, 0.7 * v**2 * h / (v * h).norm())


def test_asam_of_matrices_leaves_vectors_unscaled():
    bias, (g, h) = vectors(0), vectors(1)
    torch.testing.assert_close(
        moved(ASAM(0.3, adapt="matrices"), bias, [g, h]), moved(SAM(0.3), [b.clone() for b in bias], [g, h])
    )


@pytest.mark.parametrize("perturbation", [SAM(0.3), SAM(0.3, norm="joint"), ASAM(0.3)], ids=repr)
def test_a_zero_gradient_gives_no_step(perturbation):
    weights = vectors(0)
    steps = moved(perturbation, weights, [torch.zeros(5), torch.zeros(3)])
    assert all((step == 0).all() for step in steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_any_precision_come_back_bit_for_bit(dtype):
    weights = [w.to(dtype) for w in vectors(0)]
    moved(ASAM(0.5), weights, [g.float() * 1e-20 for g in vectors(1)])


def test_weights_come_back_when_the_body_raises():
    weights, gradients = vectors(0), vectors(1)
    before = weights[0].clone()
    parts, places = [Part([weights[0]], [gradients[0]], 1.0)], [[torch.empty(5, dtype=torch.float64)]]
    seen = []

    def body():
        with kept(weights[:1], places[0]):
            ascend(SAM(1.0), parts, places)
            seen.append(weights[0].clone())
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert not torch.equal(seen[0], before)
    assert torch.equal(weights[0], before)


@pytest.mark.parametrize("kind", [SAM, ASAM])
class TestRefusals:
    def test_radii(self, kind):
        with pytest.raises(ValueError, match="rho must not be negative, got -0.05. For plain multi-task learning pass"):
            kind(-0.05)
        with pytest.raises(ValueError, match="rho_heads must not be negative"):
            kind(0.05, rho_heads=-1)
        with pytest.raises(ValueError, match="rho must be a finite number, got nan"):
            kind(math.nan)
        with pytest.raises(TypeError, match="rho must be a number, got '0.1'"):
            kind("0.1")

    def test_options(self, kind):
        with pytest.raises(ValueError, match="unknown norm 'both'. Known: separate, joint"):
            kind(0.1, norm="both")
        with pytest.raises(ValueError, match="unknown scope 'node'"):
            kind(0.1, scope="node")
        with pytest.raises(ValueError, match=r"local must lie in \[0, 1\], got 2"):
            kind(0.1, local=2)


def test_unknown_adaptation():
    with pytest.raises(ValueError, match="unknown adapt 'biases'. Known: all, matrices"):
        ASAM(0.1, adapt="biases")


def test_printed_form_names_what_differs_from_the_defaults():
    assert repr(SAM(0.1)) == "SAM(rho=0.1)"
    assert repr(ASAM(0.5, rho_heads=0.1, norm="joint")) == "ASAM(rho=0.5, rho_heads=0.1, norm='joint')"


@pytest.mark.parametrize("radius", ["rho", "rho_heads"])
def test_a_radius_that_is_set_later_is_checked_too(radius):
    perturbation = ASAM(0.5, rho_heads=0.2)
    setattr(perturbation, radius, 0.1)
    assert f"{radius}=0.1" in repr(perturbation)
    with pytest.raises(ValueError, match=f"{radius} must not be negative, got -1.0"):
        setattr(perturbation, radius, -1.0)
