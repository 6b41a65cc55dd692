from __future__ import annotations

import time

from psgd.bench.timing import Laps, milliseconds, typical


def test_every_call_is_timed_but_not_what_comes_before_it():
    calls = []
    times = milliseconds(
        lambda: calls.append("step") or time.sleep(0.002),
        "cpu",
        repeat=3,
        warmup=2,
        before=lambda: calls.append("before") or time.sleep(0.05),
    )
    assert calls == ["before", "step"] * 5
    assert len(times) == 3
    assert all(2 <= t < 50 for t in times)


def test_slow_calls_are_made_less_often():
    fast, slow = [], []
    typical(lambda: fast.append(0), "cpu", seconds=0.05, most=20)
    typical(lambda: slow.append(time.sleep(0.03)), "cpu", seconds=0.05, most=20)
    assert len(fast) == 3 + 20
    assert len(slow) == 3 + 3


def test_laps_are_timed_by_kind():
    laps = Laps("cpu")
    for _ in range(3):
        laps.mark()
        time.sleep(0.002)
        laps.mark()
        time.sleep(0.02)
        laps.mark()
        time.sleep(0.05)  # between two rounds
    first, second = laps.read(2)
    assert len(first) == len(second) == 3
    # A busy machine makes single laps longer, but never shorter.
    assert 2 <= min(first) < 20
    assert 20 <= min(second) < 50
    assert laps.read(2) == [[], []]
