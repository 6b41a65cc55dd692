"""The step of a factor whose tangent is mostly rounding."""

from __future__ import annotations

import pytest
import torch

from psgd import Dense, LimitedMemory, MaxDiag
from psgd.groups import Structure
from psgd.tangent import Tangent

#: the least norm that a step is divided by
LEAST = 2.0**-20


@pytest.mark.parametrize("structure", [Dense(), LimitedMemory(1)], ids=str)
@pytest.mark.parametrize("norm", [2.0**-2, 2.0**-30])
def test_a_norm_of_rounding_does_not_lengthen_a_step(structure: Structure, norm: float):
    """Where the diagonal of ``S`` nearly vanishes, what is beside it moves by no more than ``lr / LEAST``."""
    group = structure.init((2,), dtype=torch.float64, device="cpu")
    x, y = torch.tensor([[[1.0, 0.0]], [[norm / 2, 1.0]]], dtype=torch.float64)
    group.descend_(Tangent(x, y), LEAST, MaxDiag())  # S = [[norm, 1], [1, 0]]
    assert group.dense()[0, 0, 1].item() == -LEAST / max(norm, LEAST)


@pytest.mark.parametrize("structure", [Dense(), LimitedMemory(1)], ids=str)
def test_a_norm_of_zero_is_no_step(structure: Structure):
    group = structure.init((2,), dtype=torch.float64, device="cpu")
    x, y = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    group.descend_(Tangent(x, y), 0.5, MaxDiag())
    assert torch.equal(group.dense()[0], torch.eye(2, dtype=torch.float64))
