"""The law of param groups: what one of them is told never changes the steps of another, not by one bit.

Two exceptions are meant: ``max_norm`` limits the length of the step of all parameters together, and a step that is not
finite in one group is skipped in all.

The loss is a sum of one function of the first group and one of the second, so that gradients of the first do not depend
on the second. Both groups have parameters of the same shapes, and each has one of a shape of its own.

A group with a structure of its own takes the steps that it takes in an optimizer in which all groups have that
structure. Its parameters are at the same positions there, and so get the same random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from psgd import PSGD, Diagonal, FiniteDifference, HessianVector, Joint, Kronecker, PerTensor, Whitening
from psgd.blocks import Blocks
from psgd.groups import Structure
from psgd.probes import Probe

from ..cases import STRUCTURES
from ..emulated import emulated_graphs
from .suite import law_of_structures

SHAPES = ([(3, 4), (4,), (2, 3, 2)], [(3, 4), (4,), (5, 3)])
PROBES = [FiniteDifference(), HessianVector(), Whitening(), Whitening(of_average=False)]
#: numbers of both groups
BASE = {"lr": 0.05, "precond_lr": 0.1, "update_every": 2, "update_anneal": 0, "momentum": 0.5, "weight_decay": 0.01}
#: what the second group is told instead, and numbers of both groups without which that would change nothing
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": ({"lr": 0.02}, {}),
    "lr as a tensor": ({"lr": torch.tensor(0.02)}, {}),
    "precond_lr": ({"precond_lr": 0.3}, {}),
    "momentum": ({"momentum": 0.9}, {}),
    "no momentum": ({"momentum": 0.0}, {}),
    "momentum of one": ({"momentum": 0.9}, {"momentum": 0.0}),
    "weight_decay": ({"weight_decay": 0.3}, {}),
    "update_every": ({"update_every": 1}, {}),
    "fewer updates": ({"update_every": 3}, {"update_every": 1}),
    "update_anneal": ({"update_anneal": 5}, {}),
    "max_rms": ({"max_rms": 0.1}, {}),
    "maximize": ({"maximize": True}, {}),
}
#: a number that changes only what draws random numbers
SEED = {"seed": ({"seed": 1}, {})}


def loss_of(params: list[list[Tensor]]) -> Tensor:
    """A smooth function of each group, whose curvature is neither constant nor the same in all directions."""
    total = torch.zeros((), dtype=torch.float64)
    for scale, group in zip((1.0, 3.0), params, strict=True):
        own = torch.cat([p.flatten() for p in group])
        slopes = torch.linspace(0.5, 2, len(own), dtype=torch.float64)
        total = total + scale * ((1 + (slopes * own - 0.3).square()).sqrt().sum() + 0.05 * own.sum().square())
    return total


def new_params() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.3).requires_grad_() for shape in shapes]
        for shapes in SHAPES
    ]


def train(
    structure: Structure,
    probe: Probe,
    numbers: Mapping[str, Any],
    second: Mapping[str, Any],
    steps: int,
    blocks: Blocks = PerTensor(),
) -> list[Any]:
    """Take steps, and return for each group its parameters and their state."""
    params = new_params()
    groups = [{"params": params[0], **numbers}, {"params": params[1], **numbers, **second}]
    optimizer = PSGD(groups, preconditioner=structure, probe=probe, blocks=blocks)

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step((lambda: loss_of(params)) if probe.forward_only else backward)
    assert not optimizer.state[params[0][0]]["skipped"]
    return [
        [(p.detach(), {k: v for k, v in optimizer.state[p].items() if k not in ("step", "skipped")}) for p in group]
        for group in params
    ]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether parameters and state of a group are equal in every bit."""
    return all(
        torch.equal(p, q) and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for (p, a), (q, b) in zip(ours, theirs, strict=True)
    )


