"""One tensor for each parameter, by position or by address."""

from __future__ import annotations

import torch
from torch import nn

from psgd.engine.tensors import Pairs, Tensors, TensorsAtAddresses

from .buckets import bucket_of, grads_of, store_of


def test_tensors_are_addressed_in_the_order_of_their_buckets():
    """Stack by stack, whatever the order of the parameters, and each precision by itself."""
    shapes = [(2, 3), (4,), (2, 3)]
    params = [nn.Parameter(torch.zeros(s, dtype=d)) for d in (torch.float32, torch.float64) for s in shapes]
    tensors = {i: torch.randn_like(p) for i, p in enumerate(params)}
    buckets = store_of(params).buckets(tensors)
    assert sorted(bucket.positions for bucket in buckets) == [[0, 2, 1], [3, 5, 4]]
    at = TensorsAtAddresses(buckets)
    at.point(tensors)
    for bucket in buckets:
        assert at.addresses[bucket].place.tolist() == [tensors[i].data_ptr() for i in bucket.positions]


def test_tensors_that_are_missing_count_as_zero():
    grads = grads_of()
    del grads[1]
    first, second = Tensors(grads).pack(bucket_of())
    assert torch.equal(first, torch.stack([grads[0], torch.zeros(3, 4, dtype=torch.float64)]))
    assert torch.equal(second, grads[2][None])


def test_who_takes_pairs_owns_them():
    """Blocks without a pair get zeros."""
    bucket = bucket_of()
    dthetas, dgrads = grads_of(1), grads_of(2)
    pairs = Pairs({i: (dthetas[i], dgrads[i]) for i in (0, 2)})
    first, second = pairs.take(bucket)
    zero = torch.zeros(3, 4, dtype=torch.float64)
    for packed, given in zip(first, (dthetas, dgrads), strict=True):
        assert torch.equal(packed, torch.stack([given[0], zero]))
    for packed, given in zip(second, (dthetas, dgrads), strict=True):
        assert torch.equal(packed, given[2][None])
    assert not pairs.by_position
