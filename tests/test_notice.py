"""Warnings: of one category, and about the line of the user's program."""

from __future__ import annotations

import warnings

import pytest
import torch

import psgd
from psgd import PSGD, Kronecker, PSGDWarning, Whitening
from psgd.notice import warn
from psgd.state import arithmetic


def test_a_warning_has_a_category_of_its_own_which_is_one_of_users():
    assert issubclass(PSGDWarning, UserWarning)
    with pytest.warns(PSGDWarning, match="words"):
        warn("words")


def test_it_names_the_line_that_led_to_it_through_torch_and_the_package(monkeypatch):
    monkeypatch.setattr(arithmetic, "has_bfloat16", lambda device: False)
    with pytest.warns(PSGDWarning) as caught:
        PSGD([torch.ones(2, requires_grad=True)], probe=Whitening(), precond_dtype=torch.bfloat16)
    assert [each.filename for each in caught] == [__file__]
    theta = torch.ones(2, requires_grad=True)
    optimizer = PSGD([theta], probe=Whitening())
    theta.grad = torch.full((2,), torch.nan)
    for _ in range(20):
        optimizer.step()
    with pytest.warns(PSGDWarning) as caught:
        optimizer.step()
    assert [each.filename for each in caught] == [__file__]


def test_it_can_be_turned_off_by_its_category(monkeypatch):
    monkeypatch.setattr(arithmetic, "has_bfloat16", lambda device: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=psgd.PSGDWarning)
        PSGD([torch.ones(2, requires_grad=True)], preconditioner=Kronecker(), precond_dtype=torch.bfloat16)
