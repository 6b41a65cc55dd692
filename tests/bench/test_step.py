from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from psgd.bench import peers, step
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import SkippedError
from psgd.cli import main as cli

TINY = step.Transformer(layers=1, width=4, vocabulary=7, context=3)


def test_the_shapes_are_those_of_gpt2():
    model = step.MODELS["gpt2"]
    shapes = [*model.hidden(), *model.others()]
    assert len(shapes) == 148
    assert sum(map(math.prod, shapes)) == 124_475_904  # 124,439,808 with the 50,257 words of the original
    assert {(50304, 768), (1024, 768), (2304, 768), (768, 3072), (3072,)} < set(shapes)
    assert all(len(shape) == 2 for shape in model.hidden())


@pytest.mark.parametrize(
    "peer",
    # torch before 2.9 has no Muon
    [peers.PSGD_FLOAT32, *peers.chosen("adamw,muon" if hasattr(torch.optim, "Muon") else "adamw")],
    ids=lambda peer: peer.name,
)
def test_work(peer):
    first, later = step.work(peer=peer, model=TINY, device="cpu", steps=3)
    assert first["first s"] > 0
    assert first["state MB"] > 0
    assert later["median ms"] > 0


def test_the_state_of_adam_is_two_numbers_for_each_parameter():
    (first, _) = step.work(peer=peers.ADAM, model=TINY, device="cpu", steps=1)
    count = sum(map(math.prod, [*TINY.hidden(), *TINY.others()]))
    steps = 4 * len([*TINY.hidden(), *TINY.others()])
    assert first["state MB"] == pytest.approx((8 * count + steps) / 1e6)


def test_views_of_one_memory_count_once():
    stack = torch.zeros(4, 5)
    optimizer = SimpleNamespace(state={0: {"Q": stack[0], "n": 3}, 1: {"Q": [stack[1], (stack[2],)]}})
    assert step.state_bytes(optimizer) == 4 * 5 * 4


def test_gradients_are_there_at_every_step():
    """Some optimizers take them away, and would then be fast at nothing."""
    seen = []

    class Takes:
        def __init__(self, params):
            self.params, self.state = params, {}

        def step(self):
            seen.append([p.grad for p in self.params])
            for p in self.params:
                p.grad = None

    peer = peers.Peer("takes", lambda params, hidden, lr: Takes(params), 0.1)
    list(step.work(peer=peer, model=TINY, device="cpu", steps=3))
    assert len(seen) == 1 + step.WARMUP + 3
    assert all(g is not None for grads in seen for g in grads)
    assert seen[0][0] is not seen[1][0]


def test_what_cannot_be_measured_says_why():
    with pytest.raises(SkippedError, match="line search"):
        next(step.work(peer=peers.LBFGS, model=TINY, device="cpu", steps=1))

    class Breaks:
        def __init__(self, params):
            self.params, self.state = params, {}

        def step(self):
            with torch.no_grad():
                self.params[0].fill_(torch.nan)

    peer = peers.Peer("breaks", lambda params, hidden, lr: Breaks(params), 0.1)
    with pytest.raises(FloatingPointError, match="not finite"):
        list(step.work(peer=peer, model=TINY, device="cpu", steps=1))


def test_the_model_is_the_large_one_on_a_gpu():
    for plan, name in ((Plan(), "small"), (Plan("cuda"), "gpt2"), (Plan(model="gpt2"), "gpt2")):
        assert {task.settings["model"] for task in step.tasks(plan)} == {step.MODELS[name]}


@pytest.mark.usefixtures("quick_processes")
def test_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peers, "OURS", (peers.PSGD_FLOAT32,))
    monkeypatch.setitem(step.MODELS, "small", TINY)
    absent = peers.Peer("abacus.Beads", peers.sgd, 0.1, "abacus")
    for known in (peers.PEERS, peers.KNOWN):
        monkeypatch.setitem(known, absent.name, absent)
    assert cli.main(["bench", "step", "--quick", "--peers", "sgd,abacus,lbfgs"]) == 0
    out = capsys.readouterr().out
    assert "abacus.Beads: abacus is not installed: pip install 'psgd[bench]'" in out
    found = json.loads((tmp_path / "bench" / "step.json").read_text())
    good, sgd, lbfgs, missing = found["measurements"]
    assert (good["label"], good["failure"]) == ("PSGD", None)
    assert good["settings"]["peer"] == "PSGD"
    assert good["settings"]["model"] == repr(TINY)
    assert (sgd["label"], sgd["failure"]) == ("SGD", None)
    assert "line search" in lbfgs["failure"]
    assert "not installed" in missing["failure"]
    assert [row[0] for row in found["table"]["rows"]] == ["PSGD", "SGD", "LBFGS", "abacus.Beads"]
    assert "1 layers of width 4, 7 words" in found["table"]["caption"]
    assert (tmp_path / "bench" / "step.png").exists()
