"""Peak memory on a CPU, counted instead of measured, so that it is the same every time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The largest number of bytes in storages that were made under it and are alive.

    Tensors that exist before it are named, so that letting go of them counts as well.
    """

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.bytes = self.peak = 0
        self.count(existing)
        self.bytes -= (start := self.bytes)
        assert start == sum(t.nbytes for t in existing)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.count(t for t in tree_leaves(result) if isinstance(t, Tensor) and t.untyped_storage()._cdata not in before)
        self.peak = max(self.peak, self.bytes)
        return result

    def count(self, tensors: Iterable[Tensor]) -> None:
        for storage in (t.untyped_storage() for t in tensors):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size
