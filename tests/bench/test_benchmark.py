from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import psgd
from psgd.bench import BENCHMARKS, benchmark, peers
from psgd.bench.isolate import Task
from psgd.cli import main as cli
from psgd.cli.commands import bench
from tests.bench import toy


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def console():
    return Console(file=io.StringIO(), width=120)


@pytest.mark.usefixtures("quick_processes")
def test_what_fails_is_reported_beside_what_does_not(tmp_path):
    one = toy.benchmark(Task("good", toy.count, {"to": 3}), Task("bad", toy.raises), Task("odd", toy.no_number))
    plan = benchmark.Plan(peers=[peers.SGD])
    out = console()
    outcomes = benchmark.run(one, plan, out)
    benchmark.show(one, outcomes, out)
    text = out.file.getvalue()
    assert "[1/3] good: k 2" in text
    assert text.count("bad: ArithmeticError: no such number") == 2  # as it happens, and under the table
    assert "a caption" in text
    paths = benchmark.write(one, plan, outcomes, tmp_path / "some")
    assert [path.name for path in paths] == ["toy.json", "toy.png", "toy.svg"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in paths[2].read_bytes()
    found = json.loads(paths[0].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["command"] == "psgd bench toy --device cpu --peers SGD"
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["psgd"] == psgd.__version__
    assert found["machine"]["device"] == "cpu"
    good, bad, odd = found["measurements"]
    assert good["settings"] == {"to": 3}
    assert bad["settings"] == {}
    assert [row["k"] for row in good["rows"]] == [0, 1, 2]
    assert good["failure"] is None
    assert bad["failure"] == "ArithmeticError: no such number"
    assert "Traceback" in bad["details"]
    assert 'File "psgd/bench/isolate.py"' in bad["details"]
    assert str(Path(psgd.__file__).parents[1]) not in bad["details"]
    assert odd["rows"] == [{"k": None, "name": "x"}]
    assert found["table"]["rows"][0] == ["good", "2"]


def test_the_command_repeats_the_run():
    plan = benchmark.Plan("cuda:1", peers.chosen("sgd,heavyball.soap"), "small", True, 5.0)
    words = BENCHMARKS["step"].command(plan).split()
    assert words[:3] == ["psgd", "bench", "step"]
    assert " ".join(words[3:]) == "--device cuda:1 --peers SGD,heavyball.SOAP --model small --quick --limit 5"
    assert BENCHMARKS["dense"].command(benchmark.Plan()) == "psgd bench dense --device cpu"
    assert "--peers none" in BENCHMARKS["step"].command(benchmark.Plan())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["steps"], "'steps' is none of dense, kron, step, problems"),
        (["step", "--peers", "adamx"], "'adamx' is none of SGD, momentum, Adam, AdamW"),
        (["dense", "--peers", "sgd"], "dense compares with no others"),
        (["lm", "--peers", "adamw,sgd"], "'sgd' is none of PSGD, PSGD-bf16, AdamW, Muon, heavyball.PSGDKron, "),
        (["lm", "--size", "7b"], "'7b' is none of small, 52m, 124m"),
        (["step", "--rates", "3"], "step cannot be run in parts"),
        (["step", "--total", "3"], "step cannot be run in parts"),
        (["defaults", "--rates", "3"], "defaults has no such option"),
        (["lm", "--jobs", "3"], "lm has no such option"),
        (["dense", "--model", "gpt2"], "dense has no choice of models"),
        (["step", "--model", "gpt3"], "'gpt3' is none of gpt2, 52m, small"),
        (["dense", "--device", "abacus"], "abacus"),
        (["dense", "--limit", "0"], "--limit"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_the_right_ones(args, named, capsys):
    assert cli.main(["bench", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("psgd: ")
    assert named in line


def test_a_directory_that_cannot_be_written_is_found_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.benchmark, "run", lambda *_: pytest.fail("measured for nothing"))
    (tmp_path / "file").touch()
    assert cli.main(["bench", "dense", "--out", "file"]) == 2
    assert "file" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_processes")
def test_a_second_run_overwrites_the_first(tmp_path, monkeypatch, capsys):
    for task in (Task("first", toy.count), Task("second", toy.count)):
        monkeypatch.setattr(bench, "BENCHMARKS", {"toy": toy.benchmark(task, models=("a", "b"))})
        assert cli.main(["bench", "--model", "b", "--limit", "9"]) == 0
        found = json.loads((tmp_path / "bench" / "toy.json").read_text())
        assert [one["label"] for one in found["measurements"]] == [task.label]
        assert found["settings"]["model"] == "b"
        assert found["settings"]["peers"] == list(peers.PEERS)
    assert "Results: bench/toy.json, bench/toy.png, bench/toy.svg" in capsys.readouterr().out
