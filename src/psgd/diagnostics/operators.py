"""``H``, ``P`` and ``Q H Qᵀ`` of a model as linear operators, by Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..blocks import Block
from ..ops.real import as_real, from_real
from ..optimizer import PSGD
from ..probes.closures import evaluate_forward
from ..probes.restore import Gradients


class Operators:
    """``H``, ``P`` and ``Q H Qᵀ`` of a model as functions of one flat vector: the packed blocks of the optimizer."""

    def __init__(self, optimizer: PSGD, closure: Callable[[], Tensor], who: str) -> None:
        self.params = optimizer.parameters()
        self.stacks = [
            stack.select(chosen, torch.tensor(chosen, device=stack.device))
            for stack in optimizer.stacks
            if (chosen := _trainable(stack.blocks, self.params))
        ]
        with torch.enable_grad():
            loss = evaluate_forward(closure, Gradients(self.params), who)
            self.inputs = {i: p for i, p in enumerate(self.params) if p.requires_grad and p.numel() > 0}
            grads = torch.autograd.grad(loss, list(self.inputs.values()), create_graph=True, allow_unused=True)
        self.grads = [g if g is not None and g.requires_grad else None for g in grads]
        self.sizes = [len(stack.blocks) * stack.blocks[0].numel for stack in self.stacks]
        self.size = sum(self.sizes)
        self.dtype, self.device = self.stacks[0].like.dtype, self.stacks[0].device

    def probes(self, count: int, seed: int) -> list[Tensor]:
        """Vectors of random signs, or all unit vectors if there are no more of them than ``count``."""
        if count >= self.size:
            return list(torch.eye(self.size, dtype=self.dtype, device=self.device))
        generator = torch.Generator("cpu").manual_seed(seed)
        signs = torch.randint(0, 2, (count, self.size), generator=generator, device="cpu") * 2 - 1
        return list(signs.to(self.device, self.dtype))

    def _split(self, v: Tensor) -> list[Tensor]:
        return [
            part.reshape(len(stack.blocks), *stack.blocks[0].shape).to(stack.like)
            for stack, part in zip(self.stacks, v.split(self.sizes), strict=True)
        ]

    def _join(self, parts: list[Tensor]) -> Tensor:
        first = self.stacks[0].like
        return torch.cat([part.flatten().to(first) for part in parts])

    def P(self, v: Tensor) -> Tensor:
        parts = zip(self.stacks, self._split(v), strict=True)
        return self._join([stack.group.precondition(part) for stack, part in parts])

    def QHQt(self, v: Tensor) -> Tensor:
        parts = zip(self.stacks, self._split(v), strict=True)
        Hv = self.H(self._join([stack.group.apply_t(part) for stack, part in parts]))
        parts = zip(self.stacks, self._split(Hv), strict=True)
        return self._join([stack.group.apply(part) for stack, part in parts])

    def H(self, v: Tensor) -> Tensor:
        vectors = {
            i: part
            for stack, stacked in zip(self.stacks, self._split(v), strict=True)
            for i, part in stack.unpack(stacked)
        }
        used = [
            (g, from_real(vectors[i].to(as_real(g).dtype).contiguous(), g))
            for i, g in zip(self.inputs, self.grads, strict=True)
            if g is not None
        ]
        products = torch.autograd.grad(
            [g for g, _ in used],
            list(self.inputs.values()),
            [u for _, u in used],
            retain_graph=True,
            allow_unused=True,
        )
        found = {i: p.detach() for i, p in zip(self.inputs, products, strict=True) if p is not None}
        return self._join([stack.pack(found) for stack in self.stacks])


def _trainable(blocks: Sequence[Block], params: Sequence[Tensor]) -> list[int]:
    """Indices of trainable blocks; raise if only some parameters of one are, as then only a part of ``P`` would act."""
    chosen = []
    for b, block in enumerate(blocks):
        trainable = [params[i].requires_grad for i in block.params]
        if all(trainable):
            chosen.append(b)
        elif any(trainable):
            raise ValueError(
                f"optimizer: a block of shape {block.shape} has trainable and frozen parameters; model_properties "
                "wants blocks of one kind, as PerTensor() makes them"
            )
    return chosen
