"""Choices of a param group: the structure of its ``Q``, and which of its parameters share one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..blocks import Blocks
from ..groups import Structure
from . import checks


class Choices(NamedTuple):
    """Options that a param group may choose for itself, by their names in it; they are fixed once it is added."""

    preconditioner: Structure
    blocks: Blocks

    def of_group(self, group: Mapping[str, Any], where: str) -> Choices:
        """Choices of a param group; these choices are the defaults for those that it does not make."""
        kinds = zip(self._fields, self, (Structure, Blocks), strict=True)
        return Choices(*[checks.choice(name, group.get(name, usual), kind, where) for name, usual, kind in kinds])


def without(group: Mapping[str, Any]) -> dict[str, Any]:
    """Param group without its choices."""
    return {name: value for name, value in group.items() if name not in Choices._fields}


def only(group: Mapping[str, Any]) -> dict[str, Any]:
    """Choices that a param group makes for itself."""
    return {name: group[name] for name in Choices._fields if name in group}
