"""``tools/settings.py``: what a setting says, and what the file has after a command that was ended."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .test_project import ROOT, tool

settings = tool("settings")
#: a training of the addition problem that is soon solved
SHORT = "lr=0.02;length=4;iterations=300;precond_lr=0.1"


def entries(path):
    return list(json.loads(path.read_text()).values())


def test_a_setting_has_numbers_lists_and_names():
    text = "states=[20,40];lr=0.0006;stop=true;problem=temporal order, 2 symbols"
    assert settings.parse(text) == {
        "states": [20, 40], "lr": 0.0006, "stop": True, "problem": "temporal order, 2 symbols",
    }  # fmt: skip
    assert settings.parse("default") == {}
    with pytest.raises(ValueError, match="lr"):
        settings.parse("lr")


def test_what_a_setting_leaves_out_is_as_in_the_experiment():
    first, second, other = settings.plan("rnn2d", ["lr=0.5", "default"], [100], "cpu", None) + settings.plan(
        "addition", ["lr=0.02"], [3], "cpu", None
    )
    assert first.settings == {**second.settings, "lr": 0.5}
    assert second.settings["states"] == [24, 40]
    assert (second.rows, second.place) == (40, {"data": None})
    assert (other.seed, other.rows, other.settings["precond_lr"]) == (3, 120, 0.01)


def test_a_wrong_name_is_found_before_training(tmp_path, capsys):
    with pytest.raises(SystemExit):
        settings.main([str(tmp_path / "runs.json"), "rnn2d", "learning_rate=0.1"])
    assert "learning_rate" in capsys.readouterr().err


def test_a_finished_run_is_not_repeated(tmp_path, capsys):
    out = tmp_path / "runs.json"
    settings.main([str(out), "addition", SHORT, "--seeds", "0", "--jobs", "1"])
    assert "finished" in capsys.readouterr().out
    (entry,) = entries(out)
    assert entry["finished"]
    assert entry["settings"]["lr"] == 0.02
    assert entry["rows"][-1]["iteration"] <= 300
    settings.main([str(out), "addition", SHORT, "--seeds", "0", "--jobs", "1"])
    assert capsys.readouterr().out == ""
    settings.main([str(out), "addition", SHORT, "--seeds", "1", "--jobs", "1"])
    assert [entry["seed"] for entry in entries(out)] == [0, 1]


def test_an_ended_command_leaves_the_curves_so_far(tmp_path, monkeypatch):
    """And the next command begins such a run again."""
    out = tmp_path / "runs.json"
    words = [str(out), "addition", SHORT + ";stop=false", "--jobs", "1"]
    carry_out = settings.pool.carry_out

    def ended(runs, jobs):
        yield next(carry_out(runs, jobs))
        raise SystemExit(143)

    monkeypatch.setattr(settings.pool, "carry_out", ended)
    with pytest.raises(SystemExit):
        settings.main(words)
    (entry,) = entries(out)
    assert (entry["finished"], len(entry["rows"])) == (False, 1)
    monkeypatch.undo()
    settings.main(words)
    (entry,) = entries(out)
    assert (entry["finished"], len(entry["rows"])) == (True, 3)


def test_neither_pictures_nor_the_command_line_are_needed(tmp_path):
    """A machine for training alone may have torch and nothing else."""
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'typer', 'rich'):\n"
        "    sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "import settings\n"
        f"settings.main([{str(tmp_path / 'runs.json')!r}, 'addition', {SHORT!r}, '--jobs', '1'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
    assert entries(tmp_path / "runs.json")[0]["finished"]
