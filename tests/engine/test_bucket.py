"""Stacks that take their steps together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from psgd import Diagonal, Kronecker
from psgd.engine.bucket import Bucket
from psgd.engine.direction import Room
from psgd.engine.part import MostOfBucket, SomeOfBucket, having
from psgd.engine.tensors import Tensors
from psgd.groups import Structure, pool
from psgd.groups.base import Preconditioned
from psgd.groups.pooled import Pooled

from .buckets import NO, YES, bucket_of, grads_of, store_of


def transposed(grads: dict[int, Tensor]) -> dict[int, Tensor]:
    """The same values, the other way round in memory."""
    return {i: g.T.contiguous().T if g.ndim > 1 else g for i, g in grads.items()}


def contents(bucket: Bucket) -> list[dict[str, Tensor]]:
    return [{name: value.clone() for name, value in stack.buffers().items()} for stack in bucket.stacks]


def test_numbers_are_split_by_stack():
    first, second = bucket_of().split(torch.tensor([1.0, 2.0, 3.0]))
    assert first.tolist() == [1.0, 2.0]
    assert second.tolist() == [3.0]
    one = Bucket(bucket_of().stacks[:1], 0, Kronecker(), None)
    assert [part.tolist() for part in one.split(torch.tensor([1.0, 2.0]))] == [[1.0, 2.0]]


def test_only_inverse_free_groups_are_pooled():
    assert isinstance(bucket_of().Q, Pooled)
    for structure in (Diagonal(), Kronecker(inverse_free=False)):
        Q = bucket_of(structure=structure).Q
        assert not isinstance(Q, Pooled)
        assert not Q.whitens
        assert not Q.recordable


def test_what_is_kept_is_counted_in_bytes():
    plain, averaging = bucket_of(), bucket_of(momentum=True)
    factors_and_lengths = 8 * (2 * (3 * 3 + 4 * 4) + 5 * 5 + 3 * 4)
    assert plain.nbytes() == factors_and_lengths
    assert averaging.nbytes() == factors_and_lengths + 8 * (2 * 12 + 5 + 3)


# -- averages ---------------------------------------------------------------------------------------------------------


def test_without_momentum_there_is_no_average():
    bucket, grads = bucket_of(), grads_of()
    assert not bucket.averaging
    m = bucket.average_(Tensors(grads), 0.0, None, YES)
    assert m.weight is None
    for g, u, stack in zip(m.arrays, m.unbiased(), bucket.stacks, strict=True):
        assert torch.equal(g, stack.pack(grads))
        assert torch.equal(u, g)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_an_average_divided_by_its_weight_is_unbiased(momentum: float):
    """It is ``Σ β^(t−s) g_s / Σ β^(t−s)``: of a constant the constant itself, from the first step on."""
    bucket = bucket_of(momentum=True)
    assert bucket.averaging
    history: list[dict[int, Tensor]] = []
    for t in range(5):
        history.append(grads_of(t))
        m = bucket.average_(Tensors(history[-1]), momentum, None, YES)
        assert m.weight is not None
        ours = [*m.arrays[0], m.arrays[1][0]]
        unbiased = [v for stacked in m.unbiased() for v in stacked]
        weights = [momentum ** (t - s) for s in range(t + 1)]
        for i in range(3):
            right = sum(w * g[i] for w, g in zip(weights, history, strict=True)) / sum(weights)
            torch.testing.assert_close(ours[i] / m.weight[i], right)
            torch.testing.assert_close(unbiased[i], right)


@pytest.mark.parametrize("momentum", [0.1, 0.9])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_gradients_that_are_not_usable_leave_the_average_alone(momentum: float, layout: str):
    bucket = bucket_of(momentum=True)
    bucket.average_(Tensors(grads_of()), momentum, None, YES)
    before = contents(bucket)
    bad = {i: g * torch.nan for i, g in grads_of(1).items()}
    if layout == "transposed":
        bad = transposed(bad)
    m = bucket.average_(Tensors(bad), momentum, None, NO)
    for old, new in zip(before, contents(bucket), strict=True):
        assert all(torch.equal(new[name], old[name]) for name in old)
    assert torch.equal(m.weight, torch.cat([old["momentum_weight"] for old in before]))


def test_before_the_first_usable_gradient_the_average_is_zero_not_nan():
    bucket = bucket_of(momentum=True)
    m = bucket.average_(Tensors({i: g * torch.nan for i, g in grads_of().items()}), 0.9, None, NO)
    for mean in m.unbiased():
        assert torch.equal(mean, torch.zeros_like(mean))


def test_how_gradients_lie_in_memory_does_not_matter():
    """Those that lie like the average are taken in by one kernel, the others one by one."""
    plain, other = bucket_of(momentum=True), bucket_of(momentum=True)
    for t in range(3):
        grads = grads_of(t)
        plain.average_(Tensors(grads), 0.7, None, YES)
        other.average_(Tensors(transposed(grads)), 0.7, None, YES)
    for a, b in zip(plain.stacks, other.stacks, strict=True):
        for name in a.average:
            torch.testing.assert_close(a.average[name], b.average[name])


def test_gradients_less_precise_than_their_average_are_taken_in():
    bucket = bucket_of(momentum=True, dtype=torch.float32)
    grads = {i: g.to(torch.bfloat16) for i, g in grads_of().items()}
    m = bucket.average_(Tensors(grads), 0.9, None, YES)
    torch.testing.assert_close(m.arrays[0][1] / m.weight[1], grads[1].float())


# -- directions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [Kronecker(), Kronecker(max_dense=3), Diagonal()], ids=str)
@pytest.mark.parametrize("momentum", [False, True])
def test_an_average_is_preconditioned_and_still_to_be_divided(structure: Structure, momentum: bool):
    bucket = bucket_of(momentum=momentum, structure=structure)
    for stack in bucket.stacks:
        for buffer in stack.group.buffers().values():
            buffer.add_(torch.rand(buffer.shape, dtype=buffer.dtype, generator=torch.Generator().manual_seed(0)))
    for t in range(2):
        m = bucket.average_(Tensors(grads_of(t)), 0.7, None, YES)
    d = bucket.precondition(m, False, Room(bucket))
    assert (d.divisor is None) == (not momentum)
    divisors = [1.0] * 2 if d.divisor is None else bucket.split(d.divisor)
    lengths = []
    for stack, array, v, by in zip(bucket.stacks, d.arrays, m.unbiased(), divisors, strict=True):
        right = stack.group.precondition(v)
        rate = torch.ones(len(stack.blocks), dtype=torch.float64) / by
        torch.testing.assert_close(array.times(rate, stack.blocks[0].shape, torch.float64), right)
        lengths.append(right.flatten(1).norm(dim=1))
    torch.testing.assert_close(d.length, torch.cat(lengths))


LENGTH = torch.tensor([2.0, 0.5, 30.0], dtype=torch.float64)


def test_without_a_limit_nothing_is_shortened():
    assert bucket_of().limit_rms(LENGTH, math.inf).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("max_rms", [0.01, 0.3, 100.0])
def test_max_rms_limits_the_root_mean_square_of_each_block(max_rms: float):
    rate = bucket_of().limit_rms(LENGTH, max_rms)
    root = torch.tensor([12.0, 12.0, 5.0], dtype=torch.float64).sqrt()
    torch.testing.assert_close(rate * LENGTH / root, (LENGTH / root).clamp_max(max_rms))


def test_a_length_of_zero_is_no_division_by_zero():
    zero = torch.zeros(3, dtype=torch.float64)
    assert bucket_of().limit_rms(zero, 1.0).tolist() == [1.0, 1.0, 1.0]


# -- blocks that have gradients ---------------------------------------------------------------------------------------


def test_a_bucket_whose_blocks_all_have_gradients_is_itself():
    bucket = bucket_of()
    assert having(bucket, grads_of()) is bucket
    assert having(bucket, {**grads_of(), 7: torch.ones(3)}) is bucket
    assert having(bucket, {7: torch.ones(3)}) is None


def overwrite_(bucket: Bucket) -> None:
    for stack in bucket.stacks:
        for buffer in stack.buffers().values():
            for row, i in zip(buffer, stack.positions, strict=True):
                row.fill_(7.0 + i)


def check_rows(bucket: Bucket, before: list[dict[str, Tensor]], given: list[int]) -> None:
    """Rows of given blocks were overwritten, and the others were not."""
    for stack, old in zip(bucket.stacks, before, strict=True):
        for name, buffer in stack.buffers().items():
            for row, i in enumerate(stack.positions):
                assert torch.equal(buffer[row], torch.full_like(buffer[row], 7.0 + i) if i in given else old[name][row])


@pytest.mark.parametrize("given", [[0], [1], [2], [0, 1], [0, 2], [1, 2]], ids=str)
def test_some_blocks_are_copies_until_their_update_is_done(given: list[int]):
    bucket = bucket_of(group=3, momentum=True)
    before = contents(bucket)
    part = having(bucket, grads_of().keys() & given)
    assert isinstance(part, SomeOfBucket)
    assert part.group == 3
    assert part.positions == given
    with part.updating(fits=True):
        overwrite_(part)
        for stack, old, new in zip(bucket.stacks, before, contents(bucket), strict=True):
            if not set(stack.positions) <= set(given):  # all blocks of a stack are the stack itself
                assert all(torch.equal(new[name], old[name]) for name in old)
    check_rows(bucket, before, given)


def large_bucket() -> Bucket:
    """Bucket of eight blocks of one shape, at the positions from 0 on."""
    params = [nn.Parameter(torch.zeros(3, 4)) for _ in range(8)]
    (bucket,) = store_of(params).buckets(everything(params))
    return bucket


@pytest.mark.parametrize("missing", [[0], [7], [2, 5]], ids=str)
def test_few_blocks_without_gradients_rest_in_their_bucket(missing: list[int]):
    bucket = large_bucket()
    given = [i for i in range(8) if i not in missing]
    before = contents(bucket)
    part = having(bucket, given)
    assert isinstance(part, MostOfBucket)
    assert part.Q is bucket.Q
    with part.updating(fits=True):
        overwrite_(part)
    check_rows(bucket, before, given)
    d = Preconditioned([], torch.full((8,), torch.inf))
    direction = part.direction(d, {"max_rms": math.inf, "clip_steps": math.inf}, None, True, YES, Room(part))
    assert [i for i, length in enumerate(direction.length) if length == 0] == missing


@pytest.mark.parametrize(("given", "changed"), [([*range(1, 8)], [*range(1, 8)]), ([0, 1], [])], ids=["most", "some"])
def test_blocks_at_rest_have_what_they_had_also_if_the_step_fails(given: list[int], changed: list[int]):
    bucket = large_bucket()
    before = contents(bucket)
    part = having(bucket, given)

    def failing_step() -> None:
        with part.updating(fits=True):
            overwrite_(part)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing_step()
    check_rows(bucket, before, changed)


@pytest.mark.parametrize("given", [[0, 1], [*range(1, 8)]], ids=["some", "most"])
def test_without_an_update_no_preconditioner_is_written(given: list[int]):
    """So ``P`` that is kept beside it stays valid."""
    bucket = large_bucket()
    versions = [buffer._version for stack in bucket.stacks for buffer in stack.group.buffers().values()]
    with having(bucket, given).updating(fits=False):
        pass
    assert versions == [buffer._version for stack in bucket.stacks for buffer in stack.group.buffers().values()]


def test_rows_are_found_once_for_the_same_missing_gradients():
    bucket = large_bucket()
    having(bucket, [0, 1])
    division = bucket.division
    having(bucket, [0, 1])
    assert bucket.division is division
    having(bucket, [0, 2])
    assert bucket.division is not division


# -- which blocks share a bucket --------------------------------------------------------------------------------------


def everything(params: list[nn.Parameter]) -> dict[int, Tensor]:
    return {i: torch.ones_like(p) for i, p in enumerate(params)}


def test_factors_of_a_bucket_lie_side_by_side():
    """Also where parameters of two dtypes, which are two buckets, take turns."""
    kinds = [((8, 8), torch.bfloat16), ((4, 8), torch.float32), ((16, 8), torch.bfloat16), ((8, 16), torch.float32)] * 2
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in kinds]
    buckets = store_of(params).buckets(everything(params))
    assert len(buckets) == 2
    assert not any(pool.copied for bucket in buckets for pool in bucket.Q.pools)


def test_thin_factors_lie_side_by_side_even_among_others_of_their_size(monkeypatch):
    monkeypatch.setattr(pool, "THIN", 8)
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(8, 8), (8, 3), (8, 9), (2, 8), (8, 7)]]
    (bucket,) = store_of(params).buckets(everything(params))
    eights = [each for each in bucket.Q.pools if each.Q.shape[1:] == (8, 8)]
    assert sorted((each.thin, len(each.Q)) for each in eights) == [(False, 4), (True, 2)]
    assert not any(each.copied for each in bucket.Q.pools)


def test_a_bucket_has_blocks_of_one_param_group():
    """Also if they are of one shape and have the same numbers."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(4, 4), (4, 4), (4,), (4, 4), (4,), (4, 4)]]
    buckets = store_of(params[:3], params[3:]).buckets(everything(params))
    assert [bucket.group for bucket in buckets] == [0, 1]
    assert [sorted(bucket.positions) for bucket in buckets] == [[0, 1, 2], [3, 4, 5]]
    assert not any(pool.copied for bucket in buckets for pool in bucket.Q.pools)
