"""Checks of a state dict: everything is checked and copied before any of it is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..engine.stack import AVERAGE, LENGTHS
from ..groups import Group
from . import choices, options

#: entries that a state may lack: entries of options not in use, and entries that older versions did not write
_OPTIONAL = {*AVERAGE, *LENGTHS, "skipped"}


def checked_groups(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Saved param groups, completed by the defaults of options that did not exist when they were saved.

    Structure and blocks are not loaded: this optimizer keeps its own, and ``checked_state`` checks that the saved state
    fits them.
    """
    for key, kind in (("state", Mapping), ("param_groups", list)):
        if key not in saved:
            raise ValueError(f"state_dict[{key!r}]: missing; load_state_dict wants what state_dict() returned")
        _check_kind(saved[key], kind, f"state_dict[{key!r}]")
    theirs = saved["param_groups"]
    for i, group in enumerate(theirs):
        _check_kind(group, Mapping, f"state_dict['param_groups'][{i}]")
        _check_kind(group.get("params"), list, f"state_dict['param_groups'][{i}]['params']")
    sizes = [len(group["params"]) for group in groups]
    their_sizes = [len(group["params"]) for group in theirs]
    if sizes != their_sizes:
        raise ValueError(
            f"state_dict['param_groups']: groups of {their_sizes} parameters; this optimizer has groups of {sizes}. "
            "psgd.whiten and psgd.newton make more groups with weight_decay than without"
        )
    # Checkpoints from before these two options existed were made without a boost and without a factor.
    without = {"precond_boost": 1.0, "adapt_lr": 0.0}
    completed = [{**defaults, **without, **group} for group in map(choices.without, theirs)]
    for i, group in enumerate(completed):
        options.check(group, f" in state_dict['param_groups'][{i}]")
    return completed


def checked_state(
    saved: Mapping[str, Any],
    expected: Sequence[Mapping[str, Tensor]],
    templates: Sequence[Group | None],
    frozen: Sequence[bool],
) -> list[dict[str, Tensor]]:
    """Copies of the saved state in the dtypes of this optimizer, one dict for each parameter in order.

    Args:
        saved: a state dict whose param groups have been checked
        expected: for each parameter, tensors of the right shape, dtype and device for every entry that it may have
        templates: for each parameter, the group of the block whose state it holds, or None
        frozen: for each parameter, whether its state may be missing; it then gets a copy of ``expected``
    """
    ids = list(chain.from_iterable(group["params"] for group in saved["param_groups"]))
    state = saved["state"]
    known = set(ids)
    unknown = [key for key in state if key not in known]
    if unknown:
        raise ValueError(f"state_dict['state'][{unknown[0]!r}]: belongs to no parameter of state_dict['param_groups']")
    return [
        _checked_entries(state[key], right, template, f"state_dict['state'][{key!r}]")
        if key in state
        else _missing(right, may_be_missing, key)
        for key, right, template, may_be_missing in zip(ids, expected, templates, frozen, strict=True)
    ]


def _missing(right: Mapping[str, Tensor], may_be_missing: bool, key: object) -> dict[str, Tensor]:
    if not may_be_missing:
        raise ValueError(f"state_dict['state'][{key!r}]: missing; it should have {', '.join(right)}")
    return {name: value.clone() for name, value in right.items() if name not in ("momentum", "momentum_weight")}


