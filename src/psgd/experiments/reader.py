"""The digit reader: a deep two-dimensional recurrent network without gates that reads an image in four directions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from .layers import linear
from .sweep import DIRECTIONS, sweep

CLASSES = 10
#: size of each of the two feedback matrices at the start, which are multiples of orthogonal ones. There are many ways
#: from one pixel to another: with size one, a tenth of the second layer's states would start beyond ±0.9.
FEEDBACK = 0.5


def windows(maps: Tensor, size: int, stride: int) -> Tensor:
    """Windows of feature maps (height × width × batch × channels), with channels and pixels as one axis, the last.

    Every ``stride``-th pixel of both axes has a window. Where a window is larger than the image, it sees zeros.
    """
    before = (size - stride) // 2
    after = [(-(-length // stride) - 1) * stride + size - length - before for length in maps.shape[:2]]
    if before or any(after):
        maps = nn.functional.pad(maps, (0, 0, 0, 0, before, after[1], before, after[0]))
    return maps.unfold(0, size, stride).unfold(1, size, stride).flatten(3)


class Layer(nn.Module):
    """Layer of a digit reader: in each direction ``h = tanh(W x + U h_above + V h_left + b)``.

    ``x`` is a window of the layer's input. The matrices ``[W U V b]`` of the four directions are its parameters.
    """

    def __init__(self, channels: int, states: int, size: int, stride: int, generator: torch.Generator) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        self.inputs, self.states = channels * size * size, states
        self.weights = nn.ParameterList(self._start(generator) for _ in DIRECTIONS)

    def _start(self, generator: torch.Generator) -> Tensor:
        W = torch.randn(self.states, self.inputs, generator=generator) * self.inputs**-0.5
        drawn = torch.randn(2, self.states, self.states, generator=generator)
        U, V = FEEDBACK * torch.linalg.qr(drawn)[0]
        return torch.cat([W, U, V, torch.zeros(self.states, 1)], 1)

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps with the states of all directions as channels."""
        seen = windows(maps, self.size, self.stride)
        height, width, batch, _ = seen.shape
        W, U, V, b = torch.stack(list(self.weights)).split([self.inputs, self.states, self.states, 1], 2)
        y = nn.functional.linear(seen.flatten(0, 1), W.flatten(0, 1), b.flatten())
        y = y.view(height * width, batch, len(DIRECTIONS), self.states).permute(2, 0, 1, 3)
        h = sweep(y, U, V, height, width)
        return h.permute(1, 2, 0, 3).reshape(height, width, batch, -1)


class Reader(nn.Module):
    """Layers of states in four directions, each on windows of the one before; their average tells the class.

    Args:
        states: number of states of each layer, for each direction
        sizes: side of the windows of each layer
        strides: distance of neighbouring windows of each layer
        generator: source of the initial weights
    """

    def __init__(
        self, states: Sequence[int], sizes: Sequence[int], strides: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        channels = [1, *(len(DIRECTIONS) * count for count in states)]
        self.layers = nn.Sequential(
            *(
                Layer(inputs, outputs // len(DIRECTIONS), size, stride, generator)
                for (inputs, outputs), size, stride in zip(pairwise(channels), sizes, strides, strict=True)
            )
        )
        self.readout = linear(channels[-1], CLASSES, generator, torch.float32)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes for images (batch × height × width)."""
        maps = self.layers(images.permute(1, 2, 0)[..., None])
        scores: Tensor = self.readout(maps.mean((0, 1)))
        return scores
