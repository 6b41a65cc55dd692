"""Blocks: parameters that share a ``Q``, and how they are packed into the array that ``Q`` acts on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .ops.real import as_real, shaped


@dataclass(frozen=True)
class Block:
    """Parameters that share a ``Q``: each is viewed in a shape of its own, and all views are joined along ``dim``.

    ``unpack(pack(tensors))`` returns the same tensors, as real arrays.
    """

    #: positions of the parameters in the optimizer's list of parameters
    params: tuple[int, ...]
    #: shapes of the parameters, as real arrays
    shapes: tuple[tuple[int, ...], ...]
    #: shapes of the parameters within the block, each with at least one axis
    views: tuple[tuple[int, ...], ...]
    dim: int = 0

    def __hash__(self) -> int:
        """Hash of the positions alone, which are unique to a block of an optimizer."""
        return hash(self.params)

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.views) == 1:
            return self.views[0]
        first = list(self.views[0])
        first[self.dim] = sum(view[self.dim] for view in self.views)
        return tuple(first)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) == 1:
            return shaped(as_real(tensors[0]), self.views[0])
        if len(self.views[0]) == 1:  # vectors, which one call flattens and joins
            return torch._utils._flatten_dense_tensors([as_real(t) for t in tensors])
        return torch.cat([as_real(t).reshape(view) for t, view in zip(tensors, self.views, strict=True)], self.dim)

    def unpack(self, block: Tensor) -> list[Tensor]:
        if len(self.views) == 1:
            return [block if self.views[0] == self.shapes[0] else block.reshape(self.shapes[0])]
        parts = block.split([view[self.dim] for view in self.views], self.dim)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Placed(NamedTuple):
    """Block with the dtype and device of its ``Q``."""

    block: Block
    dtype: torch.dtype
    device: torch.device


class Blocks(ABC):
    """Rule that divides the parameters of a param group into blocks."""

    @abstractmethod
    def divide(self, params: Sequence[tuple[int, Tensor]]) -> list[Block]:
        """Divide parameters, given with their positions, into blocks; the caller leaves out empty parameters."""


@dataclass(frozen=True)
class PerTensor(Blocks):
    """Every parameter has its own ``Q``, so that ``P`` is block diagonal with one block for each parameter."""

    def divide(self, params: Sequence[tuple[int, Tensor]]) -> list[Block]:
        blocks = []
        for i, p in params:
            shape = tuple(as_real(p).shape)
            blocks.append(Block((i,), (shape,), (shape or (1,),)))
        return blocks


@dataclass(frozen=True)
class Joint(Blocks):
    """All parameters of a param group share one ``Q``, which acts on them as one long vector."""

    def divide(self, params: Sequence[tuple[int, Tensor]]) -> list[Block]:
        if not params:
            return []
        _check_one_device(params, "Joint")
        shapes = tuple(tuple(as_real(p).shape) for _, p in params)
        return [Block(tuple(i for i, _ in params), shapes, tuple((math.prod(s),) for s in shapes))]


@dataclass(frozen=True)
class Affine(Blocks):
    """One matrix for all parameters of a layer: ``[W b]``, or ``[W_ih W_hh b]`` for a recurrent cell.

    Each param group must be one layer. The first axis of its weight counts the outputs, and all its tensors must have
    that many rows. ``Affine.groups(model)`` makes such groups. A group that has no weight or only one tensor is treated
    as with ``PerTensor``.

    >>> from torch import nn
    >>> for group in Affine.groups(nn.Sequential(nn.RNN(2, 50), nn.Linear(50, 1))):
    ...     print([name for name, _ in group["params"]])
    ['0.weight_ih_l0', '0.weight_hh_l0', '0.bias_ih_l0', '0.bias_hh_l0']
    ['1.weight', '1.bias']
    """

    def divide(self, params: Sequence[tuple[int, Tensor]]) -> list[Block]:
        weights = [p for _, p in params if p.ndim >= 2]
        if not weights or len(params) == 1:
            return PerTensor().divide(params)
        rows = weights[0].shape[0]
        if any(p.ndim == 0 or p.shape[0] != rows for _, p in params):
            found = ", ".join(str(tuple(p.shape)) for _, p in params)
            raise ValueError(
                f"params: a group with tensors of shapes {found} is not one layer; Affine wants one param group for "
                "each layer, as Affine.groups(model) makes them"
            )
        if any(p.is_complex() != weights[0].is_complex() for _, p in params):
            raise ValueError("params: Affine wants the tensors of a layer to be all real or all complex")
        _check_one_device(params, "Affine")
        shapes = tuple(tuple(as_real(p).shape) for _, p in params)
        pair = (2,) if weights[0].is_complex() else ()
        views = tuple((rows, math.prod(p.shape[1:]), *pair) for _, p in params)
        return [Block(tuple(i for i, _ in params), shapes, views, dim=1)]

    @staticmethod
    def groups(module: nn.Module, **options: Any) -> list[dict[str, Any]]:
        """Param groups of a model for ``PSGD(…, blocks=Affine())``, one for each layer.

        A layer consists of a module's own parameters, in the order in which they were registered. In a recurrent
        network, the tensors of each level and direction (names that end in ``_l0``, ``_l0_reverse``, …) form a layer,
        and so do the tensors of each recurrent cell. Parameters that do not fit the weight of their module, such as
        embeddings beside a matrix or the scales of a normalisation, get groups of their own. Shared parameters appear
        once. (The recurrent networks of torch have two biases: 50 states and 2 inputs make a matrix of 50 × 54, whereas
        the matrix of the paper is 50 × 53.)

        Args:
            module: the model
            options: options of every group, such as ``lr``, ``weight_decay`` or ``blocks``
        """
        groups: list[dict[str, Any]] = []
        seen: set[Tensor] = set()
        for prefix, child in module.named_modules():
            levels: dict[str, list[tuple[str, Tensor]]] = {}
            for name, p in child.named_parameters(recurse=False):
                if p not in seen:
                    seen.add(p)
                    level = name.partition("_l")[2] if isinstance(child, nn.RNNBase) else ""
                    levels.setdefault(level, []).append((f"{prefix}.{name}".lstrip("."), p))
            for level in levels.values():
                # The first axis of a transposed convolution counts its inputs, so its bias cannot be a column of it.
                transposed = isinstance(child, nn.modules.conv._ConvTransposeNd)
                rows = next((p.shape[0] for _, p in level if p.ndim >= 2 and not transposed), None)
                layer = [item for item in level if item[1].ndim >= 1 and item[1].shape[0] == rows]
                alone = [[item] for item in level if all(item[1] is not p for _, p in layer)]
                groups += [{"params": items, **options} for items in ([layer] if layer else []) + alone]
        return groups


def _check_one_device(params: Iterable[tuple[int, Tensor]], kind: str) -> None:
    devices = {str(p.device) for _, p in params}
    if len(devices) > 1:
        raise ValueError(
            f"params: a group on the devices {', '.join(sorted(devices))}; {kind} joins the tensors of a group, "
            "so they must be on one device (use PerTensor, or a group for each device)"
        )
