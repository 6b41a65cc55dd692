"""The O(n²) update of a dense Q, and that it is one."""

from __future__ import annotations

import time

import pytest
import torch

from psgd.groups import triangular
from psgd.groups.triangular import descend_rank_two_


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("block_rows", [None, 8, 16, 300])
@pytest.mark.parametrize("at_once", [1, 24, 208])
def test_blocked_update_is_the_product(n, batch, block_rows, at_once, monkeypatch):
    """Whatever number of rows is handled at a time."""
    monkeypatch.setattr(triangular, "CPU_ROWS", (16, at_once))
    Q = torch.randn(batch, n, n, dtype=torch.float64).triu()
    x, y = torch.randn(2, batch, n, 1, dtype=torch.float64)
    step = torch.rand(batch, 1, 1, dtype=torch.float64)
    scale = torch.rand(batch, 1, 1, dtype=torch.float64)
    expected = scale * (Q - step * (x @ y.mT + y @ x.mT).triu() @ Q)
    descend_rank_two_(Q, x, y, step, scale, block_rows)
    torch.testing.assert_close(Q, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(Q, Q.triu())


def test_blocked_update_is_much_faster_than_the_product():
    """O(n²) against O(n³): about 8 times at this size, so half of that is a safe claim."""
    n = 1000
    Q = torch.randn(1, n, n, dtype=torch.float64).triu() / n
    x, y = torch.randn(2, 1, n, 1, dtype=torch.float64)
    step = torch.full((1, 1, 1), 1e-3, dtype=torch.float64)

    def product():
        Q.sub_(step * ((x @ y.mT + y @ x.mT).triu() @ Q))

    def best(f):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return min(times)

    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert best(lambda: descend_rank_two_(Q, x, y, step, one)) < best(product) / 2
