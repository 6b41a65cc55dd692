"""Modules that a closure can reach, found without running any code of the user."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

#: largest number of objects that are searched, and largest length of containers that are searched
_OBJECTS = 2000
_ITEMS = 1000
#: types that the search does not enter, as they lead to no module, or to all modules of the program
_ENDS = (str, bytes, int, float, complex, type(None), type, ModuleType, CodeType, FrameType, Tensor, Optimizer)


def modules_of(closure: Callable[[], Any]) -> list[nn.Module]:
    """Modules that a closure refers to, by its variables or through functions and objects that it uses.

    The search is bounded and may miss some. Submodules are not listed.
    """
    found, queue, seen = [], deque[Any]([closure]), set[int]()
    while queue and len(seen) < _OBJECTS:
        thing = queue.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kind = type(thing)  # `isinstance` would run code of proxy objects
        if issubclass(kind, nn.Module):
            found.append(thing)
        elif not issubclass(kind, _ENDS) and not (kind in (list, tuple, dict, set) and len(thing) > _ITEMS):
            queue.extend(_function(thing) if kind is FunctionType else gc.get_referents(thing))
    return found


def _function(function: FunctionType) -> Iterator[Any]:
    """Objects that a function refers to; its globals are included only if its code names them."""
    variables = function.__globals__
    yield from (thing for thing in (function.__closure__, function.__defaults__, function.__kwdefaults__) if thing)
    yield from vars(function).values()
    yield from (variables[name] for name in _names(function.__code__) if name in variables)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
