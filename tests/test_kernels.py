"""Passes over all parameters: the same on every device, by kernels or without."""

from __future__ import annotations

import pytest
import torch

from psgd import kernels

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
def test_a_coarse_change_leaves_q_as_precise_as_it_is(device):
    Q, change = on(device, 2, 8, 8), on(device, 2, 8, 8, dtype=torch.bfloat16, seed=1)
    expected = Q - 1e-4 * change.float()
    kernels.descend_(Q, change, torch.full((2,), 1e-4, device=device))
    torch.testing.assert_close(Q, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("theta_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("v_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", [False, True])
def test_parameters_of_many_shapes_move_at_once(theta_dtype, v_dtype, odd):
    shapes = [(5, 7), (5, 7), (9000,), (3, 4)] if odd else [(16, 32), (16, 32), (8192,), (16, 16)]
    thetas = [on("cuda", *shape, dtype=theta_dtype, seed=k) for k, shape in enumerate(shapes)]
    before = [theta.clone() for theta in thetas]
    v, scale = on("cuda", 20000, dtype=v_dtype), on("cuda", 100, dtype=v_dtype, seed=1)
    starts = [0, 35, 128, 9500] if odd else [0, 512, 1024, 9600]
    rows, columns = shapes[0]
    scales = [(1, rows, columns), (1 + rows, rows, columns), (0, 1, thetas[2].numel()), (50, shapes[3][1], 1)]
    rate, decay = on("cuda", 4, seed=2), on("cuda", 4, seed=3)
    table = kernels.Table(thetas, starts, scales)
    table.subtract_(v, scale, rate, decay, torch.tensor(False, device="cuda"))
    assert all(map(torch.equal, thetas, before))
    table.subtract_(v, scale, rate, decay, torch.tensor(True, device="cuda"))
    for b, (old, start, (first, n, after)) in enumerate(zip(before, starts, scales, strict=True)):
        i = torch.arange(old.numel(), device="cuda")
        direction = (v[start : start + old.numel()].double() * scale[first + (i // after) % n].double()).view_as(old)
        expected = old.double() - rate[b].double() * direction - decay[b].double() * old.double()
        torch.testing.assert_close(thetas[b], expected.to(theta_dtype))


def test_without_triton_or_a_gpu_there_are_no_kernels(monkeypatch):
    assert not kernels.ready(torch.device("cpu"))
    monkeypatch.setattr(kernels, "triton", None)
    assert not kernels.ready(torch.device("cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_where_nothing_can_be_compiled_torch_does_it(monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "_compiling", {})
    monkeypatch.setattr(kernels, "_failed", set())
    monkeypatch.setattr(kernels, "_try_descend", fail)
    kernels.prepare.cache_clear()
    with pytest.warns(UserWarning, match=r"without Triton on cuda:0.*no compiler"):
        assert not kernels.ready(device)
    assert not kernels.ready(device)  # and says so once
    v, scale = on("cuda", 2, 3, 4), on("cuda", 2, 3, 1, seed=1)
    assert torch.equal(kernels.scaled(v, scale, torch.empty_like(v)), v * scale)
    kernels.prepare.cache_clear()
