"""The documentation: its examples run as they are written, and the build fails where it has a gap."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
import torch

import psgd
from psgd.experiments import digits

from .laws import test_descent, test_isolation, test_maps, test_together
from .laws.suite import LAWS

#: modules whose laws are in ``LAWS``
SUITE = (test_descent, test_isolation, test_maps, test_together)
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
#: languages whose blocks are programs; ``python notest`` is one that needs what is not there
BLOCK = re.compile(r"^( *)```(python(?: notest)?)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def examples(page: Path) -> Iterator[str]:
    for _, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            yield code


def run(page: Path) -> dict[str, Any]:
    """All examples of a page, one after the other, as a reader would type them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(examples(page), 1):
        exec(compile(code, f"{page.name}, example {number}", "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if any(examples(page))], ids=lambda page: page.name)
def test_examples_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run(page)
    output = capsys.readouterr().out
    if page.name in ("README.md", "index.md"):
        assert "PSGD(Kronecker" in output
        assert names["loss"].item() < (0.1 if page.name == "index.md" else 1.0)


def test_few_examples_are_left_out():
    left_out = [page.name for page in PAGES for _, kind, _ in BLOCK.findall(page.read_text()) if kind != "python"]
    assert sum(name == "distributed.md" for name in left_out) == 1
    assert len(left_out) <= 14


def test_the_readme_starts_with_the_two_commands():
    first = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line.split("#")[0].strip() for line in first.group(1).splitlines()] == ["make demo", "make test"]


def test_links_of_the_readme_lead_somewhere():
    for file in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / file).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{file}: {target}"


def test_errors_that_are_explained_are_raised():
    """The words of each message in the tables of warnings and errors are those of a text in the sources."""
    texts = [words(text) for path in (ROOT / "src" / "psgd").rglob("*.py") for text in texts_of(path)]
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## What PSGD warns of")[2]
    messages = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(messages) >= 20
    filled_in = {"finitedifference", "hessianvector", "preconditioner", "torch", "bfloat16", "state_dict", "state"}
    filled_in |= {"param_groups", "psgd", "wants"}
    for message in messages:
        assert any(words(message) - filled_in <= text for text in texts), message


