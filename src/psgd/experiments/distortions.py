"""Small random shifts, rotations, scalings, shears and bends of images, all images at once on their device."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

#: number of images that are distorted at once
CHUNK = 5000
#: number of points along each axis whose random shifts bend an image
POINTS = 5


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


def bends(count: int, generator: torch.Generator, bend: float) -> Tensor:
    """Random shifts of ``POINTS`` × ``POINTS`` points of each image, at most ``bend`` pixels of 28 along each axis."""
    return (2 * torch.rand(count, 2, POINTS, POINTS, generator=generator) - 1) * (2 * bend / 28)


def distort(images: Tensor, maps: Tensor, shifts: Tensor | None = None) -> Tensor:
    """Distorted images (N × height × width), by bilinear interpolation; outside of an image all is zero.

    Args:
        images: the images
        maps: affine maps, one for each image
        shifts: shifts of points, as ``bends`` draws them; between the points they are interpolated
    """
    parts = []
    for begin in range(0, len(images), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        part = images[chunk]
        shape = [len(part), 1, *part.shape[1:]]
        grid = nn.functional.affine_grid(maps[chunk].to(part.device), shape, align_corners=False)
        if shifts is not None:
            some = shifts[chunk].to(part.device)
            smooth = nn.functional.interpolate(some, list(part.shape[1:]), mode="bicubic", align_corners=True)
            grid = grid + smooth.permute(0, 2, 3, 1)
        parts.append(nn.functional.grid_sample(part[:, None], grid, align_corners=False)[:, 0])
    return torch.cat(parts)
