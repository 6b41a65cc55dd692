"""Slices of scaled arrays: the same on every device, by a kernel or without."""

from __future__ import annotations

import pytest
import torch

from psgd.ops.slices import measure_slices
from tests.ops.test_factors import devices, dtypes, on

#: arrays, with scales that run along one of their axes
SHAPES = [
    ((3, 50, 70), (3, 50, 1)),
    ((3, 50, 70), (3, 1, 70)),
    ((2, 64, 128), (2, 64, 1)),
    ((2, 256, 512), (2, 1, 512)),
    ((2, 3, 1), (2, 3, 1)),
    ((2, 1, 300), (2, 1, 300)),
    ((2, 5, 6, 7), (2, 5, 1, 1)),
    ((2, 5, 6, 7), (2, 1, 6, 1)),
    ((2, 5, 6, 7), (2, 1, 1, 7)),
    ((1, 2000, 9), (1, 2000, 1)),
    ((1, 9, 2000), (1, 1, 2000)),
]
shapes = pytest.mark.parametrize(("shape", "scale_shape"), SHAPES, ids=str)
matrices = pytest.mark.parametrize(("shape", "scale_shape"), [case for case in SHAPES if len(case[0]) == 3], ids=str)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double(), expected, **tolerance)


def lengths_of(product: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    others = [i for i in range(1, product.ndim) if scale.shape[i] == 1]
    return product.square().sum(others, keepdim=True).sqrt()


@devices
@dtypes
@shapes
def test_lengths_are_those_of_the_product(device, dtype, shape, scale_shape):
    v, scale = on(device, *shape, dtype=dtype), on(device, *scale_shape, dtype=dtype, seed=1).abs()
    lengths, products = measure_slices(v, scale)
    assert products is None
    assert lengths.shape == scale.shape
    assert lengths.dtype == torch.promote_types(dtype, torch.float32)
    if dtype == torch.bfloat16 and device == "cpu":  # torch multiplies the lengths, which are float32, by the scale
        assert torch.allclose(lengths.double(), lengths_of(v.double() * scale.double(), scale), rtol=0.01)
    else:
        close(lengths, lengths_of(v.double() * scale.double(), scale), dtype)


@devices
@dtypes
@shapes
def test_the_product_is_rounded_once_and_written_everywhere(device, dtype, shape, scale_shape):
    v, scale = on(device, *shape, dtype=dtype), on(device, *scale_shape, dtype=dtype, seed=1).abs()
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16 if dtype == torch.float32 else dtype, device=device)
    version = out._version
    lengths, _ = measure_slices(v, scale, out)
    assert out._version > version
    wide = torch.promote_types(dtype, torch.float32)
    assert torch.equal(out, (v.to(wide) * scale.to(wide)).to(out.dtype))
    torch.testing.assert_close(lengths.double(), lengths_of(out.double(), scale), rtol=0.01, atol=1e-6)


@devices
@dtypes
@matrices
def test_products_with_a_vector(device, dtype, shape, scale_shape):
    """``scale · v`` times a vector along the axis without a scale; the vector may be more precise than the array."""
    v, scale = on(device, *shape, dtype=dtype), on(device, *scale_shape, dtype=dtype, seed=1).abs()
    by_row = scale_shape[2] == 1
    wide = torch.promote_types(dtype, torch.float32)
    x = on(device, shape[0], shape[2] if by_row else shape[1], 1, dtype=wide, seed=2)
    lengths, products = measure_slices(v, scale, x=x)
    assert products is not None
    assert products.shape == lengths.shape == scale.shape
    product = v.double() * scale.double()
    expected = ((product if by_row else product.mT) @ x.double()).view(scale.shape)
    if dtype == torch.bfloat16:
        error = torch.linalg.vector_norm(products.double() - expected)
        assert error < 0.02 * torch.linalg.vector_norm(expected)
    else:
        close(products, expected, dtype)


@devices
def test_an_infinite_element_shows_in_the_length_of_its_slice_alone(device):
    v, scale = on(device, 2, 20, 30), on(device, 2, 20, 1, seed=1).abs()
    v[1, 3, 4] = torch.inf
    lengths, _ = measure_slices(v, scale)
    assert (~lengths.isfinite()).nonzero().tolist() == [[1, 3, 0]]


@devices
def test_an_array_in_another_order_of_memory(device):
    v, scale = on(device, 3, 70, 50).mT, on(device, 3, 50, 1, seed=1).abs()
    found, expected = measure_slices(v, scale)[0], measure_slices(v.contiguous(), scale)[0]
    torch.testing.assert_close(found, expected)
