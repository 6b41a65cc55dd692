from __future__ import annotations

import io

import pytest
from rich.console import Console

from psgd.experiments import progress
from psgd.experiments.pool import Advanced, Finished
from psgd.experiments.progress import TimeLeft, show
from psgd.experiments.reproduce import Order, Planned, Written, reproduce
from tests.experiments.runs import result, run, toy


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def shown(file, out):
    console = Console(file=file, width=120)
    events = reproduce([Order.of(toy(), False)], out, jobs=1, device="cpu")
    written = list(show(console, events, 1))
    assert [type(event) for event in written] == [Written]
    return file.getvalue()


def test_a_line_for_each_run_with_loss_and_time_left(tmp_path):
    text = shown(io.StringIO(), tmp_path)
    lines = text.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("[1/4] toy, a, seed 0: loss 0.33")
    assert all(line.endswith("left") for line in lines)
    assert lines[-1].endswith("about 0:00:00 left")
    assert "\x1b" not in text


def test_a_long_run_is_heard_of(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert "toy, a, seed 0: 2/3, loss 0.5" in shown(io.StringIO(), tmp_path)


def test_what_was_done_before_is_told(tmp_path):
    shown(io.StringIO(), tmp_path)
    assert shown(io.StringIO(), tmp_path) == "4 of 4 runs were finished before.\n"


def test_bars_on_a_terminal(tmp_path):
    text = shown(Terminal(), tmp_path)
    assert "all runs" in text
    assert "about 0:00:00 left" in text


class TestTimeLeft:
    def test_it_learns_how_slow_the_machine_is(self):
        slow, waiting = run("a"), run("b")  # 0.01 seconds each, one would think
        left = TimeLeft(Planned([slow, waiting], []), jobs=1)
        assert str(left) == "about 0:00:00 left"
        left.update(Advanced(slow, 1, {"loss": 1.0}, seconds=100.0))  # a third of it, in fact
        assert str(left) == "about 0:08:20 left"
        left.update(Finished(slow, result(loss=[1.0])))  # 1.5 seconds after all
        assert str(left) == "about 0:00:02 left"

    def test_jobs_share_the_work(self):
        runs = [run(str(k)) for k in range(4)]
        left = TimeLeft(Planned(runs, []), jobs=4)
        left.update(Finished(runs[0], result(loss=[1.0])))
        assert str(left) == "about 0:00:01 left"

    def test_finished_runs_take_no_time(self):
        runs = [run(str(k)) for k in range(2)]
        assert str(TimeLeft(Planned(runs, runs), jobs=1)) == "about 0:00:00 left"
