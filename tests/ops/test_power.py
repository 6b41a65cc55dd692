"""Power iteration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgd.ops.power import power_iteration


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_eigenvector_has_the_length_of_its_eigenvalue(dtype: torch.dtype):
    A = torch.tensor([[-3.0, 0.0], [0.0, 2.0]], dtype=dtype)
    v, length = power_iteration(lambda v: A @ v, torch.tensor([[[5.0, 0.0], [0.0, 0.25]]], dtype=dtype), 3)
    assert length.tolist() == [[[3.0, 2.0]]]
    assert length.dtype == torch.promote_types(dtype, torch.float32)
    assert v.tolist() == [[[-3.0, 0.0], [0.0, 2.0]]]


@pytest.mark.parametrize("iterations", [0, 1, 4])
def test_there_are_as_many_products_as_asked_for(iterations: int):
    seen = []

    def double(v: Tensor) -> Tensor:
        seen.append(v)
        return 2 * v

    v = torch.ones(1, 4, 1)
    _, length = power_iteration(double, v, iterations)
    assert len(seen) == iterations
    assert length.item() == 2
    _, length = power_iteration(double, v, 1, length=torch.full((1, 1, 1), 4.0))  # whoever knows it is believed
    assert length.item() == 1


def test_what_is_mapped_to_zero_stays_there():
    v, length = power_iteration(lambda v: 0 * v, torch.ones(1, 3, 1), 5)
    assert torch.equal(v, torch.zeros(1, 3, 1))
    assert length.item() == 0
