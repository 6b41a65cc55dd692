"""Record of one step, and the names of its numbers, which are columns of a CSV and tags of TensorBoard."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import nn

from ..optimizer import PSGD

#: numbers of a block with their descriptions: how far ``Q`` moved, its condition, how far it is from fitted, and how
#: far the parameters moved
METRICS: Mapping[str, str] = {
    "residual": "fit residual",
    "q_step": "step of Q",
    "condition": "condition of Q",
    "update_rms": "update RMS",
}
#: numbers of the spectrum of ``PH``
SPECTRUM = ("ph_q10", "ph_q50", "ph_q90", "ph_max", "ph_negative")
#: first columns of every file
FIRST = ("step", "time", "model", "loss", "skipped")


@dataclass(frozen=True)
class BlockRecord:
    """Numbers of one block of parameters; None if a number was not measured."""

    name: str
    #: relative size of the last update of ``Q``
    q_step: float | None
    #: condition number of each factor of ``Q``
    condition: tuple[float, ...]
    #: distance of ``Q`` from fitting the criterion, see ``psgd.criteria.misfit``
    residual: float | None
    #: root mean square of the change of the parameters
    update_rms: float | None


@dataclass(frozen=True)
class Record:
    """Numbers of one step; None if a number was not measured."""

    #: number of steps before this one
    step: int
    #: time in seconds, as returned by ``time.time()``
    time: float
    loss: float | None
    #: number of steps skipped so far because loss or gradients were not finite
    skipped: int
    #: learning rate of each param group
    lr: tuple[float, ...]
    blocks: tuple[BlockRecord, ...]
    #: quantiles of the absolute eigenvalues of ``PH``, see ``Monitor.spectrum``; empty if it was not called
    spectrum: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, float | None]:
        """All numbers by the names of the columns: ``{"step": 50, "loss": 0.3, "q_step/0.weight": 0.01, …}``."""
        row: dict[str, float | None] = {"step": self.step, "time": self.time, "loss": self.loss}
        row |= {"skipped": self.skipped, **dict(zip(_numbered("lr", len(self.lr)), self.lr, strict=True))}
        row |= {name: self.spectrum.get(name) for name in SPECTRUM}
        for metric in METRICS:
            for block in self.blocks:
                values = block.condition if metric == "condition" else (getattr(block, metric),)
                row |= zip(_numbered(f"{metric}/{block.name}", len(values)), values, strict=True)
        return row

    def summary(self) -> dict[str, float]:
        """A few numbers for a log: loss, skipped steps, learning rate and spectrum, as far as they were measured.

        For each number of the blocks, the summary has the median and the maximum, such as ``q_step`` and
        ``q_step_max``.
        """
        found = {"loss": self.loss, "skipped": self.skipped, "lr": max(self.lr, default=None), **self.spectrum}
        for metric in METRICS:
            values = [
                v
                for block in self.blocks
                for v in (block.condition if metric == "condition" else (getattr(block, metric),))
                if v is not None and not math.isnan(v)
            ]
            if values:
                found |= {metric: median(values), f"{metric}_max": max(values)}
        return {name: float(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Named:
    """Block with its name in the columns."""

    name: str
    params: tuple[int, ...]
    #: shape of the block and description of its ``Q``
    about: str
    factors: int


def named_blocks(optimizer: PSGD, model: nn.Module | None = None) -> list[Named]:
    """Blocks of this rank in the order of their parameters, with names of the model's parameters if known."""
    names = param_names(optimizer, model)
    blocks = []
    for stack in optimizer.stacks:
        for block in stack.blocks:
            mine = [names[i] for i in block.params]
            name = "+".join(mine) if len(mine) < 4 else f"{mine[0]}+..+{mine[-1]}"
            about = f"{'x'.join(map(str, block.shape))} {stack.group.describe()}"
            blocks.append(Named(name, block.params, about, len(stack.group.factors)))
    return sorted(blocks, key=lambda block: block.params)


def param_names(optimizer: PSGD, model: nn.Module | None) -> list[str]:
    """Name of each parameter: that in the model, else that given to the optimizer, else its position."""
    of_model = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    names: list[str] = []
    for group in optimizer.param_groups:
        given: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        for p, name in zip(group["params"], given, strict=True):
            names.append(of_model.get(id(p)) or name or f"param{len(names)}")
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:  # users may give one name twice
            names[i] = f"{name}.param{i}"
        seen.add(names[i])
    return names


def columns(blocks: Iterable[Named], groups: int) -> list[str]:
    """Columns of a file."""
    blocks = list(blocks)
    of_blocks = [
        column
        for metric in METRICS
        for block in blocks
        for column in _numbered(f"{metric}/{block.name}", block.factors if metric == "condition" else 1)
    ]
    return [*FIRST, *_numbered("lr", groups), *SPECTRUM, *of_blocks]


def fingerprint(blocks: Iterable[Named]) -> str:
    """Eight letters that differ if blocks have other names, shapes or structures."""
    return f"{zlib.crc32(repr([(b.name, b.params, b.about) for b in blocks]).encode()):08x}"


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}/{k}" for k in range(count)]
