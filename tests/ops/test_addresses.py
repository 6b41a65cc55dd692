"""Addresses of tensors, kept where a recording finds them."""

from __future__ import annotations

import torch
from torch import nn

from psgd import PSGD, Whitening
from psgd.ops.addresses import Addressed, Addresses


def test_addresses_stay_at_their_place():
    addresses = Addresses(2, torch.device("cpu"))
    place = addresses.place.data_ptr()
    addresses.point([16, 32])
    assert addresses.aligned
    addresses.point([16, 36])
    assert not addresses.aligned
    assert addresses.place.tolist() == [16, 36]
    assert addresses.place.data_ptr() == place


def test_tensors_are_addressed_in_the_order_of_their_fleets():
    """Stack by stack, whatever the order of the parameters, and each precision by itself."""
    shapes = [(2, 3), (4,), (2, 3)]
    params = [nn.Parameter(torch.zeros(s, dtype=d)) for d in (torch.float32, torch.float64) for s in shapes]
    optimizer = PSGD(params, lr=0.1, probe=Whitening())
    fleets = optimizer._by_device(optimizer.stacks)
    assert sorted(fleet.positions for fleet in fleets) == [[0, 2, 1], [3, 5, 4]]
    addressed = Addressed(fleets)
    tensors = {i: torch.randn_like(p) for i, p in enumerate(params)}
    addressed.point(tensors)
    for fleet in fleets:
        assert addressed.of[fleet].place.tolist() == [tensors[i].data_ptr() for i in fleet.positions]
