"""Blind equalization of Section VI.B: find the inverse of a channel without knowing what was sent.

The source is uniform in [−1, 1]; the channel is ``h = (−0.8 + z⁻²) / (1 + 0.8 z⁻²)``; the equalizer ``w`` has 21 taps
and is adapted such that the squares of its outputs are as constant as those of the source can be (constant modulus).

The energy of the channel is 8.11, and the criterion is of fourth degree: raw gradients explode at the paper's step
sizes. As any receiver does, we bring the received signal to unit gain first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TAPS = 21
BATCH = 10
#: E s⁴ / E s² of the source
MODULUS = (1 / 5) / (1 / 3)
#: length at which the impulse response of the channel is cut: it has fallen to 1e-12
RESPONSE = 256


def channel() -> Tensor:
    """The impulse response of the channel, with unit energy."""
    h = torch.zeros(RESPONSE, dtype=torch.float64)
    h[0], h[2] = -0.8, 1.0
    for k in range(2, RESPONSE):
        h[k] -= 0.8 * h[k - 2]
    return h / torch.linalg.vector_norm(h)


def batches(generator: torch.Generator, batch: int = BATCH, chunk: int = 1000) -> Iterator[tuple[Tensor]]:
    """Consecutive outputs of the channel: for each output of ``w`` a window of TAPS samples, the newest first."""
    h = channel().flip(0)[None, None]
    past = TAPS - 1 + RESPONSE - 1
    source = 2 * torch.rand(past, generator=generator, dtype=torch.float64) - 1
    while True:
        new = 2 * torch.rand(batch * chunk, generator=generator, dtype=torch.float64) - 1
        source = torch.cat([source[-past:], new])
        received = torch.nn.functional.conv1d(source[None, None], h)[0, 0]
        for windows in received.unfold(0, TAPS, 1).flip(1).split(batch):
            yield (windows,)


def start() -> Tensor:
    """The taps: one in the centre, the rest zero."""
    w = torch.zeros(TAPS, dtype=torch.float64)
    w[TAPS // 2] = 1
    return w


def loss(w: Tensor, windows: Tensor) -> Tensor:
    """Mean squared difference of the squared outputs and the modulus."""
    return ((windows @ w).square() - MODULUS).square().mean()


def hessian(w: Tensor, windows: Tensor) -> Tensor:
    """Hessian of the loss: ``mean 4 (3y² − R) x xᵀ``"""
    curvature = 4 * (3 * (windows @ w).square() - MODULUS)
    return windows.mT @ (curvature[:, None] * windows) / len(windows)


def isi(w: Tensor) -> float:
    """Intersymbol interference: ``Σ c² / max c² − 1`` of channel and equalizer together."""
    h = channel()[None, None]
    c = torch.nn.functional.conv1d(h, w.detach().cpu().flip(0)[None, None], padding=TAPS - 1)
    energy = c.square()
    return float(energy.sum() / energy.max() - 1)


def floor(delay: int) -> float:
    """Least interference that 21 taps can leave: least squares with the given total delay."""
    h = channel()
    columns = torch.zeros(RESPONSE + TAPS - 1, TAPS, dtype=torch.float64)
    for k in range(TAPS):
        columns[k : k + RESPONSE, k] = h
    wanted = torch.zeros(RESPONSE + TAPS - 1, dtype=torch.float64)
    wanted[delay] = 1
    return isi(torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0])