def texts_of(path: Path) -> Iterator[str]:
    """All texts of a module, with a gap where something is filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else " … " for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z_0-9]{3,}", text.lower()))


@pytest.fixture(scope="module")
def paired() -> dict[Any, list[tuple[int, ...]]]:
    """The line of docs/extending.md that joins its example to the suite of laws."""
    page = DOCS / "extending.md"
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in list(examples(page))[:2]:
        exec(code, names)
    (line,) = re.findall(r"^ *(Paired\(\): \[.*\]),$", page.read_text(encoding="utf-8"), re.MULTILINE)
    line_of_shapes: dict[Any, list[tuple[int, ...]]] = eval(f"{{{line}}}", names)
    return line_of_shapes


#: laws for some structures only: of coordinates of their own, of several factors, of recorded steps, and of pools
ELSEWHERE = {
    "test_in_its_own_coordinates_a_step_is_along_the_tangent",
    "test_factors_are_kept_in_balance_and_the_product_keeps_every_bit",
    "test_the_same_holds_for_recorded_steps",
    "test_the_same_holds_in_single_precision",
}


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_structure_of_the_example_obeys_all_laws(law, paired):
    ((structure, shapes),) = paired.items()
    assert (law.check(structure, shapes) > 0) == (str(law) not in ELSEWHERE)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("solve", lambda self, v: self.apply(v)),
        ("apply_t", lambda self, v: self.apply(v)),
        ("descend_off_diagonal_", lambda self, tangent, step, scale: None),
        ("random_", lambda self, generator: self.random_diagonal_(generator)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_structure_would_be_found(paired, method, wrong, monkeypatch):
    ((structure, shapes),) = paired.items()
    factor = type(structure.init((6,), dtype=torch.float64, device="meta").factors[0])
    monkeypatch.setattr(factor, method, wrong)
    with pytest.raises(AssertionError):
        sum(law.check(structure, shapes) for law in LAWS)


# The build


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hook_{name}", DOCS / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("tables", ""),
        ("links", ""),
        ("examples", ""),
        ("offline", ""),
        ("pictures", ""),
        ("project", ""),
        ("docstrings", "griffe"),
    ],
)
def test_examples_of_hooks(name, needs):
    if needs:
        pytest.importorskip(needs)
    assert doctest.testmod(hook(name)).failed == 0


@pytest.mark.parametrize("address", ["", "https://example.org/someone/psgd/"])
def test_the_repository_is_linked_if_its_address_is_known(address, monkeypatch):
    monkeypatch.setenv("PSGD_REPOSITORY", address)
    config = hook("project").on_config({"config_file_path": str(ROOT / "mkdocs.yml")})
    assert config["site_name"] == f"psgd {psgd.__version__}"
    assert config.get("repo_url", "") == address.rstrip("/")
    assert config.get("repo_name", "") == ("someone/psgd" if address else "")


def test_docstrings_for_the_reference():
    pytest.importorskip("griffe")
    examples = hook("docstrings").examples
    assert examples("See:\n\n>>> 1 + 1\n2\n\nThat.") == "See:\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThat."


def anchors_of_all(public: ModuleType) -> set[str]:
    return {name.places[0] for name in public.public(psgd)}


def test_all_that_is_public_must_be_documented():
    public = hook("public")
    anchors = anchors_of_all(public)
    assert {"psgd.PSGD", "psgd.PSGD.step", "psgd.Affine.groups", "psgd.Plan.balance", "psgd.closed_form.c3"} <= anchors
    assert {"psgd.PSGD.add_param_group", "psgd.diagnostics.Properties", "psgd.Kronecker.init"} <= anchors
    assert not any("._" in anchor for anchor in anchors)
    assert public.undocumented(psgd, anchors) == []
    for missing in ("psgd.c3", "psgd.PSGD.step", "psgd.closed_form.c1", "psgd.diagnostics"):
        (problem,) = public.undocumented(psgd, anchors - {missing})
        assert problem.startswith(f"{missing}: not in the reference")


def test_inherited_names_may_be_documented_where_they_come_from():
    public = hook("public")
    anchors = anchors_of_all(public)
    ours = {anchor for anchor in anchors if anchor.endswith(".divide")}
    assert len(ours) == 3
    assert public.undocumented(psgd, anchors - ours) != []
    assert public.undocumented(psgd, (anchors - ours) | {"psgd.blocks.Blocks.divide"}) == []


def test_a_name_without_docstring_is_found(monkeypatch):
    public = hook("public")

    class Undocumented:
        """Has a docstring."""

        def method(self) -> None: ...

    Undocumented.__module__ = "psgd.made_up"
    monkeypatch.setattr(psgd, "Undocumented", Undocumented, raising=False)
    monkeypatch.setattr(psgd, "__all__", [*psgd.__all__, "Undocumented"])
    problems = public.undocumented(psgd, anchors_of_all(public))
    assert problems == ["psgd.Undocumented.method: no docstring"]
    monkeypatch.setattr(Undocumented, "__doc__", None)
    assert "psgd.Undocumented: no docstring" in public.undocumented(psgd, anchors_of_all(public))


def test_tables_are_those_of_the_files():
    tables = hook("tables")
    table = tables.benchmark(DOCS / "results" / "bench" / "step.json")
    assert "| PSGD, bf16 Q | " in table
    assert "`psgd bench step --device cuda" in table
    assert "NVIDIA H200" in table
    claims = tables.claims(DOCS / "results")
    held = [tuple(map(int, found)) for found in re.findall(r"\| (\d+) of (\d+) \|", claims)]
    assert [sum(part) for part in zip(*held, strict=True)] == [51, 56]
    with pytest.raises(ValueError, match="no such file"):
        tables.benchmark(DOCS / "nowhere.json")


def test_every_table_that_a_page_wants_is_there():
    for page in DOCS.glob("*.md"):
        for path in re.findall(r"^<!-- (?:table|claims): (\S+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert (DOCS / path).exists()


def test_formulas():
    pytest.importorskip("latex2mathml")
    mathml = hook("mathml")
    content = r'<p><span class="arithmatex">\(a &lt; b\)</span></p><div class="arithmatex">\[Q^T Q\]</div>'
    found = mathml.replaced(content)
    assert found.count("<math") == 2
    assert "arithmatex" not in found
    assert "<mo>&#x0003C;</mo>" in found
    with pytest.raises(ValueError, match="nosuchthing"):
        mathml.mathml(r"\nosuchthing x", block=True)
    aligned = mathml.mathml(r"\begin{aligned} a &= b \\ c &= d \end{aligned}", block=True)
    assert aligned.count("<mtr>") == 2


def test_pictures_are_those_of_the_script():
    """At a small size; what is committed is what the script draws, but for the fonts of other versions."""
    pytest.importorskip("matplotlib")
    script = runpy.run_path(str(DOCS / "pictures.py"))
    committed = {path.stem for path in (DOCS / "pictures").glob("*.svg")} - {"icon"}
    assert committed == set(script["PICTURES"])
    pages = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("method.md", "architecture.md"))
    for name in committed:
        assert f"(pictures/{name}.svg)" in pages
    assert len(script["fitting"](steps=5).axes) == 2
    assert script["optimum"]("c1", 0.1, 1.0) == pytest.approx(10)
    assert script["optimum"]("c2", 0.1, 1.0) == pytest.approx(0.1 / 1.01)
    assert script["optimum"]("c3", 0.1, 1.0) == pytest.approx(1.01**-0.5)
    for name in ("geometry", "noise", "groups", "rank-two", "layers", "buckets", "step"):
        drawn = script["drawn"](name)
        old = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn.count("<g ") == old.count("<g ")


def test_the_table_of_choices_can_be_made():
    script = runpy.run_path(str(DOCS / "choose.py"))
    choices = {choice.name: choice for choice in script["choices"]()}
    page = (DOCS / "choose.md").read_text(encoding="utf-8")
    for name, choice in choices.items():
        assert re.search(
            rf"^\| {re.escape(name)} \| {f'{choice.numbers:,}' if choice.numbers else ''}", page, re.MULTILINE
        )
    assert script["row"](choices["Adam"], 2).startswith("| Adam |  |")


def test_the_table_of_the_readme_is_that_of_the_measurements():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = json.loads((DOCS / "results" / "bench" / "problems" / "mnist.json").read_text(encoding="utf-8"))
    rows = {one["label"].removeprefix("mnist, "): one["rows"] for one in measured["measurements"]}
    names = {
        "PSGD, whitening": "PSGD, whitening",
        "PSGD, curvature": "PSGD",
        "SOAP of pytorch_optimizer": "pytorch_optimizer.SOAP",
        "SOAP": "pytorch_optimizer.SOAP",
        "SGD with momentum 0.9": "momentum",
        "Adam": "Adam",
    }
    found = re.findall(
        r"^\| (.+), (tuned|default) \| ([\d.]+) \| ([\d.]+) \(([\d.]+)–([\d.]+)\) \| ([\d,]+) \|$", readme, re.MULTILINE
    )
    assert len(found) == 8
    for name, role, lr, *numbers, steps in found:
        runs = [row for row in rows[names[name]] if row["role"] == role]
        seconds = [row["seconds"] for row in runs]
        assert float(lr) == pytest.approx(runs[0]["lr"], rel=0.01)
        assert all(row["reached"] for row in runs)
        assert [float(n) for n in numbers] == [round(f(seconds), 1) for f in (median, min, max)]
        assert int(steps.replace(",", "")) == median(row["iteration"] for row in runs)


def test_the_first_picture_can_be_made(monkeypatch):
    script = runpy.run_path(str(DOCS / "first.py"))
    rates = script["rates"]()
    assert set(script["DRAWN"]) <= set(rates)
    assert rates["PSGD, whitening"] == 0.001
    picture = script["draw"]({name: [([0, 24], [0.0, 1.0], [0.9, 0.1])] * 3 for name in script["DRAWN"]})
    assert [len(panel.lines) for panel in picture.axes] == [10, 10]


def test_the_picture_of_learning_rates_can_be_made(monkeypatch):
    images, labels = torch.randn(200, 784), torch.randint(10, (200,))
    monkeypatch.setattr(digits, "tensors", lambda *_: (images, labels, images, labels))
    script = runpy.run_path(str(DOCS / "transfer.py"))
    assert 0 < script["error"](script["Setting"](width=8, batch=50), 1e-3, None, steps=2) <= 1
    settings = [setting for curves in script["PANELS"].values() for setting in curves.values()]
    picture = script["draw"]({setting: [0.1] * len(script["RATES"]) for setting in settings})
    assert [len(axes.lines) - 1 for axes in picture.axes] == [3, 3, 3]


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    """The configuration of the site, with one page on three names."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    shutil.copytree(DOCS / "hooks", tmp_path / "docs" / "hooks")
    (tmp_path / "src").symlink_to(ROOT / "src")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    before, after = config.split("\nnav:\n")
    after = after[after.index("\nexclude_docs") :]
    (tmp_path / "mkdocs.yml").write_text(before.replace("  favicon: pictures/icon.svg\n", "") + after, encoding="utf-8")
    (tmp_path / "docs" / "index.md").write_text(
        "# Reference\n\n::: psgd.c1\n\n::: psgd.PSGD\n\n::: psgd.Diagonal\n", encoding="utf-8"
    )
    (tmp_path / "docs" / "style.css").touch()
    return tmp_path


def test_the_build_fails_for_a_name_that_is_not_in_the_reference(small_site, caplog):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort, BuildError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of others
        with pytest.raises((Abort, BuildError, SystemExit)) as error:
            build(load_config(str(small_site / "mkdocs.yml")))
    said = caplog.text + str(error.value)
    assert "psgd.c2: not in the reference; add `::: psgd.c2`" in said
    assert "psgd.Diagonal.smaller: not in the reference" in said  # inherited
    assert "psgd.c1:" not in said
    assert "psgd.Diagonal:" not in said
    assert "psgd.PSGD.step:" not in said
