"""Arrays whose scale is left to others: their lengths and spectral norms are those of the product."""

from __future__ import annotations

import pytest
import torch

from psgd.groups.base import Scaled


def scaled(shape: tuple[int, ...], axis: int, seed: int = 0) -> tuple[Scaled, torch.Tensor]:
    """Arrays with a few directions that stand out, scaled along an axis; and the product."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    v = v * torch.logspace(1, 0, shape[-1], dtype=torch.float64)
    scale = torch.rand(2, shape[axis], generator=generator, dtype=torch.float64) + 0.5
    scale = scale.view(2, *(n if k == axis else 1 for k, n in enumerate(shape)))
    return Scaled(v, scale), v * scale


@pytest.mark.parametrize(("shape", "axis"), [((40, 6), 0), ((6, 40), 1), ((5, 7, 4), 1), ((1, 5), 0), ((5, 1), 0)])
def test_the_spectral_norm_is_that_of_the_matrix_of_slices(shape, axis):
    array, product = scaled(shape, axis)
    assert array.spectral_norm(axis) is None  # lengths of slices are not known yet
    array.length()
    matrices = product.movedim(axis + 1, 1).flatten(2)
    exact = torch.linalg.matrix_norm(matrices, 2)
    found = array.spectral_norm(axis)
    assert (found <= exact * (1 + 1e-12)).all()
    assert (found > 0.95 * exact).all()


def test_a_long_slice_does_not_hide_what_all_others_have_in_common():
    v = torch.zeros(1, 200, 50)
    v[0, 1:, 1] = 7.0
    v[0, 0, 0] = 25.0
    array = Scaled(v, torch.ones(1, 200, 1))
    array.length()
    assert array.spectral_norm(0).item() == pytest.approx(7 * 199**0.5)
    array.v[0, 0, 0] = 200.0
    array.length()
    assert array.spectral_norm(0).item() == pytest.approx(200)


@pytest.mark.parametrize(("shape", "axis"), [((40, 6), 0), ((6, 40), 1)])
def test_a_direction_that_is_known_gives_the_spectral_norm(shape, axis):
    """Whatever its length is; another direction is stretched less, but no slice is longer than the spectral norm."""
    array, product = scaled(shape, axis)
    _, norms, directions = torch.linalg.svd(product.movedim(axis + 1, 1))
    array.length(1e-3 * directions[:, :1].mT)
    torch.testing.assert_close(array.spectral_norm(axis), norms[:, 0])
    array.length(directions[:, 1:2].mT)
    longest = torch.linalg.vector_norm(product.movedim(axis + 1, 1), dim=2).amax(1)
    torch.testing.assert_close(array.spectral_norm(axis), torch.maximum(norms[:, 1], longest))
    array.length(torch.zeros_like(directions[:, :1].mT))
    torch.testing.assert_close(array.spectral_norm(axis), longest)


def test_an_array_without_a_scale_has_no_slices():
    array = Scaled(torch.ones(1, 2, 3), None)
    array.length()
    assert array.spectral_norm(0) is None


def test_zeros_have_a_norm_of_zero():
    array = Scaled(torch.zeros(1, 2, 3), torch.ones(1, 2, 1))
    array.length()
    assert array.spectral_norm(0).item() == 0
