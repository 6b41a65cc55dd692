"""A step on several ranks: what belongs to a rank's own blocks is collected, and their steps are sent to all.

Alone, with no team, nothing of this happens. See ``team`` for how ranks talk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..engine import flags as usable
from ..engine.bucket import Fleet, Heading
from ..engine.found import Found
from ..ops import parameters as guarded
from ..ops.distributed import is_divided, local
from ..ops.real import real
from ..state import checks, options
from ..state.store import BlockOptimizer, precise_dtype
from .team import Divided, Team


class SharedOptimizer(BlockOptimizer):
    """A ``BlockOptimizer`` whose ranks do the work of a step together."""

    def _demand_finite(self, loss: Any, grads: Mapping[int, Tensor], step: int) -> None:
        error: Exception | None = None
        try:
            checks.finite(loss, {i: local(grad) for i, grad in grads.items()}, step, self._name)
        except FloatingPointError as e:
            error = e
        if self._team is not None:
            self._team.together(error, f"step {step}")
        elif error is not None:
            raise error

    def _agree(
        self, team: Team, error: Exception | None, grads: Mapping[int, Tensor], pairs: Mapping[int, Any]
    ) -> None:
        """Before ranks rely on each other: raise on all of them where one has an error, or is about to do otherwise."""
        numbers = [[group.get(name) for name in options.NAMES if name != "lr"] for group in self.param_groups]
        found = (sorted(grads), sorted(pairs), [tuple(kind[0]) for kind in self._made_for])
        plans = (int(self._clock), numbers, sorted(self._owners.items()), error and team.rank)
        advice = "the same parameters must have gradients on every rank, and param groups the same numbers"
        team.same("step", (found, plans), advice, error)

    def _collect(self, team: Team, found: Found) -> None:
        """Whole gradients and pairs of the blocks of this rank, from all ranks; nothing else is left there."""
        grads, pairs = found.grads, found.pairs
        self._moving = sorted(grads)
        mine = {i: grad for i, grad in grads.items() if self._owners[i] == team.rank}
        measured = {i: pair for i, pair in pairs.items() if self._owners[i] == team.rank}
        parts = {
            i: [local(t) for t in (grads[i], *pairs.get(i, ()))] for i in self._moving if is_divided(self._params[i])
        }
        found.grads, found.pairs = mine, measured
        found.moved = [i for i in found.moved if self._owners[i] == team.rank]
        if parts:
            del grads
            pairs.clear()
            dtype = precise_dtype([self._params[i] for i in parts])
            for i, (grad, *pair) in self._divided().collect(parts, dtype).items():
                mine[i] = grad
                if pair:
                    measured[i] = (pair[0], pair[1])

    def _divided(self) -> Divided:
        if self._parts is None:
            assert self._team is not None
            params = {i: p for i, p in enumerate(self._params) if is_divided(p) and i in self._owners}
            self._parts = Divided(self._team, params, self._owners)
        return self._parts

    def _move_together(
        self,
        team: Team,
        fleets: Sequence[Fleet],
        headings: Sequence[Heading],
        rates: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        ok: usable.Flags,
    ) -> None:
        """Send the steps of this rank's blocks to the others, and move all parameters by those of all."""
        mine: dict[int, Tensor] = {}
        for fleet, heading, rate in zip(fleets, headings, rates, strict=True):
            for stack, direction, r in zip(fleet.stacks, heading.directions, fleet.split(rate), strict=True):
                mine.update(stack.unpack(direction.step(r, stack.blocks[0].shape, fleet.dtype)))
        dtype = precise_dtype([self._params[i] for i in self._moving])
        divided = [i for i in self._moving if is_divided(self._params[i])]
        if divided:
            here = {i: mine[i] for i in divided if i in mine}
            self._subtract(self._divided().deliver(here, divided, dtype), groups, ok)
        owners = {i: self._owners[i] for i in self._moving if not is_divided(self._params[i])}
        shapes = {i: real(self._params[i]).shape for i in owners}
        for steps in team.broadcast(mine, owners, shapes, dtype) if owners else ():
            self._subtract(steps, groups, ok)

    def _subtract(self, steps: Mapping[int, Tensor], groups: Sequence[Mapping[str, Any]], ok: usable.Flags) -> None:
        """Move parameters, or the parts of them that are here, and let them decay."""
        for g, group in enumerate(groups):
            here = [i for i in steps if self._group_of[i] == g]
            thetas = [real(local(self._params[i])) for i in here]
            parts = [steps[i] for i in here]
            rate, decay = group["lr"], 0.0
            if isinstance(rate, Tensor) and group["weight_decay"]:
                each = group["weight_decay"] * rate.detach().reshape(())
                for theta, part in zip(thetas, parts, strict=True):
                    part.addcmul_(theta.to(part.dtype), each.to(part))
            elif group["weight_decay"]:
                decay = float(group["weight_decay"] * rate)
            guarded.subtract_(thetas, parts, decay, ok)
