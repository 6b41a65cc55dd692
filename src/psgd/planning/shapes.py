"""Input of a plan: a model, its parameters, or only their shapes, as parameters that use no memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import Affine, Blocks
from ..state import choices

WANTED = "plan wants a module, parameters, or shapes: (64, 32), or (80, (64, 32)) for 80 alike, or ('name', (64, 32))"


def param_groups(model_or_shapes: Any, blocks: Blocks) -> tuple[list[str], list[dict[str, Any]]]:
    """Names of all parameters, and param groups of tensors of the same kinds on the device ``"meta"``.

    Args:
        model_or_shapes: see ``plan``
        blocks: if they join the tensors of a layer, a module gets one param group for each layer
    """
    if isinstance(model_or_shapes, nn.Module):
        named = model_or_shapes.named_parameters()
        model_or_shapes = Affine.groups(model_or_shapes) if isinstance(blocks, Affine) else named
    elif isinstance(model_or_shapes, Mapping):
        model_or_shapes = model_or_shapes.items()
    if isinstance(model_or_shapes, (Tensor, str)) or not isinstance(model_or_shapes, Iterable):
        raise TypeError(f"model_or_shapes={model_or_shapes!r}: {WANTED}")
    items = list(model_or_shapes)
    are_groups = bool(items) and all(isinstance(item, Mapping) and "params" in item for item in items)
    names: list[str] = []
    groups = []
    known: dict[Tensor, Tensor] = {}  # parameters that appear twice must still do so
    for group in items if are_groups else [{"params": items}]:
        inside = group["params"]
        params = []
        for name, p in _read(inside.items() if isinstance(inside, Mapping) else inside):
            names.append(name or f"parameter {len(names)}")
            params.append(p if p.is_meta else known.setdefault(p, torch.empty(p.shape, dtype=p.dtype, device="meta")))
        groups.append({"params": params, **choices.only(group)})
    if not names:
        raise ValueError(f"model_or_shapes={items!r}: plan wants at least one parameter")
    return names, groups


def _read(items: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    for i, whole in enumerate([items] if isinstance(items, Tensor) else items):
        name, count, item = "", 1, whole
        if _is_pair(item) and isinstance(item[0], str):
            name, item = item
        if _is_pair(item) and not _is_length(item[1]):
            count, item = item
        if isinstance(item, Tensor) and count == 1:
            yield name, item
            continue
        if not (_is_length(count) and count > 0 and isinstance(item, (tuple, list)) and all(map(_is_length, item))):
            raise TypeError(f"model_or_shapes: item {i} is {whole!r}; {WANTED}")
        for k in range(count):
            yield name.replace("*", str(k)), torch.empty(tuple(item), dtype=torch.float32, device="meta")


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
