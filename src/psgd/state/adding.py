"""Addition of a param group: its checks, the options that PSGD chooses for it, and its state."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from . import checks, options, spelling
from .choices import Choices
from .defaults import Given
from .store import Store


def checked(
    param_group: Any,
    store: Store,
    choice_names: Sequence[str],
    defaults: Mapping[str, Any],
    given: Given,
    whitening: bool,
) -> dict[str, Any]:
    """Param group, completed by the options for ``Q`` that it lacks; raise if anything in it is not allowed.

    Args:
        param_group: param group of the user, which is not changed
        store: store of the optimizer; the group becomes the next of its groups
        choice_names: names of the optimizer's choices; a group may make only those of ``Choices``
        defaults: options for groups that do not set them
        given: options for ``Q`` that the user gave to the optimizer
        whitening: whether ``Q`` is fitted to gradients instead of pairs
    """
    index = len(store.groups)
    where = f" in param group {index}"
    for_all = [name for name in choice_names if name not in Choices._fields]
    group = checks.param_group(param_group, for_all, index)
    if store.groups and "param_names" in store.groups[0]:
        group["params"] = checks.named(group["params"], index)
    spelling.check_keys(group, (*options.NAMES, *choice_names), index)
    checks.new_parameters(group["params"], store.params, where)
    structure, blocks = store.choices_of(index, group)
    own = where if "preconditioner" in group else ""
    checks.fits_structure(structure, store.precond_dtype, store.normalize, own)
    tensors = checks.tensors_of(group["params"])
    store.ranks.check_new(tensors, where)
    placed = store.divide(tensors, blocks)
    given.fill(group, structure, whitening, placed)
    options.check({**defaults, **group}, where)
    if store.ranks.has_all:
        checks.fits_memory(structure, placed, own)
    return group


def adopt(store: Store, groups: list[dict[str, Any]], state: MutableMapping[Any, Any]) -> None:
    """Create the state of the last param group; if that fails, remove the group and its state again."""
    try:
        store.adopt(len(groups) - 1, groups[-1])
    except BaseException:
        for p in groups.pop()["params"]:
            state.pop(p, None)
        store.rebuild()
        raise
