from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from torch import nn

from psgd.experiments import zebra


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestPattern:
    def test_is_the_paper_s_formula(self):
        x, y = next(zebra.batches(generator(), 1000))
        assert y.tolist() == [round(10**x1 - 10**x2) % 2 for x1, x2 in x.tolist()]

    def test_has_ten_stripes_along_an_edge(self):
        # There 10^x₁ − 1 runs from 0 to 9 and passes nine half-integers; the stripes become narrower.
        edge = torch.stack([torch.linspace(0, 1, 10001, dtype=torch.float64), torch.zeros(10001).double()], dim=-1)
        changes = zebra.label(edge).diff().nonzero().flatten() / 10000
        assert changes.tolist() == pytest.approx([math.log10(k + 1.5) for k in range(9)], abs=2e-4)

    def test_is_symmetric_about_a_black_diagonal(self):
        pattern = zebra.label(zebra.grid(64))
        assert torch.equal(pattern, pattern.T)
        assert not pattern.diagonal().any()
        assert 0.45 < float(pattern.mean()) < 0.55

    def test_grid_has_x1_along_rows_and_no_point_on_the_border(self):
        x = zebra.grid(4)
        assert x.shape == (4, 4, 2)
        assert x[0, 1].tolist() == [0.375, 0.125]


class TestData:
    def test_fills_the_unit_square_evenly(self):
        x, _ = next(zebra.batches(generator(), 40000))
        assert x.dtype == torch.float64
        assert x.min() >= 0
        assert x.max() < 1
        assert x.mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.01)
        assert x.T.cov().flatten().tolist() == pytest.approx([1 / 12, 0, 0, 1 / 12], abs=0.003)

    def test_every_batch_is_new(self):
        first, second = islice(zebra.batches(generator()), 2)
        assert len(first[0]) == zebra.BATCH
        assert not torch.equal(first[0], second[0])


class TestNetwork:
    def test_has_401_parameters_in_float64(self):
        params = list(zebra.Network(generator()).parameters())
        assert sum(p.numel() for p in params) == 401
        assert {p.dtype for p in params} == {torch.float64}

    def test_starts_with_variance_one_over_the_inputs(self):
        model = zebra.Network(generator(), hidden=10000)
        assert model.hidden.weight.var().item() == pytest.approx(1 / 2, rel=0.05)
        assert model.output.weight.var().item() == pytest.approx(1 / 10000, rel=0.05)
        assert not model.hidden.bias.any()
        assert not model.output.bias.any()

    def test_normalizes_its_inputs(self):
        model = zebra.Network(generator())
        seen = []
        model.hidden.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(zebra.grid(100).reshape(-1, 2))
        assert seen[0].mean(0).tolist() == pytest.approx([0, 0], abs=1e-12)
        assert seen[0].var(0).tolist() == pytest.approx([1, 1], abs=1e-3)

    def test_loss_is_the_cross_entropy(self):
        model, data = zebra.start(0)
        x, y = next(data)
        p = torch.sigmoid(model(x))
        assert p.shape == y.shape
        by_hand = -torch.where(y == 1, p, 1 - p).log().mean()
        assert zebra.loss(model, x, y).item() == pytest.approx(by_hand.item())


class TestStart:
    def test_depends_on_the_seed_alone(self):
        (one, ones), (same, sames), (other, others) = zebra.start(0), zebra.start(0), zebra.start(1)
        assert torch.equal(one.hidden.weight, same.hidden.weight)
        assert torch.equal(one.output.weight, same.output.weight)
        assert not torch.equal(one.hidden.weight, other.hidden.weight)
        x = next(ones)[0]
        assert torch.equal(x, next(sames)[0])
        assert not torch.equal(x, next(others)[0])

    def test_leaves_the_global_generator_alone(self):
        before = torch.get_rng_state()
        _, data = zebra.start(0)
        next(data)
        assert torch.equal(torch.get_rng_state(), before)


class Known(nn.Module):
    """Knows the class, and says it or the other."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = logit

    def forward(self, x):
        return self.logit * (2 * zebra.label(x) - 1)


@pytest.mark.parametrize(("logit", "expected"), [(3.0, 0.0), (-3.0, 1.0)])
def test_error_rate_counts_the_wrong_class(logit, expected):
    assert zebra.error_rate(Known(logit)) == expected


def test_probability_is_that_of_class_1():
    pattern = zebra.probability(Known(math.log(4)), 16)
    torch.testing.assert_close(pattern, torch.where(zebra.label(zebra.grid(16)) == 1, 0.8, 0.2).double())
