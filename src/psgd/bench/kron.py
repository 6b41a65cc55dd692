"""Kronecker factors of square matrices, one or many: the cost of their update, with triangular solves and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from matplotlib.figure import Figure as Picture

from ..experiments.figure import Table
from . import peers
from .benchmark import Benchmark, Plan
from .charts import OURS, THEIRS, lines, number
from .isolate import Outcome, Row, Task
from .peers import NEVER, Peer
from .timing import typical

SIZES = (128, 256, 512, 1024, 2048)
STACKS = (1, 12, 48)
#: size of a product, B n³, above which a CPU needs seconds
MOST_ON_CPU = 2e9

TRIANGULAR, INVERSE_FREE, BF16 = "triangular", "inverse-free", "inverse-free, bf16"
COLORS = {TRIANGULAR: THEIRS, INVERSE_FREE: OURS, BF16: "tab:green"}
#: steps that are timed
WITH, WITHOUT = "with update", "without update"
DASHES = {1: ":", 12: "--", 48: "-"}


def work(*, peer: Peer, shapes: Sequence[tuple[int, int]], device: str, seconds: float) -> Iterator[Row]:
    """Yield a row for each size and height of a stack."""
    torch.set_float32_matmul_precision("high")
    for n, count in shapes:
        params = [torch.zeros(n, n, device=device, requires_grad=True) for _ in range(count)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = peer.optimizer(params, lr=1e-6)
        row: Row = {"n": n, "stack": count, WITH: typical(optimizer.step, device, seconds=seconds)}
        for group in optimizer.param_groups:
            group["update_every"] = NEVER
        yield {**row, WITHOUT: typical(optimizer.step, device, seconds=seconds)}


def tasks(plan: Plan) -> list[Task]:
    shapes = [(n, count) for n in SIZES for count in STACKS if plan.cuda or count * n**3 <= MOST_ON_CPU]
    if plan.quick:
        shapes = [(n, count) for n, count in shapes if n <= 256]
    settings = {"shapes": shapes, "device": plan.device, "seconds": 0.1 if plan.quick else 0.5}
    kinds = [peers.PSGD_TRIANGULAR, peers.PSGD_FLOAT32]
    if plan.cuda:
        kinds.append(peers.PSGD_BF16)
    return [
        Task(label, work, {"peer": peer, **settings}, plan.limit or 300.0)
        for label, peer in zip(COLORS, kinds, strict=False)
    ]


def table(outcomes: Sequence[Outcome]) -> Table:
    """Table with a line for each shape, and a pair of columns for each kind of ``Q``."""
    times = {(o.label, row["n"], row["stack"]): row for o in outcomes for row in o.rows}
    shapes = sorted({(n, count) for _, n, count in times})
    columns = [f"{what}, {o.label}" for what in (WITH, WITHOUT) for o in outcomes]
    rows = []
    for n, count in shapes:
        cells = [
            number(times[o.label, n, count][what]) if (o.label, n, count) in times else "–"
            for what in (WITH, WITHOUT)
            for o in outcomes
        ]
        rows.append([f"{count} × {n}²", *cells])
    return Table("median milliseconds; tf32 is allowed in float32", ("", *columns), rows)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    picture = Picture(figsize=(10, 4.5), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for panel, what in zip(panels, (WITH, WITHOUT), strict=True):
        curves, styles = {}, {}
        for outcome in outcomes:
            for count in STACKS:
                name = f"{outcome.label}, {count} matri{'x' if count == 1 else 'ces'}"
                points = [(row["n"], row[what]) for row in outcome.rows if row["stack"] == count]
                if points:
                    curves[name], styles[name] = points, (COLORS[outcome.label], DASHES[count])
        lines(panel, curves, styles, base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set_title(f"One step {what} of Q")
        panel.set_xlabel("size n of n × n matrices")
    panels[0].set_ylabel("milliseconds")
    if legend := panels[0].get_legend():
        legend.remove()  # that of the other panel is the same, and hides nothing
    return picture


BENCHMARK = Benchmark(
    "kron",
    "Update of a Kronecker-factored Q",
    "One step for a stack of n × n gradients, with both factors of Q updated and without: by triangular factors, whose "
    "update takes triangular solves, and by near-symmetric ones, for which matrix products are enough.",
    tasks,
    table,
    draw,
    peers=(),
)
