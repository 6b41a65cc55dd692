"""The build fails where a public name is not documented.

Public is what ``psgd.__all__`` has, what the modules among it define or export, and what their classes define that does
not begin with an underscore. Each of them must have a docstring and a place in the reference: its own, or for what a
class inherits or overrides that of the class it comes from.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_ANCHORS: set[str] = set()


def on_pre_build(*, config: Any) -> None:
    _ANCHORS.clear()


def on_page_content(content: str, *, page: Any, config: Any, files: Any) -> None:
    _ANCHORS.update(re.findall(r'\bid="([\w.]+)"', content))


def on_post_build(*, config: Any) -> None:
    sys.path.insert(0, str(Path(config["config_file_path"]).parent / "src"))
    try:
        import psgd
    finally:
        sys.path.pop(0)
    if problems := undocumented(psgd, _ANCHORS):
        from mkdocs.exceptions import PluginError

        raise PluginError("public names that are not documented:\n  " + "\n  ".join(problems))


@dataclass(frozen=True)
class Name:
    """A public name, where it may be documented, and its docstring."""

    name: str
    places: tuple[str, ...]
    doc: str | None


def undocumented(package: ModuleType, anchors: set[str]) -> list[str]:
    """What is missing, in words."""
    return [
        f"{name.name}: no docstring"
        if not name.doc
        else f"{name.name}: not in the reference; add `::: {name.places[0]}`"
        for name in public(package)
        if not name.doc or not anchors.intersection(name.places)
    ]


def public(package: ModuleType) -> Iterator[Name]:
    for name in package.__all__:
        value = getattr(package, name)
        path = f"{package.__name__}.{name}"
        yield Name(path, (path, _home(value, path)), _own_doc(value))
        if inspect.ismodule(value):
            yield from _of_module(value, path, package)
        elif inspect.isclass(value):
            yield from _of_class(value, path)


def _of_module(module: ModuleType, path: str, package: ModuleType) -> Iterator[Name]:
    for name in getattr(module, "__all__", None) or vars(module):
        value = vars(module)[name]
        home = getattr(value, "__module__", None) or ""
        if name.startswith("_") or not f"{home}.".startswith(f"{module.__name__}."):
            continue
        if name in package.__all__ and value is getattr(package, name):
            continue  # a name of the package too, and documented as that
        yield Name(f"{path}.{name}", (f"{path}.{name}",), _own_doc(value))
        if inspect.isclass(value):
            yield from _of_class(value, f"{path}.{name}")


def _of_class(cls: type, path: str) -> Iterator[Name]:
    package = cls.__module__.partition(".")[0]
    ours = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == package]
    for name in sorted({name for c in ours for name in vars(c) if not name.startswith("_")}):
        holders = [c for c in ours if name in vars(c)]
        value = vars(holders[0])[name]
        if not (callable(value) or isinstance(value, property | staticmethod | classmethod)):
            continue  # fields are described where the class is
        places = (f"{path}.{name}", *_places(holders, name))
        yield Name(f"{path}.{name}", places, inspect.getdoc(getattr(cls, name)))


def _places(holders: Iterable[type], name: str) -> Iterator[str]:
    for holder in holders:
        package, *modules = holder.__module__.split(".")
        for depth in range(len(modules), -1, -1):
            yield ".".join([package, *modules[:depth], holder.__name__, name])


def _home(value: Any, path: str) -> str:
    return (
        value.__name__ if inspect.ismodule(value) else f"{getattr(value, '__module__', path)}.{path.rpartition('.')[2]}"
    )


def _own_doc(value: Any) -> str | None:
    """A dataclass without docstring has its signature for one."""
    doc = value.__doc__
    return None if doc is None or re.fullmatch(rf"{getattr(value, '__name__', '')}\(.*\)", doc) else doc
