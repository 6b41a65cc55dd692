"""No test here may need a network, nor leave settings behind for the next one."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def offline_and_fresh(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    if (accelerate := sys.modules.get("accelerate")) is not None:  # it keeps its settings in singletons
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
