"""Updates of many tensors at once, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgd.ops.parameters import all_finite, average_, can_fuse, subtract_

YES = {torch.device("cpu"): torch.tensor(True)}
NO = {torch.device("cpu"): torch.tensor(False)}
SHAPES = [(3, 4), (5,), (), (2, 3, 4, 5)]


def tensors(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def transposed(ts: list[Tensor]) -> list[Tensor]:
    """The same values, the other way round in memory."""
    return [t.mT.contiguous().mT if t.ndim > 1 else t for t in ts]


def channels_last(ts: list[Tensor]) -> list[Tensor]:
    return [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in ts]


def strided(ts: list[Tensor]) -> list[Tensor]:
    """Every other column of something larger."""
    return [torch.stack([t, torch.full_like(t, 7.0)], -1)[..., 0] for t in ts]


LAYOUTS = {"contiguous": list, "transposed": transposed, "channels_last": channels_last, "strided": strided}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize(
    ("of_targets", "of_steps"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=str,
)


@dtypes
@layouts
@pytest.mark.parametrize("steps_too", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_subtract_is_plain_arithmetic(of_targets, of_steps, layout: str, steps_too: bool, decay: float):
    arrange = LAYOUTS[layout]
    targets = arrange(tensors(of_targets))
    steps = tensors(of_steps, seed=1)
    if steps_too:
        steps = arrange(steps)
    right = [t.double() - (s.double() + decay * t.double()) for t, s in zip(targets, steps, strict=True)]
    strides = [t.stride() for t in targets]
    pointers = [t.data_ptr() for t in targets]
    subtract_(targets, steps, [decay] * len(SHAPES), YES)
    tolerance = 2 * torch.finfo(of_targets).eps
    for t, wanted in zip(targets, right, strict=True):
        assert t.dtype == of_targets
        torch.testing.assert_close(t.double(), wanted, rtol=tolerance, atol=2 * tolerance)
    assert [t.stride() for t in targets] == strides
    assert [t.data_ptr() for t in targets] == pointers


MIXED = {
    "numbers": [0.25, 0.0, 0.5, 0.125],
    "the last differs": [0.25, 0.25, 0.25, 0.5],
    "tensors": [torch.tensor(d) for d in (0.25, 0.0, 0.5, 0.125)],
    "both": [0.25, torch.tensor(0.0), 0.5, torch.tensor(0.125)],
    "one tensor": [torch.tensor(0.25)] * 4,
}


@dtypes
@layouts
@pytest.mark.parametrize("kind", MIXED)
def test_every_tensor_has_its_own_decay(of_targets, of_steps, layout: str, kind: str):
    decays = MIXED[kind]
    targets, steps = LAYOUTS[layout](tensors(of_targets)), tensors(of_steps, seed=1)
    each = zip(targets, steps, map(float, decays), strict=True)
    right = [t.double() - (s.double() + d * t.double()) for t, s, d in each]
    subtract_(targets, steps, decays, YES)
    tolerance = 2 * max(torch.finfo(of_targets).eps, torch.finfo(of_steps).eps)
    for t, wanted in zip(targets, right, strict=True):
        torch.testing.assert_close(t.double(), wanted, rtol=tolerance, atol=2 * tolerance)


@dtypes
@layouts
@pytest.mark.parametrize("decays", [[0.0] * 4, [0.25] * 4, [0.0, 0.25, 0.5, torch.tensor(0.75)]], ids=str)
@pytest.mark.parametrize("bad", [1.0, torch.nan])
def test_what_is_called_off_changes_no_bit(of_targets, of_steps, layout: str, decays, bad: float):
    """Also of targets that are not finite themselves, or a negative zero."""
    targets = LAYOUTS[layout](tensors(of_targets))
    targets[1][0], targets[1][1], targets[1][2] = torch.nan, -torch.inf, -0.0
    before = [t.clone() for t in targets]
    subtract_(targets, [torch.full_like(s, bad) for s in tensors(of_steps)], decays, NO)
    for t, old in zip(targets, before, strict=True):
        assert torch.equal(t.nan_to_num(nan=12345.0), old.nan_to_num(nan=12345.0))
        assert torch.equal(t.signbit() & ~t.isnan(), old.signbit() & ~old.isnan())


def test_what_is_not_a_number_arrives_where_it_is_wanted():
    targets, steps = tensors(), tensors(seed=1)
    steps[0][0, 0] = torch.nan
    subtract_(targets, steps, [0.0] * len(SHAPES), YES)
    assert targets[0][0, 0].isnan()
    assert sum(int(t.isnan().sum()) for t in targets) == 1


def test_nothing_to_subtract_is_no_error():
    subtract_([], [], [], YES)


def test_subtract_reaches_into_a_larger_tensor():
    whole = torch.zeros(4, 3)
    subtract_([whole[1], whole[3]], [torch.ones(3), torch.full((3,), 2.0)], [0.0, 0.0], YES)
    assert torch.equal(whole[:, 0], torch.tensor([0.0, -1.0, 0.0, -2.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0])
def test_average_is_plain_arithmetic(dtype: torch.dtype, weight: float):
    means, values = tensors(dtype), tensors(dtype, seed=1)
    kept = [v.clone() for v in values]
    right = [m.double() + weight * (v.double() - m.double()) for m, v in zip(means, values, strict=True)]
    average_(means, values, weight, torch.tensor(True))
    tolerance = 2 * torch.finfo(dtype).eps
    for m, wanted in zip(means, right, strict=True):
        torch.testing.assert_close(m.double(), wanted, rtol=tolerance, atol=2 * tolerance)
    assert all(torch.equal(v, old) for v, old in zip(values, kept, strict=True))


@pytest.mark.parametrize("bad", [1.0, torch.nan, torch.inf])
def test_an_average_that_is_called_off_keeps_every_bit(bad: float):
    means = tensors()
    before = [m.clone() for m in means]
    average_(means, [torch.full_like(m, bad) for m in means], 0.1, torch.tensor(False))
    assert all(torch.equal(m, old) for m, old in zip(means, before, strict=True))


def test_a_value_that_stays_is_its_own_average():
    means, values = [torch.zeros(3, dtype=torch.float64)], [torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)]
    for _ in range(400):
        average_(means, values, 0.1, torch.tensor(True))
    torch.testing.assert_close(means[0], values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_of_one_kind_are_fused(dtype: torch.dtype):
    assert can_fuse(tensors(dtype), tensors(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_cpu_half_precision_is_not_fused(dtype: torch.dtype):
    """Torch's kernel for CPUs is wrong there from 16 elements on (torch 2.13)."""
    assert not can_fuse(tensors(dtype), tensors(dtype))


