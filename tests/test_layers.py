"""The layers of the package: imports point one way, and only a room of its own knows the kinds of things in it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import psgd
from psgd.groups import Factor, Group, Groups, Structure
from psgd.probes import Probe

ROOT = Path(psgd.__file__).parent

#: Units of the package, from the top: each imports units of lower layers only, and none of its own layer.
#: ``psgd`` is the package itself, its public names and version.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"bench"},
    {"experiments"},
    {"psgd", "lightning"},
    {"monitor"},
    {"diagnostics", "minimizing", "planning", "recipes"},
    {"optimizer"},
    {"sample"},
    {"state"},
    {"engine", "ranks"},
    {"probes"},
    {"blocks", "criteria"},
    {"groups"},
    {"normalize", "tangent"},
    {"ops", "closed_form"},
    {"notice"},
]
#: what users choose, by the unit that alone may ask which kind it is
CHOICES = {"probes": [Probe], "groups": [Structure, Group, Groups, Factor]}
CRITERIA = {"c1", "c2", "c3"}
#: comparisons that find out which thing something is
SAME = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.In, ast.NotIn)


class Import(NamedTuple):
    importer: str
    imported: str
    where: str


@cache
def modules() -> list[tuple[str, Path, ast.Module]]:
    """All modules, with the unit that each belongs to."""
    paths = sorted(ROOT.rglob("*.py"))
    first = [path.relative_to(ROOT).with_suffix("").parts[0] for path in paths]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    return list(zip(["psgd" if name == "__init__" else name for name in first], paths, trees, strict=True))


@cache
def units() -> frozenset[str]:
    """All units that there are."""
    return frozenset(unit for unit, _, _ in modules())


def unit_of(module: list[str]) -> str:
    """Unit of a module, given by its path below the package."""
    return module[0] if module and module[0] in units() else "psgd"


def imported(tree: ast.Module, package: list[str]) -> Iterator[tuple[list[str], int]]:
    """Modules of this package that a module imports, anywhere in it, with the line.

    Args:
        tree: the module
        package: path of its folder below the package
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "psgd":
                    yield alias.name.split(".")[1:], node.lineno
        elif isinstance(node, ast.ImportFrom):
            name = (node.module or "").split(".") if node.module else []
            if node.level:
                base = package[: len(package) - (node.level - 1)] + name
            elif name[0] == "psgd":
                base = name[1:]
            else:
                continue
            for alias in node.names:  # `from . import flags` imports a module, `from . import PSGD` a name of one
                yield base or [alias.name], node.lineno


@cache
def imports() -> list[Import]:
    """Imports of one unit by another."""
    found = []
    for unit, path, tree in modules():
        package = list(path.relative_to(ROOT).parts[:-1])
        for module, line in imported(tree, package):
            other = unit_of(module)
            if other != unit:
                found.append(Import(unit, other, f"{path.relative_to(ROOT)}:{line}"))
    return found


def layer(unit: str) -> int:
    return next(depth for depth, layer in enumerate(LAYERS) if unit in layer)


def test_every_unit_has_a_layer():
    placed = [unit for layer in LAYERS for unit in layer]
    assert len(placed) == len(set(placed))
    assert set(placed) == units()


def test_imports_point_down():
    wrong = [each for each in imports() if layer(each.imported) <= layer(each.importer)]
    assert not wrong, "\n".join(f"{where}: {unit} imports {other}" for unit, other, where in wrong)


def test_there_are_no_cycles_between_units():
    """Follows from the layers; here without them."""
    rest = {unit: {each.imported for each in imports() if each.importer == unit} for unit in units()}
    while free := {unit for unit, others in rest.items() if not others & rest.keys()}:
        rest = {unit: others for unit, others in rest.items() if unit not in free}
    assert not rest, f"imports in a circle among {sorted(rest)}"


@pytest.mark.parametrize("unit", ["closed_form", "notice", "ops"])
def test_the_lowest_units_need_nothing_of_the_package_but_a_way_to_warn(unit: str):
    assert not [each for each in imports() if each.importer == unit and each.imported != "notice"]


def test_a_formula_needs_torch_alone():
    (tree,) = (tree for unit, _, tree in modules() if unit == "closed_form")
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {(name or "").split(".")[0] for name in names} <= {"__future__", "torch"}


