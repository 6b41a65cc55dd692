"""Products in blocks against whole ones, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from psgd.ops import triangular_products as products

#: smallest and largest sizes that are computed in blocks here, with and without a last block that is shorter
SIZES = (2 * products.ROWS + 1, 3 * products.ROWS, 400)


def triangular(n: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    above = torch.randn(batch, n, n, generator=generator, dtype=torch.float64).triu_(1) / n
    return above + torch.rand(batch, n, generator=generator, dtype=torch.float64).add_(0.5).diag_embed()


@pytest.fixture(autouse=True)
def _all_are_worth_it(monkeypatch):
    monkeypatch.setattr(products, "WORTH", 1)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("n", SIZES)
def test_products_and_solutions_are_those_of_whole_matrices(n, transposed):
    Q, v = triangular(n), torch.randn(2, n, 7, dtype=torch.float64)
    if transposed:
        v = v.mT.contiguous().mT
    assert products.in_blocks(Q, 7)
    for found, expected in (
        (products.multiply(Q, v), Q @ v),
        (products.multiply_t(Q, v), Q.mT @ v),
        (products.solve(Q, v), torch.linalg.solve(Q, v)),
        (products.solve_t(Q, v), torch.linalg.solve(Q.mT, v)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found.stride() == v.stride()


@pytest.mark.parametrize("n", SIZES)
def test_rows_of_a_triangle(n):
    Q, E = triangular(n), torch.randn(2, 30, n, dtype=torch.float64)
    torch.testing.assert_close(products.multiply_rows(E, Q), E @ Q, rtol=1e-12, atol=1e-12)


def test_zeros_below_the_diagonal_are_left_out():
    n, Q, v = 400, triangular(400), torch.randn(2, 400, 3, dtype=torch.float64)
    spoiled = Q.clone()
    spoiled[:, products.ROWS :, 0] = torch.nan
    assert products.multiply(spoiled, v)[:, n // 2 :].isfinite().all()
    with FlopCounterMode(display=False) as counter:
        products.multiply(Q, v)
    assert counter.get_total_flops() == 2 * products.flops(Q.device, n, 3)
    assert counter.get_total_flops() < 0.65 * 2 * 2 * n * n * 3


def test_small_products_are_whole_ones(monkeypatch):
    monkeypatch.undo()
    Q, v = triangular(50), torch.randn(2, 50, 53, dtype=torch.float64)
    assert not products.in_blocks(Q, 53)
    assert torch.equal(products.multiply(Q, v), Q @ v)
    assert torch.equal(products.solve_t(Q, v), torch.linalg.solve_triangular(Q.mT, v, upper=False))


def test_the_number_of_blocks_of_a_stack_does_not_matter():
    Q, v = triangular(400, 3), torch.randn(3, 400, 5, dtype=torch.float64)
    for name in ("multiply", "multiply_t", "solve", "solve_t"):
        together = getattr(products, name)(Q, v)
        assert all(torch.equal(getattr(products, name)(Q[k : k + 1], v[k : k + 1])[0], together[k]) for k in range(3))
