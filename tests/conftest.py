"""Shared by all tests: one thread each, as they run side by side, and nothing left behind in torch."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

import pytest
from hypothesis import settings

from .browser import browser  # noqa: F401
from .processes import imported_before

# The same examples in every run; `pytest --hypothesis-profile=default` looks for new ones.
settings.register_profile("psgd", deadline=None, derandomize=True)
settings.load_profile("psgd")


def pytest_configure(config: pytest.Config) -> None:
    """One thread for a process that runs tests; one that only hands them out to others need not wait for torch."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def forks() -> BaseContext:
    return imported_before()


@pytest.fixture
def quick_processes(forks, monkeypatch) -> None:
    """Let processes that this one starts be forks of one that has imported torch."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: forks)


@pytest.fixture(autouse=True)
def torch_stays_as_it_was():
    import torch

    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
