"""Values on their way to the host are those of when they were sent."""

from __future__ import annotations

import torch

from psgd.ops.streams import Arrival


def test_later_changes_do_not_matter():
    values = torch.tensor([1.0, 2.0])
    arrival = Arrival(values)
    values.zero_()
    assert arrival.read().tolist() == [1.0, 2.0]
