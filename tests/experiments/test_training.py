from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch
from torch import nn

from psgd import PSGD, Affine
from psgd.experiments import training, zebra


def test_losses_are_those_before_each_step():
    model, data = zebra.start(0)
    reference, same_data = zebra.start(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = list(islice(training.losses(optimizer, partial(zebra.loss, model), data), 3))
    for value in losses:
        loss = zebra.loss(reference, *next(same_data))
        assert value == pytest.approx(loss.item(), rel=1e-12)
        params = list(reference.parameters())
        with torch.no_grad():
            for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.sub_(0.5 * grad)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_schedule_is_followed():
    model, data = zebra.start(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    steps = training.losses(optimizer, partial(zebra.loss, model), data, schedule)
    assert [optimizer.param_groups[0]["lr"] for _ in islice(steps, 3)] == [0.5, 0.75, 1.0]


def test_averaged():
    rows = list(training.averaged(iter([1.0, 2.0, 3.0, 4.0, 5.0]), 4, 2))
    assert rows == [{"iteration": 2, "loss": 1.5}, {"iteration": 4, "loss": 3.5}]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_run_ends(bad):
    rows = list(training.averaged(iter([1.0, 1.0, bad, 1.0, 1.0, 1.0]), 6, 2))
    assert [row["iteration"] for row in rows] == [2, 4]


@pytest.mark.parametrize("method", ["SGD", "RMSProp", "Adam", "c1", "c2", "c3"])
def test_each_method_is_what_it_is_called(method):
    model = nn.Linear(3, 2)
    optimizer = training.optimizer(method, model, 0.25, seed=7, blocks=Affine())
    assert optimizer.param_groups[0]["lr"] == 0.25
    if method.startswith("c"):
        assert isinstance(optimizer, PSGD)
        assert optimizer.criterion.__name__ == method
        assert optimizer.param_groups[0]["seed"] == 7
        assert len(optimizer.param_groups) == 1  # weight and bias are one block
    else:
        assert type(optimizer).__name__.lower() == method.lower()


def test_labels_are_the_papers():
    assert training.label("c3", 0.1) == "preconditioner 3, step size 0.1"
    assert training.label("SGD", 1.0) == "SGD, step size 1"
