from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import typer
from matplotlib.figure import Figure
from rich.table import Table

import psgd
from psgd import __main__
from psgd.bench.isolate import Outcome, Task
from psgd.cli import main as cli
from psgd.cli import output
from psgd.cli.commands import bench, reproduce
from psgd.experiments import demo as zebra_demo
from psgd.experiments import store
from tests.bench import toy
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

sys.argv = ["psgd", "demo", "--help"]
results = []
for blocker.missing in [("matplotlib",), ("rich",), ("typer",), ()]:  # matplotlib cannot be imported twice
    again = ("psgd.bench", "psgd.cli", "psgd.experiments", *blocker.missing)
    for name in [name for name in sys.modules if name.startswith(again)]:
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
    out = capsys.readouterr().out
    assert cli.main(["-h"]) == 0
    assert capsys.readouterr().out == out
    for code in (0, 1, 2, 130, 141):
        assert f"\n    {code} " in out


COMMANDS = list(cli.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples_that_can_be_run(command, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["--help"]) == 0
    assert f"\n  {command} " in capsys.readouterr().out
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    assert "\x1b" not in text
    lines = re.findall(r"^  ((?:--?[\w-]+(?:, )?)+)", text, re.MULTILINE)
    options = [name for line in lines for name in line.split(", ")]
    examples = re.findall(rf"^ +(?:.*\()?psgd {command}\b(.*)", text, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example.split("|")[0].partition("#")[0].replace(')"', ""))
        assert {word for word in words if word.startswith("--")} <= {*options}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestStreams:
    """What goes where."""

    @pytest.fixture(autouse=True)
    def _no_wishes(self, monkeypatch):
        for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(zebra_demo, "draw", lambda finished: Figure(figsize=(1, 1)))  # a tenth of the time

    def test_numbers_of_the_demo_as_json(self, capsys):
        assert cli.main(["demo", "--iterations", "3", "--json"]) == 0
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        assert (found["iterations"], found["seed"], found["figure"]) == (3, 0, "demo/zebra.png")
        assert [run["name"] for run in found["runs"]] == ["PSGD", "SGD", "Adam"]
        for run in found["runs"]:
            curve = run["curve"]
            assert [curve[name][0] for name in ("iterations", "losses")] == [3, run["loss_after_iterations"]]
            assert curve["losses"][-1] == run["loss"]
            assert curve["seconds"][-1] == run["seconds"]
            assert 0 < run["error_rate"] < 1
        assert "3 of 3 mini-batches" in captured.err
        assert cli.main(["demo", "--iterations", "3", "--json", "--quiet"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["runs"][0]["loss"] == found["runs"][0]["loss"]
        assert captured.err == ""

    def test_quiet_has_results_and_no_progress(self, capsys):
        assert cli.main(["demo", "--iterations", "3", "-q"]) == 0
        captured = capsys.readouterr()
        assert "mini-batches: loss" not in captured.out
        assert "PSGD" in captured.out
        assert captured.out.endswith("Figure: demo/zebra.png\n")
        assert captured.err == ""

    def test_measurements_as_json(self, monkeypatch, capsys):
        tasks = [Task("good", toy.count), Task("odd", toy.no_number), Task("bad", toy.raises)]
        monkeypatch.setattr(bench.benchmark, "measure", in_this_process)
        monkeypatch.setattr(bench, "BENCHMARKS", {"toy": toy.benchmark(*tasks)})
        assert cli.main(["bench", "--json"]) == 0
        captured = capsys.readouterr()
        (found,) = json.loads(captured.out, parse_constant=pytest.fail)["benchmarks"]
        assert found["table"]["rows"][0] == ["good", "2"]
        assert [one["failure"] for one in found["measurements"]] == [None, None, "ArithmeticError"]
        assert found["files"] == ["bench/toy.json", "bench/toy.png", "bench/toy.svg"]
        assert found["complete"]
        assert "[1/3] good" in captured.err

    def test_an_interrupted_benchmark_prints_what_there_is(self, monkeypatch, capsys):
        def interrupt(task, advanced):
            if task.label == "second":
                raise KeyboardInterrupt
            return in_this_process(task, advanced)

        monkeypatch.setattr(bench.benchmark, "measure", interrupt)
        monkeypatch.setattr(
            bench, "BENCHMARKS", {"toy": toy.benchmark(Task("first", toy.count), Task("second", toy.count))}
        )
        assert cli.main(["bench", "--json", "--quiet"]) == 130
        captured = capsys.readouterr()
        (found,) = json.loads(captured.out)["benchmarks"]
        assert not found["complete"]
        assert [one["label"] for one in found["measurements"]] == ["first"]
        assert captured.err == "psgd: interrupted\n"

    def test_no_control_characters_but_on_a_terminal(self, monkeypatch, capsys):
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert cli.main(["demo", "--iterations", "3"]) == 0
        assert "\x1b" not in capsys.readouterr().out
        for no_color, colours in ((False, True), (True, False)):
            if no_color:
                monkeypatch.delenv("FORCE_COLOR")
                monkeypatch.setenv("NO_COLOR", "1")
            monkeypatch.setattr(sys, "stdout", terminal := Terminal())
            assert cli.main(["demo", "--iterations", "3"]) == 0
            assert "3/3" in terminal.getvalue()
            assert ("\x1b[32m" in terminal.getvalue()) is colours

    def test_a_wide_table_is_not_cut_in_a_pipe(self, capsys):
        words = ["first", *(f"a long heading {k}" for k in range(6))]
        table = Table(*words)
        output.Stream().print(table)
        out = capsys.readouterr().out
        assert all(word in out for word in words)

    def test_texts_are_printed_as_they_are(self, capsys):
        text = "[bold]results[/bold] :smile: " + "x" * 300
        output.Stream().say(text)
        assert capsys.readouterr().out == text + "\n"

    @pytest.mark.parametrize("args", [["--version"], ["--help"], ["plan", "gpt2"], ["plan", "gpt2", "--json"]])
    def test_a_pipe_that_nobody_reads_ends_it_silently(self, args, monkeypatch, capfd):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert cli.main(args) == 141
            monkeypatch.undo()
        assert capfd.readouterr() == ("", "")

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk")
    @pytest.mark.parametrize("args", [["--version"], ["plan", "3x3", "--json"]])
    def test_a_full_disk_below_stdout_is_one_line(self, args, monkeypatch, capfd):
        with open("/dev/full", "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert cli.main(args) == 1
            monkeypatch.undo()
        assert capfd.readouterr() == ("", "psgd: No space left on device\n")

    def test_streams_may_be_closed(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stderr", None)
        assert cli.main(["demon"]) == 2
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(sys, "stdout", None)
        assert cli.main(["demo", "--iterations", "1", "--json"]) == 0
        assert cli.main(["--version"]) == 0


def in_this_process(task, advanced):
    """A measurement without a process of its own, which would take seconds to start."""
    rows, failure = [], None
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            rows.extend(task.work(**task.settings))
        except ArithmeticError as error:
            failure = type(error).__name__
    return Outcome(task, rows, 0.0, failure)


class TestPlan:
    def test_a_model_by_name(self, capsys):
        assert cli.main(["plan", "gpt2", "--ranks", "8"]) == 0
        out = capsys.readouterr().out
        assert "12 × layers.*.qkv.weight" in out
        assert "of 124,439,808 elements" in out  # as the model card of GPT-2 has it
        assert "8 ranks: " in out

    def test_shapes_and_options_as_json(self, capsys):
        args = [
            "plan",
            "a=64x32:2",
            "48",
            "--ranks",
            "2",
            "--budget",
            "9000",
            "--precond-dtype",
            "bfloat16",
            "--max-dense",
            "64",
        ]
        assert cli.main([*args, "--update-every", "10", "--no-momentum", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        expected = psgd.plan(
            [("a", (2, (64, 32))), (48,)],
            preconditioner=psgd.Kronecker(max_dense=64),
            world_size=2,
            budget=9000,
            precond_dtype=torch.bfloat16,
            update_every=10,
            momentum=False,
        )
        assert {**found, "version": None} == {**expected.to_dict(), "version": None}
        assert len(found["ranks"]) == 2
        assert expected.preconditioner.max_dense < 64

    def test_a_function_that_makes_a_model_that_takes_no_memory(self, tmp_path, capsys):
        (tmp_path / "my_net.py").write_text(
            "from torch import nn\n"
            "print('not for stdout')\n"
            "class Nets:\n"
            "    @staticmethod\n"
            "    def big():\n"
            "        return nn.Linear(10**6, 10**6, bias=False)\n"
        )
        path = list(sys.path)
        assert cli.main(["plan", "my_net:Nets.big", "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["blocks"][0]["shape"] == [10**6, 10**6]
        assert captured.err == "not for stdout\n"
        assert sys.path == path


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
    assert asked == {"iterations": 12, "seed": 34, "paper": False}


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
        (["reproduce", "fig1", "--first-seed", "-1"], "--first-seed"),
        (["reproduce", "fig1", "--jobs", "0"], "--jobs"),
        (["reproduce", "fig7", "--data", "nowhere"], "nowhere"),
        (["report"], "DIR"),
        (["plan"], "MODEL"),
        (["plan", "64 x 32"], "'64 x 32' is none of gpt2"),
        (["plan", "gpt2", "64"], "'gpt2' is a whole model"),
        (["plan", "no.such.module:net"], "no.such.module:net: ModuleNotFoundError"),
        (["plan", "torch.nn:Linear"], "torch.nn:Linear: TypeError"),
        (["plan", "collections:OrderedDict"], "returns OrderedDict"),
        (["plan", "sys:exit"], "sys:exit: SystemExit"),
        (["plan", "64x32", "--precond-dtype", "bfloat"], "--precond-dtype"),
        (["plan", "64x32", "--precond-dtype", "int8"], "precond_dtype"),
        (["plan", "64x32", "--budget", "much"], "budget='much'"),
        (["plan", "64x32", "--budget", "10"], "at least that"),
        (["plan", "64x32", "--ranks", "0"], "--ranks"),
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
    assert cli.main(["demo", "--iterations", "1"]) == 1
    assert "zebra.png" in one_line(capsys)


def _ignore_data(work, *, data, **settings):
    return work(**settings)


class TestReproduce:
    @pytest.fixture(autouse=True)
    def _toy(self, monkeypatch):
        monkeypatch.setattr(reproduce, "FIGURES", {"toy": runs.toy()})

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

    def test_the_first_seed_is_an_option(self, tmp_path, capsys):
        assert cli.main(["reproduce", "--first-seed", "100", "--seeds", "2", "--jobs", "1"]) == 0
        assert "1 of 2 claims hold" in capsys.readouterr().out
        assert json.loads((tmp_path / "results" / "toy.json").read_text())["seeds"] == [100, 101]

    def test_a_directory_that_cannot_be_written_is_found_before_training(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(reproduce, "reproduce_figures", lambda *_, **__: pytest.fail("trained for nothing"))
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
        assert cli.main(["reproduce", "--jobs", "1"]) == 1
        assert "No space left on device" in one_line(capsys)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    @pytest.mark.usefixtures("quick_processes")
    def test_a_killed_worker_is_one_line(self, monkeypatch, capsys):
        figure = runs.toy()
        dying = [runs.run("a", die=True), runs.run("b")]
        monkeypatch.setattr(reproduce, "FIGURES", {"toy": replace(figure, runs=lambda size, seed: dying)})
        assert cli.main(["reproduce", "--jobs", "2"]) == 1
        assert "toy, a, seed 0: its process was killed" in one_line(capsys)

    def test_a_broken_result_beside_ours_is_one_line(self, tmp_path, capsys):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "fig1.json").write_text("{")
        assert cli.main(["reproduce", "--jobs", "1"]) == 1
        assert "fig1.json" in one_line(capsys)
        assert (tmp_path / "results" / "toy.json").exists()

    def test_files_of_others_are_left_alone(self, tmp_path):
        (tmp_path / "package.json").write_text('{"name": "x"}')
        (tmp_path / "broken.json").write_text("{")
        assert cli.main(["reproduce", "--jobs", "1", "--out", "."]) == 0
        assert "A toy" in (tmp_path / "report.html").read_text(encoding="utf-8")

    def test_data_are_wanted_only_for_runs_that_are_not_finished(self, monkeypatch, capsys):
        monkeypatch.setattr(reproduce, "FIGURES", {"toy": replace(runs.toy(), digits=True)})
        monkeypatch.setattr(runs, "work", partial(_ignore_data, runs.work))
        assert cli.main(["reproduce", "--jobs", "1", "--data", "nowhere"]) == 2
        assert "nowhere" in one_line(capsys)

        def fetch(data, say):
            say("downloading [MNIST]")

        monkeypatch.setattr(reproduce.mnist, "load", fetch)
        assert cli.main(["reproduce", "--jobs", "1", "--data", "nowhere", "--json"]) == 0
        captured = capsys.readouterr()
        assert "downloading [MNIST]\n" in captured.err
        assert len(json.loads(captured.out)["figures"]) == 1
        monkeypatch.setattr(reproduce.mnist, "load", lambda *_, **__: pytest.fail("there is nothing left to train"))
        assert cli.main(["reproduce", "--jobs", "1", "--data", "nowhere"]) == 0

    def test_a_download_that_fails_is_no_wrong_argument(self, monkeypatch, capsys):
        def fail(data, say):
            raise reproduce.mnist.DataError("MNIST cannot be downloaded")

        monkeypatch.setattr(reproduce, "FIGURES", {"toy": replace(runs.toy(), digits=True)})
        monkeypatch.setattr(reproduce.mnist, "load", fail)
        assert cli.main(["reproduce", "--jobs", "1"]) == 1
        assert one_line(capsys) == "psgd: MNIST cannot be downloaded"

    def test_verdicts_as_json(self, tmp_path, capsys):
        assert cli.main(["reproduce", "--jobs", "1", "--json"]) == 0
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        (figure,) = found["figures"]
        assert (figure["name"], figure["size"], figure["seeds"]) == ("toy", "quick", [0, 1])
        assert [(claim["name"], claim["holds"]) for claim in figure["claims"]] == [
            ("a_below_b", True),
            ("b_below_a", False),
        ]
        assert found["report"] == "results/report.html"
        assert captured.err.startswith("[1/4] toy, a, seed 0")
        assert cli.main(["report", "results", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"report": "results/report.html", "version": psgd.__version__}

    def test_quiet_has_verdicts_and_no_progress(self, capsys):
        assert cli.main(["reproduce", "--jobs", "1", "--quiet"]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("toy: A toy: 1 of 2 claims hold\n")
        assert captured.out.endswith("Report: results/report.html\n")
        assert captured.err == ""

    def test_a_terminal_without_greek_is_no_reason_to_fail(self, tmp_path):
        environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-m", "psgd", "reproduce", "fig1", "--jobs", "1"]
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert b"-4 ? -2" in done.stdout
        assert (tmp_path / "results" / "report.html").exists()

    @pytest.mark.parametrize(("jobs", "signal_"), [(1, signal.SIGKILL), (2, signal.SIGINT)], ids=str)
    @pytest.mark.usefixtures("quick_processes")
    def test_stopped_at_any_moment_the_same_command_carries_on(self, tmp_path, monkeypatch, capsys, jobs, signal_):
        script = tmp_path / "program.py"
        script.write_text(
            "import sys\n"
            "from pathlib import Path\n"
            "from psgd.cli import main as cli\n"
            "from psgd.cli.commands import reproduce\n"
            "from tests.experiments.runs import toy\n"
            "if __name__ == '__main__':\n"
            "    reproduce.FIGURES = {'toy': toy(Path('mark'), sleep=0.2)}\n"
            f"    sys.exit(cli.main(['reproduce', '--jobs', '{jobs}']))\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
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
            assert any(line.startswith("[1/4]") for line in first.stdout)  # up to that line
            first.send_signal(signal_)
            _, err = first.communicate()
        assert first.returncode == (-9 if signal_ == signal.SIGKILL else 130)
        assert "Traceback" not in err
        monkeypatch.setattr(reproduce, "FIGURES", {"toy": runs.toy(Path("mark"), sleep=0.2)})
        assert cli.main(["reproduce", "--jobs", str(jobs)]) == 0
        second = capsys.readouterr().out
        assert " of 4 runs were finished before." in second
        assert "1 of 2 claims hold" in second
        started = (tmp_path / "mark").read_text().splitlines()
        assert len(started) <= 4 + jobs  # nothing was lost but what was under way
        assert set(started) == {"0 1.0", "0 2.0", "1 1.0", "1 2.0"}


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(zebra_demo, "demo", interrupt)
    assert cli.main(["demo"]) == 130
    assert one_line(capsys) == "psgd: interrupted"


@pytest.mark.parametrize("module", ["rich", "torch"])
def test_an_interrupt_during_an_import_is_one_line_too(module, tmp_path):
    """Even if the module that is being imported would make another error of it, as modules in C do."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(10)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('initialization failed')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "psgd", "demo"],
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "psgd: interrupted\n")


@pytest.mark.parametrize(("typed", "meant"), [("demos", "demo"), ("wach", "watch"), ("REPORT", "report")])
def test_a_misspelt_command_is_named_with_the_right_one(typed, meant, capsys):
    assert cli.main([typed]) == 2
    assert one_line(capsys) == f"psgd: No such command '{typed}'; did you mean {meant}?"


def test_an_unknown_command_is_answered_with_those_there_are(capsys):
    assert cli.main(["xyz"]) == 2
    assert one_line(capsys).endswith("the commands are demo, reproduce, report, watch, bench, plan")


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
    right = (("matplotlib", "experiments"), ("rich", "cli"), ("typer", "cli"))
    for (code, out, err), (module, extra) in zip(extras, right, strict=True):
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert module in line
        assert f"pip install 'psgd[{extra}]'" in line
    code, out, err = complete
    assert (code, err) == (0, "")
    assert out.startswith("Usage: psgd demo")


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


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_an_option_with_a_value_of_its_own_name_says_its_name(name):
    """Typer 0.27 takes ``metavar="DEVICE"`` of a parameter ``device`` for the name of the option."""
    command = getattr(import_module(f"psgd.cli.commands.{name}"), name)
    hints = get_type_hints(command, include_extras=True)
    options = {key: more for key, hint in hints.items() for more in getattr(hint, "__metadata__", ())}
    named_alike = [
        option
        for key, option in options.items()
        if isinstance(option, typer.models.OptionInfo) and option.metavar == key.upper()
    ]
    # In an annotation, Typer keeps the first name in the place of the default.
    assert all(isinstance(option.default, str) and option.default.startswith("--") for option in named_alike)
