"""Numbers of all blocks of a bucket: read and written in one piece, whether or not they are adjacent in memory."""

from __future__ import annotations

import pytest
import torch

from psgd.engine.numbers import Numbers, write_


def adjacent() -> list[torch.Tensor]:
    return list(torch.arange(5.0).split([2, 3]))


def apart() -> list[torch.Tensor]:
    return [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0, 4.0])]


@pytest.mark.parametrize("parts", [adjacent, apart])
def test_what_is_written_is_in_the_parts(parts):
    numbers, others = Numbers(parts()), Numbers(parts())
    assert numbers.read().tolist() == [0, 1, 2, 3, 4]
    write_((numbers, torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0])), (others, torch.zeros(5)))
    assert [part.tolist() for part in numbers.parts] == [[5, 6], [7, 8, 9]]
    assert others.read().tolist() == [0] * 5


def test_adjacent_ones_are_not_copied():
    numbers = Numbers(adjacent())
    assert len(numbers.pieces) == 1
    assert numbers.read().data_ptr() == numbers.parts[0].data_ptr()
    assert len(Numbers(apart()).pieces) == 2
