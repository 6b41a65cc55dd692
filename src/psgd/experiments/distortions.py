"""Small random shifts, rotations, scalings and shears of images, all images at once on their device."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

#: number of images that are distorted at once
CHUNK = 5000


def transforms(
    count: int, generator: torch.Generator, *, shift: float = 0.0, degrees: float = 0.0, scale: float = 0.0
) -> Tensor:
    """Random affine maps from a distorted image to the original, count × 2 × 3, as ``affine_grid`` wants them.

    Args:
        count: number of maps
        generator: source of the random numbers, on the CPU: they are the same for all devices
        shift: largest shift along each axis, in pixels of 28
        degrees: largest rotation, and largest angle of a shear
        scale: largest relative change of the size along each axis
    """
    drawn = 2 * torch.rand(6, count, generator=generator) - 1
    angle, shear = drawn[:2] * math.radians(degrees)
    sizes = 1 + drawn[2:4] * scale
    moves = drawn[4:] * (2 * shift / 28)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])]).permute(2, 0, 1)
    ones, zeros = torch.ones(count), torch.zeros(count)
    sheared = torch.stack([torch.stack([ones, shear.tan()]), torch.stack([zeros, ones])]).permute(2, 0, 1)
    matrices = turned @ sheared * sizes.T[:, None, :]
    return torch.cat([matrices, moves.T[:, :, None]], 2)


def distort(images: Tensor, maps: Tensor) -> Tensor:
    """Distorted images (N × height × width), by bilinear interpolation; outside of an image all is zero."""
    parts = []
    for part, some in zip(images.split(CHUNK), maps.split(CHUNK), strict=True):
        shape = [len(part), 1, *part.shape[1:]]
        grid = nn.functional.affine_grid(some.to(part.device), shape, align_corners=False)
        parts.append(nn.functional.grid_sample(part[:, None], grid, align_corners=False)[:, 0])
    return torch.cat(parts)
