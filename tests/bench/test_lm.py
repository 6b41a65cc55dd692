"""The language model under the protocol: each optimizer is tuned with one seed and judged with others."""

from __future__ import annotations

import pytest

from psgd.bench import lm, peers, protocol
from psgd.bench.benchmark import Plan
from psgd.bench.gpt import Shape
from psgd.bench.isolate import Outcome, SkippedError, Task
from psgd.experiments.drawing import images

SHAPE = Shape(layers=1, heads=1, width=8, context=8, batch=2, dropout=0.0)


def rows_of(role, seed, *losses, lr=0.1):
    return [
        {"role": role, "lr": lr, "seed": seed, "step": 250 * k, "seconds": 2.0 * k, "loss": loss}
        for k, loss in enumerate(losses, 1)
    ]


def outcome(*rows, peer=peers.PSGD_FLOAT32):
    return Outcome(Task(peer.name, lm.work, {"peer": peer}), [row for some in rows for row in some], 1.0)


def test_each_optimizer_is_tuned_with_one_seed_and_judged_with_others(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 40)
    monkeypatch.setattr(lm, "EVERY", 1)
    monkeypatch.setattr(protocol, "HALF_DECADES", (0, -1, 1))
    monkeypatch.setattr(protocol, "FURTHER", 0)
    rows = list(lm.work(peer=peers.PEERS["AdamW"], text=text, shape=SHAPE, steps=2, device="cpu", seeds=(7, 8)))
    ends = [(row["role"], row["seed"]) for row in rows if row["step"] == 2]
    assert ends == [("tuning", 100)] * 3 + [("tuned", 7), ("tuned", 8), ("default", 7), ("default", 8)]
    tuning = {row["lr"]: row["loss"] for row in rows if row["role"] == "tuning" and row["step"] == 2}
    assert len(tuning) == 3
    assert {row["lr"] for row in rows if row["role"] == "tuned"} == {min(tuning, key=tuning.get)}
    assert {row["lr"] for row in rows if row["role"] == "default"} == {1e-3}


def test_table_and_picture():
    found = outcome(
        rows_of("tuning", 100, 1.4),
        rows_of("tuned", 7, 1.8, 1.6, 1.4, lr=0.3),
        rows_of("tuned", 8, 1.9, 1.7, 1.6, 1.45, lr=0.3),
        rows_of("default", 7, 2.0, 1.9),
    )
    tuned, default = lm.table([found]).rows
    assert tuned == ["PSGD", "0.3", "875 (750–1,000)", "7 (6–8)", "8 (8–8)", "1.65 (1.6–1.7)", "1.425 (1.4–1.45)"]
    assert default == ["PSGD, default", "0.1", "–", "–", "8", "1.9", "1.9"]
    assert lm.table([outcome()]).rows == [["PSGD", *["–"] * 6], ["PSGD, default", *["–"] * 6]]
    for some in ([], [outcome()], [found, outcome(peer=peers.PEERS["AdamW"])]):
        assert images(lm.draw(some), "lm")["png"]


def test_tasks_and_a_text_that_is_not_there(tmp_path):
    tasks = lm.tasks(Plan(peers=[peers.PEERS["AdamW"]], quick=True, text=tmp_path / "none.txt"))
    assert [task.label for task in tasks] == ["PSGD", "AdamW"]
    assert tasks[0].settings["seeds"] == protocol.TEST_SEEDS[:1]
    assert len(lm.tasks(Plan())[0].settings["seeds"]) >= 3
    with pytest.raises(SkippedError, match="--text FILE names one"):
        next(tasks[0].work(**tasks[0].settings))
