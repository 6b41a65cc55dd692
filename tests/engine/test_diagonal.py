"""Limits of blocks with a diagonal factor; ``laws/test_trust.py`` has what they achieve."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from psgd import PSGD, Kronecker, Whitening
from psgd.engine import diagonal


@pytest.mark.parametrize("update_every", [1, 5])
def test_no_task_frees_what_it_reads(monkeypatch, update_every):
    """In a captured graph, tasks run in parallel, and another one could get the memory."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((20, 30), (30, 8), (8, 40), (40, 4), (25, 6))]
    optimizer = PSGD(
        params, lr=0.01, probe=Whitening(), preconditioner=Kronecker(max_dense=10), update_every=update_every
    )
    limit_, seen = diagonal.limit_, []

    def watched(bucket: Any, d: Any, *rest: Any) -> Any:
        read = [weakref.ref(t) for a in d.arrays for t in (a.scale, a.slices) if t is not None]

        def at_once(tasks: Sequence[Callable[[], Any]], sizes: Any, device: Any) -> list[Any]:
            results = [task() for task in tasks]
            seen.append(len(read))
            assert all(ref() is not None for ref in read)
            return results

        monkeypatch.setattr(diagonal, "at_once", at_once)
        return limit_(bucket, d, *rest)

    monkeypatch.setattr(diagonal, "limit_", watched)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert len(seen) == 3
    assert min(seen) >= 5
