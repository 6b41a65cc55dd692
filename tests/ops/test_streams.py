"""Values on their way to the host are those of when they were sent; parallel tasks leave each other's memory alone."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from psgd import PSGD, Kronecker, Whitening
from psgd.ops.streams import Arrival, at_once


def test_later_changes_do_not_matter():
    values = torch.tensor([1.0, 2.0])
    arrival = Arrival(values)
    values.zero_()
    assert arrival.read().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("options", [{}, {"update_every": 3}, {"precond_dtype": torch.bfloat16}], ids=str)
def test_tasks_free_nothing_that_was_there_before(options, monkeypatch):
    """In a graph, a task on another stream could get the memory while it is still read."""
    freed = []

    def checked(tasks, sizes, device):
        assert len(tasks) == len(sizes)
        before = [StorageWeakRef(t.untyped_storage()) for t in gc.get_objects() if type(t) is torch.Tensor]
        results = [task() for task in tasks]
        freed.extend(tasks[0] for storage in before if storage.expired())
        return results

    for name, module in list(sys.modules.items()):
        if name.startswith("psgd.") and getattr(module, "at_once", None) is at_once:
            monkeypatch.setattr(module, "at_once", checked)
    gc.freeze()  # what was there before the test is not among the objects of the collector, of which there are many
    shapes = [(40, 6), (6, 40), (8, 5), (41, 6), (40, 6, 3), (7,), (30, 7), (6, 33)]
    params = [torch.randn(*shape).requires_grad_() for shape in shapes]
    optimizer = PSGD(params, lr=0.01, probe=Whitening(), preconditioner=Kronecker(20), **options)
    try:
        for step in range(6):
            for p in params:
                p.grad = torch.randn_like(p) * (1 + step)
            optimizer.step()
    finally:
        gc.unfreeze()
    assert not freed
