"""Modules that a closure refers to are found wherever users keep them, without running their code."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from psgd import PSGD
from psgd.probes.reachable import modules_of

MODEL = nn.Linear(2, 1)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.parts = {"models": [model]}

    def closure(self) -> None: ...

    def __getattr__(self, name: str):
        raise AssertionError("the search runs code of the user")

    @property
    def model(self):
        raise AssertionError("the search runs code of the user")


def by_variable(model):
    def closure():
        return model(torch.ones(2))

    return closure


def by_function(model):
    loss_of = by_variable(model)
    return lambda: loss_of()


def by_default(model):
    def closure(model=model):
        return model

    return closure


def by_slots(model):
    class Held:
        __slots__ = ("model",)

    held = Held()
    held.model = model
    return lambda: held


@pytest.mark.parametrize(
    "make",
    [
        by_variable,
        by_function,
        by_default,
        by_slots,
        lambda model: Trainer(model).closure,
        lambda model: partial(print, model),
        lambda model: partial(Trainer.closure, Trainer(model)),
        lambda model: SimpleNamespace(inner=by_variable(model)),
        lambda model: model.forward,
        lambda model: torch.compile(by_variable(model), backend="eager"),
    ],
)
def test_a_module_is_found(make):
    model = nn.Linear(2, 1)
    assert model in modules_of(make(model))


def test_globals_are_found_if_they_are_named():
    assert modules_of(lambda: MODEL.weight) == [MODEL]
    assert modules_of(lambda: [MODEL.weight for _ in range(3)]) == [MODEL]
    assert modules_of(lambda: 3) == []


def test_the_search_is_bounded_and_does_not_enter_optimizers():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    optimizer = PSGD(model.parameters())
    many, deep = [[i] for i in range(10**5)], []
    for _ in range(10**4):
        deep = [deep]
    assert modules_of(lambda: (optimizer, many, deep)) == []
