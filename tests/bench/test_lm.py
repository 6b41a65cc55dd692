"""The language model under the protocol: tuned with one seed, judged with others, in parts and without repetition."""

from __future__ import annotations

import math
import time

import pytest
import torch

from psgd.bench import corpus, lm, lm_report, peers, protocol
from psgd.bench.benchmark import Effort, Plan
from psgd.bench.contestants import CONTESTANTS
from psgd.bench.gpt import GPT, Shape
from psgd.bench.isolate import Outcome, SkippedError, Task
from psgd.bench.lm_training import Trainer, factor
from psgd.bench.protocol import Setting
from psgd.bench.tokens import tokens
from psgd.cli import main as cli
from psgd.experiments.drawing import images

SHAPE = Shape(layers=1, heads=1, width=8, context=8, batch=2, dropout=0.0, tied=False)
SIZE = lm.Size("tiny", SHAPE, vocabulary=256, most=10**6, steps=4, every=2, judged=64, seconds=60.0)
WORDS = "to be or not to be that is the question whether it is nobler in the mind"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    lines = [f"{k} {word} {k * k}" for k in range(200) for word in WORDS.split()]
    path.write_text("\n".join(lines))
    return path


def settings(text, **changed):
    return {
        "contestant": CONTESTANTS["AdamW"],
        "size": SIZE,
        "text": text,
        "device": "cpu",
        "rates": 3,
        "seeds": (7, 8),
        "default_seeds": (7,),
        "steps": 4,
        "tuning_steps": 2,
        "runs": None,
        "until": None,
        **changed,
    }


def test_each_optimizer_is_tuned_with_one_seed_and_judged_with_others(text, monkeypatch):
    monkeypatch.setattr(protocol, "FURTHER", 0)
    data, *rows = lm.work(**settings(text))
    assert data["role"] == lm_report.DATA
    assert data["text"] == corpus.read(text, SIZE.most).sha256
    ends = [row for row in rows if row["step"] == (2 if row["role"] == "tuning" else 4)]
    judged = [(row["role"], row["seed"]) for row in ends if row["role"] != "tuning"]
    assert judged == [("tuned", 7), ("tuned", 8), ("default", 7)]
    tuning = {(row["lr"], row["weight_decay"]): row["loss"] for row in ends if row["role"] == "tuning"}
    assert len(tuning) == 3 * len(lm.WEIGHT_DECAYS)
    assert {row["seed"] for row in ends if row["role"] == "tuning"} == {protocol.TUNING_SEED}
    best = {(row["lr"], row["weight_decay"]) for row in ends if row["role"] == "tuned"}
    assert best == {min(tuning, key=tuning.get)}
    assert {(row["lr"], row["weight_decay"]) for row in ends if row["role"] == "default"} == {(1e-3, 0.01)}
    for row in ends:
        assert row["tokens"] == row["step"] * SHAPE.batch * SHAPE.context
        assert row["seconds"] * 1000 >= row["gradient_ms"] > 0
        assert row["optimizer_ms"] > 0


def test_finished_runs_are_not_repeated(text, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "FURTHER", 0)
    before = list(lm.work(**settings(text, runs=tmp_path / "runs", seeds=(7,))))
    seen = []
    train = Trainer.train

    def counted(self, contestant, setting, seed, steps):
        seen.append((seed, steps))
        return train(self, contestant, setting, seed, steps)

    monkeypatch.setattr(Trainer, "train", counted)
    assert list(lm.work(**settings(text, runs=tmp_path / "runs", seeds=(7,)))) == before
    assert seen == []
    after = list(lm.work(**settings(text, runs=tmp_path / "runs", seeds=(7, 8))))
    assert seen == [(8, 4)]
    assert [row for row in after if row["seed" if "seed" in row else "role"] != 8] == before
    path = next((tmp_path / "runs").glob("*-100-*"))
    path.write_text("damaged")
    list(lm.work(**settings(text, runs=tmp_path / "runs", seeds=(7,))))
    assert seen == [(8, 4), (100, 2)]


def test_a_run_that_would_end_too_late_is_left_to_another_command(text, tmp_path):
    rows = []
    with pytest.raises(SkippedError, match="the same command continues"):
        rows.extend(lm.work(**settings(text, until=time.time())))
    assert [row["role"] for row in rows] == [lm_report.DATA]


def test_the_learning_rate_grows_and_then_falls_to_zero():
    factors = [factor(step, 50) for step in range(1, 51)]
    assert factors[4] == max(factors) == 1.0
    assert factors == sorted(factors[:5]) + sorted(factors[5:], reverse=True)
    assert 0 < factors[-1] < 0.03
    assert factor(1, 1) == 1.0


#: optimizers that this torch has
PRESENT = ["PSGD", "PSGD-bf16", "AdamW", *(["Muon"] if hasattr(torch.optim, "Muon") else [])]


@pytest.mark.parametrize("name", PRESENT)
def test_runs_of_one_model_are_those_of_new_ones(name, text):
    """Nothing of a run is left in the next one, and each starts from parameters of its seed."""
    data = tokens(corpus.read(text, SIZE.most), 256)

    def losses(trainer, seed):
        return [row["loss"] for row in trainer.train(CONTESTANTS[name], Setting(0.01, 0.1), seed, 4)]

    again = Trainer(SHAPE, 2, 64, data, "cpu")
    first, other, second = losses(again, 1), losses(again, 2), losses(again, 1)
    assert len(first) == 2
    assert first == second == losses(Trainer(SHAPE, 2, 64, data, "cpu"), 1)
    assert other != first


