"""The optimizer: owns the state and the param groups, and ties the other modules together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from . import checks, options, summary, usable
from .blocks import Blocks, PerTensor
from .criteria import Criterion, c3
from .groups import Kronecker, Structure
from .noise import Noise
from .normalize import MaxAbs, Normalization
from .probes import FiniteDifference, Gradients, Probe
from .real import real
from .stacks import Stack, per_block
from .state import BlockOptimizer
from .tangent import largest


class PSGD(BlockOptimizer):
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
        &\quad d \leftarrow Q^T Q\, m, \text{ shortened to the length max\_norm} \\
        &\quad \theta \leftarrow \theta - \text{lr}\, (d + \text{weight\_decay}\; \theta)
        \end{aligned}

    A step whose loss or gradients are not finite changes nothing; it is counted in ``state[p]["skipped"]``.

    Args:
        params: parameters, named parameters, or param groups
        lr: step size, a number or a tensor; for a fitted preconditioner between 0 and 1, and with ``Whitening``, whose
            steps do not shrink with the gradient, rather 0.01 or less
        preconditioner: what ``P = QᵀQ`` looks like: ``Kronecker``, ``Dense``, ``LimitedMemory`` or ``Diagonal``
        criterion: what ``P`` is fitted to: ``c3``, ``c1`` or ``c2``
        probe: where the pairs come from: ``FiniteDifference``, ``HessianVector`` or ``Whitening``
        blocks: which parameters share a ``Q``: ``PerTensor``, ``Joint`` or ``Affine``
        precond_lr: normalised step size of ``Q``, between 0 and 1
        normalize: how it is normalised: ``MaxAbs``, ``MaxDiag`` or ``Spectral``
        momentum: decay of the average of gradients that is preconditioned; 0 for none
        weight_decay: decoupled weight decay
        update_every: ``Q`` is updated at every so many steps; the others need no second gradient
        max_norm: largest length of the preconditioned gradient of all parameters together
        seed: of the probes' random numbers, which are a function of seed, step and parameter alone
        maximize: go up instead of down
        error_if_nonfinite: raise ``FloatingPointError`` where a step would be skipped; the host then waits for the
            device at every step

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

    criterion: Criterion
    probe: Probe
    normalize: Normalization
    error_if_nonfinite: bool

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        *,
        preconditioner: Structure = Kronecker(),
        criterion: Criterion = c3,
        probe: Probe = FiniteDifference(),
        blocks: Blocks = PerTensor(),
        precond_lr: float = 0.01,
        normalize: Normalization = MaxAbs(),
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        update_every: int = 1,
        max_norm: float | None = None,
        seed: int = 0,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        choices = {
            "preconditioner": checks.choice("preconditioner", preconditioner, Structure),
            "criterion": checks.function("criterion", criterion, "c1, c2, c3 or a function like them"),
            "probe": checks.choice("probe", probe, Probe),
            "blocks": checks.choice("blocks", blocks, Blocks),
            "normalize": checks.function("normalize", normalize, "MaxAbs(), MaxDiag() or Spectral()"),
            "error_if_nonfinite": bool(error_if_nonfinite),
        }
        numbers = {
            "lr": lr,
            "precond_lr": precond_lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "update_every": update_every,
            "max_norm": max_norm,
            "seed": seed,
            "maximize": maximize,
        }
        super().__init__(params, numbers, choices)

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
        self._check_before(closure)
        now = int(self._clock)
        due = [now % group["update_every"] == 0 for group in self.param_groups]
        noise = Noise(now)
        start = Gradients(self._params)
        try:
            evaluation = self.probe(
                closure,
                self._params,
                [i for i, p in enumerate(self._params) if due[self._group_of[i]] and p.numel() > 0],
                lambda i: noise(real(self._params[i]), self._group(i)["seed"], i),
                start,
            )
            grads = checks.gradients(self._params, evaluation.grads, self._name)
            if self.error_if_nonfinite:
                checks.finite(evaluation.loss, grads, now, self._name)
        except BaseException:
            start.restore()
            raise
        del start
        flags = usable.finite(evaluation.loss, grads.values())
        flags += [flag for group in self.param_groups if (flag := options.rate_is_usable(group["lr"])) is not None]
        ok = usable.agree(flags, self._skipped)

        with without_autocast(ok):
            moves = [
                (stack, direction)
                for whole in self.stacks
                for stack, direction in self._advance(whole, grads, evaluation.pairs, ok[whole.device])
            ]
            self._move(moves, grads, ok)
        return evaluation.loss

    def _advance(
        self, whole: Stack, grads: Mapping[int, Tensor], pairs: dict[int, tuple[Tensor, Tensor]], ok: Tensor
    ) -> Iterator[tuple[Stack, Tensor]]:
        """Update ``Q`` of the blocks with new pairs, then precondition the gradients of all blocks that have one."""
        fitted = whole.having(pairs)
        if fitted:
            stack = whole.select(fitted)
            measured = {i: list(pairs.pop(i)) for i in stack.params() if i in pairs}
            # Lists that are emptied: a pair is as large as the parameters, and nobody else needs it.
            pair = [stack.pack({i: halves.pop(0) for i, halves in measured.items()}) for _ in range(2)]
            if (sign := self._signs(stack)) is not None:
                pair[1] = pair[1] * per_block(sign, pair[1])
            lr = self._numbers(stack, "precond_lr")
            stack.fit_(self.probe, self.criterion, self.normalize, lr, pair, ok)
            whole.put_back_(fitted, stack)

        active = whole.having(grads)
        if active:
            if not whole.average and any(self._group(i)["momentum"] for i in whole.params()):
                whole.start_average()
                self._share_state(whole)
            stack = whole.select(active)
            g = stack.pack(grads)
            if stack.average:
                g = stack.average_(g, self._numbers(stack, "momentum"), ok)
                whole.put_back_(active, stack)
            direction = stack.group.precondition(g).contiguous()
            if (sign := self._signs(stack)) is not None:
                direction.mul_(per_block(sign, direction))
            yield stack, direction

    def _move(
        self,
        moves: Sequence[tuple[Stack, Tensor]],
        grads: Mapping[int, Tensor],
        ok: usable.Flags,
    ) -> None:
        """Turn directions into steps, in place, and move all parameters at once."""
        flags = list(ok.values())
        length = None
        if moves and any(group["max_norm"] is not None for group in self.param_groups):
            length = _length([direction for _, direction in moves])
            flags.append(torch.isfinite(length))
        thetas = {i: self._params[i].detach() for i in grads}
        steps: list[tuple[Tensor, Tensor]] = []
        for stack, direction in moves:
            if length is not None:
                limit = self._numbers(stack, "max_norm", torch.inf)
                shorter = (limit / length.to(direction.device)).clamp(max=1).to(direction.dtype)
                direction.mul_(per_block(shorter, direction))
            decay = self._numbers(stack, "weight_decay")
            if isinstance(decay, Tensor) or decay != 0:
                direction.add_(stack.pack(thetas) * per_block(decay, direction))
            direction.mul_(per_block(self._numbers(stack, "lr"), direction))
            flags.append(torch.isfinite(largest(direction)).all())
        ok = usable.agree(flags, self._skipped)
        for stack, direction in moves:
            direction.masked_fill_(~ok[direction.device], 0)
            steps += [(real(thetas[i]), part) for i, part in stack.unpack(direction) if i in grads]
        for device, count in self._skipped.items():
            count += ~ok[device]
        # One call that allocates nothing: an interrupt or a failure finds all parameters moved, or none.
        if steps:
            torch._foreach_sub_([theta for theta, _ in steps], [step for _, step in steps])
        self._clock += 1

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

    def _signs(self, stack: Stack) -> Tensor | None:
        """−1 for the blocks whose loss is maximised, 1 for the others; None where there are no such blocks."""
        up = [self._group(block.params[0])["maximize"] for block in stack.blocks]
        if not any(up):
            return None
        like = stack.like
        return torch.stack([torch.full((), 1.0 - 2.0 * m, dtype=like.dtype, device=like.device) for m in up])

    def _numbers(self, stack: Stack, key: str, instead_of_none: float = 0.0) -> float | Tensor:
        """An option of the stack's blocks: one number where they agree, else one for each, shape ``(B,)``."""
        values = [self._group(block.params[0])[key] for block in stack.blocks]
        values = [instead_of_none if value is None else value for value in values]
        first = values[0]
        if all(value is first or (not isinstance(value, Tensor) and value == first) for value in values):
            return first.reshape(()) if isinstance(first, Tensor) else first
        like = stack.like
        return torch.stack(
            [
                v.detach().to(like.device, like.dtype).reshape(())
                if isinstance(v, Tensor)
                else torch.full((), v, dtype=like.dtype, device=like.device)
                for v in values
            ]
        )

    def __repr__(self) -> str:
        choices = [self.preconditioner, self.criterion, self.probe, self.blocks, self.normalize]
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


def _length(tensors: Sequence[Tensor]) -> Tensor:
    """Length of all tensors as one vector; in float64, whose range holds the squares of any float32."""
    wide = [torch.float32 if t.device.type == "mps" else torch.float64 for t in tensors]
    each = [torch.linalg.vector_norm(t, dtype=dtype) for t, dtype in zip(tensors, wide, strict=True)]
    return torch.linalg.vector_norm(torch.stack([t.to(each[0].device, each[0].dtype) for t in each]))
