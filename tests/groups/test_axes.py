"""Products along one axis of a stack of arrays, against ``einsum``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from psgd.groups.axes import lower, multiply_axes, multiply_axis

AXES = {0: "bij,bjkl->bikl", 1: "bij,bkjl->bkil", 2: "bij,bklj->bkli"}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("out", [False, True])
def test_a_matrix_multiplies_one_axis(axis: int, out: bool):
    """Also one that is not symmetric."""
    v = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    M = torch.randn(2, *[v.shape[axis + 1]] * 2, dtype=torch.float64)
    room = torch.empty_like(v) if out else None
    found = multiply_axis(M, v, axis, room)
    torch.testing.assert_close(found, torch.einsum(AXES[axis], M, v))
    assert room is None or found.data_ptr() == room.data_ptr()
    diagonal = M.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(multiply_axis(diagonal, v, axis), multiply_axis(diagonal.diag_embed(), v, axis))


def test_matrices_multiply_one_after_the_other():
    v, A, B = (torch.randn(2, *shape, dtype=torch.float64) for shape in [(3, 4), (3, 3), (4, 4)])
    torch.testing.assert_close(multiply_axes([(A, 0), (B, 1)], v), A @ v @ B.mT)
    torch.testing.assert_close(multiply_axes([(B, 1), (B.mT, 1)], v), v @ B.mT @ B)


def test_estimates_are_rounded_where_torch_says_that_products_are(monkeypatch):
    """Torch before 2.9 does not say it in this way, and estimates keep their dtype."""
    devices, dtypes = ("cpu", "cuda"), (torch.float32, torch.float64)
    rounded = {}
    for name, settings in {"new": SimpleNamespace(fp32_precision="tf32"), "old": SimpleNamespace()}.items():
        monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
        rounded[name] = [(d, t) for d in devices for t in dtypes if lower(torch.device(d), t) != t]
    assert rounded == {"new": [("cuda", torch.float32)], "old": []}
