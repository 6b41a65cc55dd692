"""Numbers that PSGD chooses by itself: how often ``Q`` is updated depends on device, shapes, structure and probe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import psgd
from psgd import PSGD, Dense, Diagonal, FiniteDifference, Kronecker, LimitedMemory, Whitening


def schedule(*shapes: tuple[int, ...], device: str = "cpu", **options: Any) -> tuple[int, int]:
    """``update_every`` and ``update_anneal`` of parameters of some shapes."""
    optimizer = PSGD([torch.zeros(shape, device=device) for shape in shapes], **{"probe": Whitening(), **options})
    (group,) = optimizer.param_groups
    return group["update_every"], group["update_anneal"]


def test_whitening_updates_rarely_on_a_cpu():
    assert schedule((4, 3)) == (10, 100)
    assert schedule((64, 64), (64,)) == (10, 100)
    assert schedule((4, 3), device="meta") == (1, 0)  # as on a GPU


def test_curvature_updates_at_every_step_unless_axes_are_long():
    curvature = FiniteDifference()
    assert schedule((4, 3), (256, 256), probe=curvature) == (1, 0)
    assert schedule((200,), probe=curvature) == (1, 0)  # a function of few numbers
    assert schedule((512, 512), probe=curvature) == (10, 100)
    assert schedule((784, 10), probe=curvature) == (10, 100)
    assert schedule((512, 512), probe=curvature, preconditioner=Kronecker(max_dense=256)) == (1, 0)


def test_the_longer_the_axes_the_rarer_the_updates():
    """Updates cost n³ for an axis of n, and a gradient n² for each sample."""
    found = [schedule((n, n))[0] for n in (256, 512, 1024, 2048)]
    assert found == [10, 11, 22, 44]
    assert schedule((784, 300), (300,), (300, 10), (10,))[0] == 12  # one of them thin
    assert schedule((512, 512), preconditioner=Kronecker(max_dense=256))[0] == 10
    assert schedule((200,))[0] == 10  # a function of few numbers
    assert schedule((784, 10))[0] == 48


@pytest.mark.parametrize("structure", [Dense(), Diagonal(), LimitedMemory(), Kronecker(inverse_free=False)], ids=str)
def test_structures_that_draw_random_numbers_need_all_updates(structure):
    assert schedule((512, 4), preconditioner=structure) == (1, 0)


def test_a_dense_Q_is_young_at_a_smaller_step_size_if_it_is_fitted_to_curvature():
    """With the boost of the others, the first steps on noisy losses are far too long."""

    def boost(**options: Any) -> float:
        return PSGD([torch.zeros(3)], **options).param_groups[0]["precond_boost"]

    assert boost(preconditioner=Dense()) == 2
    assert boost(preconditioner=Dense(), probe=Whitening()) == 3
    assert boost(preconditioner=Diagonal()) == 3
    assert boost() == 6


def test_numbers_that_are_given_are_used():
    assert schedule((4, 3), update_every=1) == (1, 0)
    assert schedule((4, 3), update_every=3) == (3, 0)
    assert schedule((4, 3), update_anneal=7) == (10, 7)
    assert schedule((4, 3), update_every=3, update_anneal=7) == (3, 7)


def test_a_number_of_a_group_does_not_undo_what_was_given_for_all():
    params = [{"params": [torch.zeros(4, 3)], "update_every": 20, "precond_lr": 0.2}, {"params": [torch.zeros(3, 4)]}]
    first, second = PSGD(params, probe=Whitening(), update_every=5, update_anneal=500, precond_boost=2.0).param_groups
    assert (first["update_every"], first["update_anneal"], first["precond_boost"]) == (20, 500, 2.0)
    assert (second["update_every"], second["update_anneal"], second["precond_boost"]) == (5, 500, 2.0)


def test_each_param_group_has_its_own():
    groups = [
        {"params": [torch.zeros(4, 3)]},
        {"params": [torch.zeros(1024, 1024)]},
        {"params": [torch.zeros(5)], "update_every": 4},
        {"params": [torch.zeros(6)], "update_every": 4, "update_anneal": 9},
        {"params": [torch.zeros(7)], "preconditioner": Dense()},
    ]
    optimizer = copy.deepcopy(PSGD(groups, probe=Whitening()))
    optimizer.add_param_group({"params": [torch.zeros(8, 2)]})  # what was given is remembered
    found = [(group["update_every"], group["update_anneal"]) for group in optimizer.param_groups]
    assert found == [(10, 100), (22, 100), (4, 0), (4, 9), (1, 0), (10, 100)]


def test_a_checkpoint_keeps_its_own_and_text_shows_it():
    """What was chosen for one machine is still the same when training is resumed on another."""
    params = [torch.zeros(4, 3)]
    saved = PSGD(params, probe=Whitening(), update_every=1).state_dict()
    optimizer = PSGD(params, probe=Whitening())
    assert "update_every=10" in repr(optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["update_every"] == 1
    assert "update_every=10" not in repr(optimizer)


@pytest.mark.parametrize("make", [psgd.whiten, psgd.newton])
def test_one_line_for_a_model_has_them_too(make):
    (group,) = make(nn.Linear(600, 600, bias=False)).param_groups
    assert (group["update_every"], group["update_anneal"]) == (12 if make is psgd.whiten else 10, 100)
    (group,) = make(nn.Linear(600, 600, bias=False), update_every=2).param_groups
    assert (group["update_every"], group["update_anneal"]) == (2, 0)
