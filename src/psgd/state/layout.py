"""Stacks and buckets of the blocks of an optimizer, built from its state when they are needed."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..blocks import Block
from ..engine.bucket import Bucket
from ..engine.graphs import is_small, without_garbage_collection
from ..engine.part import having
from ..engine.stack import AVERAGE, Stack
from ..ops.streams import capturing
from .resting import Resting
from .stacking import add_rows, side_by_side, stack_of

if TYPE_CHECKING:
    from .store import Store


class Layout:
    """Stacks and buckets of the blocks of a store.

    Args:
        store: store of the blocks and their state
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        #: state of each block, and its entries that are views of a stack, to detect that one was replaced
        self._views: dict[Block, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self._stacks: list[Stack] | None = None
        self._buckets: list[Bucket] = []
        #: whether the state is small enough for steps to be captured, and for a copy of the state
        self._small = True
        self._resting = Resting()

    def stacks(self) -> list[Stack]:
        """Stacks of blocks of one param group, shape and precision, with their ``Q``; the state holds views of them."""
        # Other code may have replaced tensors of the state, as offloading does.
        if self._stacks is None or self._was_replaced():
            self._stack_again()
        assert self._stacks is not None
        return self._stacks

    def _was_replaced(self) -> bool:
        """Whether an entry of the state is no longer the view of its stack."""
        for entries, views in self._views.values():  # loops, as a generator costs twice as much at every step
            for name, view in views.items():
                if entries.get(name) is not view:
                    return True
        return False

    @without_garbage_collection()
    def _stack_again(self) -> None:
        """Build stacks and buckets from the state."""
        stacks = self._new_stacks()  # before anything changes, as there may not be enough memory
        self._views = {}
        self._stacks = stacks
        for stack in stacks:
            self._share_views(stack)
        self._buckets = self._new_buckets(stacks)
        nbytes = sum(bucket.nbytes() for bucket in self._buckets)
        self._small = all(is_small(bucket.device, nbytes) for bucket in self._buckets)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _new_stacks(self) -> list[Stack]:
        alike: defaultdict[tuple[Any, ...], list[tuple[Block, dict[str, Tensor]]]] = defaultdict(list)
        averaging: set[int] = set()
        for block in self.store.blocks:
            state = self.store.state_of(block)
            like = next(v for k, v in state.items() if k.startswith("Q"))
            kind = self._kind_of(block)
            alike[block.shape, like.dtype, self.store.dtype_of(block), like.device, kind].append((block, state))
            if "momentum" in state:
                averaging.add(kind[0])
        stacks = []
        for (shape, dtype, precise, device, kind), same in alike.items():
            blocks, states = zip(*same, strict=True)
            template = self.store.template(kind[0], shape, dtype)
            stacks.append(stack_of(blocks, states, template, precise, device, kind[0] in averaging))
        return side_by_side(stacks, self._key)

    def _kind_of(self, block: Block) -> tuple[int, torch.dtype, bool]:
        """Param group of a block, dtype of its parameters, and whether it is stacked apart, see ``Resting``.

        The dtype is part of the key because kernels require one dtype for all parameters of a bucket.
        """
        first = block.params[0]
        return self.store.group_of[first], self.store.params[first].dtype, block in self._resting.apart

    def _key(self, stack: Stack) -> tuple[Any, ...]:
        """Key that the stacks of a bucket have in common."""
        return self._kind_of(stack.blocks[0]), stack.device, stack.like.dtype, stack.dtype

    def _share_views(self, stack: Stack) -> None:
        """Make the state of a stack's parameters views of the stack."""
        buffers = stack.buffers()
        # Tools replace all entries of Q or none of them: it is enough to watch one of them, and the average.
        watched = [next(iter(buffers)), *(name for name in AVERAGE if name in buffers)]
        states = [self.store.state_of(block) for block in stack.blocks]
        add_rows(states, buffers)
        for block, state in zip(stack.blocks, states, strict=True):
            self._views[block] = (state, {name: state[name] for name in watched})

    def _new_buckets(self, stacks: Sequence[Stack]) -> list[Bucket]:
        alike: defaultdict[tuple[Any, ...], list[Stack]] = defaultdict(list)
        for stack in stacks:
            alike[self._key(stack)].append(stack)
        return [
            Bucket(same, kind[0], self.store.choices[kind[0]].preconditioner, self.store.normalize)
            for (kind, *_), same in alike.items()
        ]

    def buckets(self, given: Mapping[int, Tensor]) -> Sequence[Bucket]:
        """Buckets of the blocks that have gradients.

        The result is the same object as long as all blocks have gradients and nothing was changed from outside. Blocks
        that had no gradient for several steps get buckets of their own if the steps of the others can then be captured.
        """
        self.stacks()
        if self._small and all(bucket.has_kernels for bucket in self._buckets) and self._set_apart(given):
            self._stack_again()
        for stack in self._stacks or ():  # momentum may be switched on at any step
            if not stack.average and self.store.options_of(stack.positions[0])["momentum"]:
                stack.start_average()
                self._share_views(stack)
        some = [having(bucket, given) for bucket in self._buckets]
        if all(map(operator.is_, some, self._buckets)):
            return self._buckets
        return [bucket for bucket in some if bucket is not None]

    def _set_apart(self, given: Mapping[int, Tensor]) -> bool:
        """Decide which blocks are stacked apart, and return whether that has changed, see ``Resting``."""
        if capturing():
            self._resting.stop()
        blocks, group_of, apart = self.store.blocks, self.store.group_of, self._resting.apart
        if len(given) == sum(len(block.params) for block in blocks):
            return self._resting.changes(frozenset())
        # A param group without any gradient has buckets of its own anyway, so that its blocks stay as they are stacked.
        active = {group_of[i] for i in given}

        def is_apart(block: Block) -> bool:
            return not any(i in given for i in block.params) if group_of[block.params[0]] in active else block in apart

        return self._resting.changes(frozenset(filter(is_apart, blocks)))
