"""Directions of descent, against the bound that Hager and Zhang prove for theirs."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor

from psgd.minimizing.descent import Directions


class Fixed:
    """Metric with a ``P`` that stays as it is."""

    unit = 1.0

    def __init__(self, P: Tensor) -> None:
        self.P = P

    def precondition(self, g: Tensor) -> Tensor:
        return self.P @ g


@pytest.mark.parametrize("seed", range(20))
def test_a_conjugate_direction_falls_as_steeply_as_is_proved(seed: int):
    """Whatever the last direction was, the slope is at least ⅞ of that along ``−P g``."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    P = root @ root.mT
    g, last, change = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    change *= last.dot(change).sign()  # as a line search finds it
    directions = Directions(Fixed(P))
    directions.last = (last, change)
    (d, slope, _), (plain, decrement, _) = islice(directions.to_try(g), 2)
    torch.testing.assert_close(plain, -P @ g)
    assert d.dot(g).item() == pytest.approx(slope)
    assert slope <= 7 / 8 * decrement * (1 - 1e-9)
    assert not torch.allclose(d, plain)
