from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from psgd.bench.isolate import Task, at_once, measure
from tests.bench import toy


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_rows_come_from_another_process_as_they_are_made(capfd):
    seen = []
    outcome = measure(Task("counts", toy.count, {"to": 3}), seen.append)
    assert seen == outcome.rows
    assert [row["k"] for row in outcome.rows] == [0, 1, 2]
    assert outcome.row["k"] == 2
    assert outcome.failure is None
    (pid,) = {row["pid"] for row in outcome.rows}
    assert pid != os.getpid()
    assert {row["threads"] for row in outcome.rows} == {1}
    assert gone(pid)
    assert capfd.readouterr() == ("", "")  # what a peer prints would spoil the table


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize(
    ("work", "rows", "failure"),
    [
        (toy.raises, 1, r"ArithmeticError: no such number"),
        (toy.dies, 1, r"its process ended by SIGKILL; is there enough memory\?"),
        (partial(toy.dies, signal.SIGSEGV), 1, r"its process ended by SIGSEGV; .*"),
        (toy.exits, 1, r"its process ended with exit code 3; .*"),
        (toy.misses, 0, r"no_such_package_at_all is not installed: pip install 'psgd\[bench\]'"),
        (toy.wants, 0, r"abacus is not installed: pip install 'psgd\[bench\]'"),
        (toy.skips, 0, r"skipped: no beads"),
    ],
    ids=["raises", "killed", "crashes", "exits", "imports", "wants", "skips"],
)
def test_what_goes_wrong_is_one_line_and_earlier_rows_are_kept(work, rows, failure):
    outcome = measure(Task("bad", work))
    assert len(outcome.rows) == rows
    assert outcome.failure is not None
    assert re.fullmatch(failure, outcome.failure)
    assert ("Traceback" in outcome.details) == (work in (toy.raises, toy.misses))


@pytest.mark.usefixtures("quick_processes")
def test_a_time_limit_keeps_the_rows_and_ends_all_processes():
    begin = time.monotonic()
    outcome = measure(Task("slow", toy.sleeps, limit=1.5))
    assert outcome.failure == "timed out after 1.5 s"
    assert len(outcome.rows) == 1
    assert 1.4 < outcome.seconds < 10
    assert time.monotonic() - begin < 60
    assert gone(outcome.row["child"])


@pytest.mark.usefixtures("quick_processes")
def test_an_interrupt_ends_all_processes():
    pids = []

    def interrupt(row):
        pids.append(row["child"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(Task("slow", toy.sleeps), interrupt)
    assert len(pids) == 1
    assert gone(*pids)


@pytest.mark.usefixtures("quick_processes")
def test_several_at_once(tmp_path):
    tasks = [Task("slow", toy.sleeps), Task("bad", toy.raises), Task("good", toy.count, {"to": 3})]
    outcomes = {}
    found = at_once(tasks, 2)
    for number, outcome in found:
        outcomes[number] = outcome
        if len(outcomes) == 2:  # the slow one goes on
            found.close()
    assert sorted(outcomes) == [1, 2]
    assert outcomes[1].failure == "ArithmeticError: no such number"
    assert [row["k"] for row in outcomes[2].rows] == [0, 1, 2]


@pytest.mark.usefixtures("quick_processes")
def test_several_at_once_end_with_an_interrupt(tmp_path):
    mark = tmp_path / "mark"
    found = at_once([Task("good", toy.count), Task("slow", toy.sleeps, {"mark": str(mark)})], 2)
    next(found)
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(KeyboardInterrupt):
        found.throw(KeyboardInterrupt)
    pids = list(map(int, mark.read_text().split()))
    assert len(pids) == 2
    assert gone(*pids)


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_nothing_is_left_of_a_command_that_is_stopped(tmp_path, signal_):
    """Ctrl-C goes to the whole group of a terminal; a killed parent can tell nobody."""
    mark = tmp_path / "mark"
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "from psgd.cli import main as cli\n"
        "from psgd.cli.commands import bench\n"
        "from psgd.bench.isolate import Task\n"
        "from tests.bench import toy\n"
        "if __name__ == '__main__':\n"
        f"    task = Task('slow', toy.sleeps, {{'mark': {str(mark)!r}}})\n"
        "    bench.BENCHMARKS = {'toy': toy.benchmark(task)}\n"
        "    sys.exit(cli.main(['bench', 'toy']))\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in background
    ) as parent:
        deadline = time.monotonic() + 60
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = list(map(int, mark.read_text().split()))
        if signal_ == signal.SIGINT:
            os.killpg(parent.pid, signal_)
        else:
            parent.send_signal(signal_)
        _, err = parent.communicate(timeout=30)
    assert len(pids) == 2
    assert gone(*pids)
    if signal_ == signal.SIGINT:
        assert (parent.returncode, err) == (130, "psgd: interrupted\n")
