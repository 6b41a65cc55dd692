from __future__ import annotations

import pytest
import torch

from psgd.experiments.sweep import DIRECTIONS, places, sweep

SIZES = pytest.mark.parametrize(("height", "width"), [(3, 4), (5, 2), (4, 4), (2, 1), (1, 2)])


def pixel_by_pixel(y, U, V, height, width):
    """The recurrence as it is written: a loop over the rows and one over the columns, in each direction."""
    directions = []
    for d, (up, back) in enumerate(DIRECTIONS):
        h = {}
        for i in range(height)[:: -1 if up else 1]:
            for j in range(width)[:: -1 if back else 1]:
                above, left = (i + 1 if up else i - 1, j), (i, j + 1 if back else j - 1)
                z = y[d, i * width + j]
                if above in h:
                    z = z + h[above] @ U[d].T
                if left in h:
                    z = z + h[left] @ V[d].T
                h[i, j] = z.tanh()
        directions.append(torch.stack([h[i, j] for i in range(height) for j in range(width)]))
    return torch.stack(directions)


def arguments(height, width, batch=3, states=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (4, height * width, batch, states), (4, states, states), (4, states, states)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.requires_grad_() for tensor in made]


@SIZES
def test_diagonals_give_what_pixels_give(height, width):
    y, U, V = arguments(height, width)
    ours, theirs = (function(y, U, V, height, width) for function in (sweep, pixel_by_pixel))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    weights = torch.randn_like(ours)
    gradients = [
        torch.autograd.grad((out * weights).sum(), (y, U, V), allow_unused=True, materialize_grads=True)
        for out in (ours, theirs)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_derivatives_are_those_of_differences():
    y, U, V = arguments(3, 2, batch=2)
    assert torch.autograd.gradcheck(lambda *tensors: sweep(*tensors, 3, 2), (y, U, V))


def test_every_direction_reads_from_its_own_corner():
    """A change of one pixel changes the states from there to the end of the direction, and no others."""
    y, U, V = (tensor.detach() for tensor in arguments(4, 5, batch=1))
    changed = y.clone()
    changed[:, 1 * 5 + 2] += 1
    moved = (sweep(y, U, V, 4, 5) != sweep(changed, U, V, 4, 5)).flatten(2).any(2).view(4, 4, 5)
    for (up, back), where in zip(DIRECTIONS, moved, strict=True):
        expected = torch.zeros(4, 5, dtype=torch.bool)
        expected[slice(0, 2) if up else slice(1, 4), slice(0, 3) if back else slice(2, 5)] = True
        assert torch.equal(where, expected)


def test_it_can_be_differentiated_once_only():
    y, U, V = arguments(2, 2)
    (gradient,) = torch.autograd.grad(sweep(y, U, V, 2, 2).square().sum(), U, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@SIZES
def test_every_pixel_has_a_place_of_its_own(height, width):
    skewed, pixels = places(height, width, torch.device("cpu"))
    assert len(skewed.unique()) == len(skewed) == 4 * height * width
    assert torch.equal(pixels[skewed], torch.arange(len(skewed)))
