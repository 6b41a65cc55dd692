"""Short description of an optimizer: its choices and options, and its blocks with their structure and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor

from ..criteria import Criterion
from ..engine.stack import Stack
from ..probes import Probe
from . import options
from .choices import Choices
from .memory import readable
from .store import Store


def describe(name: str, store: Store, criterion: Criterion, probe: Probe, init: str) -> str:
    """Headline with choices and options, and a table of the blocks.

    Args:
        name: name of the optimizer's class
        store: store of the optimizer
        criterion: criterion that ``P`` is fitted to
        probe: source of the pairs
        init: initial ``Q``
    """
    structures, blocks = (either(getattr(c, field) for c in store.choices) for field in Choices._fields)
    choices = [structures, criterion, probe, blocks]
    choices += [choice for choice in (store.precond_dtype, store.normalize) if choice is not None]
    choices += [f"init={init!r}"] * (init != "scaled")
    alike = len(set(map(str, store.choices))) < 2
    lines = _table(store.stacks(), store.params, None if alike else store.group_of)
    return f"{_headline(name, choices, store.groups)}\n{lines}"


def _headline(name: str, choices: Sequence[object], groups: Sequence[Mapping[str, Any]]) -> str:
    shown = [choice.__name__ if isinstance(choice, FunctionType) else str(choice) for choice in choices]
    numbers = [f"{option}={either([_plain(group[option]) for group in groups])}" for option in options.NAMES]
    return f"{name}({', '.join(shown)}; {', '.join(numbers)})"


def either(values: Iterable[object]) -> str:
    """Distinct values of an option over the param groups, joined by "or"."""
    texts = list(dict.fromkeys(map(str, values)))
    return " or ".join(texts) if len(texts) < 4 else "various"


def _table(stacks: Sequence[Stack], params: Sequence[Tensor], group_of: Sequence[int] | None = None) -> str:
    """Table with one line for all blocks of a stack, and a last line with the sums.

    Args:
        stacks: stacks of all blocks
        params: all parameters
        group_of: param group of each parameter, or None if the lines do not name it
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
