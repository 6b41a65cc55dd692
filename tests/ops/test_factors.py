"""Passes over all factors: the same on every device, by kernels or without."""

from __future__ import annotations

import pytest
import torch

from psgd.ops import factors as kernels

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)

#: arrays, with what they are multiplied by
BROADCASTS = [
    ((3, 50, 70), (3, 50, 1)),
    ((3, 50, 70), (3, 1, 70)),
    ((2, 5, 6, 7), (2, 1, 6, 1)),
    ((3, 9000), (3, 1)),
    ((2, 64, 128), (2, 64, 1)),
    ((3, 100), (3, 100)),
    ((2, 3, 1), (2, 1, 1)),
    ((2, 300, 257), (2, 300, 1)),
    ((2, 5, 400), (2, 1, 400)),
    ((2, 70, 5, 64), (2, 70, 1, 1)),
    ((3, 128, 128), (3, 1, 1)),
]


def on(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


@devices
@dtypes
@pytest.mark.parametrize(("shape", "scale_shape"), BROADCASTS, ids=str)
def test_a_scaled_array_is_the_product_rounded_once(device, dtype, shape, scale_shape):
    v, scale = on(device, *shape, dtype=dtype), on(device, *scale_shape, dtype=dtype, seed=1)
    out_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    out = torch.full(shape, torch.nan, dtype=out_dtype, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    assert torch.equal(kernels.scaled(v, scale, out), (v.to(wide) * scale.to(wide)).to(out_dtype))
    assert torch.equal(kernels.scaled(v, scale, v).to(out_dtype), out)  # into itself


@devices
def test_there_may_be_more_blocks_than_programs(device):
    """CUDA has at most 65,535 programs along the second axis of a grid."""
    v, scale = on(device, 70_000, 2, 3), on(device, 70_000, 2, 1, seed=1)
    assert not kernels.fits_grid(v)
    assert torch.equal(kernels.scaled(v, scale, torch.empty_like(v)), v * scale)
    Q, change = on(device, 70_000, 2, 2), on(device, 70_000, 2, 2, seed=2)
    expected = Q - 0.5 * change
    assert torch.equal(kernels.asymmetry(Q), Q - Q.mT)
    kernels.descend_(Q, change, torch.full((70_000,), 0.5, device=device))
    torch.testing.assert_close(Q, expected)


@devices
@pytest.mark.parametrize(("shape", "scale_shape"), BROADCASTS, ids=str)
def test_positions_find_their_scale(device, shape, scale_shape):
    v, scale = on(device, *shape), on(device, *scale_shape, seed=1)
    n, after = kernels.broadcast(scale, v)
    i = torch.arange(v[0].numel(), device=device)
    found = scale.reshape(len(v), -1)[:, (i // after) % n]
    torch.testing.assert_close(v.flatten(1) * found, (v * scale).flatten(1))


@devices
@dtypes
@pytest.mark.parametrize("n", [3, 64, 70])
def test_factors_descend_unless_their_step_is_zero(device, dtype, n):
    Q, change = on(device, 3, n, n, dtype=dtype), on(device, 3, n, n, dtype=dtype, seed=1)
    change[1] = torch.nan
    step = torch.tensor([0.1, 0.0, 0.3], device=device)
    before = Q.clone()
    expected = (Q.double() - step.double().view(-1, 1, 1) * change.double()).to(dtype)
    version = Q._version
    kernels.descend_(Q, change, step)
    assert Q._version > version
    assert torch.equal(Q[1], before[1])
    tolerance = {"rtol": 0.01, "atol": 0.01} if dtype == torch.bfloat16 else {}  # the step may be rounded too
    for b in (0, 2):
        torch.testing.assert_close(Q[b], expected[b], **tolerance)


@devices
@dtypes
@pytest.mark.parametrize("each", [1, 70])
def test_a_diagonal_is_subtracted_from_the_change(device, dtype, each):
    """``Q ← Q − step · (change − D Q)``, where ``D`` is one number for a matrix, or one for each row."""
    Q, change = on(device, 3, 70, 70, dtype=dtype), on(device, 3, 70, 70, dtype=dtype, seed=1)
    diagonal = on(device, 3, each, seed=2)
    step = torch.tensor([0.1, 0.0, 0.3], device=device)
    before = Q.clone()
    D = diagonal.double().expand(3, 70).diag_embed()
    expected = (Q.double() - step.double().view(-1, 1, 1) * (change.double() - D @ Q.double())).to(dtype)
    kernels.descend_(Q, change, step, diagonal)
    assert torch.equal(Q[1], before[1])
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(Q[::2], expected[::2], **tolerance)


@devices
def test_a_coarse_change_leaves_q_as_precise_as_it_is(device):
    Q, change = on(device, 2, 8, 8), on(device, 2, 8, 8, dtype=torch.bfloat16, seed=1)
    expected = Q - 1e-4 * change.float()
    kernels.descend_(Q, change, torch.full((2,), 1e-4, device=device))
    torch.testing.assert_close(Q, expected)


@devices
@dtypes
@pytest.mark.parametrize("n", [1, 3, 64, 70, 144])
def test_asymmetry_is_what_the_transpose_lacks(device, dtype, n):
    Q = on(device, 3, n, n, dtype=dtype)
    R = kernels.asymmetry(Q)
    assert torch.equal(R, Q - Q.mT)
    assert torch.equal(kernels.asymmetry(Q.mT), Q.mT - Q)  # not contiguous