def check(
    structure: Structure, probe: Probe, options: Mapping[str, tuple[dict[str, Any], dict[str, Any]]], steps: int = 4
) -> None:
    runs: dict[str, list[Any]] = {}
    for option, (second, both) in options.items():
        numbers = {**BASE, **both}
        if str(both) not in runs:
            runs[str(both)] = train(structure, probe, numbers, {}, steps)
        first, rest = runs[str(both)]
        first_again, changed = train(structure, probe, numbers, second, steps)
        assert same(first_again, first), f"{option} of the second group changes the first"
        assert not same(changed, rest), f"{option} changes nothing"


@law_of_structures(probe=PROBES)
def test_numbers_of_one_group_do_not_change_the_steps_of_another(structure: Structure, probe: Probe):
    """The options take turns: each meets every structure, with two of the four probes, and every probe."""
    in_expectation = probe.whitens and structure.init((2, 3), dtype=torch.float64, device="meta").whitens
    turn = STRUCTURES.index(structure) if structure in STRUCTURES else 0
    turn += PROBES.index(probe)
    some = {option: numbers for k, (option, numbers) in enumerate(OTHER.items()) if (k + turn) % 2}
    check(structure, probe, some if in_expectation else some | SEED)


@pytest.mark.slow
@law_of_structures(where=lambda structure: structure == Kronecker(), probe=PROBES)
def test_the_same_holds_for_recorded_steps(structure: Structure, probe: Probe):
    """A group that is told something else has other recordings, and both have the same numbers in the other group."""
    some = {option: OTHER[option] for option in ("momentum", "no momentum", "update_every", "fewer updates")}
    with emulated_graphs() as total:
        check(structure, probe, some, steps=10)
        assert total["replays"] > 2 * len(some)


#: numbers of both groups, without those that depend on the structure
WITHOUT_STEPS_OF_Q = {name: number for name, number in BASE.items() if name != "precond_lr"}


@law_of_structures(probe=PROBES)
def test_a_structure_of_ones_own_takes_the_steps_of_an_optimizer_of_ones_own(structure: Structure, probe: Probe):
    """Also with the step sizes of ``Q`` that it has by default."""
    other = Diagonal() if structure == Kronecker() else Kronecker()
    first, _ = train(structure, probe, WITHOUT_STEPS_OF_Q, {}, steps=4)
    _, second = train(other, probe, WITHOUT_STEPS_OF_Q, {}, steps=4)
    mixed = train(structure, probe, WITHOUT_STEPS_OF_Q, {"preconditioner": other}, steps=4)
    assert same(mixed[0], first)
    assert same(mixed[1], second)


@law_of_structures(probe=PROBES)
def test_blocks_of_ones_own_take_the_steps_of_an_optimizer_of_ones_own(structure: Structure, probe: Probe):
    first, rest = train(structure, probe, BASE, {}, steps=4)
    _, second = train(structure, probe, BASE, {}, steps=4, blocks=Joint())
    mixed = train(structure, probe, BASE, {"blocks": Joint()}, steps=4)
    assert same(mixed[0], first)
    assert same(mixed[1], second)
    assert not same(mixed[1], rest)


def test_two_structures_are_two_optimizers():
    """Without random numbers it does not matter at which position a parameter is."""
    structures = (Kronecker(max_dense=0), Kronecker())
    apart, together = new_params(), new_params()
    optimizers = [
        PSGD(params, lr=0.05, preconditioner=structure, probe=Whitening())
        for params, structure in zip(apart, structures, strict=True)
    ]
    groups = [{"params": p, "preconditioner": s} for p, s in zip(together, structures, strict=True)]
    mixed = PSGD(groups, lr=0.05, probe=Whitening())
    for _ in range(6):
        for params in (apart, together):
            for p in (p for group in params for p in group):
                p.grad = None
            loss_of(params).backward()
        for optimizer in (*optimizers, mixed):
            optimizer.step()
    for ours, theirs, optimizer in zip(together, apart, optimizers, strict=True):
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)
            assert all(torch.equal(value, optimizer.state[q][name]) for name, value in mixed.state[p].items())
