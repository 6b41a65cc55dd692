"""Laws of the start: the size of the loss changes nothing, and later blocks start as first ones do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, FiniteDifference, HessianVector, Kronecker, Whitening
from psgd.groups import Structure
from psgd.probes import Probe
from tests.cases import STRUCTURES

structures = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
probes = pytest.mark.parametrize(
    "probe",
    [FiniteDifference(1e-4), HessianVector(), Whitening(), Whitening(of_average=False)],
    ids=lambda p: f"{type(p).__name__}-{p.of_average}",
)
SHAPE = (4, 6)


def curve(probe: Probe, structure: Structure, scale: float, steps: int = 12, **options) -> Tensor:
    """Parameters after each step on a quadratic function, multiplied by a number."""
    generator = torch.Generator().manual_seed(0)
    H = torch.rand(SHAPE, generator=generator, dtype=torch.float64) + 0.1
    theta = nn.Parameter(torch.randn(SHAPE, generator=generator, dtype=torch.float64))
    optimizer = PSGD([theta], lr=0.01, probe=probe, preconditioner=structure, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = scale * (H * theta.square()).sum()
        if not probe.forward_only:
            loss.backward()
        return loss

    seen = []
    for _ in range(steps):
        optimizer.step(closure)
        seen.append(theta.detach().clone())
    return torch.stack(seen)


@structures
@probes
def test_the_size_of_the_loss_changes_nothing(probe, structure):
    """``P`` is as much smaller as gradients are larger, from the first step on."""
    plain = curve(probe, structure, 1.0)
    rtol = 1e-5 if probe.calls_twice else 1e-8
    for scale in (1e-6, 3e4):
        torch.testing.assert_close(curve(probe, structure, scale), plain, rtol=rtol, atol=0)


@structures
def test_from_the_identity_the_size_matters(structure):
    """So the law above is one of the start."""
    paper = {"init": "identity", "clip_steps": math.inf}
    large, small = (curve(HessianVector(), structure, scale, 2, **paper) for scale in (3e4, 1.0))
    assert not torch.allclose(large, small, rtol=0.01, atol=0)


@structures
def test_a_block_whose_gradient_comes_later_starts_as_others_do(structure):
    """Also after some updates of others, and with updates that are rare."""
    first, later = (nn.Parameter(torch.ones(SHAPE, dtype=torch.float64)) for _ in range(2))
    optimizer = PSGD([first, later], lr=1e-3, preconditioner=structure, update_every=2, seed=1, momentum=0.0)

    def closure(parts: list[Tensor], scale: float) -> Tensor:
        optimizer.zero_grad()
        loss = sum((scale * part.square().sum() for part in parts), torch.zeros((), dtype=torch.float64))
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(lambda: closure([first], 1.0))
    for _ in range(2):
        optimizer.step(lambda: closure([first, later], 1e6))
    before = later.detach().clone()
    optimizer.step(lambda: closure([first, later], 1e6))
    # P of the second is that of its own curvature, 2e6: a step of lr · θ, and not a million times as long.
    assert 1e-4 < (later - before).abs().max() < 1e-2


@structures
def test_a_Q_that_has_moved_keeps_its_bits(structure):
    group = structure.init(SHAPE, batch=3, dtype=torch.float64, device="cpu")
    for buffer in group.buffers().values():
        buffer[2] = buffer[2] * 1.5
    before = {name: buffer.clone() for name, buffer in group.buffers().items()}
    group.start_(torch.full((3,), 4.0, dtype=torch.float64), torch.tensor([True, False, True]))
    after = group.buffers()
    assert all(torch.equal(after[name][1:], old[1:]) for name, old in before.items())
    v = torch.randn(3, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(group.precondition(v)[0], 16 * v[0])


def test_init_is_one_of_two_words():
    with pytest.raises(ValueError, match="init='eye': PSGD wants 'scaled' or 'identity'"):
        PSGD([torch.ones(2, requires_grad=True)], init="eye")


@pytest.mark.parametrize("structure", [Kronecker(), Kronecker(max_dense=4), Kronecker(max_dense=0)], ids=str)
def test_the_first_whitened_step_is_of_size_one(structure):
    """Without a limit that would make it so: ``P = √n / ‖g‖ · I`` for ``n`` elements, whatever their size."""
    for shape in ((3, 2), (6, 30)):
        theta = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        options = {"max_rms": math.inf, "precond_lr": 1e-6}  # with a step size of nearly zero Q stays as it starts
        optimizer = PSGD([theta], 1.0, probe=Whitening(), preconditioner=structure, **options)
        theta.grad = 1e3 * torch.randn(shape, dtype=torch.float64)
        optimizer.step()
        assert theta.square().mean().sqrt().item() == pytest.approx(1, rel=1e-3)
