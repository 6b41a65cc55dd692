"""Restoration of gradients and of the state of random generators, which a closure may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Gradients:
    """Gradients (``.grad``) of all parameters before a step, to restore every bit if the step fails.

    The tensors themselves are kept and, before a closure may write to them, copies of their values.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.grads = [p.grad for p in params]
        self.values: list[Tensor | None] = [None] * len(params)
        self.versions = [None if grad is None else grad._version for grad in self.grads]

    def save(self) -> None:
        """Copy the values, before a closure is called."""
        self.values = [None if grad is None else grad.clone() for grad in self.grads]

    def forget_untouched(self) -> None:
        """Free copies that are not needed: a closure that sets gradients to None does not write to the old tensors."""
        for i, grad in enumerate(self.grads):
            if grad is not None and grad._version == self.versions[i]:
                self.values[i] = None

    def hide(self) -> None:
        for p in self.params:
            p.grad = None

    def restore(self) -> None:
        """Restore all gradients, so that a closure called again starts from the same ones, even if it accumulates."""
        for p, grad, value in zip(self.params, self.grads, self.values, strict=True):
            p.grad = grad
            if grad is not None and value is not None:
                grad.copy_(value)


class RandomState:
    """State of torch's global generators on the CPU and on the devices of the parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.cpu = torch.get_rng_state()
        devices = {p.device for p in params if p.device.type != "cpu"}
        self.devices = {d: torch.get_device_module(d).get_rng_state(d) for d in devices}

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
