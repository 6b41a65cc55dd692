"""The law of missing gradients: a parameter without one keeps all its bits, and the others do not know of it.

The loss is a sum of functions of single parameters, so that gradients of some do not depend on the others. Whether few
or most of the parameters lack a gradient decides how a step is computed, but not what it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psgd import PSGD, FiniteDifference, HessianVector, Kronecker, Whitening
from psgd.groups import Structure
from psgd.probes import Probe

from .suite import law_of_structures

SHAPES = [(3, 4), (3, 4), (4,), (3, 4), (2, 3, 2), (4,), (3, 4), (5, 3)]
PROBES = [FiniteDifference(), HessianVector(), Whitening(), Whitening(of_average=False)]
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"momentum": 0.5, "weight_decay": 0.1, "max_norm": 0.05, "max_rms": 0.1},
    "rare updates": {"momentum": 0.9, "update_every": 2},
}
#: shapes of the parameters that lack a gradient
MISSING = {"few": [(3, 4), (6, 1)], "most": [*SHAPES, (7,)] * 2}
#: every probe with all options and with all that is missing, of which any two meet with two of the four probes
TURNS = [
    (probe, options, list(MISSING)[(i + j) % len(MISSING)])
    for i, probe in enumerate(PROBES)
    for j, options in enumerate(OPTIONS)
]


def loss_of(params: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=params[0].dtype)
    for p in params:
        slopes = torch.linspace(0.5, 2, p.numel(), dtype=p.dtype).view(p.shape)
        total = total + (1 + (slopes * p - 0.3).square()).sqrt().sum() + 0.05 * p.sum().square()
    return total


def bits(optimizer: PSGD, params: list[Tensor]) -> list[dict[str, Tensor]]:
    own = [{k: v for k, v in optimizer.state[p].items() if k not in ("step", "skipped")} for p in params]
    return [{k: v.detach().clone() for k, v in {**s, "theta": p}.items()} for p, s in zip(params, own, strict=True)]


def same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(a[k], b[k]) for a, b in zip(ours, theirs, strict=True) for k in a)


@law_of_structures(turn=TURNS)
def test_a_parameter_without_a_gradient_keeps_its_bits_and_others_do_not_know(
    structure: Structure, turn: tuple[Probe, str, str]
):
    check(structure, *turn, torch.float64, {"rtol": 1e-9, "atol": 1e-12})


@law_of_structures(where=lambda structure: structure == Kronecker(), missing=tuple(MISSING))
def test_the_same_holds_in_single_precision(structure: Structure, missing: str):
    for probe in PROBES:
        check(structure, probe, "all", missing, torch.float32, {"rtol": 1e-3, "atol": 1e-5})


def check(
    structure: Structure, probe: Probe, options: str, missing: str, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    def new(shapes: list[tuple[int, ...]]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(s, generator=generator, dtype=dtype).mul_(0.3).requires_grad_() for s in shapes]

    shapes = [*SHAPES, *MISSING[missing]]
    everything, alone = new(shapes), new(SHAPES)
    some, rest = everything[: len(SHAPES)], everything[len(SHAPES) :]
    numbers = {"lr": 0.05, "precond_lr": 0.1, "preconditioner": structure, "probe": probe, **OPTIONS[options]}
    first, second = PSGD(everything, **numbers), PSGD(alone, **numbers)

    def step(optimizer: PSGD, params: list[Tensor]) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(params)
            if not probe.forward_only:
                loss.backward()
            return loss

        optimizer.step(closure)

    def limit(value: float | None) -> None:
        for optimizer in (first, second):
            optimizer.param_groups[0]["max_norm"] = value

    limit(None)  # which is for all parameters together
    for _ in range(2):
        step(first, everything)
        step(second, alone)
    limit(OPTIONS[options].get("max_norm"))
    before, start = bits(first, rest), bits(first, some)
    for _ in range(3):
        step(first, some)
        step(second, alone)
    assert same(bits(first, rest), before)
    assert not same(bits(first, some), start)
    assert not first.state[some[0]]["skipped"]
    # Products of another number of matrices may be rounded in another way.
    for ours, theirs in zip(bits(first, some), bits(second, alone), strict=True):
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], **tolerance)
    step(first, everything)  # what rested goes on
    assert not same(bits(first, rest), before)


@law_of_structures(probe=(Whitening(), Whitening(of_average=False)), missing=("few", "most"))
def test_numbers_that_are_not_finite_stay_where_there_is_no_gradient(structure: Structure, probe: Probe, missing: str):
    """What someone has put into the state of a parameter that rests stops nobody else."""
    torch.manual_seed(0)
    params = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in [*SHAPES, *MISSING[missing]]]
    some, rest = params[: len(SHAPES)], params[len(SHAPES) :]
    optimizer = PSGD(params, lr=0.01, preconditioner=structure, probe=probe, momentum=0.5, max_norm=1.0, max_rms=1.0)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in rest:
        for name, value in optimizer.state[p].items():
            if name not in ("step", "skipped"):
                value.fill_(torch.nan)
        p.grad = None
    before = bits(optimizer, some)
    optimizer.step()
    assert not optimizer.state[some[0]]["skipped"]
    for old, new in zip(before, bits(optimizer, some), strict=True):
        assert not torch.equal(old["theta"], new["theta"])
        assert all(bool(value.isfinite().all()) for value in new.values())
