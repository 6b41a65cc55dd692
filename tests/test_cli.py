from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import psgd
from psgd import __main__, cli
from psgd.experiments import demo as zebra_demo
from psgd.experiments import store
from tests.experiments import runs

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
        (["reproduce", "fig10"], "fig10"),
        (["reproduce", "fig1", "Fig2"], "Fig2"),
        (["reproduce", "fig1", "--device", "abacus"], "abacus"),
        (["reproduce", "fig1", "--device", "cpu:7"], "cpu:7"),
        (["reproduce", "fig1", "--seeds", "0"], "--seeds"),
        (["reproduce", "fig1", "--jobs", "0"], "--jobs"),
        (["reproduce", "fig7", "--data", "nowhere"], "nowhere"),
        (["report"], "DIR"),
        (["report", "nowhere"], "nowhere"),
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


def _ignore_data(work, *, data, **settings):
    return work(**settings)


class TestReproduce:
    @pytest.fixture(autouse=True)
    def _toy(self, monkeypatch):
        monkeypatch.setattr(cli, "FIGURES", {"toy": runs.toy()})

    def test_it_says_what_holds_and_where_the_report_is(self, tmp_path, capsys):
        assert cli.main(["reproduce", "--jobs", "1"]) == 0
        out = capsys.readouterr().out
        assert "toy: A toy: 1 of 2 claims hold" in out
        assert "  holds:         a is below b." in out
        assert "  does not hold: b is below a." in out
        assert out.endswith("Report: results/report.html\n")
        assert "does not hold" in (tmp_path / "results" / "report.html").read_text()
        assert cli.main(["report", "results"]) == 0
        assert capsys.readouterr().out == "results/report.html\n"

    def test_options_are_handed_on(self, tmp_path):
        assert cli.main(["reproduce", "all", "toy", "--full", "--seeds", "1", "--jobs", "1", "--out", "a/b"]) == 0
        summary = json.loads((tmp_path / "a" / "b" / "toy.json").read_text())
        assert (summary["size"], summary["settings"], summary["seeds"]) == ("full", {"count": 6, "seeds": 1}, [0])

    def test_a_directory_that_cannot_be_written_is_found_before_training(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(cli, "reproduce_figures", lambda *_, **__: pytest.fail("trained for nothing"))
        (tmp_path / "file").touch()
        assert cli.main(["reproduce", "--out", "file"]) == 2
        assert "file" in one_line(capsys)

    def test_a_full_disk_is_one_line_and_spares_earlier_results(self, tmp_path, monkeypatch, capsys):
        assert cli.main(["reproduce", "--jobs", "1", "--seeds", "1"]) == 0
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        capsys.readouterr()

        def full(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(store.os, "replace", full)
        assert cli.main(["reproduce", "--jobs", "1"]) == 2
        assert "No space left on device" in one_line(capsys)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_a_killed_worker_is_one_line(self, monkeypatch, capsys):
        figure = runs.toy()
        dying = [runs.run("a", die=True), runs.run("b")]
        monkeypatch.setattr(cli, "FIGURES", {"toy": replace(figure, runs=lambda size, seed: dying)})
        assert cli.main(["reproduce", "--jobs", "2"]) == 2
        assert "toy, a, seed 0: its process was killed" in one_line(capsys)

    def test_a_broken_result_beside_ours_is_one_line(self, tmp_path, capsys):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "fig1.json").write_text("{")
        assert cli.main(["reproduce", "--jobs", "1"]) == 2
        assert "fig1.json" in one_line(capsys)
        assert (tmp_path / "results" / "toy.json").exists()

    def test_files_of_others_are_left_alone(self, tmp_path):
        (tmp_path / "package.json").write_text('{"name": "x"}')
        (tmp_path / "broken.json").write_text("{")
        assert cli.main(["reproduce", "--jobs", "1", "--out", "."]) == 0
        assert "A toy" in (tmp_path / "report.html").read_text(encoding="utf-8")

    def test_data_are_wanted_only_for_runs_that_are_not_finished(self, monkeypatch, capsys):
        monkeypatch.setattr(cli, "FIGURES", {"toy": replace(runs.toy(), digits=True)})
        monkeypatch.setattr(runs, "work", partial(_ignore_data, runs.work))
        assert cli.main(["reproduce", "--jobs", "1", "--data", "nowhere"]) == 2
        assert "nowhere" in one_line(capsys)
        monkeypatch.setattr(cli.mnist, "load", lambda data: None)
        assert cli.main(["reproduce", "--jobs", "1", "--data", "nowhere"]) == 0
        monkeypatch.setattr(cli.mnist, "load", lambda data: pytest.fail("there is nothing left to train"))
        assert cli.main(["reproduce", "--jobs", "1", "--data", "nowhere"]) == 0

    def test_a_terminal_without_greek_is_no_reason_to_fail(self, tmp_path):
        environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-m", "psgd", "reproduce", "fig1", "--jobs", "1"]
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert b"-4 ? -2" in done.stdout
        assert (tmp_path / "results" / "report.html").exists()

    @pytest.mark.parametrize(
        ("jobs", "signal_"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGINT)], ids=str
    )
    def test_stopped_at_any_moment_the_same_command_carries_on(self, tmp_path, jobs, signal_):
        script = tmp_path / "program.py"
        script.write_text(
            "import sys\n"
            "from pathlib import Path\n"
            "from psgd import cli\n"
            "from tests.experiments.runs import toy\n"
            "if __name__ == '__main__':\n"
            "    cli.FIGURES = {'toy': toy(Path('mark'), sleep=0.2)}\n"
            f"    sys.exit(cli.main(['reproduce', '--jobs', '{jobs}']))\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
        command = [sys.executable, "-u", str(script)]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in background
        ) as first:
            assert first.stdout is not None
            assert first.stdout.readline().startswith("[1/4]")
            first.send_signal(signal_)
            _, err = first.communicate()
        assert first.returncode == (-9 if signal_ == signal.SIGKILL else 130)
        assert "Traceback" not in err
        second = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert " of 4 runs were finished before." in second.stdout
        assert "1 of 2 claims hold" in second.stdout
        started = (tmp_path / "mark").read_text().splitlines()
        assert len(started) <= 4 + jobs  # nothing was lost but what was under way
        assert set(started) == {"0 1.0", "0 2.0", "1 1.0", "1 2.0"}


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
