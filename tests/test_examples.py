"""The examples of the gallery run, at a small size: they learn something, draw it, and the gallery shows them all.

Those for several ranks have a file of their own, tests/ranks/test_examples.py.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from psgd.experiments import mnist

from .experiments.small_digits import small_digits  # noqa: F401

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
#: for torchrun, and what they share
SEVERAL_RANKS = {"ddp_mnist", "elastic", "fsdp_gpt"}
GALLERY = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - SEVERAL_RANKS)
#: what takes a second, and is enough for all optimizers of an example to be better than at the start
SMALL = {
    "char_gpt": ["--steps", 20, "--text", ROOT / "examples/char_gpt.py"],
    "echo": ["--steps", 60],
    "equalizer": ["--steps", 100],
    "mnist_mlp": ["--steps", 10],
    "poisson": ["--steps", 60],
    "rnn_addition": ["--steps", 100, "--length", 6],
    "spectrum": ["--steps", 30],
    "zebra": ["--steps", 200],
}
NUMBER = r"(-?\d[\d.]*(?:e[+-]\d+)?)"


@pytest.fixture
def run(monkeypatch, capsys, small_digits):  # noqa: F811
    """Call an example as from the command line, with a small set in MNIST's place; what it prints."""

    def call(name: str, *options: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", GALLERY)
def test_it_learns_and_draws(name, run, tmp_path):
    figure = tmp_path / "new" / f"{name}.png"
    output = run(name, *SMALL[name], "--out", figure)
    falls = re.findall(rf"{NUMBER}(?: dB)? -> {NUMBER}", output)
    assert len(falls) >= 2, output  # one for each optimizer or structure that is compared
    for first, last in falls:
        assert float(last) < float(first), output
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert f"drawn to {figure}" in output


def test_the_seed_decides_what_is_seen(run, tmp_path):
    def curves(seed: int) -> list[str]:
        output = run("echo", "--steps", 20, "--seed", seed, "--out", tmp_path / "echo.png")
        return re.findall(r"dB -> (.*?) dB", output)

    assert curves(0) == curves(0)
    assert curves(0) != curves(1)


@pytest.mark.parametrize("name", GALLERY)
def test_no_steps_are_refused(name, run, capsys):
    with pytest.raises(SystemExit) as refused:
        run(name, "--steps", 0)
    assert refused.value.code == 2
    assert "--steps wants at least 1" in capsys.readouterr().err


def test_without_mnist_it_says_what_to_do(run, monkeypatch, tmp_path):
    def missing(data: Path | None = None) -> mnist.Digits:
        raise mnist.DataError(f"cannot find it in {data}")

    monkeypatch.setattr(mnist, "load", missing)
    with pytest.raises(SystemExit, match="mnist_mlp: cannot find it in nowhere"):
        run("mnist_mlp", "--data", "nowhere", "--out", tmp_path / "mnist_mlp.png")


def test_texts(run, tmp_path):
    read = runpy.run_path(str(ROOT / "examples/char_gpt.py"))["read"]
    assert len(read(None)) > 100_000  # comes with Python
    with pytest.raises(SystemExit, match="name another text by --text"):
        run("char_gpt", "--text", tmp_path / "nowhere.txt")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit, match="5 letters are too few"):
        run("char_gpt", "--text", tmp_path / "short.txt")


@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery_shows_it(name):
    assert f"python examples/{name}.py" in PAGE
    assert f"](gallery/{name}.png)" in PAGE
    picture = ROOT / "docs/gallery" / f"{name}.png"
    assert 5_000 < picture.stat().st_size < 120_000


def test_the_notebook_runs_from_start_to_end(tmp_path, monkeypatch, capsys):
    """Cell by cell, as a reader would; a resumed run is the same to the last bit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    notebook = json.loads((ROOT / "examples" / "from_adamw.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert cell["outputs"] or "print" not in "".join(cell["source"]).split("def ")[0]  # it was run before
    output = capsys.readouterr().out
    assert output.count("after 2 steps") == 8
    first, second = output.splitlines()[-1].split()
    assert first == second
