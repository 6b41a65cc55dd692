from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from psgd.bench import dist
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import Outcome, Task, measure
from psgd.experiments.drawing import images

#: one worker of pytest-xdist, as they look at the same measurements
pytestmark = pytest.mark.xdist_group("bench dist")

SMALL = {"shape": replace(dist.TINY, layers=1, width=8, context=4, batch=4), "device": "cpu", "repeat": 1}


def task(kind: str, size: int, **settings: object) -> Task:
    return Task(f"{kind}, {size}", dist.work, {"kind": kind, "size": size, **SMALL, **settings}, 120.0)


@pytest.fixture(scope="module")
def outcomes(forks) -> list[Outcome]:
    """All kinds, by processes of this one: those of a measurement of its own are in the last test but one."""
    tasks = [task(kind, 2) for kind in (dist.PLAIN, dist.SHARED, dist.FSDP)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: forks)
        return [Outcome(one, list(one.work(**one.settings)), 1.0) for one in tasks]


def test_all_kinds_are_measured(outcomes):
    for outcome in outcomes:
        assert outcome.row["processes"] == 2
        assert outcome.row[dist.STEP] > 0
        assert outcome.row[dist.OPTIMIZER] > 0
    plain, shared, fsdp = (outcome.row for outcome in outcomes)
    assert plain[dist.ALL] == 2 * plain[dist.MOST]
    assert shared[dist.MOST] == fsdp[dist.MOST] < plain[dist.MOST]
    # What is shared is there once, but for two counters on each rank.
    assert shared[dist.ALL] == pytest.approx(plain[dist.MOST], abs=64)


def test_table_and_picture(outcomes):
    table = dist.table(outcomes)
    assert all(cell != "–" for row in table.rows for cell in row)
    assert "million parameters" in table.caption
    failed = Outcome(task(dist.PLAIN, 4), [], 1.0, "timed out after 1 s")
    assert dist.table([failed]).rows[0][1:] == ["–"] * 4
    for some in (outcomes, outcomes[:1], [failed], []):
        assert images(dist.draw(some), "dist")["png"]


@pytest.mark.usefixtures("quick_processes")
def test_an_error_on_one_rank_is_told():
    outcome = measure(task(dist.PLAIN, 2, shape=replace(SMALL["shape"], heads=3)))
    assert outcome.failure is not None
    assert "on one of 2 processes" in outcome.failure


def test_as_many_processes_as_there_are_gpus(monkeypatch):
    assert [task.label for task in dist.tasks(Plan())][:3] == ["DDP, 1 process", "DDP, 2 processes", "DDP, 4 processes"]
    assert len(dist.tasks(Plan())) == 9
    monkeypatch.setattr(dist.torch.cuda, "device_count", lambda: 2)
    assert [task.settings["size"] for task in dist.tasks(Plan("cuda"))] == [1, 2] * 6
    assert {task.settings["vocabulary"] for task in dist.tasks(Plan("cuda"))} == {dist.MANY_WORDS}
    assert {task.settings["shape"] for task in dist.tasks(Plan("cuda"))} == {dist.LARGE}
    assert {task.settings["shape"] for task in dist.tasks(Plan(quick=True))} == {dist.TINY}
    assert {task.limit for task in dist.tasks(Plan(limit=7))} == {7}
