from __future__ import annotations

import json
import subprocess
import sys

import pytest

import psgd
from psgd import __main__, cli
from psgd.experiments import demo as zebra_demo

#: Runs the program again and again, each time without some modules, and prints what it did.
WITHOUT = """
import contextlib, io, json, runpy, sys

class Blocker:
    missing = ()

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.missing):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocker = Blocker()
sys.meta_path.insert(0, blocker)
blocker.missing = ("typer", "rich", "matplotlib", "scipy")
import psgd

sys.argv = ["psgd", "--version"]
results = []
for blocker.missing in [("typer",), ("rich",), ("matplotlib",), ()]:
    for name in [name for name in sys.modules if name.startswith(("psgd.cli", "psgd.experiments"))]:
        del sys.modules[name]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = runpy.run_module("psgd", run_name="__main__")
        except SystemExit as exit:
            code = exit.code
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def one_line(capsys) -> str:
    """What was said on stderr: one line of the program's own, and no traceback."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("psgd: ")
    return line


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{psgd.__version__}\n"


def test_help_without_a_command(capsys):
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_demo_writes_a_figure_and_says_where(tmp_path, capsys):
    assert cli.main(["demo", "--iterations", "3", "--seed", "5", "--out", "some/where"]) == 0
    assert (tmp_path / "some" / "where" / "zebra.png").read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert "PSGD" in captured.out
    assert "Figure: some/where/zebra.png" in captured.out
    assert captured.err == ""


def test_demo_hands_on_its_options(monkeypatch, capsys):
    asked = {}

    def stop(console, **options):
        asked.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(zebra_demo, "demo", stop)
    cli.main(["demo", "--iterations", "12", "--seed", "34"])
    assert asked == {"iterations": 12, "seed": 34}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["demo", "--iterations", "0"], "--iterations"),
        (["demo", "--iterations", "many"], "--iterations"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--colour"], "--colour"),
        (["demon"], "demon"),
    ],
)
def test_a_wrong_argument_is_one_line(args, named, capsys):
    assert cli.main(args) == 2
    assert named in one_line(capsys)


def test_a_directory_that_cannot_be_written_is_found_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zebra_demo, "demo", lambda *_, **__: pytest.fail("trained for nothing"))
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        assert cli.main(["demo", "--out", out]) == 2
        assert out in one_line(capsys)


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "demo" / "zebra.png").mkdir(parents=True)
    assert cli.main(["demo", "--iterations", "1"]) == 2
    assert "zebra.png" in one_line(capsys)


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(zebra_demo, "demo", interrupt)
    assert cli.main(["demo"]) == 130
    assert one_line(capsys) == "psgd: interrupted"


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(zebra_demo, "demo", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


def test_a_missing_extra_is_one_line_and_the_library_does_without():
    process = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert process.stderr == ""
    *extras, complete = json.loads(process.stdout)
    for (code, out, err), module in zip(extras, ("typer", "rich", "matplotlib"), strict=True):
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert module in line
        assert "pip install 'psgd[experiments]'" in line
    assert complete == [0, f"{psgd.__version__}\n", ""]


def test_another_missing_module_is_a_bug_which_no_extra_mends(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "psgd.cli":
                raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")

    monkeypatch.delattr(psgd, "cli")
    monkeypatch.delitem(sys.modules, "psgd.cli")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        __main__.main()
