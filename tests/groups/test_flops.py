"""What a step costs, against a count of the products that it really does."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import psgd.probes.whitening
from psgd import PSGD, Dense, Diagonal, Kronecker, LimitedMemory, LowRank, Whitening, c3
from psgd.groups import Group
from psgd.groups.diagonal import DiagonalFactor
from psgd.groups.inverse_free import KINDS, Chores
from psgd.groups.near_symmetric import NearSymmetric
from psgd.groups.pooled import Pooled

from ..cases import Case, cases

#: what torch's counter leaves out
UNCOUNTED = {
    torch.ops.aten.linalg_solve_triangular: lambda M, v, **_: math.prod(M) * v[-1],
    torch.ops.aten.baddbmm_: lambda _, a, b, **__: 2 * math.prod(a) * b[-1],
}


def counted(step) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    with counter:
        step()
    return counter.get_total_flops()


def products(group: Group, update_every: int = 1) -> float:
    """What the group says of matrices: the counter does not see elementwise products."""
    each = zip(group.flops(update_every), group.factors, strict=True)
    return sum(flops for flops, factor in each if not isinstance(factor, DiagonalFactor))


def fit_and_precondition(group: Group, shape, batch: int) -> None:
    v, h, g = torch.randn(3, batch, *shape, dtype=torch.float64, device=group.factors[0].diagonal().device)
    group.descend_(c3(group, v, h), 0.1)
    group.precondition(g)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@cases
def test_pairs(case: Case, device):
    """Exact but for vectors whose rows are no whole number of blocks."""
    group = case.structure.init(case.shape, batch=2, dtype=torch.float64, device=device)
    real = counted(lambda: fit_and_precondition(group, case.shape, 2)) / 2
    vector = len(group.dims) == 1
    assert products(group) == pytest.approx(real, rel=0.15 if vector else 0, abs=20 if vector else 0)


@pytest.mark.parametrize("structure", [Dense(), LimitedMemory(20), LowRank(20), Kronecker(inverse_free=False)], ids=str)
def test_large_blocks_as_on_a_gpu(structure):
    shape = (64, 80)
    group = structure.init(shape, dtype=torch.float64, device="meta")
    real = counted(lambda: fit_and_precondition(group, shape, 1))
    assert products(group) == pytest.approx(real, rel=0.001)


@pytest.mark.parametrize("shape", [(30, 20), (7, 5, 6), (9,), (300, 4)], ids=str)
@pytest.mark.parametrize("max_dense", [2048, 20, 6, 0])
def test_whitening(shape, max_dense):
    group = Kronecker(max_dense).init(shape, batch=2, dtype=torch.float32, device="cpu")
    pooled = Pooled([group])
    g = torch.randn(2, *shape)
    each = []
    for chores in (Chores.of(number, 0.1) for number in range(KINDS)):
        update = partial(pooled.whiten_, damping=1e-3 * chores.damping, ok=torch.tensor(True), tidy=chores.tidy)
        each.append(counted(lambda update=update: update([g], 0.1)) / 2)
    # An update without damping multiplies slices with the direction that it finds. `flops` counts this product for the
    # diagonal factor, which `products` leaves out.
    finds = (
        group.scale_axis is not None
        and len(shape) == 2
        and isinstance(group.factors[1 - group.scale_axis], NearSymmetric)
    )
    stretches = 2 * (KINDS - 1) * math.prod(shape) if finds else 0
    assert products(group) == (sum(each) - stretches) / KINDS


@pytest.mark.parametrize("update_every", [1, 3])
@pytest.mark.parametrize(
    "structure", [Kronecker(), Kronecker(max_dense=4), Kronecker(inverse_free=False), Diagonal()], ids=str
)
def test_steps_of_the_optimizer(structure, update_every, monkeypatch):
    monkeypatch.setattr(psgd.probes.whitening, "mix", lambda step: step // update_every)  # one update of each kind
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    optimizer = PSGD(
        model.parameters(),
        lr=0.001,
        probe=Whitening(),
        preconditioner=structure,
        precond_lr=0.1,
        update_every=update_every,
    )
    x = torch.randn(16, 4)
    model(x).square().mean().backward()
    optimizer.step()  # the first one does all chores
    steps = KINDS * update_every
    real = counted(lambda: [optimizer.step() for _ in range(steps)]) / steps
    expected = sum(len(stack.blocks) * products(stack.group, update_every) for stack in optimizer.stacks)
    # Power iterations for the spectral norm, which the diagonal factor counts as its own; updates of a matrix with a
    # dense factor find the direction, unless they are damped.
    for stack in optimizer.stacks:
        if stack.group.scale_axis is not None:
            knows = any(isinstance(factor, NearSymmetric) for factor in stack.group.factors)
            at_update = (2 * (KINDS - 1) + 18) / KINDS if knows else 18
            each = (18 * (update_every - 1) + at_update) / update_every
            expected += sum(each * block.numel for block in stack.blocks)
    assert expected == pytest.approx(real, rel=1e-9)
