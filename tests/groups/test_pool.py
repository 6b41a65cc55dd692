"""Factors of one kind and size as one tensor."""

from __future__ import annotations

import pytest
import torch

from psgd.groups.pool import adjacent


def test_parts_side_by_side_are_seen_as_one_tensor():
    whole = torch.arange(24.0).view(6, 2, 2)
    parts = [whole[:1], whole[1:4], whole[4:]]
    view = adjacent(parts)
    assert view is not None
    assert torch.equal(view, whole)
    view[5] = -1
    assert torch.equal(parts[2][1], torch.full((2, 2), -1.0))
    inner = adjacent(parts[1:])
    assert inner is not None
    assert inner.data_ptr() == whole[1].data_ptr()


@pytest.mark.parametrize(
    "parts",
    [
        lambda t: [t[1:2], t[:1]],
        lambda t: [t[:1], t[2:3]],
        lambda t: [t[:1], t[:1]],
        lambda t: [t[:2], t[2:].clone()],
        lambda t: [t[:2].mT, t[2:].mT],
        lambda t: [t[::2], t[1::2]],
    ],
    ids=["reversed", "gap", "twice", "elsewhere", "transposed", "interleaved"],
)
def test_other_parts_are_not(parts):
    assert adjacent(parts(torch.arange(16.0).view(4, 2, 2))) is None
