"""The optimizer: owns the state and the param groups, and ties the other modules together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import checkpoint, options
from .blocks import Block, Blocks, PerTensor
from .criteria import Criterion, c3
from .groups import Kronecker, Structure
from .memory import available_bytes, readable
from .noise import Noise
from .normalize import MaxAbs, Normalization
from .probes import Evaluation, FiniteDifference, Gradients, Probe
from .real import real
from .stacks import AVERAGE, Stack, per_block


class PSGD(Optimizer):
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
        lr: step size, a number or a tensor; for a fitted preconditioner between 0 and 1
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
    >>> _ = torch.manual_seed(0)
    >>> theta = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    >>> optimizer = PSGD([theta], lr=0.5)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (1 - theta[0]) ** 2 + 100 * (theta[1] - theta[0] ** 2) ** 2
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(1000):
    ...     loss = optimizer.step(closure)
    >>> bool(loss < 1e-12)
    True
    """

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
        self.preconditioner = _one_of("preconditioner", preconditioner, Structure)
        self.criterion = _called("criterion", criterion)
        self.probe = _one_of("probe", probe, Probe)
        self.blocks = _one_of("blocks", blocks, Blocks)
        self.normalize = _called("normalize", normalize)
        self.error_if_nonfinite = bool(error_if_nonfinite)
        defaults = {
            "lr": lr,
            "precond_lr": precond_lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "update_every": update_every,
            "max_norm": max_norm,
            "seed": seed,
            "maximize": maximize,
        }
        options.check(defaults)
        self._start_over()
        super().__init__(params, defaults)

    # ---------------------------------------------------------------- parameters and their state

    def _start_over(self) -> None:
        #: steps taken; every state holds this tensor, on the CPU, where looking at it costs nothing
        self._clock = torch.zeros((), dtype=torch.int64, device="cpu")
        #: steps skipped, counted on each device without looking
        self._skipped: dict[torch.device, Tensor] = {}
        self._params: list[Tensor] = []
        self._group_of: list[int] = []
        self._made_for: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._blocks: list[Block] = []
        self._stacks: list[Stack] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, at any time; they start from ``Q = I``."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group={param_group!r}: PSGD wants a dict with the key 'params'")
        group = dict(param_group)
        if not isinstance(group["params"], (Tensor, set)):
            group["params"] = list(group["params"])
        where = f" in param group {len(self.param_groups)}"
        self._check_new(group["params"], where)
        options.check({**self.defaults, **group}, where)
        self._check_memory(self._divide(_tensors(group["params"])))
        super().add_param_group(group)
        self._adopt(self.param_groups[-1])

    def _check_new(self, params: Any, where: str) -> None:
        tensors = _tensors(params)
        if not tensors:
            raise ValueError(f"params=[]{where}: PSGD wants at least one parameter")
        known = set(self._params)
        for i, p in enumerate(tensors):
            if not isinstance(p, Tensor):
                continue  # torch says it
            if p in known:
                raise ValueError(f"params: parameter {i}{where}, of shape {tuple(p.shape)}, appears twice")
            known.add(p)
            if not (p.is_floating_point() or p.is_complex()):
                raise ValueError(
                    f"params: parameter {i}{where} is of dtype {p.dtype}; PSGD wants floating-point or complex ones"
                )

    def _divide(self, params: Sequence[Tensor], first: int = 0) -> list[tuple[Block, torch.dtype, torch.device]]:
        """The blocks of a param group, each with the dtype and device of its ``Q``."""
        numbered = [(i, p) for i, p in enumerate(params, first) if isinstance(p, Tensor) and p.numel() > 0]
        return [
            (block, _precise_dtype([params[i - first] for i in block.params]), params[block.params[0] - first].device)
            for block in self.blocks.divide(numbered)
        ]

    def _check_memory(self, blocks: Iterable[tuple[Block, torch.dtype, torch.device]]) -> None:
        needed: defaultdict[torch.device, int] = defaultdict(int)
        largest: dict[torch.device, tuple[int, tuple[int, ...]]] = {}
        for block, dtype, device in blocks:
            size = self.preconditioner.init(block.shape, dtype=dtype, device="meta").nbytes()
            needed[device] += size
            largest[device] = max(largest.get(device, (0, ())), (size, block.shape))
        for device, size in needed.items():
            free = available_bytes(device)
            if free is not None and size > free:
                most, shape = largest[device]
                raise ValueError(
                    f"preconditioner={self.preconditioner!r}: Q would take {readable(size)} on {device}, where "
                    f"{readable(free)} are free; its largest block, of shape {shape}, takes {readable(most)}. "
                    "Use Kronecker(), LimitedMemory() or Diagonal(), or smaller blocks, as PerTensor() makes them"
                )

    def _adopt(self, group: Mapping[str, Any]) -> None:
        """Take in a new param group, and make its state."""
        for block, dtype, device in self._register(group):
            Q = self.preconditioner.init(block.shape, dtype=dtype, device=device)
            self._state_of(block).update({name: buffer[0] for name, buffer in Q.buffers().items()})

    def _register(self, group: Mapping[str, Any]) -> list[tuple[Block, torch.dtype, torch.device]]:
        index = 1 + max(self._group_of, default=-1)
        first = len(self._params)
        divided = self._divide(group["params"], first)
        for p in group["params"]:
            self._params.append(p)
            self._group_of.append(index)
            self._made_for.append((p.shape, p.dtype, p.device))
            self.state.setdefault(p, {}).update(step=self._clock, skipped=self._skip_count(p.device))
        self._blocks += [block for block, _, _ in divided]
        self._stacks = None
        return divided

    def _adopt_all(self) -> None:
        self._start_over()
        self.state.clear()
        for group in self.param_groups:
            self._adopt(group)

    def _skip_count(self, device: torch.device) -> Tensor:
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._skipped[device]

    def _state_of(self, block: Block) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[self._params[block.params[0]]]
        return state

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the param groups; blocks and stacks refer to their positions in it."""
        return list(self._params)

    @property
    def stacks(self) -> list[Stack]:
        """The blocks with their ``Q``, equal shapes together. The state of the parameters are views of them."""
        if self._stacks is None:
            alike: defaultdict[tuple[Any, ...], list[Block]] = defaultdict(list)
            for block in self._blocks:
                like = next(v for k, v in self._state_of(block).items() if k.startswith("Q"))
                alike[block.shape, like.dtype, like.device].append(block)
            self._stacks = [self._stack(blocks, *key) for key, blocks in alike.items()]
        return self._stacks

    def _stack(self, blocks: list[Block], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Stack:
        states = [self._state_of(block) for block in blocks]
        template = self.preconditioner.init(shape, dtype=dtype, device="meta")
        with_average = any("momentum" in state for state in states)
        for state in states if with_average else []:
            if "momentum" not in state:
                state.update(Stack.new_average(shape, dtype, device))
        buffers = {
            name: states[0][name][None] if len(states) == 1 else torch.stack([state[name] for state in states])
            for name in (*template.buffers(), *(AVERAGE if with_average else ()))
        }
        average = {name: buffers[name] for name in AVERAGE if with_average}
        stack = Stack(blocks, template.bind(buffers), average)
        self._share_state(stack)
        return stack

    def _share_state(self, stack: Stack) -> None:
        for i, block in enumerate(stack.blocks):
            self._state_of(block).update({name: buffer[i] for name, buffer in stack.buffers().items()})

    # ---------------------------------------------------------------- one step

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
            grads = self._checked_gradients(evaluation)
            usable = self._all_finite(evaluation.loss, grads)
        except BaseException:
            start.restore()
            raise
        del start

        for i in [i for i in grads if self._group(i)["maximize"]]:
            grads[i] = -grads[i]
            if i in evaluation.pairs:
                dtheta, dgrad = evaluation.pairs[i]
                evaluation.pairs[i] = (dtheta, -dgrad)
        moves = [
            (stack, direction)
            for whole in self.stacks
            for stack, direction in self._advance(whole, grads, evaluation.pairs, usable[whole.device])
        ]
        self._move(moves, grads, usable)
        return evaluation.loss

    def _advance(
        self, whole: Stack, grads: Mapping[int, Tensor], pairs: dict[int, tuple[Tensor, Tensor]], usable: Tensor
    ) -> Iterator[tuple[Stack, Tensor]]:
        """Update ``Q`` of the blocks with new pairs, then precondition the gradients of all blocks that have one."""
        fitted = whole.having(pairs)
        if fitted:
            stack = whole.select(fitted)
            measured = {i: pairs.pop(i) for i in stack.params() if i in pairs}
            # A list that `fit_` empties: a pair is as large as the parameters, and nobody else needs it.
            pair = [stack.pack({i: halves[which] for i, halves in measured.items()}) for which in (0, 1)]
            del measured
            lr = self._numbers(stack, "precond_lr")
            stack.fit_(self.probe, self.criterion, self.normalize, lr, pair, usable)
            whole.put_back_(fitted, stack)

        active = whole.having(grads)
        if active:
            if not whole.average and any(self._group(i)["momentum"] for i in whole.params()):
                whole.start_average()
                self._share_state(whole)
            stack = whole.select(active)
            g = stack.pack(grads)
            if stack.average:
                g = stack.average_(g, self._numbers(stack, "momentum"), usable)
                whole.put_back_(active, stack)
            yield stack, stack.group.precondition(g).contiguous()

    def _move(
        self,
        moves: Sequence[tuple[Stack, Tensor]],
        grads: Mapping[int, Tensor],
        usable: Mapping[torch.device, Tensor],
    ) -> None:
        """Turn directions into steps, in place, and move all parameters at once."""
        flags = [torch.isfinite(torch.linalg.vector_norm(direction, torch.inf)) for _, direction in moves]
        usable = self._agree([*usable.values(), *flags])
        length = None
        if any(group["max_norm"] is not None for group in self.param_groups):
            length = _length([direction for _, direction in moves])
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
            direction.masked_fill_(~usable[direction.device], 0)
            steps += [(real(thetas[i]), part) for i, part in stack.unpack(direction) if i in grads]
        for device, count in self._skipped.items():
            count += ~usable[device]
        # One call that allocates nothing: an interrupt or a failure finds all parameters moved, or none.
        if steps:
            torch._foreach_sub_([theta for theta, _ in steps], [step for _, step in steps])
        self._clock += 1

    # ---------------------------------------------------------------- checks

    def _check_before(self, closure: Callable[[], Any] | None) -> None:
        for i, group in enumerate(self.param_groups):
            options.check(group, f" in param group {i}")
        if closure is None and self.probe.needs_closure:
            raise ValueError(
                f"closure=None: {type(self.probe).__name__} wants step(closure); Whitening works without one"
            )
        if closure is not None and not callable(closure):
            raise TypeError(f"closure={closure!r}: step wants a function, or None")
        changed = [
            i
            for i, (p, (shape, dtype, device)) in enumerate(zip(self._params, self._made_for, strict=True))
            if p.shape != shape or p.dtype != dtype or p.device != device
        ]
        if changed and int(self._clock) == 0:
            self._adopt_all()  # the model was moved or cast after the optimizer was made, before it was used
        elif changed:
            i = changed[0]
            raise ValueError(
                f"params: {self._name(i)} was {_kind(*self._made_for[i])} and is now "
                f"{_kind(self._params[i].shape, self._params[i].dtype, self._params[i].device)}; PSGD wants parameters "
                "to stay as they are after the first step"
            )

    def _checked_gradients(self, evaluation: Evaluation) -> dict[int, Tensor]:
        """Gradients by position, without empty ones."""
        grads = {}
        for i, (p, grad) in enumerate(zip(self._params, evaluation.grads, strict=True)):
            if grad is None or p.numel() == 0:
                continue
            if grad.layout != torch.strided:
                raise ValueError(f"params: {self._name(i)} has a sparse gradient; PSGD wants dense ones")
            if grad.shape != p.shape or grad.dtype != p.dtype or grad.device != p.device:
                raise ValueError(
                    f"params: {self._name(i)} is {_kind(p.shape, p.dtype, p.device)} and its gradient "
                    f"{_kind(grad.shape, grad.dtype, grad.device)}; PSGD wants them alike"
                )
            grads[i] = grad
        return grads

    def _all_finite(self, loss: Any, grads: Mapping[int, Tensor]) -> dict[torch.device, Tensor]:
        """Whether loss, gradients and step sizes can be used, as a flag on each device; the host does not look."""
        flags = [flag for group in self.param_groups if (flag := options.rate_is_usable(group["lr"])) is not None]
        if isinstance(loss, Tensor):
            flags.append(torch.isfinite(loss.detach()).all())
        elif isinstance(loss, (int, float)) and not math.isfinite(loss):
            flags.append(torch.zeros((), dtype=torch.bool, device=self._params[0].device))
        alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for grad in grads.values():
            alike[grad.device, grad.dtype].append(real(grad))
        flags += [torch.isfinite(torch.stack(torch._foreach_norm(same, torch.inf))).all() for same in alike.values()]
        usable = self._agree(flags)
        if self.error_if_nonfinite and not all(bool(flag) for flag in usable.values()):
            bad = [self._name(i) for i, grad in grads.items() if not bool(torch.isfinite(grad).all())]
            raise FloatingPointError(f"step {int(self._clock)}: {', '.join(bad) or 'the loss'} is not finite")
        return usable

    def _agree(self, flags: Sequence[Tensor]) -> dict[torch.device, Tensor]:
        """Whether all flags are true, told to every device."""
        local: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        for flag in flags:
            local[flag.device].append(flag)
        each = [torch.stack(here).all() for here in local.values()]
        return {
            device: torch.stack([flag.to(device) for flag in each]).all()
            if each
            else torch.ones((), dtype=torch.bool, device=device)
            for device in self._skipped
        }

    # ---------------------------------------------------------------- small answers

    def _group(self, i: int) -> dict[str, Any]:
        return self.param_groups[self._group_of[i]]

    def _name(self, i: int) -> str:
        names = self._group(i).get("param_names")
        name = "" if names is None else f" ({names[i - self._group_of.index(self._group_of[i])]})"
        return f"parameter {i}{name}"

    def _numbers(self, stack: Stack, key: str, instead_of_none: float = 0.0) -> float | Tensor:
        """An option of the stack's blocks: one number where they agree, else one for each, shape ``(B,)``."""
        values = [self._group(block.params[0])[key] for block in stack.blocks]
        values = [instead_of_none if value is None else value for value in values]
        first = values[0]
        if all(value is first or (not isinstance(value, Tensor) and value == first) for value in values):
            return first
        like = stack.like
        return torch.stack(
            [
                v.detach().to(like.device, like.dtype).reshape(())
                if isinstance(v, Tensor)
                else torch.full((), v, dtype=like.dtype, device=like.device)
                for v in values
            ]
        )

    # ---------------------------------------------------------------- saving, loading, copying

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, after checking all of it; every tensor keeps its dtype.

        Torch would cast each to the dtype of its parameter, so it is shown none of them.
        """
        loaded: list[dict[str, Tensor]] = []

        def check_and_copy(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            groups = checkpoint.checked_groups(saved, self.param_groups, self.defaults)
            frozen = [not p.requires_grad for p in self._params]
            loaded.extend(checkpoint.checked_state(saved, [self._expected(i) for i in range(len(frozen))], frozen))
            return {"state": {}, "param_groups": groups}

        def install(_: Optimizer) -> None:
            self.state.update(zip(self._params, loaded, strict=True))
            self._rebuild()

        # After the user's own hooks before loading, and before the user's own hooks after it.
        handles = [
            self.register_load_state_dict_pre_hook(check_and_copy),
            self.register_load_state_dict_post_hook(install, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _expected(self, i: int) -> dict[str, Tensor]:
        """All that the state of a parameter may hold."""
        p = self._params[i]
        expected: dict[str, Tensor] = dict(self.state[p])
        for block in self._blocks:
            if block.params[0] == i and "momentum" not in expected:
                like = next(v for k, v in expected.items() if k.startswith("Q"))
                expected |= Stack.new_average(block.shape, like.dtype, torch.device("meta"))
        return expected

    def _rebuild(self) -> None:
        """Put together again what the state has in common, after it came from outside."""
        states = [self.state[p] for group in self.param_groups for p in group["params"]]
        steps = max((int(state["step"]) for state in states), default=0)
        skipped = {state["skipped"].device: state["skipped"] for state in states}
        self._start_over()
        self._clock.fill_(steps)
        self._skipped.update(skipped)
        for group in self.param_groups:
            self._register(group)

    def __getstate__(self) -> dict[str, Any]:
        # Copies, as each view of a stack would carry the whole stack along.
        state = defaultdict(dict, {p: {k: v.clone() for k, v in entries.items()} for p, entries in self.state.items()})
        chosen = ("preconditioner", "criterion", "probe", "blocks", "normalize", "error_if_nonfinite")
        return {**super().__getstate__(), "state": state, **{name: getattr(self, name) for name in chosen}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "preconditioner" in state:  # unpickled or copied; otherwise torch is loading a state dict, see above
            self._rebuild()

    # ---------------------------------------------------------------- what a person sees

    def __repr__(self) -> str:
        criterion = getattr(self.criterion, "__name__", repr(self.criterion))
        chosen = [self.preconditioner, criterion, self.probe, self.blocks, self.normalize]
        numbers = []
        for name in self.defaults:
            values = [group[name] for group in self.param_groups if name in group]
            numbers += [f"{name}={values[0]}" if all(v is values[0] or v == values[0] for v in values) else f"{name}=…"]
        lines = [f"PSGD({', '.join(map(str, chosen))}; {', '.join(numbers)})"]
        total = 0
        for stack in self.stacks:
            size = sum(buffer.nbytes for buffer in stack.buffers().values())
            total += size
            times = f"{len(stack.blocks)} × " if len(stack.blocks) > 1 else ""
            shape = " × ".join(map(str, stack.blocks[0].shape))
            kind = str(stack.like.dtype).removeprefix("torch.")
            lines.append(f"  {times}{shape}: {stack.group.describe()}, {kind} on {stack.device}, {readable(size)}")
        numel = sum(p.numel() for p in self._params)
        lines.append(f"  in all {len(self._params)} tensors of {numel:,} elements, state of {readable(total)}")
        return "\n".join(lines)


def _tensors(params: Any) -> list[Any]:
    """The tensors among what a param group may hold: a tensor, tensors, or pairs of a name and a tensor."""
    return [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]


def _precise_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """The dtype of ``Q``: the parameters' own, but never less precise than float32."""
    dtype = torch.float32
    for p in params:
        dtype = torch.promote_types(dtype, real(p).dtype)
    return dtype


def _length(tensors: Sequence[Tensor]) -> Tensor:
    """Length of all tensors as one vector; in float64, whose range holds the squares of any float32."""
    wide = [torch.float32 if t.device.type == "mps" else torch.float64 for t in tensors]
    each = [torch.linalg.vector_norm(t, dtype=dtype) for t, dtype in zip(tensors, wide, strict=True)]
    return torch.linalg.vector_norm(torch.stack([t.to(each[0].device, each[0].dtype) for t in each]))


def _one_of(name: str, value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        known = ", ".join(f"{c.__name__}()" for c in kind.__subclasses__())
        hint = f" (an object: {value.__name__}())" if isinstance(value, type) else ""
        raise TypeError(f"{name}={value!r}: PSGD wants one of {known}{hint}")
    return value


def _called(name: str, value: Any) -> Any:
    if isinstance(value, type) or not callable(value):
        right = "c1, c2, c3 or a function like them" if name == "criterion" else "MaxAbs(), MaxDiag() or Spectral()"
        raise TypeError(f"{name}={value!r}: PSGD wants {right}")
    return value


def _kind(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype} of shape {tuple(shape)} on {device}"
