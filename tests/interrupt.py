"""Interrupts at a chosen operation."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Break(TorchDispatchMode):
    """Raises at the n-th operation of torch: out of memory, or a person at the keyboard."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))
