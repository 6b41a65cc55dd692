"""Kernels that go through parameters of many shapes. Skipped, visibly, where there is no GPU;
``engine/test_recorder.py`` has what they are used for, with emulated ones.
"""

from __future__ import annotations

import math

import pytest
import torch

from psgd.groups.axes import support
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
    return TensorTable(thetas, starts, [(0, 1, theta.numel()) for theta in thetas], axes_of(thetas))


def axes_of(thetas: list[torch.Tensor]) -> list[list[tuple[int, int, int]]]:
    """Where the slices of each axis are, one tensor after the other."""
    axes, first = [], 0
    for theta in thetas:
        axes.append([])
        for axis, n in enumerate(theta.shape):
            axes[-1].append((first, n, math.prod(theta.shape[axis + 1 :])))
            first += n
    return axes


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
    table = TensorTable(thetas, starts, scales, axes_of(thetas))
    table.subtract_(v, scale, rate, decay, torch.tensor(False, device="cuda"))
    assert all(map(torch.equal, thetas, before))
    table.subtract_(v, scale, rate, decay, torch.tensor(True, device="cuda"))
    for b, (old, start, (first, n, after)) in enumerate(zip(before, starts, scales, strict=True)):
        i = torch.arange(old.numel(), device="cuda")
        direction = (v[start : start + old.numel()].double() * scale[first + (i // after) % n].double()).view_as(old)
        expected = old.double() - rate[b].double() * direction - decay[b].double() * old.double()
        torch.testing.assert_close(thetas[b], expected.to(theta_dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def lengths_of(table: TensorTable, sources: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.empty(len(sources), dtype=wide(sources[0].dtype), device="cuda")
    has_zeros = torch.empty(len(sources), dtype=torch.bool, device="cuda")
    table.lengths(pointing(sources), lengths, has_zeros)
    return lengths, has_zeros


@on_gpu
@theta_dtypes
@odds
def test_lengths(theta_dtype, odd):
    shapes, starts = shapes_of(odd)
    sources = [on("cuda", *shape, dtype=theta_dtype, seed=k) for k, shape in enumerate(shapes)]
    sources[1].view(-1)[-1] = 0
    sources[2].zero_()
    lengths, has_zeros = lengths_of(table_of(sources, starts), sources)
    expected = torch.stack([source.double().norm() for source in sources]).to(wide(theta_dtype))
    torch.testing.assert_close(lengths, expected)
    assert has_zeros.tolist() == [False, False, True, False]  # one zero is not a slice of zeros


@on_gpu
@theta_dtypes
@odds
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found_wherever_it_is(theta_dtype, odd, bad):
    shapes, starts = shapes_of(odd)
    sources = [on("cuda", *shape, dtype=theta_dtype, seed=k) for k, shape in enumerate(shapes)]
    table = table_of(sources, starts)
    for k, source in enumerate(sources):
        for position in (0, -1):
            before = source.view(-1)[position].clone()
            source.view(-1)[position] = bad
            lengths, _ = lengths_of(table, sources)
            assert [not bool(length < torch.inf) for length in lengths] == [k == j for j in range(len(sources))]
            source.view(-1)[position] = before


@on_gpu
@pytest.mark.parametrize("shape", [(3, 5000), (5000, 3), (1, 7), (70, 70, 3), (2, 3, 4, 5), (4100, 4097)], ids=str)
def test_slices_of_any_shape_are_found(shape):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(shape, generator=generator)
    for axis, n in enumerate(shape):
        source.index_fill_(axis, torch.randint(0, n, (1 + n // 3,), generator=generator), 0.0)
    source = source.cuda()
    table = table_of([source], [0])
    found = table.support(pointing([source]), torch.ones(1, dtype=torch.bool, device="cuda"))
    assert torch.equal(found, torch.cat([each.flatten() for each in support(source[None], shape)]).float())


@on_gpu
@theta_dtypes
@odds
def test_slices_that_are_zero_are_found(theta_dtype, odd):
    shapes, starts = shapes_of(odd)
    sources = [on("cuda", *shape, dtype=theta_dtype, seed=k) for k, shape in enumerate(shapes)]
    sources[0][2] = 0
    sources[0][:, 3] = 0
    sources[1][1, 1] = 0
    sources[2][5000:] = 0
    table = table_of(sources, starts)
    _, has_zeros = lengths_of(table, sources)
    found = table.support(pointing(sources), has_zeros)
    expected = [each for source in sources for each in support(source[None], source.shape)]
    assert torch.equal(found, torch.cat([each.flatten() for each in expected]).float())


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
    factor = torch.tensor([1.0, 0.5, 1.0, 2.0], device="cuda")
    table.average_(pointing(sources), pointing(means), mean_dtype, weight, factor, usable)
    assert all(map(torch.equal, means, before))
    table.average_(pointing(sources), pointing(means), mean_dtype, weight, factor, ~usable)
    for w, f, source, old, new in zip(weight, factor, sources, before, means, strict=True):
        torch.testing.assert_close(new, torch.lerp(old, source.to(mean_dtype) * f, w.to(mean_dtype)))
    assert torch.equal(means[2], sources[2].to(mean_dtype))
