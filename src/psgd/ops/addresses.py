"""Tensors known by their addresses, so that a recorded step finds those of today wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .streams import sent

if TYPE_CHECKING:
    from ..engine.bucket import Fleet


class Addresses:
    """Those of some tensors, at a place on a device that stays the same."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.place = torch.zeros(count, dtype=torch.int64, device=device)
        self._last: list[int] = []
        #: whether 16 bytes can be read at once at all of them
        self.aligned = False

    def point(self, addresses: list[int]) -> None:
        if addresses != self._last:
            self.place.copy_(sent(torch.tensor(addresses, dtype=torch.int64, device="cpu"), self.place.device))
            self._last = addresses
            self.aligned = all(address % 16 == 0 for address in addresses)


class Addressed:
    """A real tensor for every parameter of some fleets.

    Args:
        fleets: each with a table
    """

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self.of = {fleet: Addresses(len(fleet.positions), fleet.device) for fleet in fleets}

    def point(self, tensors: Mapping[int, Tensor]) -> None:
        """To other tensors; whoever replays a recording keeps them until then."""
        for fleet, addresses in self.of.items():
            addresses.point([tensors[i].data_ptr() for i in fleet.positions])

    def check_(self, usable: Tensor) -> None:
        """Set a flag to false if anything is not finite."""
        for fleet, addresses in self.of.items():
            assert fleet.table is not None
            fleet.table.check_(addresses, usable)
