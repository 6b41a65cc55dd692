"""Initialisation of a recurrent network for long memory, and a measure of that memory.

An orthogonal feedback matrix rotates the state: each of its planes by an angle of its own, at every step. What a fast
rotation keeps is turned to a different place for every delay, so that fast rotations tell many delays apart, which is
what a network needs to repeat ten symbols in their order. But the trace of an event whose time varies has turned to
every direction alike when the sequence ends, and averages to nothing: the gradient of a read-out that wants it is only
noise. What a slow rotation keeps stays where it is, whenever it came in. So a network that is to learn both kinds of
problems starts with both kinds of rotations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .recurrent import Network

#: share of the planes that are rotated fast
FAST = 0.6
#: largest angle of a slow rotation: in 100 steps a plane turns by half a turn at most
SLOW = 0.01 * math.pi
#: standard deviation of what the inputs of one step add to a state. Over 100 steps these sum up to 0.42, where the
#: slope of tanh is 0.84: inputs are seen, but they do not drive the states to where memory ends.
DRIVE = 0.042
#: number of steps that ``SLOW`` and ``DRIVE`` were chosen for; with more of them both are smaller
STEPS = 100
#: least standard deviation of an input channel that is taken for one; weights of a constant channel would be infinite
LEAST = 0.05


def rotations(states: int, generator: torch.Generator, fast: float = FAST, slow: float = SLOW) -> Tensor:
    """Orthogonal matrix that rotates ``states // 2`` random planes by random angles.

    Args:
        states: number of rows and columns; an odd one leaves one direction as it is
        generator: source of the planes and the angles
        fast: share of the planes whose angle is uniform in 0 … π
        slow: the angles of the other planes are uniform in 0 … ``slow``
    """
    Q, R = torch.linalg.qr(torch.randn(states, states, generator=generator, dtype=torch.float64))
    Q = Q * R.diagonal().sign()  # uniformly distributed
    angles = torch.rand(states // 2, generator=generator, dtype=torch.float64)
    count = round(fast * len(angles))
    angles[:count] *= math.pi
    angles[count:] *= slow
    cos, sin = angles.cos(), angles.sin()
    planes = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
    return Q @ torch.block_diag(*planes, torch.eye(states % 2, dtype=torch.float64)) @ Q.mT


def slowest(length: int) -> float:
    """Largest angle of a slow rotation: in ``length`` steps, too, no slow plane turns by more than half a turn."""
    return SLOW * min(STEPS / length, 1.0)


def drive(length: int) -> float:
    """Standard deviation of what one step adds to a state, such that ``length`` steps leave the same memory as 100.

    Inputs of variance ``d²`` and the slope of tanh, about ``1 − h²``, balance at ``h² = d / √2``. A step then keeps
    ``1 − d / √2`` of what was there, so ``length · d`` decides how much is left at the end.
    """
    return DRIVE * min(STEPS / length, 1.0)


@torch.no_grad()
def initialise_(model: Network, examples: Tensor, generator: torch.Generator, length: int = STEPS) -> None:
    """Start a network with both kinds of rotations, and with inputs that drive its states little and without bias.

    Args:
        model: the network; its output layer is left as it is
        examples: sequences ``(length, batch, inputs)`` that show the mean and the spread of each input channel
        generator: source of the weights
        length: number of steps over which the network is to remember
    """
    states, inputs = model.cell.out_features, model.inputs
    channels = examples.double().flatten(0, 1)
    std = channels.std(0).clamp_min(LEAST)
    normal = torch.randn(states, inputs, generator=generator, dtype=torch.float64)
    forward = drive(length) * normal / (std * math.sqrt(inputs))
    model.cell.weight.copy_(torch.cat([forward, rotations(states, generator, slow=slowest(length))], 1))
    model.cell.bias.copy_(-forward @ channels.mean(0))


@torch.no_grad()
def memory(model: Network, x: Tensor) -> float:
    """Length that a tiny change of the first state has after sequences ``x``, relative to its length at first.

    A number near 1 means that the network remembers. As long as the number is tiny, no gradient of the answer comes
    back to the beginning.
    """
    weight, bias = model.cell.weight.double(), model.cell.bias.double()
    forward, feedback = weight.split([model.inputs, model.cell.out_features], dim=1)
    generator = torch.Generator().manual_seed(0)
    change = 1e-6 * torch.randn(x.shape[1], len(bias), generator=generator, dtype=torch.float64).to(x.device)
    plain, changed = torch.zeros_like(change), change
    for drive in x.double() @ forward.mT + bias:
        plain, changed = torch.tanh(drive + plain @ feedback.mT), torch.tanh(drive + changed @ feedback.mT)
    return float((changed - plain).norm() / change.norm())
