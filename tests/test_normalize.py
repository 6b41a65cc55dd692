"""The three norms by which a step of Q is normalised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgd import MaxAbs, MaxDiag, Spectral
from psgd.tangent import Tangent

#: the norms of a symmetric matrix
NORMS = [
    (MaxAbs(), lambda S: S.abs().max()),
    (MaxDiag(), lambda S: S.diagonal().abs().max()),
    (Spectral(), lambda S: torch.linalg.matrix_norm(S, 2)),
]


@pytest.mark.parametrize(("normalize", "norm"), NORMS, ids=["MaxAbs", "MaxDiag", "Spectral"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_it_is_the_norm_that_it_is_named_after(normalize, norm, n: int):
    x, y = torch.randn(2, 1, n, 1, dtype=torch.float64)
    S: Tensor = x[0] @ y[0].mT + y[0] @ x[0].mT
    torch.testing.assert_close(normalize(Tangent(x, y))[0], norm(S))