def test_others_are_not():
    plain = tensors()
    for name in ("transposed", "channels_last", "strided"):
        assert not can_fuse(LAYOUTS[name](plain), plain), name
        assert not can_fuse(plain, LAYOUTS[name](plain)), name
    assert not can_fuse(plain, tensors(torch.float32))
    assert not can_fuse(tensors(torch.float32), plain)
    assert not can_fuse([*plain[:-1], plain[-1].float()], plain)
    assert not can_fuse(plain, [*plain[:-1], plain[-1].float()])
    elsewhere = [t.to("meta") for t in plain]
    assert not can_fuse(elsewhere, elsewhere)  # no kernel for that device
    assert not can_fuse([*plain[:-1], elsewhere[-1]], plain)


def test_values_on_another_device_are_not_fused():
    plain = tensors()
    assert not can_fuse(plain, [t.to("meta") for t in plain])


# -- whether all is finite --------------------------------------------------------------------------------------------

finite_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)


@finite_dtypes
@layouts
def test_ordinary_numbers_are_finite(dtype: torch.dtype, layout: str):
    (flag,) = all_finite(LAYOUTS[layout](tensors(dtype)))
    assert flag.dtype == torch.bool
    assert flag.shape == ()
    assert flag


@finite_dtypes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_element_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, bad: float):
    for k in range(len(SHAPES)):
        for position in (0, -1):
            ts = tensors(dtype)
            ts[k].view(-1)[position] = bad
            (flag,) = all_finite(ts)
            assert not flag, (k, position)


def test_infinities_of_both_signs_do_not_cancel():
    (flag,) = all_finite([torch.tensor([torch.inf, -torch.inf]), torch.ones(3)])
    assert not flag


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_beyond_half_precision_is_finite(dtype: torch.dtype):
    (flag,) = all_finite([torch.full((100,), torch.finfo(torch.float16).max, dtype=dtype)])
    assert flag


def test_an_imaginary_part_counts():
    (flag,) = all_finite([torch.tensor([1 + 2j, complex(0, torch.nan)])])
    assert not flag


def test_there_is_a_flag_for_each_dtype_and_device():
    ts = [torch.ones(2), torch.ones(2, dtype=torch.float64) * torch.nan, torch.ones(3), torch.ones(2, device="meta")]
    flags = all_finite(ts)
    assert sorted(flag.device.type for flag in flags) == ["cpu", "cpu", "meta"]
    assert sorted(bool(flag) for flag in flags if flag.device.type == "cpu") == [False, True]


def test_empty_tensors_say_nothing():
    assert all_finite([]) == []
    assert all_finite([torch.empty(0), torch.empty(0, 3)]) == []
    (flag,) = all_finite([torch.empty(0), torch.ones(2)])
    assert flag
