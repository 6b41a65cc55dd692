"""Which blocks a limited memory is for."""

from __future__ import annotations

import pytest
import torch

from psgd import LimitedMemory


@pytest.mark.parametrize(
    ("shape", "description"), [((2,), "dense 2"), ((3,), "dense 3"), ((2, 2), "limited memory 3 of 4")]
)
def test_a_block_with_no_more_elements_than_whole_rows_is_dense(shape: tuple[int, ...], description: str):
    assert LimitedMemory(3).init(shape, dtype=torch.float32, device="meta").describe() == description
