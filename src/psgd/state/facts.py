"""Facts about a model and its optimizer that must be the same on all ranks, see ``ops.agreement``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..ops.agreement import Fact, checksum
from ..ops.distributed import is_dtensor
from . import choices, options
from .store import Store


def of_groups(store: Store) -> list[Fact]:
    """Facts that every step depends on: shapes and param groups of all parameters, and options of all param groups."""
    numbers = [
        Fact(lambda g, name=name: f"{name} of param group {g}", [group.get(name) for group in store.groups])  # type: ignore[misc]
        for name in options.NAMES
    ]
    own = [{name: _in_words(choice) for name, choice in choices.only(group).items()} for group in store.groups]
    numbers += [
        Fact(lambda g, name=name: f"{name} of param group {g}", [group.get(name) for group in own])  # type: ignore[misc]
        for name in choices.Choices._fields
    ]
    shapes = Fact(lambda i: f"the shape of {store.name(i)}", [tuple(kind[0]) for kind in store.kinds])
    return [shapes, Fact(lambda i: f"the param group of {store.name(i)}", store.group_of), *numbers]


def of_model(store: Store, chosen: Mapping[str, Any]) -> list[Fact]:
    """Facts of ``of_groups``, dtypes and names of the parameters, and the choices of the optimizer."""
    names = [name for group in store.groups for name in group.get("param_names", ())]
    return [
        *of_groups(store),
        Fact(lambda i: f"the dtype of {store.name(i)}", [str(p.dtype) for p in store.params]),
        Fact(lambda i: f"the name of parameter {i}", names),
        Fact(lambda k: list(chosen)[k], [_in_words(choice) for choice in chosen.values()]),
    ]


def of_contents(store: Store, all_state: bool) -> list[Fact]:
    """Checksums of all parameters that this rank holds as a whole, and of their state if all ranks have all of it.

    The facts include whether each parameter is frozen or has no gradient, as a difference in these would make
    parameters differ after the next step.
    """
    whole = [i for i, p in enumerate(store.params) if not is_dtensor(p)]
    entries = [(i, name) for i in whole for name in sorted(store.state[store.params[i]])] if all_state else []
    return [
        Fact(lambda i: f"whether {store.name(i)} requires a gradient", [p.requires_grad for p in store.params]),
        Fact(lambda i: f"whether {store.name(i)} has a gradient", [p.grad is not None for p in store.params]),
        Fact(lambda k: f"the checksum of {store.name(whole[k])}", [checksum(store.params[i]) for i in whole]),
        Fact(
            lambda k: f"the checksum of {entries[k][1]} of {store.name(entries[k][0])}",
            [checksum(store.state[store.params[i]][name]) for i, name in entries],
        ),
    ]


def _in_words(choice: Any) -> str:
    """Text of a choice that is the same on every rank: without memory addresses and device numbers."""
    return re.sub(r"0x[0-9a-f]+|cuda:\d+", "…", repr(choice))
