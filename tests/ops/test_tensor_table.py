"""Kernels that go through parameters of many shapes. Skipped, visibly, where there is no GPU;
``engine/test_recorder.py`` has what they are used for, with emulated ones.
"""

from __future__ import annotations

import pytest
import torch

from psgd.ops.factors import CHUNK
from psgd.ops.tensor_table import Addresses, TensorTable
from tests.ops.test_factors import on

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

odds = pytest.mark.parametrize("odd", [False, True])
theta_dtypes = pytest.mark.parametrize(
    "theta_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


def shapes_of(odd: bool) -> tuple[list[tuple[int, ...]], list[int]]:
    """Shapes, and where the directions begin."""
    if odd:
        return [(5, 7), (5, 7), (9000,), (3, 4)], [0, 35, 128, 9500]
    return [(16, 32), (16, 32), (8192,), (16, 16)], [0, 512, 1024, 9600]


def table_of(thetas: list[torch.Tensor], starts: list[int]) -> TensorTable:
    return TensorTable(thetas, starts, [(0, 1, theta.numel()) for theta in thetas])


def pointing(tensors: list[torch.Tensor]) -> Addresses:
    addresses = Addresses(len(tensors), tensors[0].device)
    addresses.point([t.data_ptr() for t in tensors])
    return addresses


def test_addresses_stay_at_their_place():
    addresses = Addresses(2, torch.device("cpu"))
    place = addresses.place.data_ptr()
    addresses.point([16, 32])
    assert addresses.aligned
    addresses.point([16, 36])
    assert not addresses.aligned
    assert addresses.place.tolist() == [16, 36]
    assert addresses.place.data_ptr() == place


@odds
def test_every_element_is_in_one_chunk(odd):
    shapes, starts = shapes_of(odd)
    table = table_of([torch.zeros(shape) for shape in shapes], starts)
    seen = [torch.zeros(shape).flatten() for shape in shapes]
    for b, c in table.chunks.tolist():
        seen[b][c * CHUNK : (c + 1) * CHUNK] += 1
    assert all(torch.equal(count, torch.ones_like(count)) for count in seen)
    assert table.even == (not odd)


def test_sizes_and_starts_are_all_even_or_nothing_is_read_by_sixteen():
    thetas = [torch.zeros(16), torch.zeros(32)]
    assert table_of(thetas, [0, 16]).even
    assert not table_of(thetas, [0, 17]).even
    assert not table_of([torch.zeros(16), torch.zeros(31)], [0, 16]).even


@on_gpu
@theta_dtypes
@pytest.mark.parametrize("v_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@odds
def test_parameters_of_many_shapes_move_at_once(theta_dtype, v_dtype, odd):
    shapes, starts = shapes_of(odd)
    thetas = [on("cuda", *shape, dtype=theta_dtype, seed=k) for k, shape in enumerate(shapes)]
    before = [theta.clone() for theta in thetas]
    v, scale = on("cuda", 20000, dtype=v_dtype), on("cuda", 100, dtype=v_dtype, seed=1)
    rows, columns = shapes[0]
    scales = [(1, rows, columns), (1 + rows, rows, columns), (0, 1, thetas[2].numel()), (50, shapes[3][1], 1)]
    rate, decay = on("cuda", 4, seed=2), on("cuda", 4, seed=3)
    table = TensorTable(thetas, starts, scales)
    table.subtract_(v, scale, rate, decay, torch.tensor(False, device="cuda"))
    assert all(map(torch.equal, thetas, before))
    table.subtract_(v, scale, rate, decay, torch.tensor(True, device="cuda"))
    for b, (old, start, (first, n, after)) in enumerate(zip(before, starts, scales, strict=True)):
        i = torch.arange(old.numel(), device="cuda")
        direction = (v[start : start + old.numel()].double() * scale[first + (i // after) % n].double()).view_as(old)
        expected = old.double() - rate[b].double() * direction - decay[b].double() * old.double()
        torch.testing.assert_close(thetas[b], expected.to(theta_dtype))


@on_gpu
@theta_dtypes
@odds
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found_wherever_it_is(theta_dtype, odd, bad):
    shapes, starts = shapes_of(odd)
    thetas, sources = ([on("cuda", *shape, dtype=theta_dtype, seed=k) for shape in shapes] for k in range(2))
    sources[0].fill_(torch.finfo(theta_dtype).max)
    table = table_of(thetas, starts)
    for source in sources:
        for position in (0, -1):
            before = source.view(-1)[position].clone()
            if bad is not None:
                source.view(-1)[position] = bad
            usable = torch.tensor(True, device="cuda")
            table.check_(pointing(sources), usable)
            assert bool(usable) == (bad is None)
            source.view(-1)[position] = before
    never = torch.tensor(False, device="cuda")
    table.check_(pointing(sources), never)
    assert not never


@on_gpu
@theta_dtypes
@odds
def test_tensors_are_gathered(theta_dtype, odd):
    shapes, starts = shapes_of(odd)
    sources = [on("cuda", *shape, dtype=theta_dtype, seed=k) for k, shape in enumerate(shapes)]
    out = torch.full((20000,), 7.0, dtype=theta_dtype, device="cuda")
    expected = out.clone()
    for source, start in zip(sources, starts, strict=True):
        expected[start : start + source.numel()] = source.view(-1)
    table_of(sources, starts).gather(pointing(sources), out)
    assert torch.equal(out, expected)


@on_gpu
@theta_dtypes
@odds
@pytest.mark.parametrize("mean_dtype", [torch.float32, torch.float64], ids=str)
def test_tensors_are_averaged_if_they_are_usable(theta_dtype, odd, mean_dtype):
    shapes, starts = shapes_of(odd)
    sources = [on("cuda", *shape, dtype=theta_dtype, seed=k) for k, shape in enumerate(shapes)]
    means = [on("cuda", *shape, dtype=mean_dtype, seed=9) for shape in shapes]
    weight = torch.tensor([0.1, 0.7, 1.0, 0.0], device="cuda")
    before = [mean.clone() for mean in means]
    table = table_of(sources, starts)
    usable = torch.tensor(False, device="cuda")
    table.average_(pointing(sources), pointing(means), mean_dtype, weight, usable)
    assert all(map(torch.equal, means, before))
    table.average_(pointing(sources), pointing(means), mean_dtype, weight, ~usable)
    for w, source, old, new in zip(weight, sources, before, means, strict=True):
        torch.testing.assert_close(new, torch.lerp(old, source.to(mean_dtype), w.to(mean_dtype)))
    assert torch.equal(means[2], sources[2].to(mean_dtype))
