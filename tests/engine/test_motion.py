"""Rates of the blocks, and the step of the parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from psgd.engine.bucket import Bucket
from psgd.engine.motion import Motion, decay

from .buckets import CPU, NO, SHAPES, YES, bucket_of, direction_of, grads_of, options

LENGTH = torch.tensor([2.0, 0.5, 30.0], dtype=torch.float64)
BOTH = torch.cat([LENGTH, 2 * LENGTH])


def alone(length: Tensor) -> Tensor:
    return length


def motion_of(*groups: dict, buckets: list[Bucket] | None = None, total_length=alone) -> Motion:
    """Motion of a bucket for each param group; the directions of the second are twice as long as those of the first."""
    if buckets is None:
        buckets = [bucket_of(group=g, first=3 * g) for g in range(len(groups))]
    directions = [
        direction_of(bucket, (1 + k) * LENGTH, max_rms=groups[bucket.group]["max_rms"])
        for k, bucket in enumerate(buckets)
    ]
    return Motion(buckets, directions, groups, total_length)


def rates_of(*groups: dict, **others) -> list[list[float]]:
    return [rates.tolist() for rates in motion_of(*groups, **others).rates]


# -- options ----------------------------------------------------------------------------------------------------------


def test_without_limits_the_rate_is_the_step_size():
    assert rates_of(options(0.1)) == [[0.1] * 3]


def test_every_bucket_has_the_numbers_of_its_group():
    buckets = [bucket_of(group=2), bucket_of(group=0, first=3)]
    groups = [options(0.1), options(0.5, maximize=True), options(0.3)]
    assert rates_of(*groups, buckets=buckets) == [[0.3] * 3, [0.1] * 3]


def test_to_maximise_is_to_go_the_other_way():
    assert rates_of(options(0.1, maximize=True), options(0.2)) == [[-0.1] * 3, [0.2] * 3]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_tensor_is_taken_as_it_is(shape: tuple[int, ...]):
    lr = torch.full(shape, 0.25, requires_grad=True)
    (rates,) = motion_of(options(lr)).rates
    assert rates.shape == (3,)
    assert not rates.requires_grad
    assert rates.tolist() == [0.25] * 3


@pytest.mark.parametrize("order", ["tensor first", "number first", "two tensors"])
def test_tensors_and_numbers_mix(order: str):
    a, b = torch.tensor(0.25), torch.tensor([0.5])
    lrs = {"tensor first": (a, 0.5), "number first": (0.25, b), "two tensors": (a, b)}[order]
    assert rates_of(*map(options, lrs)) == [[0.25] * 3, [0.5] * 3]


@pytest.mark.parametrize("order", ["tensor first", "number first", "two tensors"])
def test_the_host_never_looks_at_a_tensor(order: str):
    """On the device `meta` a tensor has no value: any look at one raises."""
    a, b = torch.tensor(0.25, device="meta"), torch.tensor([0.5], device="meta")
    lrs = {"tensor first": (a, 0.5), "number first": (0.25, b), "two tensors": (a, b)}[order]
    buckets = [bucket_of(group=g, first=3 * g, device="meta") for g in range(2)]
    limits = {"max_norm": 1.0, "max_rms": 1.0, "weight_decay": 0.1}
    motion = motion_of(*(options(lr, **limits) for lr in lrs), buckets=buckets)
    assert [rates.shape for rates in motion.rates] == [(3,), (3,)]
    assert [flag.device.type for flag in motion.is_finite()] == ["meta", "meta"]


def test_what_the_directions_are_still_to_be_divided_by_divides_the_rates():
    bucket = bucket_of()
    divisor = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64)
    direction = direction_of(bucket, LENGTH, divisor)
    limited = options(0.1, max_norm=LENGTH.norm().item() / 2)  # the length has been divided already
    (rates,) = Motion([bucket], [direction], [limited], alone).rates
    torch.testing.assert_close(rates, 0.05 / divisor)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_max_rms_may_differ_between_groups():
    limited, free = rates_of(options(1.0, max_rms=0.1), options(1.0))
    root = torch.tensor([12.0, 12.0, 5.0], dtype=torch.float64).sqrt()
    torch.testing.assert_close(torch.tensor(limited, dtype=torch.float64), (0.1 * root / LENGTH).clamp_max(1.0))
    assert free == [1.0] * 3


@pytest.mark.parametrize("max_norm", [0.5, 10.0, 1000.0])
def test_max_norm_limits_the_length_of_all_blocks_together(max_norm: float):
    rates = torch.cat(motion_of(*[options(1.0, max_norm=max_norm)] * 2).rates)
    assert len(rates.unique()) == 1  # the direction stays
    torch.testing.assert_close((rates * BOTH).norm(), BOTH.norm().clamp_max(max_norm))


def test_max_norm_may_differ_between_groups():
    limited, free = rates_of(options(1.0, max_norm=3.0), options(1.0))
    assert limited == pytest.approx([3 / BOTH.norm().item()] * 3)
    assert free == [1.0] * 3


def test_max_norm_is_for_what_max_rms_has_left():
    rates = rates_of(options(1.0, max_rms=0.1, max_norm=0.2))
    root = torch.tensor([12.0, 12.0, 5.0], dtype=torch.float64).sqrt()
    left = (0.1 * root / LENGTH).clamp_max(1.0)
    torch.testing.assert_close(torch.tensor(rates[0], dtype=torch.float64), left * 0.2 / (left * LENGTH).norm())


def test_max_norm_is_for_the_length_over_all_ranks():
    rates = rates_of(options(1.0, max_norm=1.0), total_length=lambda mine: 2 * mine)
    assert rates[0] == pytest.approx([0.5 / LENGTH.norm().item()] * 3)


def test_ranks_are_asked_for_the_length_also_by_one_that_has_no_blocks():
    """All of them wait for each other."""
    asked = []

    def total(mine: Tensor) -> Tensor:
        asked.append(mine.item())
        return mine

    motion = motion_of(options(1.0, max_norm=1.0), buckets=[], total_length=total)
    assert asked == [0.0]
    assert motion.rates == []
    motion_of(options(1.0), total_length=total)
    assert asked == [0.0]


def test_precisions_may_differ_between_buckets():
    buckets = [bucket_of(dtype=torch.float32), bucket_of(first=3)]
    motion = motion_of(options(1.0, max_norm=3.0), buckets=buckets)
    assert [rates.dtype for rates in motion.rates] == [torch.float32, torch.float64]
    for rates in motion.rates:
        torch.testing.assert_close(rates.double(), torch.full((3,), 3.0).double() / BOTH.norm())


@pytest.mark.parametrize("order", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_length_is_as_precise_as_the_most_precise_bucket(order: tuple[torch.dtype, torch.dtype]):
    buckets = [bucket_of(dtype=dtype, first=3 * k) for k, dtype in enumerate(order)]
    lengths = [LENGTH * (1e100 if dtype == torch.float64 else 1.0) for dtype in order]
    directions = [direction_of(bucket, length) for bucket, length in zip(buckets, lengths, strict=True)]
    motion = Motion(buckets, directions, [options(1.0, max_norm=3.0)], alone)
    taken = [(rates * length).norm() for rates, length in zip(motion.rates, lengths, strict=True)]
    assert max(taken).item() == pytest.approx(3)


def test_a_length_of_zero_is_no_division_by_zero():
    bucket = bucket_of()
    limits = options(0.1, max_rms=1.0, max_norm=1.0)
    (rates,) = Motion([bucket], [direction_of(bucket, [0.0] * 3, max_rms=1.0)], [limits], alone).rates
    assert rates.tolist() == [0.1] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("limits", [{}, {"max_rms": 1.0}, {"max_norm": 1.0}], ids=str)
def test_a_length_that_is_not_finite_is_told(bad: float, limits: dict):
    buckets = [bucket_of(), bucket_of(first=3)]
    max_rms = limits.get("max_rms", math.inf)
    each = zip(buckets, (LENGTH, [1.0, bad, 1.0]), strict=True)
    directions = [direction_of(bucket, lengths, max_rms=max_rms) for bucket, lengths in each]
    motion = Motion(buckets, directions, [options(0.1, **limits)], alone)
    assert [flag.item() for flag in motion.is_finite()] == [False]  # of the first the host sees that it is finite


# -- the step ---------------------------------------------------------------------------------------------------------


def test_decay_is_that_of_one_step():
    assert decay(options(0.1)) == 0.0
    assert decay(options(torch.tensor(0.1))) == 0.0
    assert decay(options(0.1, weight_decay=0.5)) == 0.05
    lr = torch.tensor([0.5], requires_grad=True)
    on_device = decay(options(lr, weight_decay=0.5))
    assert isinstance(on_device, Tensor)
    assert not on_device.requires_grad
    assert on_device.shape == ()
    assert on_device == 0.25


GROUPS = [options(0.1, weight_decay=0.5), options(torch.tensor(0.25), max_norm=3.0), options(0.5, maximize=True)]


def thetas_of(count: int) -> list[Tensor]:
    return [theta for g in range(count) for theta in grads_of(g, first=3 * g).values()]


def test_steps_are_the_directions_times_their_rates():
    motion = motion_of(*GROUPS)
    rates = torch.cat(motion.rates)
    steps = dict(motion.steps())
    assert sorted(steps) == list(range(9))
    for i, step in steps.items():
        torch.testing.assert_close(step, rates[i] * torch.ones(SHAPES[i % 3], dtype=torch.float64))


@pytest.mark.parametrize("given", [range(9), [0, 4, 8], [2], []], ids=str)
def test_parameters_that_have_gradients_move(given):
    thetas, before = thetas_of(3), thetas_of(3)
    motion = motion_of(*GROUPS)
    rates, decays = torch.cat(motion.rates), [0.05, 0.0, 0.0]
    motion.apply_(thetas, [0] * 3 + [1] * 3 + [2] * 3, given, {CPU: YES})
    for i, (new, old) in enumerate(zip(thetas, before, strict=True)):
        if i in given:
            torch.testing.assert_close(new, old - (rates[i] + decays[i // 3] * old))
        else:
            assert torch.equal(new, old)


def test_all_parameters_move_or_none():
    thetas, before = thetas_of(3), thetas_of(3)
    motion_of(*GROUPS).apply_(thetas, [0] * 3 + [1] * 3 + [2] * 3, range(9), {CPU: NO})
    assert all(map(torch.equal, thetas, before))
