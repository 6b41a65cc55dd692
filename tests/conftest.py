"""Shared by all tests: one thread each, as they run side by side, and nothing left behind in torch."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def torch_stays_as_it_was():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
