"""One suite of laws for every structure.

A law is a test of a case, or of a structure alone. ``law`` and ``law_of_structures`` let it run for all of those in
``tests/cases.py``, and keep it in ``LAWS``, so that a structure from elsewhere can be held to it too. A law that is not
for all has a ``where``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from psgd.groups import Structure

from ..cases import CASES, STRUCTURES, Case


@dataclass(frozen=True)
class Law:
    """A test, what it is a test of, and all values of its other arguments."""

    test: Callable[..., None]
    of: str
    where: Callable[[Any], bool]
    choices: dict[str, Sequence[Any]]

    def __str__(self) -> str:
        return self.test.__name__

    def check(self, structure: Structure, shapes: Iterable[tuple[int, ...]]) -> int:
        """Hold a structure to the law, and return how many tests that took."""
        subjects = [structure] if self.of == "structure" else [Case(structure, shape) for shape in shapes]
        runs = list(product(filter(self.where, subjects), *self.choices.values()))
        for subject, *values in runs:
            self.test(**{self.of: subject}, **dict(zip(self.choices, values, strict=True)))
        return len(runs)


LAWS: list[Law] = []


def law(where: Callable[[Case], bool] = lambda case: True, **choices: Sequence[Any]) -> Callable[..., Any]:
    """Run a test for all cases that it is for, and for all values of its other arguments."""
    return _registered("case", CASES, where, choices)


def law_of_structures(
    where: Callable[[Structure], bool] = lambda structure: True, **choices: Sequence[Any]
) -> Callable[..., Any]:
    """Run a test for all structures that it is for, and for all values of its other arguments."""
    return _registered("structure", STRUCTURES, where, choices)


def _registered(
    of: str, subjects: Sequence[Any], where: Callable[[Any], bool], choices: dict[str, Sequence[Any]]
) -> Callable[..., Any]:
    def register(test: Callable[..., None]) -> Callable[..., None]:
        assert set(inspect.signature(test).parameters) == {of, *choices}
        LAWS.append(Law(test, of, where, choices))
        for name, values in choices.items():
            test = pytest.mark.parametrize(name, values, ids=_name)(test)
        return pytest.mark.parametrize(of, [subject for subject in subjects if where(subject)], ids=str)(test)

    return register


def _name(value: Any) -> str:
    return "-".join(map(_name, value)) if isinstance(value, tuple) else getattr(value, "__name__", str(value))
