from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from psgd.experiments.pool import Advanced, Finished, KilledError, carry_out
from tests.experiments import runs


def finished(todo, jobs):
    return {event.run.key: event.result for event in carry_out(todo, jobs) if isinstance(event, Finished)}


@pytest.mark.usefixtures("quick_processes")
def test_results_do_not_depend_on_jobs():
    todo = [runs.run("a", seed) for seed in range(5)]
    one, three = finished(todo, 1), finished(todo, 3)
    assert list(one) == [run.key for run in todo]
    assert {key: result.rows for key, result in one.items()} == {key: result.rows for key, result in three.items()}


def test_every_row_is_told():
    events = list(carry_out([runs.run()], 1))
    assert [event.rows for event in events if isinstance(event, Advanced)] == [1, 2, 3]
    assert isinstance(events[-1], Finished)
    assert events[-1].result.rows == [event.row for event in events if isinstance(event, Advanced)]


@pytest.mark.usefixtures("quick_processes")
def test_the_longest_come_first_and_those_that_measure_time_last():
    short, long, alone = (
        replace(runs.run(label), seconds=seconds, alone=alone)
        for label, seconds, alone in (("short", 1, False), ("long", 2, False), ("alone", 9, True))
    )
    for jobs in (1, 2):
        order = [event.run.label for event in carry_out([alone, short, long], jobs) if isinstance(event, Finished)]
        assert order[-1] == "alone"
        if jobs == 1:
            assert order == ["long", "short", "alone"]


@pytest.mark.usefixtures("quick_processes")
def test_a_process_that_dies_is_named():
    todo = [runs.run("dies", die=True), runs.run("lives")]
    with pytest.raises(KilledError, match=r"toy, dies, seed 0: its process was killed"):
        list(carry_out(todo, 2))


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_a_run_is_told(jobs):
    bad = runs.Run("toy", "bad", 0, runs.fails, {}, 1, 1.0)
    with pytest.raises((RuntimeError, ArithmeticError), match="no such number"):
        list(carry_out([bad, runs.run()], jobs))


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    """They notice by their pipe, as nobody can tell them."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing\n"
        "from psgd.experiments.pool import carry_out\n"
        "from tests.experiments.runs import run\n"
        "if __name__ == '__main__':\n"
        "    for _ in carry_out([run(str(k), count=1000, sleep=0.05) for k in range(2)], 2):\n"
        "        print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, cwd=root, env=environment
    ) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert len(children) == 2
    deadline = time.monotonic() + 20
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, children))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
