"""Schedulers of torch: what they set is what the next step uses, and a run resumed in the middle is the same run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from psgd import PSGD, FiniteDifference, Whitening

from ..cases import small_model, train

STEPS = 8


def warm_up_then_cosine(optimizer: PSGD) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 3)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])


SCHEDULES: dict[str, Callable[[PSGD], lr_scheduler.LRScheduler]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
    "warm-up, cosine": warm_up_then_cosine,
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, step_size_up=3),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.3),
    "swa": lambda optimizer: SWALR(optimizer, swa_lr=0.001, anneal_epochs=6),
}
schedules = pytest.mark.parametrize("name", SCHEDULES)


def new(probe) -> tuple[torch.nn.Module, PSGD]:
    model = small_model()
    return model, PSGD(model.parameters(), lr=0.01, probe=probe)


def advance(scheduler: lr_scheduler.LRScheduler) -> None:
    """A plateau is seen where the metric stays as it is."""
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize(
    ("name", "probe"), [*((name, Whitening()) for name in SCHEDULES), ("one cycle", FiniteDifference())], ids=str
)
def test_what_a_scheduler_sets_is_what_the_step_uses(name: str, probe):
    """A run with the same numbers set by hand comes to the same parameters, every bit."""
    model, optimizer = new(probe)
    scheduler = SCHEDULES[name](optimizer)
    numbers = []
    for step in range(STEPS):
        numbers.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
        train(model, optimizer, step, step + 1)
        advance(scheduler)
    assert len({each["lr"] for each in numbers}) > 1
    assert (len({each["momentum"] for each in numbers}) > 1) == (name in ("one cycle", "cyclic"))

    by_hand, by_hand_optimizer = new(probe)
    for step in range(STEPS):
        by_hand_optimizer.param_groups[0].update(numbers[step])
        train(by_hand, by_hand_optimizer, step, step + 1)
    assert same(model, by_hand)


@schedules
def test_a_resumed_schedule_is_the_same_run(name: str, tmp_path):
    def run(model, optimizer, scheduler, first: int, last: int) -> None:
        for step in range(first, last):
            train(model, optimizer, step, step + 1)
            advance(scheduler)

    model, optimizer = new(Whitening())
    scheduler = SCHEDULES[name](optimizer)
    run(model, optimizer, scheduler, 0, 3)
    saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, scheduler)]
    run(model, optimizer, scheduler, 3, STEPS)

    torch.save(saved[1], tmp_path / "optimizer.pt")
    again, again_optimizer = new(Whitening())
    again_scheduler = SCHEDULES[name](again_optimizer)
    again.load_state_dict(saved[0])
    again_optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    again_scheduler.load_state_dict(saved[2])
    run(again, again_optimizer, again_scheduler, 3, STEPS)
    assert same(model, again)
    assert [group["lr"] for group in again_optimizer.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_one_cycle_switches_momentum_on_where_there_is_none_unless_told_not_to():
    for cycle_momentum, momentum in ((True, 0.95), (False, 0.0)):
        _, optimizer = new(FiniteDifference())
        optimizer.param_groups[0]["momentum"] = 0.0
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS, cycle_momentum=cycle_momentum)
        assert optimizer.param_groups[0]["momentum"] == momentum


def test_each_param_group_follows_its_own_schedule():
    """One that stays at 0 does not move, whatever the other does."""
    model = small_model()
    layers = [{"params": model[0].parameters()}, {"params": model[3].parameters()}, {"params": model[5].parameters()}]
    optimizer = PSGD(layers, lr=0.01, probe=Whitening())
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda _: 0.0, lambda step: 1 / (1 + step), lambda _: 1.0])
    for step in range(4):
        train(model, optimizer, step, step + 1)
        scheduler.step()
    fresh = small_model()
    moved = [not torch.equal(model[i].weight, fresh[i].weight) for i in (0, 3, 5)]
    assert moved == [False, True, True]
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.01 / 5, 0.01]


def test_a_schedule_that_leaves_what_momentum_may_be_says_so():
    model, optimizer = new(Whitening())
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS, max_momentum=1.0)
    with pytest.raises(ValueError, match=r"momentum=1.0 in param group 0: PSGD wants a number of at least 0 and less"):
        train(model, optimizer, 0, 1)


def test_a_step_size_in_a_tensor_is_followed_too():
    results = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        model = small_model(torch.float64)
        optimizer = PSGD(model.parameters(), lr=lr, probe=Whitening())
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            train(model, optimizer, step, step + 1)
            scheduler.step()
        results.append(model)
        assert math.isclose(float(optimizer.param_groups[0]["lr"]), 0.0, abs_tol=1e-12)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
