"""Construction of a plan from shapes alone, without allocating anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..blocks import Blocks, PerTensor
from ..engine.stack import Stack
from ..groups import Kronecker, Structure
from ..optimizer import PSGD
from ..probes import Whitening
from ..ranks.assign import assign, cost_of
from ..state.memory import parse, readable
from . import shapes
from .result import Plan, PlannedBlock, Rank


def plan(
    model_or_shapes: Any,
    *,
    preconditioner: Structure = Kronecker(),
    world_size: int = 1,
    budget: int | str | None = None,
    blocks: Blocks = PerTensor(),
    precond_dtype: torch.dtype | None = None,
    momentum: bool = True,
    update_every: int = 1,
) -> Plan:
    """Compute the memory of the state of ``PSGD`` and the work of a step with ``Whitening``; nothing is allocated.

    Memory is that of the state, which consists of ``Q`` and the average of gradients. Three further costs are not
    included: the temporary memory of a step, the ``P`` of dense factors, which is kept beside ``Q`` if updates are
    rare, and about 100 bytes for every tensor. Work is that of the products with ``Q``, see ``Group.flops``. It does
    not include computing gradients and moving the parameters. Every block belongs to one rank, see
    ``psgd.ranks.assign``. Blocks are not divided, so some rank has at least the work of the most expensive block.

    Args:
        model_or_shapes: a module, which may be on the device ``"meta"``; or parameters, named or not; or param groups,
            which may have a ``preconditioner`` and ``blocks`` of their own; or shapes, in a list or by name in a dict.
            A shape is ``(64, 32)``, or ``(80, (64, 32))`` for 80 tensors of this shape. A ``*`` in a name is replaced
            by a number. Shapes stand for parameters of at most 32 bits.
        preconditioner: as for ``PSGD``
        world_size: number of ranks that share the blocks
        budget: bytes for the state on each rank, a number or a text such as ``"8 GiB"``. If ``preconditioner`` uses
            more, its longest dense axes become diagonal, as few of these lengths as possible. A dense factor of an axis
            of length n keeps ``n²`` numbers for n directions, so the longest axes cost most per direction.
            ``Plan.preconditioner`` is the resulting ``Kronecker``. Param groups with their own structure keep it.
        blocks: as for ``PSGD``; with ``Affine``, ``Affine.groups`` finds the layers of a module
        precond_dtype: as for ``PSGD``
        momentum: whether an average of gradients is kept
        update_every: as for ``PSGD``; work is the mean over this number of steps

    >>> from psgd import plan
    >>> print(plan({"layers.*": (3, (512, 128)), "embedding": (4096, 128)}, world_size=2))
    Kronecker(max_dense=2048, max_skew=256, inverse_free=True)
    blocks        shape     structure                             Q    average     FLOP  ranks
    3 × layers.*  512×128   symmetric 512 ⊗ symmetric 128   1.1 MiB  256.0 KiB  389.7 M    0–1
    embedding     4096×128  diagonal 4096 ⊗ symmetric 128  80.0 KiB    2.0 MiB  280.6 M      0
    all 4, of 720,896 elements: Q 3.3 MiB, average 2.8 MiB, work 1.4 GFLOP
    2 ranks: at most 3.4 MiB and 779.5 MFLOP, mean 3.0 MiB and 724.9 MFLOP, balance 1.114
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: plan wants a whole number of at least 1")
    if not isinstance(momentum, bool):
        raise TypeError(f"momentum={momentum!r}: plan wants True or False, for whether an average is kept")
    most = _bytes(budget)
    names, groups = shapes.param_groups(model_or_shapes, blocks)
    own = [group.get("preconditioner") for group in groups for _ in group["params"]]
    stacks = PSGD(
        groups,
        preconditioner=preconditioner,
        probe=Whitening(),
        blocks=blocks,
        precond_dtype=precond_dtype,
        momentum=0.9 if momentum else 0.0,
        update_every=update_every,
    ).stacks
    shrinking = [stack.group for stack in stacks if own[stack.positions[0]] is None]
    for structure in (preconditioner, *preconditioner.smaller(shrinking)):
        found = _planned(structure, own, stacks, names, world_size, update_every)
        if found.bytes_per_rank <= most:
            return found
    needed = found.bytes_per_rank
    raise ValueError(
        f"budget={budget!r}: even {structure!r} takes {needed} bytes ({readable(needed)}) on one of {world_size} "
        "ranks; plan wants at least that"
    )


def _bytes(budget: Any) -> float:
    if budget is None:
        return math.inf
    size = parse(budget) if isinstance(budget, str) else budget
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"budget={budget!r}: plan wants a number of bytes, a text such as '8 GiB', or None")
    return size


def _planned(
    structure: Structure,
    own: Sequence[Structure | None],
    stacks: Sequence[Stack],
    names: Sequence[str],
    world_size: int,
    update_every: int,
) -> Plan:
    """Plan with a structure for all parameters but those whose param group has its own."""
    of_params = {}
    costs = {}
    for stack in stacks:
        chosen = own[stack.positions[0]] or structure
        group = chosen.init(stack.blocks[0].shape, dtype=stack.like.dtype, device="meta")
        like = PlannedBlock(
            names=(),
            shape=stack.blocks[0].shape,
            structure=group.describe(),
            precond_bytes=group.nbytes(),
            average_bytes=sum(buffer[0].nbytes for buffer in stack.average.values()),
            flops=sum(group.flops(update_every)),
            owner=0,
        )
        cost = cost_of(group, stack.blocks[0].numel * stack.dtype.itemsize)
        for block in stack.blocks:
            of_params[block.params] = like
            costs[block.params] = cost
    blocks = []
    shares: list[list[PlannedBlock]] = [[] for _ in range(world_size)]
    in_order = sorted(of_params)
    for params, owner in zip(in_order, assign([costs[params] for params in in_order], world_size), strict=True):
        blocks.append(replace(of_params[params], names=tuple(names[i] for i in params), owner=owner))
        shares[owner].append(blocks[-1])
    ranks = tuple(Rank(len(s), sum(b.bytes for b in s), sum(b.flops for b in s)) for s in shares)
    return Plan(structure, tuple(blocks), ranks)
