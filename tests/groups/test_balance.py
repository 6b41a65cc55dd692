"""Balancing leaves ``P`` as it is, also where it is interrupted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from psgd import Kronecker, LowRank, c3
from psgd.groups import Group
from psgd.groups.inverse_free import InverseFree
from psgd.groups.pool import put_back_
from psgd.groups.pooled import Pooled

from ..cases import TRIANGULAR, Case
from ..interrupt import Break

PRODUCTS = [
    Case(structure, shape)
    for structure in (TRIANGULAR, Kronecker(), Kronecker(max_dense=4))
    for shape in [(4, 3), (3, 3), (5, 2, 6)]
]


def unbalanced(case: Case, dtype: torch.dtype = torch.float64) -> Group:
    group = case.group(batch=2)
    group = group.bind({name: buffer.to(dtype) for name, buffer in group.buffers().items()})
    for k, factor in enumerate(group.factors):
        for buffer in factor.buffers().values():
            if isinstance(group, InverseFree) and buffer.ndim == 3:
                buffer.add_(buffer.mT.clone())  # symmetric: there is nothing to turn back
            buffer.mul_(2.0 ** (7 - 6 * k))
    return group


def interrupted(make: Callable[[], Group], work: Callable[[Group], None]) -> list[torch.Tensor]:
    """``Q`` after an interrupt at each operation, and last without any."""
    found = []
    for at in range(1, 1000):
        group = make()
        try:
            with Break(at):
                work(group)
        except KeyboardInterrupt:
            found.append(group.dense().clone())
            continue
        return [*found, group.dense().clone()]
    raise AssertionError("it never ended")


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_interrupt_anywhere_in_balancing_leaves_p_as_it_is(case, dtype):
    usable = torch.ones(2, dtype=torch.bool)

    def balance_(group: Group) -> None:
        if isinstance(group, InverseFree):
            pooled = Pooled([group])
            pooled.factors.tidy_(usable)
            put_back_(pooled.pools)
        else:
            group._balance_(usable)

    if dtype == torch.bfloat16 and case.structure.inverts:
        pytest.skip("bfloat16 is too coarse to invert")
    before = unbalanced(case, dtype)
    after = unbalanced(case, dtype)
    balance_(after)
    assert any(not torch.equal(v, after.buffers()[name]) for name, v in before.buffers().items())
    for Q in interrupted(lambda: unbalanced(case, dtype), balance_):
        assert torch.equal(Q, before.dense())


@pytest.mark.parametrize("case", [Case(Kronecker(), (3, 3)), Case(LowRank(2), (9,))], ids=str)
def test_an_interrupt_anywhere_in_a_step_finds_an_old_or_a_new_q(case):
    """Factors of a pool that are not adjacent in memory are copied back together, and so are the parts of a factor."""
    dtheta, dgrad = case.vectors(2, batch=2)

    def step_(group: Group) -> None:
        group.descend_(c3(group, dtheta.clone(), dgrad.clone()), 0.5)

    def make() -> Group:
        if isinstance(case.structure, Kronecker):
            return unbalanced(case)
        group = case.group(batch=2)
        U, V = (group.buffers()[name] for name in ("Q0_U", "Q0_V"))
        U.mul_(2.0**9)
        V.mul_(2.0**-9)
        return group

    *stopped, new = interrupted(make, step_)
    old = make().dense()
    assert not torch.equal(old, new)
    for Q in stopped:
        assert torch.equal(Q, old) or torch.equal(Q, new)
