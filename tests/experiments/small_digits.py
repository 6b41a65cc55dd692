"""A small set in MNIST's place: ten fixed random pictures with noise, easy to tell apart, one in ten mislabelled."""

from __future__ import annotations

import pytest
import torch

from psgd.experiments import digits, mnist


def generate(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    prototypes = torch.randint(256, (10, 28, 28), generator=torch.Generator().manual_seed(5))
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(256, (count, 28, 28), generator=generator)
    mislabelled = torch.rand(count, generator=generator) < 0.1
    return ((prototypes[labels] + noise) // 2).to(torch.uint8), torch.where(mislabelled, 9 - labels, labels)


@pytest.fixture
def small_digits(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    found = mnist.Digits(*generate(600, generator), *generate(200, generator))
    monkeypatch.setattr(mnist, "load", lambda data=None: found)
    digits.tensors.cache_clear()
    yield found
    digits.tensors.cache_clear()
