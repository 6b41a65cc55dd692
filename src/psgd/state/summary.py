"""Short description of an optimizer: its choices, its numbers, and its blocks with their structure and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..engine.stack import Stack
from .memory import readable


def headline(name: str, choices: Sequence[object], groups: Sequence[Mapping[str, Any]], options: Sequence[str]) -> str:
    shown = [choice.__name__ if isinstance(choice, type(headline)) else str(choice) for choice in choices]
    numbers = [f"{option}={either([_plain(group[option]) for group in groups])}" for option in options]
    return f"{name}({', '.join(shown)}; {', '.join(numbers)})"


def either(values: Iterable[object]) -> str:
    """Text of values of param groups, each once."""
    texts = list(dict.fromkeys(map(str, values)))
    return " or ".join(texts) if len(texts) < 4 else "various"


def table(stacks: Sequence[Stack], params: Sequence[Tensor], group_of: Sequence[int] | None = None) -> str:
    """Table with one line for all blocks of a stack, and a last line with the sums.

    Args:
        stacks: stacks of all blocks
        params: all parameters
        group_of: param group of each parameter, if the lines are to tell it
    """
    lines = []
    total = 0
    for stack in stacks:
        size = stack.nbytes()
        total += size
        times = f"{len(stack.blocks)} × " if len(stack.blocks) > 1 else ""
        group = "" if group_of is None else f"group {group_of[stack.positions[0]]}: "
        shape = tuple(stack.blocks[0].shape)
        kind = str(stack.like.dtype).removeprefix("torch.")
        lines.append(f"  {group}{times}{shape}: {stack.group.describe()}, {kind} on {stack.device}, {readable(size)}")
    numel = sum(p.numel() for p in params)
    tensors = f"{len(params)} tensor{'s' if len(params) != 1 else ''}"
    return "\n".join([*lines, f"  {tensors} with {numel:,} elements, state of {readable(total)}"])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
