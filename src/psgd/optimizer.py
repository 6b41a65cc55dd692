"""The optimizer: owns the state and the param groups, and ties the other modules together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .blocks import Blocks, PerTensor
from .criteria import Criterion, c3
from .engine import flags as usable
from .engine.bucket import Direction, Fleet, Heading
from .engine.found import Found, Grads, Pairs
from .engine.recorder import RecordedOptimizer
from .engine.stack import Stack, per_block
from .groups import Kronecker, Structure
from .groups.inverse_free import ALL_CHORES, Chores, InverseFree
from .groups.pooled import Pools
from .normalize import Normalization
from .ops import parameters as guarded
from .ops.distributed import aligned, local, local_of, several_ranks
from .ops.real import real
from .ops.streams import at_once
from .probes import Evaluation, FiniteDifference, Probe, Whitening
from .probes.noise import Noise, mix
from .probes.restore import Gradients
from .state import checks, options, summary
from .state.store import Whole
from .tangent import Tangent


class PSGD(RecordedOptimizer):
    r"""Preconditioned stochastic gradient descent.

    .. math::
        \begin{aligned}
        &\textbf{repeat, from } Q = I \\
        &\quad g \leftarrow \nabla f(\theta), \text{ and every update\_every steps:} \\
        &\qquad (\delta\theta, \delta g) \leftarrow \text{probe}(f, \theta) \\
        &\qquad x, y \leftarrow \text{criterion}(Q, \delta\theta, \delta g) \\
        &\qquad \nabla\mathcal{E} \leftarrow 2\, \text{project}(x y^T + y x^T) \\
        &\qquad Q \leftarrow Q - \text{precond\_lr} / \text{normalize}(\nabla\mathcal{E})
            \cdot \nabla\mathcal{E}\, Q \\
        &\quad m \leftarrow \text{average of } g \text{ with decay momentum} \\
        &\quad d \leftarrow Q^T Q\, m, \text{ shortened to max\_rms and max\_norm} \\
        &\quad \theta \leftarrow \theta - \text{lr}\, (d + \text{weight\_decay}\; \theta)
        \end{aligned}

    The dense factors of ``Kronecker()`` move in other coordinates, along the same gradient, as those need no inverse.
    A step whose loss or gradients are not finite changes nothing; it is counted in ``state[p]["skipped"]``.

    Args:
        params: parameters, named parameters, or param groups
        lr: step size, a number or a tensor; for a fitted preconditioner between 0 and 1, and with ``Whitening``, whose
            steps do not shrink with the gradient, rather 0.01 or less
        preconditioner: what ``P = QᵀQ`` looks like: ``Kronecker``, ``Dense``, ``LowRank``, ``LimitedMemory`` or
            ``Diagonal``
        criterion: what ``P`` is fitted to: ``c3``, ``c1`` or ``c2``
        probe: where the pairs come from: ``FiniteDifference``, ``HessianVector`` or ``Whitening``
        blocks: which parameters share a ``Q``: ``PerTensor``, ``Joint`` or ``Affine``
        precond_lr: normalised step size of ``Q``, between 0 and 1; by default 0.1 for inverse-free factors, 0.3 where
            they whiten, and else 0.01
        precond_dtype: of ``Q`` and of the products with it, such as ``torch.bfloat16``; by default the parameters', or
            float32 where that is more precise
        normalize: how the step of ``Q`` is normalised: ``MaxAbs`` (the default), ``MaxDiag`` or ``Spectral``;
            inverse-free factors have a way of their own
        momentum: decay of the average of gradients that is preconditioned; 0 for none. By default 0.9 with
            ``Whitening``, else 0.
        weight_decay: decoupled weight decay
        update_every: ``Q`` is updated at every so many steps; the others need no second gradient
        update_anneal: number of steps over which updates become rarer, from every step to ``update_every``
        max_rms: largest root mean square of the preconditioned gradient of a block; by default 1.1 with ``Whitening``,
            which makes it about 1, else infinite
        max_norm: largest length of the preconditioned gradient of all parameters together
        seed: of the probes' random numbers, which are a function of seed, step and parameter alone
        maximize: go up instead of down
        cuda_graph: record the steps of inverse-free factors on a GPU and replay them, which takes the host far less
            time. What a step needs besides the state then stays reserved: with ``Whitening`` at most 1.5 times as
            much, else about five times the parameters and twice ``Q``. So it is not done where state, gradients and
            pairs take more than a sixteenth of the device's memory.
        error_if_nonfinite: raise ``FloatingPointError`` where a step would be skipped; the host then waits for the
            device at every step
        shard: ranks of a process group or device mesh that share the blocks: each keeps ``Q`` and averages of its own
            blocks only, and sends their steps to the others. They must see the same gradients, as with
            ``DistributedDataParallel``. Parameters that are ``DTensor``s, as ``fully_shard`` makes them, are always
            shared by the ranks of their mesh.

    All numbers may differ between param groups and change between steps.

    >>> import torch
    >>> from psgd import PSGD
    >>> theta = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    >>> optimizer = PSGD([theta], lr=0.5, precond_lr=0.1, max_norm=1.0)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (1 - theta[0]) ** 2 + 100 * (theta[1] - theta[0] ** 2) ** 2
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(1000):
    ...     loss = optimizer.step(closure)
    >>> loss.item() < 1e-12
    True
    """

    normalize: Normalization
    error_if_nonfinite: bool
    #: called at every step with its number, what the probe found and whole gradients, before anything moves
    observers: tuple[Callable[[int, Evaluation, Mapping[int, Tensor]], None], ...] = ()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        *,
        preconditioner: Structure = Kronecker(),
        criterion: Criterion = c3,
        probe: Probe = FiniteDifference(),
        blocks: Blocks = PerTensor(),
        precond_lr: float | None = None,
        precond_dtype: torch.dtype | None = None,
        normalize: Normalization | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        update_every: int = 1,
        update_anneal: int = 0,
        max_rms: float | None = None,
        max_norm: float | None = None,
        seed: int = 0,
        maximize: bool = False,
        cuda_graph: bool = True,
        error_if_nonfinite: bool = False,
        shard: Any = None,
    ) -> None:
        choices = {
            "preconditioner": checks.choice("preconditioner", preconditioner, Structure),
            "criterion": checks.function("criterion", criterion, "c1, c2, c3 or a function like them"),
            "probe": checks.choice("probe", probe, Probe),
            "blocks": checks.choice("blocks", blocks, Blocks),
            "precond_dtype": checks.precision(precond_dtype, preconditioner),
            "normalize": checks.normalization(normalize, preconditioner),
            "cuda_graph": bool(cuda_graph),
            "error_if_nonfinite": bool(error_if_nonfinite),
        }
        numbers = {
            "lr": lr,
            "precond_lr": preconditioner.precond_lr(isinstance(probe, Whitening)) if precond_lr is None else precond_lr,
            "momentum": probe.momentum if momentum is None else momentum,
            "weight_decay": weight_decay,
            "update_every": update_every,
            "update_anneal": update_anneal,
            "max_rms": probe.max_rms if max_rms is None else max_rms,
            "max_norm": max_norm,
            "seed": seed,
            "maximize": maximize,
        }
        super().__init__(params, numbers, choices, shard)

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="a step calls closures and reseeds generators; its products are batched already"
    )
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step and return the closure's loss.

        Args:
            closure: evaluates the model and returns the loss. ``FiniteDifference`` wants an ordinary one, which calls
                ``backward``; ``HessianVector`` one that does not; ``Whitening`` needs none.
        """
        evaluation, found = self._evaluate(closure)
        flags = usable.loss_is_finite(self._common(evaluation.loss))
        flags += [flag for group in self.param_groups if (flag := options.rate_is_usable(group["lr"])) is not None]
        with without_autocast(self._skipped):
            if self._team is not None:
                flags += usable.finite(map(local, found.grads.values()))
                self._collect(self._team, found)
                evaluation.pairs = found.pairs
            for observe in self.observers:
                observe(int(self._clock), evaluation, found.grads)
            fleets, parts = self._fleets(found.grads)
            advance = partial(self._advance, fleets, parts, found)
            if (given := self._recordable(fleets, found)) is not None:
                self._replay(fleets, found, given, advance, flags)
            else:
                if self._team is None:
                    flags += usable.finite(found.grads.values())
                ok = usable.agree(flags, self._skipped)
                if self._team is not None:
                    ok = {device: self._team.all_true(flag) for device, flag in ok.items()}
                advance(self.param_groups, ok, found.grads, found.pairs)
        self._clock += 1
        return evaluation.loss

    def _advance(
        self,
        fleets: Sequence[Fleet],
        parts: Sequence[tuple[Stack, list[int], Stack]],
        found: Found,
        groups: Sequence[Mapping[str, Any]],
        ok: usable.Flags,
        grads: Grads,
        pairs: Pairs,
    ) -> None:
        """Update ``Q`` and averages, and move the parameters: all of a step that the device does alone."""
        for fleet in fleets:
            self._fit(fleet, pairs, ok[fleet.device])
            fleet.average_(grads, fleet.number(groups, "momentum"), ok[fleet.device])
        headings = [self._head(fleet, found, grads, ok[fleet.device]) for fleet in fleets]
        for whole, rows, part in parts:
            whole.put_back_(rows, part)
        self._move(fleets, headings, found.grads, groups, ok)

    def _evaluate(self, closure: Callable[[], Any] | None) -> tuple[Evaluation, Found]:
        """Have the probe evaluate the closure; on several ranks, an error on one of them is one on all.

        Returns:
            what the probe found, and what the step goes by
        """
        error: Exception | None = None
        evaluation = Evaluation(None, [])
        grads: dict[int, Tensor] = {}
        moved: list[int] = []
        try:
            self._check_before(closure)
        except Exception as e:
            if self._team is None:
                raise
            error = e
        now = int(self._clock)
        draw = Noise(now)

        def noise(i: int) -> Tensor:
            return draw(real(self._params[i]), self._group(i)["seed"], i)

        def noise_here(i: int) -> Tensor:
            return local_of(noise(i), self._params[i])

        start = Gradients(self._params)
        try:
            if error is None:
                due = [options.is_due(group, now) for group in self.param_groups]
                moved = [i for i, kind in enumerate(self._made_for) if due[self._group_of[i]] and 0 not in kind[0]]
                try:
                    evaluation = self.probe(closure, self._params, moved, noise_here, start)
                    grads = checks.gradients(self._made_for, evaluation.grads, self._name)
                except Exception as e:
                    if self._team is None:
                        raise
                    error = e
            if self._team is not None:
                self._agree(self._team, error, grads, evaluation.pairs)
                grads = {i: aligned(grad, self._params[i]) for i, grad in sorted(grads.items())}
            if self.error_if_nonfinite:
                self._demand_finite(self._common(evaluation.loss), grads, now)
        except BaseException:
            start.restore()
            raise
        chores = self._chores() if moved and isinstance(self.probe, Whitening) else ALL_CHORES
        all_due = len(moved) == sum(0 not in kind[0] for kind in self._made_for)
        return evaluation, Found(grads, evaluation.pairs, moved, all_due, noise, chores)

    def _common(self, loss: Any) -> Any:
        """The loss, where it may decide: each rank has one of its own, and ranks without a team must not part ways."""
        return None if self._team is None and several_ranks() else loss

    def _fleets(self, grads: Mapping[int, Tensor]) -> tuple[list[Fleet], list[tuple[Stack, list[int], Stack]]]:
        """The blocks that have gradients, by device and precision; and stacks of which only some blocks are there."""
        stacks = self._current_stacks()
        if any(group["momentum"] for group in self.param_groups):
            for stack in stacks:
                self._start_average(stack)
        if len(grads) == self._filled:
            if self._whole is None or self._whole.stacks is not stacks:
                self._whole = Whole(stacks, self._by_device(stacks))
            for fleet in self._whole.fleets if self._team is None else []:
                fleet.aim(self._params)
            return self._whole.fleets, []
        chosen = [(stack, stack.having(grads)) for stack in stacks]
        parts = [(stack, rows, stack.select(rows)) for stack, rows in chosen if rows]
        fleets = self._by_device([part for _, _, part in parts])
        return fleets, [(whole, rows, part) for whole, rows, part in parts if part is not whole]

    def _by_device(self, stacks: Sequence[Stack]) -> list[Fleet]:
        alike: dict[Any, list[Stack]] = {}
        for stack in stacks:
            alike.setdefault(self._fleet_of(stack), []).append(stack)
        return [
            Fleet(same, [self._group_of[block.params[0]] for stack in same for block in stack.blocks])
            for same in alike.values()
        ]

    def _start_average(self, stack: Stack) -> None:
        """Momentum may be switched on at any step."""
        if not stack.average and any(self._group(i)["momentum"] for i in stack.params()):
            stack.start_average()
            self._share_state(stack)

    def _head(self, fleet: Fleet, found: Found, grads: Grads, ok: Tensor) -> Heading:
        """Precondition averaged gradients; whiten them, where that is how ``Q`` is fitted."""
        gs, weight = fleet.averages(grads)
        if isinstance(self.probe, Whitening) and found.moved:
            of_average = self.probe.of_average or weight is None
            if found.all_due and fleet.pools is not None and self.criterion is c3:
                whitened = gs if of_average else fleet.pack(grads)
                dtype = fleet.stacks[0].like.dtype
                buffer, outs = fleet.room() if of_average else (None, None)
                result, length = fleet.pools.whiten_(
                    [g.to(dtype) for g in whitened],
                    fleet.number(self.param_groups, "precond_lr"),
                    self.probe.relative_damping(dtype) * found.chores.damping,
                    ok,
                    weight if of_average else None,
                    tidy=found.chores.tidy,
                    outs=outs,
                )
                if of_average:  # P of before the update has been applied already
                    return Heading([Direction(v, scale) for v, scale in result], length.to(fleet.dtype), None, buffer)
            else:
                weights = fleet.split(weight) if weight is not None else [None] * len(gs)
                for stack, g, w in zip(fleet.stacks, gs, weights, strict=True):
                    if fitted := stack.having(set(found.moved)):
                        source = (g if w is None else g / per_block(w, g)) if of_average else stack.pack(found.grads)
                        self._whiten(stack, fitted, source, found.noise, ok)
        rare = all(group["update_every"] > 1 for group in self.param_groups)
        buffer, outs = fleet.room()
        each = zip(fleet.stacks, gs, outs, strict=True)
        tasks = [partial(Direction.of, stack, g, rare, out) for stack, g, out in each]
        parts = at_once(tasks, [g.numel() for g in gs], fleet.device)
        directions = [direction for direction, _ in parts]
        length = torch.cat([length for _, length in parts]).to(fleet.dtype)
        return Heading(directions, length if weight is None else length / weight, weight, buffer)

    def _chores(self) -> Chores:
        """A captured step may be the only one. Which others do what looks random, so that no schedule misses any."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        longest = max(group["precond_lr"] for group in self.param_groups)
        return ALL_CHORES if capturing else Chores.of(mix(int(self._clock)), longest)

    def _fit(self, fleet: Fleet, pairs: Pairs, ok: Tensor) -> None:
        """Update ``Q`` of the blocks with new pairs."""
        if not pairs:
            return
        chosen: list[tuple[Stack, list[int]]] = []
        if isinstance(pairs, dict):
            chosen = [(stack, rows) for stack in fleet.stacks if (rows := stack.having(pairs))]
            if not chosen:
                return
            parts = [stack.select(rows) for stack, rows in chosen]
            fitted = fleet if parts == fleet.stacks else self._by_device(parts)[0]
            measured = (_taken(stack, pairs) for stack in fitted.stacks)
        else:
            fitted = fleet
            halves = [fleet.pack(half) for half in pairs]
            measured = ([half.pop(0) for half in halves] for _ in fleet.stacks)
        lr = fitted.number(self.param_groups, "precond_lr")
        signs = self._signs(fitted)
        if fitted.pools is None:
            for stack, rate, sign, pair in zip(fitted.stacks, fitted.split(lr), signs, measured, strict=True):
                self._descend(stack, rate, pair, sign, ok)
        else:
            found = (self._tangent(*each) for each in zip(fitted.stacks, measured, signs, strict=True))
            tangents, informative = map(list, zip(*found, strict=True))
            fitted.pools.descend_(tangents, lr, ok & torch.cat(informative))
        for (stack, rows), part in zip(chosen, fitted.stacks, strict=bool(chosen)):
            stack.put_back_(rows, part)

    def _whiten(
        self, whole: Stack, fitted: Sequence[int], g: Tensor, noise: Callable[[int], Tensor], ok: Tensor
    ) -> None:
        """Update ``Q`` of some blocks of a stack from the gradients of all."""
        stack = whole.select(fitted)
        if stack is not whole:
            g = torch.stack([g[row] for row in fitted])
        fleet = self._by_device([stack])[0]
        lr = fleet.number(self.param_groups, "precond_lr")
        if isinstance(stack.group, InverseFree) and self.criterion is c3:
            dtype = stack.like.dtype
            Pools([stack.group]).whiten_([g.to(dtype)], lr, self.probe.relative_damping(dtype), ok)
        else:
            pair = [stack.pack({i: noise(i) for i in stack.params()}), g]
            self._descend(stack, lr, pair, self._signs(fleet)[0], ok)
        whole.put_back_(fitted, stack)

    def _descend(
        self, stack: Stack, lr: float | Tensor, pair: list[Tensor], sign: float | Tensor | None, ok: Tensor
    ) -> None:
        """Move ``Q`` one step along what the pair says."""
        tangent, informative = self._tangent(stack, pair, sign)
        stack.group.descend_(tangent, lr, self.normalize, ok & informative)

    def _tangent(self, stack: Stack, pair: list[Tensor], sign: float | Tensor | None) -> tuple[Tangent, Tensor]:
        """What the ``pair [δθ, δg]`` says of ``Q``, and for each block whether it says anything; empties that list."""
        if sign is not None:
            pair[1] = pair[1] * per_block(sign, pair[1])
        pair[1], informative = self.probe.damp(*pair)
        dtype = stack.like.dtype
        # Popped, they belong to the criterion alone, which lets go of each as soon as it is done with it.
        return self.criterion(stack.group, pair.pop(0).to(dtype), pair.pop(0).to(dtype)), informative

    def _move(
        self,
        fleets: Sequence[Fleet],
        headings: Sequence[Heading],
        given: Container[int],
        groups: Sequence[Mapping[str, Any]],
        ok: usable.Flags,
    ) -> None:
        """Turn directions into steps, and move all parameters that a gradient is given of at once."""
        flags = [*ok.values(), *(heading.length.amax() < torch.inf for heading in headings)]
        rates = [fleet.shorter(groups, heading.length) for fleet, heading in zip(fleets, headings, strict=True)]
        if any(group["max_norm"] is not None for group in groups) and (fleets or self._team is not None):
            total = _total([heading.length * rate for rate, heading in zip(rates, headings, strict=True)])
            if self._team is not None:
                total = self._team.sum(total.to(torch.float64).square()).sqrt()
            rates = [rate * fleet.shortest(groups, total) for rate, fleet in zip(rates, fleets, strict=True)]
        for k, (fleet, heading) in enumerate(zip(fleets, headings, strict=True)):
            rates[k] = rates[k] * fleet.number(groups, "lr")
            if any(group["maximize"] for group in groups):
                rates[k] = rates[k] * (1 - 2 * fleet.number(groups, "maximize"))
            if heading.divisor is not None:
                rates[k] = rates[k] / heading.divisor
        ok = usable.agree(flags, self._skipped)
        if self._team is not None:
            ok = {device: self._team.all_true(flag) for device, flag in ok.items()}
        for device, count in self._skipped.items():
            count += ~ok[device]
        if self._team is not None:
            self._move_together(self._team, fleets, headings, rates, groups, ok)
            return
        decays = [fleet.number(groups, "weight_decay") * fleet.number(groups, "lr") for fleet in fleets]
        if all(heading.buffer is not None for heading in headings):
            for fleet, heading, rate, decay in zip(fleets, headings, rates, decays, strict=True):
                fleet.subtract_(heading, rate, decay, ok[fleet.device])
            return
        thetas: list[Tensor] = []
        steps: list[Tensor] = []
        common = decays[0] if decays and all(isinstance(d, float | int) and d == decays[0] for d in decays) else None
        for fleet, heading, rate, decay in zip(fleets, headings, rates, decays, strict=True):
            each = zip(fleet.stacks, heading.directions, fleet.split(rate), fleet.split(decay), strict=True)
            for stack, direction, r, d in each:
                step = direction.step(r, stack.blocks[0].shape, fleet.dtype)
                moved = [(real(self._params[i]), part, i) for i, part in stack.unpack(step) if i in given]
                if common is None:
                    step += stack.pack({i: theta for theta, _, i in moved}) * per_block(d, step)
                thetas += [theta for theta, _, _ in moved]
                steps += [part for _, part, _ in moved]
        guarded.subtract_(thetas, steps, float(common or 0.0), ok)

    def _check_before(self, closure: Callable[[], Any] | None) -> None:
        self._follow()
        for i, group in enumerate(self.param_groups):
            options.check(group, f" in param group {i}")
        if closure is None and self.probe.needs_closure:
            raise ValueError(
                f"closure=None: {type(self.probe).__name__} wants step(closure); Whitening works without one"
            )
        if closure is not None and not callable(closure):
            raise TypeError(f"closure={closure!r}: step wants a function, or None")
        now = [checks.kind(p) for p in self._params]
        if now != self._made_for and not self._rehome():
            i = next(i for i, then in enumerate(self._made_for) if now[i] != then)
            raise ValueError(
                f"params: {self._name(i)} was {checks.describe(self._made_for[i])} and is now "
                f"{checks.describe(now[i])}; PSGD wants parameters to stay as they are after the first step"
            )

    def _signs(self, fleet: Fleet) -> list[float | Tensor | None]:
        """For each stack −1 for blocks whose loss is maximised, 1 for others; None where there are no such blocks."""
        if not any(group["maximize"] for group in self.param_groups):
            return [None] * len(fleet.stacks)
        return fleet.split(1 - 2 * fleet.number(self.param_groups, "maximize"))

    def __repr__(self) -> str:
        choices = [self.preconditioner, self.criterion, self.probe, self.blocks]
        choices += [choice for choice in (self.precond_dtype, self.normalize) if choice is not None]
        top = summary.headline(type(self).__name__, choices, self.param_groups, options.NAMES)
        return f"{top}\n{summary.table(self.stacks, self._params)}"


@contextmanager
def without_autocast(devices: Iterable[torch.device]) -> Iterator[None]:
    """The step's own products are not for autocast, also where the whole step is under it."""
    with ExitStack() as contexts:
        for kind in {device.type for device in devices}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        yield


def _taken(stack: Stack, pairs: dict[int, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """``[δθ, δg]`` of a stack, taken from the pairs of the parameters."""
    measured = {i: list(pairs.pop(i)) for i in stack.params() if i in pairs}
    # Lists that are emptied: a pair is as large as the parameters, and nobody else needs it.
    return [stack.pack({i: halves.pop(0) for i, halves in measured.items()}) for _ in range(2)]


def _total(lengths: Sequence[Tensor]) -> Tensor:
    """Length of all blocks as one vector."""
    if not lengths:
        return torch.zeros((), device="cpu")
    each = [length.norm() for length in lengths]
    wide = max((length.dtype for length in each), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.stack([length.to(each[0].device, wide) for length in each]).norm()
