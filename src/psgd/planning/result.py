"""Result of a plan: memory, work and owner of each block; and the table that shows them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..groups import Structure
from ..ranks.assign import cost
from ..state.memory import readable

#: width of the table, width of its column of structures, and number of kinds of blocks that it shows
COLUMNS, STRUCTURE, KINDS = 110, 34, 18


@dataclass(frozen=True)
class PlannedBlock:
    """A block, which consists of parameters that share a ``Q``, with its memory, its work and its rank."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    #: description of ``Q``
    structure: str
    precond_bytes: int
    #: bytes of the average of gradients
    average_bytes: int
    #: FLOPs of a step, see ``Group.flops``
    flops: float
    #: rank that keeps and fits ``Q``
    owner: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.precond_bytes + self.average_bytes

    @property
    def cost(self) -> float:
        return cost(self.flops, self.bytes)


@dataclass(frozen=True)
class Rank:
    """Number, memory and work of all blocks of a rank."""

    blocks: int
    bytes: int
    flops: float

    @property
    def cost(self) -> float:
        return cost(self.flops, self.bytes)


@dataclass(frozen=True)
class Plan:
    """Result of ``plan``; ``print`` shows it as a table."""

    #: structure to use with ``PSGD``
    preconditioner: Structure
    #: blocks in the order of the parameters
    blocks: tuple[PlannedBlock, ...]
    ranks: tuple[Rank, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the state of all blocks."""
        return sum(block.bytes for block in self.blocks)

    @property
    def flops(self) -> float:
        """FLOPs of a step of all blocks."""
        return sum(block.flops for block in self.blocks)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of the state on the rank that has the largest state."""
        return max(rank.bytes for rank in self.ranks)

    @property
    def flops_per_rank(self) -> float:
        """FLOPs of a step on the rank that has the most work; the other ranks wait for it."""
        return max(rank.flops for rank in self.ranks)

    @property
    def balance(self) -> float:
        """Largest cost of a rank divided by the mean cost.

        1 is perfect; ``len(ranks)`` means that one rank does everything. The balance is about the time of a step
        divided by the time that it would need if blocks could be divided at will, see ``psgd.ranks.assign.cost``.
        """
        costs = [rank.cost for rank in self.ranks]
        return max(costs) * len(costs) / sum(costs) if self.blocks else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dict of lists, numbers and strings."""
        keys = ("bytes", "flops", "bytes_per_rank", "flops_per_rank", "balance")
        return {
            "preconditioner": repr(self.preconditioner),
            **{key: getattr(self, key) for key in keys},
            "blocks": [{**asdict(b), "names": list(b.names), "shape": list(b.shape)} for b in self.blocks],
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def __str__(self) -> str:
        return table(self)


def table(plan: Plan) -> str:
    """Table with one line for all blocks of one kind, with the numbers of each of them, and the sums at the end."""
    alike: defaultdict[tuple[Any, ...], list[PlannedBlock]] = defaultdict(list)
    for block in plan.blocks:
        alike[block.shape, block.structure, block.precond_bytes, block.average_bytes].append(block)
    most = sorted(alike, key=lambda kind: -len(alike[kind]) * alike[kind][0].flops)[:KINDS]
    rows: list[tuple[str, ...]] = [("blocks", "shape", "structure", "Q", "average", "FLOP", "ranks")]
    rows += [_row(blocks, len(plan.ranks)) for kind, blocks in alike.items() if kind in most]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], COLUMNS - sum(widths[1:]) - 2 * (len(widths) - 1))
    lines = [str(plan.preconditioner), *(_line(row, widths) for row in rows)]
    if len(alike) > KINDS:
        rest = [block for kind, blocks in alike.items() if kind not in most for block in blocks]
        lines.append(f"… and {len(rest)} more, of {len(alike) - KINDS} kinds: {_sums(rest)}")
    count = len(plan.ranks)
    most_of_all = f"{readable(plan.bytes_per_rank)} and {work(plan.flops_per_rank)}"
    mean = f"{readable(plan.bytes / count)} and {work(plan.flops / count)}"
    alone = max(rank.cost for rank in plan.ranks) == max((block.cost for block in plan.blocks), default=0)
    return "\n".join(
        [
            *lines,
            f"all {len(plan.blocks)}, of {sum(block.numel for block in plan.blocks):,} elements: {_sums(plan.blocks)}",
            f"{count} rank{'s' * (count > 1)}: at most {most_of_all}, mean {mean}, balance {plan.balance:.3f}"
            + " (one block)" * (alone and count > 1),
        ]
    )


def work(flops: float) -> str:
    """FLOPs with a prefix.

    >>> work(2.5e12)
    '2.5 TFLOP'
    """
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if flops < 1000 or unit == "TFLOP":
            break
        flops /= 1000
    return f"{flops:.{int(unit != 'FLOP')}f} {unit}"


def _row(blocks: Sequence[PlannedBlock], world_size: int) -> tuple[str, ...]:
    first = blocks[0]
    names = [name for block in blocks for name in block.names]
    if len(blocks) > 1:  # the same name in every layer, without its number
        names = [re.sub(r"\b\d+\b", "*", name) for name in names]
    count = f"{len(blocks)} × " if len(blocks) > 1 else ""
    ranks = sorted({block.owner for block in blocks})
    through = f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return (
        count + _joined(dict.fromkeys(names)),
        "×".join(map(str, first.shape)),
        first.structure if len(first.structure) <= STRUCTURE else first.structure[: STRUCTURE - 1] + "…",
        readable(first.precond_bytes),
        readable(first.average_bytes) if first.average_bytes else "–",
        work(first.flops).removesuffix("FLOP").rstrip(),
        through if ranks[-1] - ranks[0] < len(ranks) else f"{len(ranks)} of {world_size}",
    )


def _joined(names: Iterable[str]) -> str:
    """Names in one text, with those that differ in their last part together.

    >>> _joined(["layers.*.q", "layers.*.o", "head"])
    'layers.*.{q,o}, head'
    """
    tails: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        head, dot, tail = name.rpartition(".")
        tails[head + dot].append(tail)
    return ", ".join(
        f"{head}{{{','.join(t)}}}" if head and len(t) > 1 else head + ", ".join(t) for head, t in tails.items()
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
    texts = [name.ljust(widths[0]), *(cell.ljust(width) for cell, width in zip(row[1:3], widths[1:3], strict=True))]
    return "  ".join([*texts, *(cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True))])


def _sums(blocks: Sequence[PlannedBlock]) -> str:
    of_Q, average = (sum(getattr(block, part) for block in blocks) for part in ("precond_bytes", "average_bytes"))
    return f"Q {readable(of_Q)}, average {readable(average)}, work {work(sum(block.flops for block in blocks))}"
