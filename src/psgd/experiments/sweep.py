"""Recurrence over the two axes of an image, in four directions at once: ``h = tanh(y + U h_above + V h_left)``.

A state needs its neighbours above and to the left, which are on the diagonal before its own. All states of a diagonal
are therefore computed together, for the four directions and the whole mini-batch: H + W − 1 dependent steps instead of
H W, each of two batched products and one tanh. States are kept in a skewed array, in which a diagonal is one
contiguous slice; the row before the first is zero.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: directions: whether the rows, and whether the columns are read backwards
DIRECTIONS = ((False, False), (False, True), (True, False), (True, True))


@cache
def places(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of pixels in the skewed array, and pixels at the positions of the skewed array.

    A pixel is counted by direction, row and column, a position by diagonal, direction and row. Positions without a
    pixel, one of which is before each first row, name pixel 0.
    """
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width).expand(height, width)
    positions = []
    for direction, (up, back) in enumerate(DIRECTIONS):
        i, j = (rows.flip(0) if up else rows), (columns.flip(1) if back else columns)
        positions.append((((i + j) * len(DIRECTIONS) + direction) * (height + 1) + i + 1).flatten())
    skewed = torch.cat(positions)
    pixels = torch.zeros((height + width - 1) * len(DIRECTIONS) * (height + 1), dtype=torch.long)
    pixels[skewed] = torch.arange(len(skewed))
    return skewed.to(device), pixels.to(device)


def _rows(diagonal: int, height: int, width: int, batch: int) -> tuple[slice, slice]:
    """Part of a diagonal that is in the image, and the part one row above; the row before the first is counted."""
    first, last = max(diagonal - width + 1, 0), min(diagonal, height - 1)
    return slice((first + 1) * batch, (last + 2) * batch), slice(first * batch, (last + 1) * batch)


class Sweep(torch.autograd.Function):
    """Recurrence with a backward pass of its own, which needs no more operations per diagonal than the forward one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, U: Tensor, V: Tensor, height: int, width: int) -> Tensor:
        directions, _, batch, states = y.shape
        skewed, pixels = places(height, width, y.device)
        diagonals = height + width - 1
        # A contiguous diagonal has the shape directions × (rows · batch) × states.
        shape = diagonals, directions, (height + 1) * batch, states
        z = y.reshape(-1, batch * states).index_select(0, pixels).view(shape)
        h = torch.zeros_like(z)
        Ut, Vt = U.mT, V.mT
        for t in range(diagonals):
            here, above = _rows(t, height, width, batch)
            sums = z[t, :, here]
            if t:
                sums.baddbmm_(h[t - 1, :, above], Ut).baddbmm_(h[t - 1, :, here], Vt)
            torch.tanh(sums, out=h[t, :, here])
        ctx.save_for_backward(h, U, V)
        ctx.height, ctx.width, ctx.batch = height, width, batch
        return h.view(-1, batch * states).index_select(0, skewed).view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        h, U, V = ctx.saved_tensors
        height, width, batch = ctx.height, ctx.width, ctx.batch
        diagonals, directions, rows, states = h.shape
        skewed, pixels = places(height, width, h.device)
        dh = grad.reshape(-1, batch * states).index_select(0, pixels).view(h.shape)
        dz = torch.zeros_like(h)
        for t in reversed(range(diagonals)):
            here, above = _rows(t, height, width, batch)
            part = dz[t, :, here]
            torch.ops.aten.tanh_backward.grad_input(dh[t, :, here], h[t, :, here], grad_input=part)
            if t:
                dh[t - 1, :, above].baddbmm_(part, U)
                dh[t - 1, :, here].baddbmm_(part, V)
        # One product for each diagonal: a sum over all of them within one product would be long and narrow.
        after = dz[1:].view(-1, rows, states)[:, batch:].mT
        before = h[:-1].view(-1, rows, states)
        dU = torch.bmm(after, before[:, :-batch]).view(-1, *U.shape).sum(0)
        dV = torch.bmm(after, before[:, batch:]).view(-1, *V.shape).sum(0)
        dy = dz.view(-1, batch * states).index_select(0, skewed)
        return dy.view(directions, height * width, batch, states), dU, dV, None, None


def sweep(y: Tensor, U: Tensor, V: Tensor, height: int, width: int) -> Tensor:
    """States of all pixels in four directions.

    Args:
        y: inputs, directions × (height · width) × batch × states
        U: weights of the neighbour that is one row earlier in the direction of reading, directions × states × states
        V: weights of the neighbour that is one column earlier

    Returns:
        states, in the order of the inputs: in every direction, a pixel has the place that it has in the image
    """
    states: Tensor = Sweep.apply(y, U, V, height, width)  # type: ignore[no-untyped-call]
    return states
