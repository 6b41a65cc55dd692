"""Short description of an optimizer: its choices, its numbers, and its blocks with their structure and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..engine.stack import Stack
from .memory import readable


def headline(name: str, choices: Sequence[object], groups: Sequence[Mapping[str, Any]], options: Sequence[str]) -> str:
    shown = [choice.__name__ if isinstance(choice, type(headline)) else str(choice) for choice in choices]
    numbers = []
    for option in options:
        values = list(dict.fromkeys(str(_plain(group[option])) for group in groups))
        numbers.append(f"{option}={' or '.join(values) if len(values) < 4 else 'various'}")
    return f"{name}({', '.join(shown)}; {', '.join(numbers)})"


def table(stacks: Sequence[Stack], params: Sequence[Tensor]) -> str:
    """Table with one line for all blocks of a stack, and a last line with the sums."""
    lines = []
    total = 0
    for stack in stacks:
        size = stack.nbytes()
        total += size
        times = f"{len(stack.blocks)} × " if len(stack.blocks) > 1 else ""
        shape = tuple(stack.blocks[0].shape)
        kind = str(stack.like.dtype).removeprefix("torch.")
        lines.append(f"  {times}{shape}: {stack.group.describe()}, {kind} on {stack.device}, {readable(size)}")
    numel = sum(p.numel() for p in params)
    tensors = f"{len(params)} tensor{'s' if len(params) != 1 else ''}"
    return "\n".join([*lines, f"  {tensors} with {numel:,} elements, state of {readable(total)}"])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
