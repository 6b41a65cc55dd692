"""The optimizer's parameters and what it keeps for them: blocks, their state, saving, loading and copying.

The state of a block belongs to its first parameter, and is made of tensors only, so that every tool that handles the
state of torch's own optimizers can handle it. For speed, the tensors of blocks of equal shape are views of a stack.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..blocks import Block, Blocks
from ..engine.bucket import Fleet
from ..engine.graphs import Replays
from ..engine.stack import AVERAGE, Stack
from ..groups import Structure
from ..groups.axes import lower
from ..ops import triton as compiled
from ..ops.addresses import Addressed
from ..ops.distributed import is_divided
from ..ops.real import real
from ..ranks.assign import assign, cost_of
from ..ranks.team import Divided, Team
from . import checkpoint, checks, options


@dataclass
class Whole:
    """The fleets of all blocks, made for some stacks; recordings of their steps, and what these have to be told."""

    stacks: list[Stack]
    fleets: list[Fleet]
    replays: Replays | None = None
    addressed: dict[str, Addressed] = field(default_factory=dict)


class BlockOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` that keeps a ``Q`` for each block of parameters.

    Args:
        params: parameters, named parameters, or param groups
        defaults: the numbers of a param group
        choices: what is not a number; kept as attributes. ``preconditioner``, ``blocks`` and ``precond_dtype`` must be
            among them.
        shard: a process group or device mesh whose ranks share the blocks
    """

    preconditioner: Structure
    blocks: Blocks
    precond_dtype: torch.dtype | None

    def __init__(self, params: Any, defaults: dict[str, Any], choices: dict[str, Any], shard: Any = None) -> None:
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise TypeError(f"params={params!r}: PSGD wants an iterable of tensors or of param groups")
        # What can be gone through only once, as model.parameters(), is needed more than once.
        params = [_listed(item) if isinstance(item, dict) else item for item in params]
        if not params:
            raise ValueError("params=[]: PSGD wants at least one parameter")
        self._choice_names = tuple(choices)
        self.__dict__.update(choices)
        options.check(defaults)
        self._team = Team.of(shard, _all_tensors(params))
        self._start_over()
        super().__init__(params, defaults)
        if self._team is not None:
            kinds = [(tuple(p.shape), str(p.dtype)) for p in self._params]
            self._team.same("params", (kinds, self.preconditioner, self.blocks), "build the same model on every rank")

    def _start_over(self) -> None:
        #: steps taken; every state holds this tensor, on the CPU, where looking at it costs nothing
        self._clock = torch.zeros((), dtype=torch.int64, device="cpu")
        #: steps skipped, counted on each device without looking
        self._skipped: dict[torch.device, Tensor] = {}
        self._params: list[Tensor] = []
        self._group_of: list[int] = []
        self._made_for: list[checks.Kind] = []
        self._blocks: list[Block] = []
        #: for each block the parameter whose state holds what belongs to the block
        self._homes: dict[Block, int] = {}
        self._stacks: list[Stack] | None = None
        #: the state of each parameter
        self._entries: list[dict[str, Tensor]] = []
        #: for each block its state, and name and value of some entries of it, which are views of a stack
        self._shared: list[tuple[dict[str, Tensor], str, Tensor]] = []
        #: number of parameters that are not empty, in blocks of this rank
        self._filled = 0
        #: in a team, positions of the parameters that move in this step
        self._moving: list[int] = []
        #: in a team, who holds which parts of divided parameters
        self._parts: Divided | None = None
        #: in a team, by position the rank that has the block of a parameter, and what each rank has to do
        self._owners: dict[int, int] = {}
        self._busy = [0.0] * (0 if self._team is None else self._team.size)
        #: what belongs to all blocks together
        self._whole: Whole | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, at any time; they start from ``Q = I``."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group={param_group!r}: PSGD wants a dict with the key 'params'")
        if "params" not in param_group:
            raise ValueError(f"param_group with the keys {list(param_group)}: PSGD wants the key 'params' too")
        group = _listed(param_group)
        where = f" in param group {len(self.param_groups)}"
        for name in self._choice_names:
            if name in group:
                raise ValueError(
                    f"{name}={group[name]!r}{where}: PSGD takes it for all parameters together; use another optimizer"
                )
        checks.new_parameters(group["params"], self._params, where)
        options.check({**self.defaults, **group}, where)
        tensors = checks.tensors_of(group["params"])
        if self._team is None:
            if any(is_divided(p) for p in tensors):
                raise ValueError(f"params{where}: ranks hold only parts of them; PSGD wants such ones from the start")
            checks.fits_memory(self.preconditioner, self._divide(tensors))
        super().add_param_group(group)
        try:
            self._adopt(self.param_groups[-1])
        except BaseException:
            for p in self.param_groups.pop()["params"]:
                self.state.pop(p, None)
            self._rebuild()
            raise

    def _divide(self, params: Sequence[Tensor], first: int = 0) -> list[tuple[Block, torch.dtype, torch.device]]:
        """The blocks of a param group, each with the dtype and device of its ``Q``."""
        numbered = [(i, p) for i, p in enumerate(params, first) if isinstance(p, Tensor) and p.numel() > 0]
        return [
            (
                block,
                self.precond_dtype or precise_dtype([params[i - first] for i in block.params]),
                params[block.params[0] - first].device,
            )
            for block in self.blocks.divide(numbered)
        ]

    def _adopt(self, group: Mapping[str, Any]) -> None:
        """Take in a param group, and make what is missing of its state."""
        index = 1 + max(self._group_of, default=-1)
        divided = self._divide(group["params"], first=len(self._params))
        for p in group["params"]:
            self._params.append(p)
            self._group_of.append(index)
            self._made_for.append(checks.kind(p))
            self.state[p].update(step=self._clock, skipped=self._skip_count(p.device))
            self._entries.append(self.state[p])
        for block, dtype, device in self._share(divided):
            self._filled += len(block.params)
            if not self.preconditioner.inverts:
                compiled.prepare(device, dtype, lower(device, dtype))
            self._blocks.append(block)
            self._homes[block] = self._home(block)
            state = self._state_of(block)
            shapes = self.preconditioner.init(block.shape, dtype=dtype, device="meta").buffers()
            if any(name not in state or state[name].shape != like.shape[1:] for name, like in shapes.items()):
                Q = self.preconditioner.init(block.shape, dtype=dtype, device=device)
                for name in state.keys() - {"step", "skipped"}:
                    del state[name]
                state.update({name: buffer[0] for name, buffer in Q.buffers().items()})
            if group["momentum"] > 0 and "momentum" not in state:
                state.update(Stack.new_average(block.shape, self._dtype_of(block), device))
        self._stacks = self._whole = self._parts = None

    def _share(
        self, divided: Sequence[tuple[Block, torch.dtype, torch.device]]
    ) -> list[tuple[Block, torch.dtype, torch.device]]:
        """Say which rank has which block, as ``plan`` does, and return those of this rank."""
        if self._team is None:
            return list(divided)
        costs = []
        for block, dtype, _ in divided:
            group = self.preconditioner.init(block.shape, dtype=dtype, device="meta")
            costs.append(cost_of(group, block.numel * self._dtype_of(block).itemsize))
        owners = assign(costs, len(self._busy), self._busy)
        for (block, _, _), each, owner in zip(divided, costs, owners, strict=True):
            self._busy[owner] += each
            self._owners.update(dict.fromkeys(block.params, owner))
        return [mine for mine, owner in zip(divided, owners, strict=True) if owner == self._team.rank]

    def _home(self, block: Block) -> int:
        """Where the state of a block is, or else its first trainable parameter: tools drop the state of frozen ones."""
        has_state = [i for i in block.params if any(name.startswith("Q") for name in self.state[self._params[i]])]
        trainable = [i for i in block.params if self._params[i].requires_grad]
        return (has_state + trainable + list(block.params))[0]

    def _rebuild(self) -> None:
        """Put together again what belongs to the parameters, after they or their state were changed from outside."""
        states = [self.state[p] for group in self.param_groups for p in group["params"] if p in self.state]
        steps = max((int(state["step"]) for state in states if "step" in state), default=0)
        skipped = {state["skipped"].device: state["skipped"] for state in states if "skipped" in state}
        self._start_over()
        self._clock.fill_(steps)
        self._skipped.update(skipped)
        for group in self.param_groups:
            self._adopt(group)

    def _follow(self) -> None:
        """Notice what others did to the param groups and the state: groups taken out, a state that was cleared."""
        groups = [p for group in self.param_groups for p in group["params"]]
        same = len(groups) == len(self._params) and all(map(operator.is_, groups, self._params))
        same = same and all(map(operator.is_, map(self.state.get, groups), self._entries))
        if not same or any(entries.get("step") is not self._clock for entries in self._entries):
            self._rebuild()

    def _rehome(self) -> bool:
        """Start over where the model was moved or cast after the optimizer was made, before it was used."""
        if int(self._clock) > 0 or self._made_for == [checks.kind(p) for p in self._params]:
            return False
        self.state.clear()
        self._rebuild()
        return True

    def _skip_count(self, device: torch.device) -> Tensor:
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._skipped[device]

    def _state_of(self, block: Block) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[self._params[self._homes[block]]]
        return state

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the param groups; blocks and stacks refer to their positions in it."""
        return list(self._params)

    @property
    def stacks(self) -> list[Stack]:
        """The blocks with their ``Q``, equal shapes together. The state of the parameters are views of them."""
        self._follow()
        return self._current_stacks()

    def _current_stacks(self) -> list[Stack]:
        # Someone may have put other tensors there, as offloading does.
        if self._stacks is None or any(entries.get(name) is not view for entries, name, view in self._shared):
            self._shared = []
            self._stacks = self._stacked()
            for stack in self._stacks:
                self._share_state(stack)
        return self._stacks

    @torch.inference_mode(False)
    @torch.no_grad()
    def _stacked(self) -> list[Stack]:
        alike: defaultdict[tuple[Any, ...], list[Block]] = defaultdict(list)
        for block in self._blocks:
            like = next(v for k, v in self._state_of(block).items() if k.startswith("Q"))
            of = self._params[block.params[0]].dtype  # see `_fleet_of`
            alike[block.shape, like.dtype, self._dtype_of(block), like.device, of].append(block)
        return self._side_by_side([self._stack(blocks, *key) for (*key, _), blocks in alike.items()])

    def _dtype_of(self, block: Block) -> torch.dtype:
        return precise_dtype([self._params[i] for i in block.params])

    def _stack(
        self,
        blocks: list[Block],
        shape: tuple[int, ...],
        precond_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Stack:
        states = [self._state_of(block) for block in blocks]
        template = self.preconditioner.init(shape, dtype=precond_dtype, device="meta")
        with_average = any("momentum" in state for state in states)
        for state in states if with_average else []:
            if "momentum" not in state:
                state.update(Stack.new_average(shape, dtype, device))
        buffers = {
            name: states[0][name][None].contiguous()
            if len(states) == 1
            else torch.stack([state[name] for state in states])
            for name in (*template.buffers(), *(AVERAGE if with_average else ()))
        }
        average = {name: buffers[name] for name in AVERAGE if with_average}
        return Stack(blocks, template.bind(buffers), average, dtype)

    def _fleet_of(self, stack: Stack) -> tuple[Any, ...]:
        """What the stacks of a fleet have in common. Kernels want parameters of one dtype, too."""
        return stack.device, stack.like.dtype, stack.dtype, self._params[stack.positions[0]].dtype

    def _side_by_side(self, stacks: list[Stack]) -> list[Stack]:
        """Put factors of one size of all stacks of a fleet side by side in memory, to be seen as one tensor."""
        alike: defaultdict[tuple[Any, ...], list[tuple[int, str, Tensor]]] = defaultdict(list)
        for k, stack in enumerate(stacks):
            for name, buffer in stack.group.buffers().items():
                part = name.partition("_")[2]
                alike[part, buffer.shape[1:], buffer.dtype, self._fleet_of(stack)].append((k, name, buffer))
        moved: list[dict[str, Tensor]] = [dict(stack.group.buffers()) for stack in stacks]
        for same in alike.values():
            if len(same) > 1:
                buffers = [buffer for _, _, buffer in same]
                joined = torch.cat(buffers).split([len(buffer) for buffer in buffers])
                for (k, name, _), part in zip(same, joined, strict=True):
                    moved[k][name] = part
        return [
            Stack(stack.blocks, stack.group.bind(buffers), stack.average, stack.dtype)
            for stack, buffers in zip(stacks, moved, strict=True)
        ]

    def _share_state(self, stack: Stack) -> None:
        """Make the state of a stack's parameters views of the stack."""
        for row, block in enumerate(stack.blocks):
            state = self._state_of(block)
            views = {name: buffer[row] for name, buffer in stack.buffers().items()}
            state.update(views)
            # Who replaces an entry of Q replaces all of it: looking at one of them is enough, and at the average.
            watched = [next(iter(views)), *(name for name in AVERAGE if name in views)]
            self._shared = [entry for entry in self._shared if entry[0] is not state]
            self._shared += [(state, name, views[name]) for name in watched]

    def _group(self, i: int) -> dict[str, Any]:
        return self.param_groups[self._group_of[i]]

    def _name(self, i: int) -> str:
        names = self._group(i).get("param_names")
        name = "" if names is None else f" ({names[i - self._group_of.index(self._group_of[i])]})"
        return f"parameter {i}{name}"

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, after checking all of it; every tensor keeps its dtype.

        Torch's own way casts all of them to the dtypes of their parameters, which would round a float32 ``Q`` of a
        bfloat16 model.
        """
        loaded: list[dict[str, Tensor]] = []

        def check_and_copy(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            self._follow()
            self._rehome()
            groups = checkpoint.checked_groups(saved, self.param_groups, self.defaults)
            saved = self._without_others(saved)
            expected = [self._expected(i) for i in range(len(self._params))]
            needed = {i for block, i in self._homes.items() if any(self._params[j].requires_grad for j in block.params)}
            frozen = [not p.requires_grad and i not in needed for i, p in enumerate(self._params)]
            loaded.extend(checkpoint.checked_state(saved, expected, frozen))
            return {"state": {}, "param_groups": groups}

        def install(_: Optimizer) -> None:
            self.state.update(zip(self._params, loaded, strict=True))
            self._rebuild()

        # After the user's own hooks before loading, and before the user's own hooks after it.
        handles = [
            self.register_load_state_dict_pre_hook(check_and_copy),
            self.register_load_state_dict_post_hook(install, prepend=True),
        ]
        error: Exception | None = None
        try:
            super().load_state_dict(state_dict)
        except Exception as e:
            if self._team is None:
                raise
            error = e
        finally:
            for handle in handles:
                handle.remove()
        if self._team is not None:
            self._team.together(error, "load_state_dict")

    def _without_others(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state dict without what belongs to blocks of other ranks, which a checkpoint of all ranks has too."""
        if self._team is None or not isinstance(saved.get("state"), dict):
            return saved
        ids = [key for group in saved["param_groups"] for key in group["params"]]
        others = {key for i, key in enumerate(ids) if self._owners.get(i, self._team.rank) != self._team.rank}
        state = {
            key: {k: v for k, v in entries.items() if k in ("step", "skipped")} if key in others else entries
            for key, entries in saved["state"].items()
        }
        return {**saved, "state": state}

    def _expected(self, i: int) -> dict[str, Tensor]:
        """All that the state of a parameter may hold."""
        expected: dict[str, Tensor] = dict(self.state[self._params[i]])
        block = next((block for block, home in self._homes.items() if home == i), None)
        if block is not None and "momentum" not in expected:
            like = next(v for k, v in expected.items() if k.startswith("Q"))
            expected |= Stack.new_average(block.shape, self._dtype_of(block), like.device)
        return expected

    def __getstate__(self) -> dict[str, Any]:
        if self._team is not None:
            raise TypeError("PSGD: ranks share this one, so it cannot be copied or pickled; use its state_dict()")
        # Copies, as each view of a stack would carry the whole stack along.
        state = defaultdict(dict, {p: {k: v.clone() for k, v in entries.items()} for p, entries in self.state.items()})
        chosen = {name: getattr(self, name) for name in self._choice_names}
        return {**super().__getstate__(), "state": state, **chosen, "_choice_names": self._choice_names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_choice_names" in state:  # unpickled or copied; otherwise torch is loading a state dict, see above
            self._team = None
            self._rebuild()


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """A param group with its parameters in a list; what torch refuses is left to it."""
    params = group.get("params")
    if isinstance(params, Iterable) and not isinstance(params, (Tensor, set)):
        return {**group, "params": list(params)}
    return dict(group)


def _all_tensors(params: Sequence[Any]) -> list[Any]:
    """The tensors among parameters, named parameters or param groups."""
    groups = [item.get("params", []) if isinstance(item, dict) else [item] for item in params]
    return [tensor for group in groups for tensor in checks.tensors_of(group)]


def precise_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """The dtype of averages and steps, and of ``Q`` unless told otherwise: the parameters', but at least float32."""
    dtype = torch.float32
    for p in params:
        dtype = torch.promote_types(dtype, real(p).dtype)
    return dtype
