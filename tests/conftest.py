"""Shared by all tests: one thread each, as they run side by side, and nothing left behind in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# The same examples in every run; `pytest --hypothesis-profile=default` looks for new ones.
settings.register_profile("psgd", deadline=None, derandomize=True)
settings.load_profile("psgd")


@pytest.fixture(autouse=True)
def torch_stays_as_it_was():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
