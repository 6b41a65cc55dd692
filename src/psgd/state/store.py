"""Parameters of the optimizer and their state: blocks, and the stacks and buckets made of them.

The state of a block belongs to its first parameter, and consists of tensors only, so that every tool that handles the
state of torch's own optimizers can handle it. For speed, the tensors of blocks of equal shape are views of a stack.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block, Blocks, Placed
from ..engine.bucket import Bucket
from ..engine.graphs import without_garbage_collection
from ..engine.stack import Stack
from ..groups import Group, Structure
from ..groups.axes import lower
from ..normalize import Normalization
from ..ops import triton
from ..ops.real import precise_dtype
from ..ranks.assign import cost_of
from ..ranks.base import Ranks
from . import checks, options
from .choices import Choices
from .layout import Layout
from .stacking import add_averages, add_rows


class Store:
    """Parameters, blocks and state of an optimizer.

    Args:
        structure: structure of ``Q``, for param groups that do not choose another
        blocks: rule that decides which parameters share a ``Q``, for param groups that do not choose another
        precond_dtype: dtype of ``Q``, or None for that of the parameters
        normalize: normalisation of the steps of ``Q``
        ranks: ranks that share the blocks
    """

    def __init__(
        self,
        structure: Structure,
        blocks: Blocks,
        precond_dtype: torch.dtype | None,
        normalize: Normalization | None,
        ranks: Ranks,
    ) -> None:
        self._usual = Choices(structure, blocks)
        self.precond_dtype, self.normalize = precond_dtype, normalize
        self.ranks = ranks
        #: state of the optimizer, see ``attach``
        self.state: MutableMapping[Tensor, dict[str, Tensor]] = {}
        self.groups: Sequence[Mapping[str, Any]] = ()
        self._start_over()

    def attach(self, state: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        """Use the present state and param groups of the optimizer: torch and users may replace them."""
        self.state, self.groups = state, groups

    def _start_over(self) -> None:
        #: number of steps taken; all states share this tensor, which is on the CPU so that the host can read it at once
        self.clock = torch.zeros((), dtype=torch.int64, device="cpu")
        #: number of skipped steps, counted on each device, so that the host need not wait for it
        self.skipped: dict[torch.device, Tensor] = {}
        self.params: list[Tensor] = []
        #: choices of each param group at the time it was added
        self.choices: list[Choices] = []
        #: templates by the id of the structure, which ``choices`` keeps alive, the shape and the dtype
        self._templates: dict[tuple[int, tuple[int, ...], torch.dtype], Group] = {}
        #: index of the param group of each parameter
        self.group_of: list[int] = []
        #: shape, dtype and device of each parameter at the time its state was created
        self.kinds: list[checks.Kind] = []
        #: blocks of this rank
        self.blocks: list[Block] = []
        #: position of the parameter that holds the state of each block
        self.homes: dict[Block, int] = {}
        #: state of each parameter, to detect that it was replaced
        self._entries: list[dict[str, Tensor]] = []
        #: options of each param group that have passed the checks
        self._numbers: dict[int, list[Any]] = {}
        #: stacks and buckets of the blocks
        self._layout = Layout(self)
        self.ranks.reset()

    # Parameters and their state.

    def choices_of(self, index: int, group: Mapping[str, Any]) -> Choices:
        """Current choices of a param group."""
        return self._usual.of_group(group, f" in param group {index}")

    def divide(self, params: Sequence[Tensor], blocks: Blocks, first: int = 0) -> list[Placed]:
        """Blocks of a param group.

        Args:
            params: parameters of the group
            blocks: rule of the group
            first: position of the first parameter
        """
        numbered = [(i, p) for i, p in enumerate(params, first) if isinstance(p, Tensor) and p.numel() > 0]
        return [
            Placed(
                block,
                self.precond_dtype or precise_dtype([params[i - first] for i in block.params]),
                params[block.params[0] - first].device,
            )
            for block in blocks.divide(numbered)
        ]

    # Everything created here stays alive: the garbage collector would find nothing and cost half of the time.
    @without_garbage_collection()
    def adopt(self, index: int, group: Mapping[str, Any]) -> None:
        """Add a param group, and create the missing parts of its state."""
        structure, rule = choices = self.choices_of(index, group)
        divided = self.divide(group["params"], rule, first=len(self.params))
        self.choices.append(choices)
        for p in group["params"]:
            self.params.append(p)
            self.group_of.append(index)
            self.kinds.append(checks.kind(p))
            self.state[p].update(step=self.clock, skipped=self._skip_count(p.device))
            self._entries.append(self.state[p])
        alike: defaultdict[tuple[Any, ...], list[Block]] = defaultdict(list)
        for block, dtype, device in self.ranks.keep(
            divided, lambda placed: placed.block.params, partial(self._cost, index)
        ):
            self.blocks.append(block)
            self.homes[block] = self._home(block)
            alike[block.shape, dtype, self.dtype_of(block), device].append(block)
        for (shape, dtype, precise, device), blocks in alike.items():
            if not structure.inverts:
                triton.prepare(device, dtype, lower(device, dtype))
            states = [self.state_of(block) for block in blocks]
            right = {name: buffer.shape[1:] for name, buffer in self.template(index, shape, dtype).buffers().items()}
            new = [s for s in states if any(name not in s or s[name].shape != right[name] for name in right)]
            for state in new:
                for name in state.keys() - {"step", "skipped"}:
                    del state[name]
            if new:
                add_rows(new, structure.init(shape, batch=len(new), dtype=dtype, device=device).buffers())
            for name, zeros in Stack.new_lengths(len(states), precise, device).items():
                # States that an older version saved may lack this number.
                old = [state for state in states if name not in state]
                add_rows(old, {name: zeros[: len(old)]})
            if group["momentum"] > 0:
                add_averages(states, shape, precise, device)
        self._layout = Layout(self)

    def template(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Group:
        """Group of one block on the device ``"meta"``, which shows the tensors of its ``Q`` and uses no memory."""
        structure = self.choices[index].preconditioner
        key = id(structure), shape, dtype
        if key not in self._templates:
            self._templates[key] = structure.init(shape, dtype=dtype, device="meta")
        return self._templates[key]

    def _cost(self, index: int, placed: Placed) -> float:
        group = self.template(index, placed.block.shape, placed.dtype)
        return cost_of(group, placed.block.numel * self.dtype_of(placed.block).itemsize)

    def _home(self, block: Block) -> int:
        """Position of the parameter that holds the state of a block.

        It is the one that has the state already, or else the first trainable one, as tools drop the state of frozen
        parameters.
        """
        has_state = [i for i in block.params if any(name.startswith("Q") for name in self.state[self.params[i]])]
        trainable = [i for i in block.params if self.params[i].requires_grad]
        return (has_state + trainable + list(block.params))[0]

    def rebuild(self) -> None:
        """Build everything again from the param groups and the state, after either was changed from outside."""
        states = [self.state[p] for group in self.groups for p in group["params"] if p in self.state]
        steps = max((int(state["step"]) for state in states if "step" in state), default=0)
        skipped = {state["skipped"].device: state["skipped"] for state in states if "skipped" in state}
        self._start_over()
        self.clock.fill_(steps)
        self.skipped.update(skipped)
        for index, group in enumerate(self.groups):
            self.adopt(index, group)

    def notice_changes(self) -> None:
        """Rebuild if the param groups or the state were changed from outside, such as by clearing the state.

        Raise if the choices of a param group have changed since it was added, as its ``Q`` would have to start anew.
        """
        params = [p for group in self.groups for p in group["params"]]
        same = len(params) == len(self.params) and all(map(operator.is_, params, self.params))
        if same := same and len(self.groups) == len(self.choices):
            self._check_choices()
        same = same and all(map(operator.is_, map(self.state.get, params), self._entries))
        if not same or any(entries.get("step") is not self.clock for entries in self._entries):
            self.rebuild()

    def _check_choices(self) -> None:
        for index, (group, then) in enumerate(zip(self.groups, self.choices, strict=True)):
            if all(map(operator.is_, map(group.get, then._fields, self._usual), then)):
                continue
            now = self.choices_of(index, group)
            for name, ours, theirs in zip(now._fields, now, then, strict=True):
                if ours != theirs:
                    raise ValueError(
                        f"{name}={ours!r} in param group {index}: it was {theirs!r}; PSGD wants the choices of a group "
                        "to stay as they were when it was added"
                    )

    def check_numbers(self) -> None:
        """Raise if an option of a param group is not allowed; unchanged options are not checked again."""
        for index, group in enumerate(self.groups):
            now = [group.get(name) for name in options.NAMES]
            then = self._numbers.get(index)
            # A tensor is always checked, as it is the same object after its value has changed.
            if then is None or not all(map(operator.is_, now, then)) or isinstance(group["lr"], Tensor):
                options.check(group, f" in param group {index}")
                self._numbers[index] = now

    def follow_model(self) -> None:
        """Start over if the model was moved or cast before the first step."""
        if int(self.clock) == 0 and not self._same_kinds():
            self.state.clear()
            self.rebuild()

    def check_kinds(self) -> None:
        """Raise if the model was moved or cast after the first step."""
        self.follow_model()
        if self._same_kinds():
            return
        now = [checks.kind(p) for p in self.params]
        i = next(i for i, then in enumerate(self.kinds) if now[i] != then)
        raise ValueError(
            f"params: {self.name(i)} was {checks.describe(self.kinds[i])} and is now "
            f"{checks.describe(now[i])}; PSGD wants parameters to stay as they are after the first step"
        )

    def _same_kinds(self) -> bool:
        """Whether shapes, dtypes and devices of all parameters have not changed since their state was created."""
        return all(map(operator.eq, map(checks.kind, self.params), self.kinds))

    def _skip_count(self, device: torch.device) -> Tensor:
        if device not in self.skipped:
            self.skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self.skipped[device]

    def state_of(self, block: Block) -> dict[str, Tensor]:
        return self.state[self.params[self.homes[block]]]

    def dtype_of(self, block: Block) -> torch.dtype:
        """Dtype of averages and steps of a block."""
        return precise_dtype([self.params[i] for i in block.params])

    def options_of(self, i: int) -> Mapping[str, Any]:
        """Param group of a parameter."""
        return self.groups[self.group_of[i]]

    def name(self, i: int) -> str:
        """Name of a parameter for errors."""
        names = self.options_of(i).get("param_names")
        name = "" if names is None else f" ({names[i - self.group_of.index(self.group_of[i])]})"
        return f"parameter {i}{name}"

    def expected(self) -> tuple[list[dict[str, Tensor]], list[Group | None]]:
        """All entries that the state of each parameter may have, and the group of the block whose state it holds."""
        entries = [dict(self.state[p]) for p in self.params]
        templates: list[Group | None] = [None] * len(entries)
        for block, i in self.homes.items():
            like = next(v for k, v in entries[i].items() if k.startswith("Q"))
            add_averages([entries[i]], block.shape, self.dtype_of(block), like.device)
            templates[i] = self.template(self.group_of[i], block.shape, like.dtype)
        return entries, templates

    def may_be_missing(self) -> list[bool]:
        """Flags of the parameters whose state a checkpoint may lack: frozen ones whose state no trainable one needs."""
        needed = {i for block, i in self.homes.items() if any(self.params[j].requires_grad for j in block.params)}
        return [not p.requires_grad and i not in needed for i, p in enumerate(self.params)]

    def stacks(self) -> list[Stack]:
        """Stacks of blocks of one param group, shape and precision, with their ``Q``; the state holds views of them."""
        return self._layout.stacks()

    def buckets(self, given: Mapping[int, Tensor]) -> Sequence[Bucket]:
        """Buckets of the blocks that have gradients, see ``Layout.buckets``."""
        return self._layout.buckets(given)
