"""Version 0.1: its checkpoints load and go on with the same steps, and its behaviour can be had with today's options.

``saved_by_0_1.pt`` was saved by version 0.1: for each of ``CASES`` model and optimizer after 5 steps, and the model
after 8. The optimizers were made by ``PSGD(model.parameters(), **options)`` with the options that are listed here.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psgd
from psgd import PSGD, Dense, Diagonal, Joint, Kronecker, LimitedMemory, LowRank, Whitening

SAVED = torch.load(Path(__file__).parent / "saved_by_0_1.pt", weights_only=True)
UPGRADE = Path(__file__).parents[2] / "docs" / "upgrade.md"

CASES: dict[str, dict[str, Any]] = {
    "kronecker-whitening": {"probe": Whitening(), "lr": 0.002, "weight_decay": 0.01},
    "kronecker": {"lr": 0.1},
    "triangular": {"preconditioner": Kronecker(inverse_free=False), "momentum": 0.9, "max_norm": 1.0},
    "dense-joint": {"preconditioner": Dense(), "blocks": Joint()},
    "low-rank": {"preconditioner": LowRank(2)},
    "limited-memory": {"preconditioner": LimitedMemory(2)},
    "diagonal": {"preconditioner": Diagonal(), "probe": Whitening(of_average=False), "update_every": 3},
}

#: options of today that are the defaults of 0.1, as docs/upgrade.md has them
AS_BEFORE: dict[str, Any] = {
    "lr": 0.1,
    "init": "identity",
    "update_every": 1,
    "clip_outliers": math.inf,
    "clip_steps": math.inf,
}

cases = pytest.mark.parametrize("name", CASES)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: PSGD, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2].sin()).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer.probe, Whitening):
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()])


def difference(model: nn.Module, name: str) -> float:
    """Relative to the length of the way from the beginning to step 8."""
    way = flat(SAVED[name]["after"]) - flat(network().state_dict())
    return ((flat(model.state_dict()) - flat(SAVED[name]["after"])).norm() / way.norm()).item()


@cases
def test_old_checkpoints_load_with_their_numbers_and_go_on_with_the_same_steps(name):
    model = network()
    choices = {key: CASES[name][key] for key in ("probe", "preconditioner", "blocks") if key in CASES[name]}
    optimizer = PSGD(model.parameters(), **choices)
    model.load_state_dict(SAVED[name]["model"])
    assert difference(model, name) > 1e-3
    optimizer.load_state_dict(SAVED[name]["optimizer"])
    saved = SAVED[name]["optimizer"]["param_groups"][0]
    assert {key: optimizer.param_groups[0][key] for key in saved} == {**saved, "params": list(model.parameters())}
    assert optimizer.param_groups[0]["precond_boost"] == 1
    assert optimizer.param_groups[0]["adapt_lr"] == 0
    train(model, optimizer, 5, 8)
    assert difference(model, name) < 1e-5


def test_an_old_checkpoint_does_not_learn_to_adapt_its_learning_rate():
    """Also one without momentum, with which nothing can be adapted."""
    old = psgd.newton(network(), momentum=0.0).state_dict()
    for group in old["param_groups"]:
        del group["adapt_lr"]
    optimizer = psgd.newton(network())
    assert optimizer.param_groups[0]["adapt_lr"] > 0
    optimizer.load_state_dict(old)
    assert [group["adapt_lr"] for group in optimizer.param_groups] == [0.0] * len(old["param_groups"])


@cases
def test_the_old_behaviour_can_be_had(name):
    options = CASES[name]
    structure, probe = options.get("preconditioner", Kronecker()), options.get("probe")
    free = isinstance(structure, Kronecker) and structure.inverse_free
    precond_lr = (0.3 if probe else 0.1) if free else 0.01
    momentum = 0.9 if probe else 0
    model = network()
    optimizer = PSGD(model.parameters(), **{**AS_BEFORE, "precond_lr": precond_lr, "momentum": momentum, **options})
    train(model, optimizer, 0, 8)
    assert difference(model, name) < 1e-4


def test_the_page_has_these_options():
    text = UPGRADE.read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]
    for key, value in AS_BEFORE.items():
        assert f"{key}={'math.inf' if value == math.inf else repr(value).replace(chr(39), chr(34))}" in code
