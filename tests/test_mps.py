"""What must hold on Apple GPUs too. Skipped, visibly, where there is none; the same is tried on a CPU everywhere.

MPS has no float64, so steps in float32 are compared with those of a CPU in float64.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import psgd
from psgd import PSGD, HessianVector, Monitor, Whitening

from .cases import PROBES, STRUCTURES, batch

#: with PSGD_MPS=1 a missing GPU is a failure
there = torch.backends.mps.is_available() or os.environ.get("PSGD_MPS") == "1"
mps = pytest.param("mps", marks=pytest.mark.skipif(not there, reason="needs an Apple GPU"))
devices = pytest.mark.parametrize("device", ["cpu", mps])


def model_on(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).to(device, dtype)


def train(model: nn.Module, optimizer: PSGD, steps: int) -> list[float]:
    losses = []
    of = next(model.parameters())
    for step in range(steps):
        x, y = (t.to(of.device, of.dtype) for t in batch(step, torch.float32))

        def loss_of(x=x, y=y):
            return ((model(x) - y) ** 2).mean()

        def closure(loss_of=loss_of):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        if isinstance(optimizer.probe, Whitening):
            loss = closure()
            optimizer.step()
        else:
            loss = optimizer.step(loss_of if isinstance(optimizer.probe, HessianVector) else closure)
        losses.append(loss.item())
    return losses


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().cpu().double().flatten() for p in model.parameters()])


@devices
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: type(probe).__name__)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_every_structure_and_probe_learns(device, structure, probe):
    """Random numbers of devices differ, so their steps do too; the losses may not."""
    model = model_on(device, torch.float32)
    optimizer = PSGD(
        model.parameters(), preconditioner=structure, probe=probe, lr=0.01 if isinstance(probe, Whitening) else 0.3
    )
    losses = train(model, optimizer, 60)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@devices
def test_steps_without_random_numbers_are_those_of_a_cpu(device):
    found = {}
    for place, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        model = model_on(place, dtype)
        before = parameters(model)
        train(model, psgd.whiten(model), 5)
        found[dtype] = parameters(model) - before
    wanted = found[torch.float64]
    assert (found[torch.float32] - wanted).norm() < 1e-3 * wanted.norm()


@devices
def test_a_model_learns_is_recorded_and_resumes(device, tmp_path):
    model = model_on(device, torch.float32)
    optimizer = psgd.whiten(model, lr=0.01)
    with Monitor(optimizer, tmp_path / "run.csv", every=10) as monitor:
        losses = train(model, optimizer, 60)
        assert monitor.last is not None
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.isfinite(torch.tensor(train(model, optimizer, 3))))


@devices
def test_curvature_works_too(device):
    model = model_on(device, torch.float32)
    losses = train(model, psgd.newton(model), 60)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