def _check_kind(value: object, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {type(value).__name__} where a {'list' if kind is list else 'dict'} should be")


def _other(name: str) -> str:
    return "; saved with another preconditioner, or other blocks?" if name.startswith("Q") else ""


def _checked_entries(
    entries: Mapping[str, Any], right: Mapping[str, Tensor], template: Group | None, where: str
) -> dict[str, Tensor]:
    _check_kind(entries, Mapping, where)
    for name in entries:
        if name not in right:
            raise ValueError(
                f"{where}[{name!r}]: not part of this optimizer's state, which has {', '.join(right)}{_other(name)}"
            )
    copies = {}
    for name, like in right.items():
        if name in entries:
            copies[name] = _converted(entries[name], like, name, where)
        elif name == "skipped":
            copies[name] = torch.zeros_like(like)
        elif name not in _OPTIONAL:
            raise ValueError(f"{where}[{name!r}]: missing{_other(name)}")
    if ("momentum" in copies) != ("momentum_weight" in copies):
        raise ValueError(f"{where}['momentum']: it comes with 'momentum_weight', or not at all")
    average = copies.get("momentum")
    if average is not None and not average.is_meta and not copies["momentum_weight"] and bool(average.any()):
        raise ValueError(f"{where}['momentum']: not zero, but its weights are; PSGD cannot go on from it")
    if template is not None and not any(copy.is_meta for copy in copies.values()):
        fault = template.bind({name: copies[name][None] for name in template.buffers()}).fault()
        if fault is not None:
            names, why = fault
            raise ValueError(f"{where}[{', '.join(map(repr, names))}]: {why}; PSGD cannot go on from it")
    return copies


def _converted(value: Any, like: Tensor, name: str, where: str) -> Tensor:
    """Copy of a saved tensor in the dtype and on the device of ``like``; raise if a value is not allowed."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{where}[{name!r}]: {type(value).__name__} where a tensor should be")
    if value.shape != like.shape or _kind_of(value) != _kind_of(like):
        raise ValueError(
            f"{where}[{name!r}]: {value.dtype} of shape {tuple(value.shape)}; "
            f"this optimizer has {like.dtype} of shape {tuple(like.shape)}{_other(name)}"
        )
    copy = value.detach().to(like.device, like.dtype, copy=True)
    if copy.is_meta:  # it has no values to check
        return copy
    if name in ("step", "skipped") and not 0 <= int(copy) < 2**53:
        raise ValueError(f"{where}[{name!r}]: {int(copy)}; PSGD wants a count of at least 0 and less than 2⁵³")
    if not bool(torch.isfinite(copy).all()):
        lost = bool(torch.isfinite(value).all())
        why = f"too large for {like.dtype}, to which it is converted" if lost else "not finite"
        raise ValueError(f"{where}[{name!r}]: {why}; PSGD cannot go on from it")
    if name == "momentum_weight" and not 0 <= float(copy) < 1.001:
        raise ValueError(f"{where}[{name!r}]: {float(copy)}; PSGD wants a sum of weights, between 0 and 1")
    if name in LENGTHS and float(copy) < 0:
        raise ValueError(f"{where}[{name!r}]: {float(copy)}; PSGD wants a number of at least 0")
    return copy


def _kind_of(value: Tensor) -> str:
    """Kind of a tensor's values; a saved tensor is converted only within its kind."""
    if value.is_complex() or value.is_floating_point():
        return "complex" if value.is_complex() else "real"
    return "flag" if value.dtype == torch.bool else "whole"


def copied(state: Mapping[Tensor, Mapping[str, Tensor]]) -> defaultdict[Tensor, dict[str, Tensor]]:
    """Copies of all tensors of a state, as pickling a view of a stack would pickle the whole stack."""
    return defaultdict(dict, {p: {k: v.clone() for k, v in entries.items()} for p, entries in state.items()})


def apart(_: object, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State dict whose tensors have separate storages: ``torch.save`` of a view would write the whole stack.

    The tensors are not copied: each gets a storage that covers only its own part of the same memory. The structure and
    blocks of param groups are saved as text, so that a checkpoint contains only tensors, numbers and text.
    """
    state = {
        key: {k: _alone(v) if isinstance(v, Tensor) else v for k, v in entries.items()}
        if isinstance(entries, Mapping)
        else entries
        for key, entries in state_dict["state"].items()
    }
    groups = [
        {**group, **{name: repr(choice) for name, choice in choices.only(group).items()}}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def _alone(view: Tensor) -> Tensor:
    if view.device.type not in ("cpu", "cuda") or type(view) is not Tensor or view.numel() == 0:
        return view
    storage = view.untyped_storage()
    size = sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True)) + 1
    first, stop = (i * view.itemsize for i in (view.storage_offset(), view.storage_offset() + size))
    if (first, stop) == (0, storage.nbytes()):
        return view
    same_memory = torch.empty(0, dtype=view.dtype, device=view.device)
    return same_memory.set_(storage[first:stop], 0, view.shape, view.stride())
