"""Parameters as real arrays."""

from __future__ import annotations

import pytest
import torch

from psgd.ops.real import as_real, from_real, precise_dtype, shaped

half, single, double = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ([half], single),
        ([torch.float16, half], single),
        ([single], single),
        ([half, double], double),
        ([torch.complex64], single),
        ([torch.complex128, single], double),
    ],
    ids=str,
)
def test_steps_are_as_precise_as_the_parameters_and_at_least_single(dtypes, wanted):
    assert precise_dtype([torch.ones(2, dtype=dtype) for dtype in dtypes]) == wanted


def test_a_complex_array_is_a_real_one_and_back():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert as_real(z).tolist() == [[1.0, 2.0], [3.0, -4.0]]
    assert as_real(z).data_ptr() == z.data_ptr()
    assert as_real(z.conj()).tolist() == [[1.0, -2.0], [3.0, 4.0]]
    assert torch.equal(from_real(as_real(z), z), z)
    x = torch.ones(3)
    assert as_real(x) is x
    assert from_real(x, x) is x


def test_a_tensor_of_the_right_shape_is_left_as_it_is():
    x = torch.arange(6.0).view(2, 3)
    assert shaped(x, (2, 3)) is x
    assert torch.equal(shaped(x, (6,)), x.flatten())
