"""Digests of facts; tests/ranks compares them between ranks."""

from __future__ import annotations

import math

import pytest
import torch

from psgd.ops.agreement import Fact, _by_rank, _digest, _plain_facts, checksum

CPU = torch.device("cpu")
#: learning rates, some of which differ in their exponents or in their last bit only
RATES = [0.0, 1e-3, 2e-3, 1e-3 * 2**16, math.nextafter(1e-3, 1), 1e-30, 1.0]


def digest(*rates: float, told: object = ()) -> int:
    """Digest with numbers that are left on their device."""
    return int(_digest([told], [torch.tensor(rate, dtype=torch.float64) for rate in rates], CPU))


def test_numbers_on_a_device_change_the_digest():
    assert len({digest(rate) for rate in RATES}) == len(RATES)
    assert len({digest(a, b) for a in RATES for b in RATES}) == len(RATES) ** 2
    assert digest(0.1, told=1) != digest(0.1, told=2)
    assert digest(0.1) == digest(0.1)


def test_numbers_are_compared_by_value_and_other_things_by_their_repr():
    """Whatever type a scheduler gives a number: that of Python, NumPy or a tensor."""
    np = pytest.importorskip("numpy")
    alike = [0.5, np.float64(0.5), np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5])]
    told, there = _plain_facts([Fact(str, alike), Fact(str, [np.int64(3), 3, True, None, (2, 4)])])
    assert not there
    assert repr(told) == repr([[0.5] * 5, [3, 3, True, None, (2, 4)]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_a_checksum_notices_a_bit(dtype):
    t = torch.arange(12).view(3, 4).to(dtype)
    other = t.clone()
    assert checksum(t) == checksum(other) == checksum(t.mT.contiguous().mT)
    torch.view_as_real(other)[1, 2, 1].add_(1) if other.is_complex() else other[1, 2].add_(1)
    assert checksum(t) != checksum(other)
    assert checksum(torch.zeros(0, dtype=dtype)) == 0


def test_ranks_are_listed_with_the_most_frequent_value_first():
    assert _by_rank(["1", "2", "2"]) == "2 on ranks 1, 2 and 1 on rank 0"
    assert _by_rank(["1"] + ["2"] * 10) == "2 on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more and 1 on rank 0"
