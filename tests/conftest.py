"""Shared by all tests: one thread each, as they run side by side, and nothing left behind in torch."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

import pytest
import torch
from hypothesis import settings

from .browser import browser  # noqa: F401
from .processes import imported_before

torch.set_num_threads(1)
# The same examples in every run; `pytest --hypothesis-profile=default` looks for new ones.
settings.register_profile("psgd", deadline=None, derandomize=True)
settings.load_profile("psgd")


@pytest.fixture(scope="session")
def forks() -> BaseContext:
    return imported_before()


@pytest.fixture
def quick_processes(forks, monkeypatch) -> None:
    """Let processes that this one starts be forks of one that has imported torch."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: forks)


@pytest.fixture(autouse=True)
def torch_stays_as_it_was():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
