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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Hand out all cases of a test together, where groups are: a worker need not ask for each of thousands of them."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByTest(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.partition("[")[0] if group == nodeid else group

    return ByTest(config, log)


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

    # Without a GPU, `torch.manual_seed` would keep a call for later, with a picture of the stack, at every test.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(0)
    yield
    torch.set_default_dtype(torch.float32)