def test_the_validation_loss_is_that_of_each_token_once(text):
    data = tokens(corpus.read(text, SIZE.most), 256)
    trainer = Trainer(SHAPE, 2, 64, data, "cpu")
    kept = data.validation[:65].long()
    x, y = kept[:-1].view(8, 8), kept[1:].view(8, 8)
    assert trainer.validation_loss() == pytest.approx(trainer.model.loss(x, y).item(), rel=1e-5)


def test_weight_decay_is_that_of_matrices_for_all():
    for name in PRESENT:
        torch.manual_seed(0)
        model = GPT(16, SHAPE)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        CONTESTANTS[name].optimizer(model, 0.1, 0.5).step()
        for key, p in model.named_parameters():
            shrunk = 0.95 if p.ndim == 2 else 1.0
            torch.testing.assert_close(p.detach(), shrunk * before[key], msg=f"{name}: {key}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONTESTANTS if "." in name])
def test_optimizers_of_other_packages(name, text):
    """Without the compiler, which some of them would keep busy for longer than all other tests of this file."""
    pytest.importorskip(peers.KNOWN[name].package)
    trainer = Trainer(SHAPE, 2, 64, tokens(corpus.read(text, SIZE.most), 256), "cpu")
    with torch.compiler.set_stance("force_eager"):
        (row,) = trainer.train(CONTESTANTS[name], Setting(0.01, 0.1), 1, 2)
    assert math.isfinite(row["loss"])


def test_sizes_are_those_of_their_names():
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in GPT(size.vocabulary, size.shape).parameters())
            for name, size in lm.SIZES.items()
        }
    assert counts["52m"] == 52_720_640
    assert counts["124m"] == 124_392_960
    assert lm.SIZES["52m"].batch_tokens == 32_768
    assert lm.SIZES["124m"].steps * lm.SIZES["124m"].batch_tokens >= 100_000_000


def rows_of(role, seed, *losses, lr=0.1):
    return [
        {
            "role": role,
            "lr": lr,
            "weight_decay": 0.1,
            "seed": seed,
            "step": 100 * k,
            "tokens": 1000 * k,
            "seconds": 2.0 * k,
            "gradient_ms": 15.0,
            "optimizer_ms": 5.0,
            "loss": loss,
        }
        for k, loss in enumerate(losses, 1)
    ]


def outcome(*rows, name="PSGD"):
    return Outcome(Task(name, lm.work, settings(None)), [row for some in rows for row in some], 1.0)


def test_table_and_picture():
    facts = {"text": "ab" * 32, "text_bytes": 2_000_000, "train_tokens": 1234, "vocabulary": 256}
    ours = outcome(
        [{"role": lm_report.DATA, **facts}],
        rows_of("tuning", 100, 1.0),
        rows_of("tuned", 7, 4.0, 2.0, 1.8, lr=0.3),
        rows_of("tuned", 8, 4.0, 2.5, 2.0, lr=0.3),
        rows_of("default", 7, 4.0, math.nan),
    )
    theirs = outcome(rows_of("tuned", 7, 5.0, 4.0, 3.0), name="AdamW")
    table = lm_report.table([ours, theirs])
    tuned, default, adamw, none = table.rows
    assert tuned == ["PSGD", "0.3", "0.1", "1.9 (1.8–2)", "15 (15–15)", "5 (5–5)", "6 (6–6)", "158.3 (150–166.7)",
                     "3.17 (3–3.33)"]  # fmt: skip
    assert default == ["PSGD, default", "0.1", "0.1", "diverged", "15", "5", "4", "–", "–"]
    assert adamw == ["AdamW", "0.1", "0.1", "3", "15", "5", "6", "300", "6"]
    assert none == ["AdamW, default", *["–"] * 8]
    assert "1,234 tokens" in table.caption
    assert "schedules of 2 steps" in table.caption
    assert lm_report.table([ours]).rows[0][-2:] == ["–", "–"]
    for some in ([], [outcome()], [ours, theirs]):
        assert images(lm_report.draw(some), "lm")["png"]


def test_tasks_of_a_plan(tmp_path):
    adamw = [peers.PEERS["AdamW"]]
    assert [task.label for task in lm.tasks(Plan(peers=adamw))] == ["PSGD", "PSGD-bf16", "AdamW"]
    named = lm.tasks(Plan(peers=[*adamw, peers.OWN["PSGD"]], model="52m", effort=Effort(3, 2, 1, 600, 300)))
    assert [task.label for task in named] == ["PSGD", "AdamW"]
    found = named[0].settings
    assert found["size"] == lm.SIZES["52m"]
    assert (found["rates"], found["steps"], found["tuning_steps"]) == (3, 600, 300)
    assert found["seeds"] == protocol.TEST_SEEDS[:2]
    assert found["default_seeds"] == protocol.TEST_SEEDS[:1]
    whole = lm.tasks(Plan())[0].settings
    assert len(whole["seeds"]) >= 3
    assert (whole["rates"], whole["steps"], whole["tuning_steps"]) == (7, 300, 300)


def test_a_text_that_is_too_short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("to be")
    with pytest.raises(SkippedError, match="too short"):
        next(lm.work(**settings(path)))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_the_command(text, tmp_path, capsys):
    """The whole of it, in parts: the second call only adds a seed."""
    words = ["bench", "lm", "--size", "small", "--peers", "psgd", "--text", str(text), "--steps", "2", "--rates", "1"]
    words += ["--default-seeds", "0", "--out", str(tmp_path / "out"), "--total", "60"]
    assert cli.main([*words, "--seeds", "0"]) == 0
    runs = set((tmp_path / "out" / "runs").iterdir())
    assert 2 <= len(runs) <= 2 + protocol.FURTHER
    assert cli.main([*words, "--seeds", "1"]) == 0
    assert len(set((tmp_path / "out" / "runs").iterdir()) - runs) == 1
    assert (tmp_path / "out" / "lm.json").exists()
    assert "PSGD, default" in capsys.readouterr().out
