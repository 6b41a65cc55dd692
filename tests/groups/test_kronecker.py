"""Which axes get a dense factor."""

from __future__ import annotations

import pytest
import torch

from psgd import Kronecker


@pytest.mark.parametrize(
    ("structure", "shape", "description"),
    [
        (Kronecker(max_dense=4), (4, 5), "symmetric 4 ⊗ diagonal 5"),
        (Kronecker(max_dense=4, inverse_free=False), (4, 5), "dense 4 ⊗ diagonal 5"),
        (Kronecker(max_skew=2), (2,), "symmetric 2"),
        (Kronecker(max_skew=2), (3,), "diagonal 3"),
        (Kronecker(max_skew=2), (6, 3), "symmetric 6 ⊗ symmetric 3"),
        (Kronecker(max_skew=2), (7, 3), "diagonal 7 ⊗ symmetric 3"),
    ],
    ids=str,
)
def test_an_axis_is_dense_up_to_the_limits(structure: Kronecker, shape: tuple[int, ...], description: str):
    """Of its length, ``max_dense``, and of its ratio to the product of the others, ``max_skew``; both included."""
    assert structure.init(shape, dtype=torch.float32, device="meta").describe() == description
