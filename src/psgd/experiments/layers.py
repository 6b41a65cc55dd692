"""Linear layers whose weights come from a given generator; torch would draw its own from the global one."""

from __future__ import annotations

import torch
from torch import nn


def linear(inputs: int, outputs: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """Linear layer with normal weights of variance ``1 / inputs`` and zero biases."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=dtype)
    nn.init.normal_(layer.weight, std=inputs**-0.5, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
