"""Averages of weights by ``torch.optim.swa_utils``: they see each step, and the run sees nothing of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from psgd import PSGD, FiniteDifference, Whitening

from ..cases import batch, small_model, train

PROBES = [Whitening(), FiniteDifference()]
probes = pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)


@probes
def test_an_exponential_average_sees_each_step_and_does_not_disturb_the_run(probe):
    """In the middle of a finite difference the weights are others: these must never get into an average."""
    model, alone = small_model(torch.float64), small_model(torch.float64)
    optimizer = PSGD(model.parameters(), lr=0.01, probe=probe)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected: list[Tensor] = []
    for step in range(10):
        train(model, optimizer, step, step + 1)
        ema.update_parameters(model)
        now = [p.detach().clone() for p in model.parameters()]
        expected = [0.9 * e + 0.1 * p for e, p in zip(expected, now, strict=True)] if expected else now
    for e, p in zip(expected, ema.parameters(), strict=True):
        torch.testing.assert_close(e, p.detach())
    train(alone, PSGD(alone.parameters(), lr=0.01, probe=probe), 0, 10)
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


@pytest.mark.parametrize("kind", [Whitening, FiniteDifference])
def test_stochastic_weight_averaging_with_batch_normalisation(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    probe = FiniteDifference(module=model) if kind is FiniteDifference else Whitening()
    optimizer = PSGD(model.parameters(), lr=0.02, probe=probe, max_norm=1.0)
    scheduler = SWALR(optimizer, swa_lr=0.005, anneal_epochs=5)
    averaged = AveragedModel(model)
    seen = []
    for step in range(60):
        train(model, optimizer, step, step + 1)
        if step >= 40:
            scheduler.step()
            averaged.update_parameters(model)
            seen.append([p.detach().clone() for p in model.parameters()])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert int(model[1].num_batches_tracked) == 60  # once for each step, however often the closure was called
    for p, values in zip(averaged.parameters(), zip(*seen, strict=True), strict=True):
        torch.testing.assert_close(p.detach(), torch.stack(values).mean(0))

    before = averaged.module[1].running_mean.clone()
    update_bn([batch(step) for step in range(20)], averaged)
    assert not torch.equal(averaged.module[1].running_mean, before)
    averaged.eval()
    x, y = batch(1000, size=500)
    loss = nn.functional.mse_loss(averaged(x), y)
    assert loss < 0.7 * y.var()