@pytest.mark.parametrize(
    ("text", "package", "expected"),
    [
        ("from ..ops import parameters", ["engine"], ["ops"]),
        ("from .. import PSGD, __version__", ["bench"], ["psgd", "psgd"]),
        ("from .. import monitor", ["bench"], ["monitor"]),
        ("from ...diagnostics import properties", ["experiments", "figures"], ["diagnostics"]),
        ("from . import flags", ["engine"], ["engine"]),
        ("from .optimizer import PSGD", [], ["optimizer"]),
        ("from psgd.state.store import Store", ["engine"], ["state"]),
        ("import psgd.ranks.team", ["engine"], ["ranks"]),
        ("import psgd", ["engine"], ["psgd"]),
        ("if TYPE_CHECKING:\n    from ..state import Store", ["engine"], ["state"]),
        ("def f():\n    from ..state import Store", ["engine"], ["state"]),
        ("import torch\nfrom torch import nn", ["engine"], []),
    ],
)
def test_all_kinds_of_imports_are_seen(text: str, package: list[str], expected: list[str]):
    assert [unit_of(module) for module, _ in imported(ast.parse(text), package)] == expected


# Kinds.


def kinds() -> dict[str, set[str]]:
    """Names of all probes, and of all structures, groups and factors, by the unit that owns them."""
    for path in sorted(ROOT.glob("groups/*.py")) + sorted(ROOT.glob("probes/*.py")):
        importlib.import_module(f"psgd.{path.parent.name}.{path.stem}".removesuffix(".__init__"))

    def below(kind: type) -> Iterator[type]:
        yield kind
        for other in kind.__subclasses__():
            yield from below(other)

    return {
        unit: {kind.__name__ for base in bases for kind in below(base) if kind.__module__.startswith("psgd.")}
        for unit, bases in CHOICES.items()
    }


def names_in(node: ast.AST) -> set[str]:
    """Names, and last parts of dotted names, in an expression."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def asked(tree: ast.Module) -> Iterator[tuple[set[str], int]]:
    """Names that something is compared with to find out which it is, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            if node.func.id in ("isinstance", "issubclass"):
                yield names_in(node.args[1]), node.lineno
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], SAME):
            for side in (node.left, *node.comparators):
                choices = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
                named = [choice for choice in choices if isinstance(choice, (ast.Name, ast.Attribute))]
                yield set().union(*map(names_in, named)), node.lineno
        elif isinstance(node, ast.MatchClass):
            yield names_in(node.cls), node.lineno


def questions() -> Iterator[tuple[str, str, str]]:
    """Units that ask for a kind of which they are not the owner, with that kind and the place."""
    owners = {
        **{name: unit for unit, names in kinds().items() for name in names},
        **dict.fromkeys(CRITERIA, "criteria"),
    }
    for unit, path, tree in modules():
        each = (alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
        other = CRITERIA - set(each)  # here names of something else, such as the results of runs
        for names, line in asked(tree):
            for name in sorted((names - other) & owners.keys()):
                if owners[name] != unit:
                    yield unit, name, f"{path.relative_to(ROOT)}:{line}"


def test_only_its_own_unit_asks_which_kind_a_thing_is():
    """Others ask for what they need to know: an attribute, or a method."""
    wrong = list(questions())
    assert not wrong, "\n".join(f"{where}: {unit} asks whether something is {name}" for unit, name, where in wrong)


def test_the_kinds_are_those_that_there_are():
    found = kinds()
    assert {"Probe", "Whitening", "FiniteDifference", "HessianVector"} <= found["probes"]
    assert {"Kronecker", "InverseFree", "Pooled", "NearSymmetric", "LowRankFactor", "Group"} <= found["groups"]
    public = {name for name in psgd.__all__ if inspect.isclass(getattr(psgd, name))}
    structures = {name for name in public if issubclass(getattr(psgd, name), Structure)}
    assert structures <= found["groups"]


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(probe, Whitening)",
        "isinstance(probe, psgd.Whitening)",
        "isinstance(probe, (int, Whitening))",
        "isinstance(probe, int | Whitening)",
        "type(probe) is Whitening",
        "type(probe) in (FiniteDifference, Whitening)",
        "Whitening != type(probe)",
        "type(probe).fit_ is Whitening.fit_",
        "match probe:\n    case Whitening():\n        pass",
        "issubclass(type(probe), Whitening)",
    ],
)
def test_all_kinds_of_questions_are_seen(text: str):
    assert any("Whitening" in names for names, _ in asked(ast.parse(text)))
    assert any("c3" in names for names, _ in asked(ast.parse(text.replace("Whitening", "c3"))))


#: functions of torch that make a tensor where the default device is, unless they are told otherwise
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"normal", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}


def test_every_new_tensor_of_the_library_is_told_its_device():
    """So ``torch.set_default_device`` changes nothing. Tools with data of their own follow the default."""
    untold = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for unit, path, tree in modules()
        if unit not in {"bench", "experiments", "cli"}
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).removeprefix("torch.") in FACTORIES
        and ast.unparse(call.func).startswith("torch.")
        and not any(keyword.arg in ("device", "out", None) for keyword in call.keywords)
    ]
    assert not untold
