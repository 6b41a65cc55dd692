"""The dense triangular ``Q``: one update in O(n²), compared with the product with ``triu(S)`` that costs O(n³)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from matplotlib.figure import Figure as Picture
from torch import Tensor

from ..criteria import c3
from ..experiments.figure import Table
from ..groups.triangular import Dense, descend_rank_two_
from ..normalize import MaxAbs
from .benchmark import Benchmark, Plan
from .charts import BASELINE, OURS, lines, number
from .isolate import Outcome, Row, Task
from .timing import typical

#: numbers of parameters: that of the paper's zebra problem, and larger ones
SIZES = (401, 1001, 2001)
LARGE = (4096, 8192, 16384)

RANK_TWO, PRODUCT, FIT = "rank two", "product", "whole update"
LEGEND = {
    RANK_TWO: "Q − μ triu(x yᵀ + y xᵀ) Q in O(n²)",
    PRODUCT: "Q − μ triu(S) @ Q in O(n³)",
    FIT: "whole update of Q from a pair (δθ, δg)",
}
STYLES = {LEGEND[RANK_TWO]: (OURS, "-"), LEGEND[FIT]: (OURS, "--"), LEGEND[PRODUCT]: (BASELINE, "-")}


def work(*, n: int, dtype: torch.dtype, device: str, seconds: float) -> Iterator[Row]:
    """Measure three times for one size, all on the same triangular matrix."""
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

    x, y = (normal(1, n, 1) / n for _ in range(2))
    # With small steps Q is still well conditioned after all repetitions, and no number is denormal.
    step, scale = (torch.full((1, 1, 1), value, dtype=dtype, device=device) for value in (1e-3, 1.0))
    Q = torch.eye(n, dtype=dtype, device=device)[None]

    yield {"n": n, RANK_TWO: typical(lambda: descend_rank_two_(Q, x, y, step, scale), device, seconds=seconds)}

    def product() -> None:
        S = x @ y.mT + y @ x.mT
        Q.sub_(step * (S.triu_() @ Q))

    yield {PRODUCT: typical(product, device, seconds=seconds)}

    group = Dense().init((n,), dtype=dtype, device=device)
    dtheta, dgrad = normal(1, n), normal(1, n)
    yield {FIT: typical(lambda: group.descend_(c3(group, dtheta, dgrad), 1e-3, MaxAbs()), device, seconds=seconds)}


def tasks(plan: Plan) -> list[Task]:
    sizes = (*SIZES, *LARGE) if plan.cuda else SIZES
    dtype = torch.float32 if plan.cuda else torch.float64
    settings = {"dtype": dtype, "device": plan.device, "seconds": 0.2 if plan.quick else 1.0}
    return [
        Task(f"n = {n}", work, {"n": n, **settings}, plan.limit or 300.0) for n in (sizes[:2] if plan.quick else sizes)
    ]


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        times = [outcome.row.get(name) for name in (RANK_TWO, PRODUCT, FIT)]
        ratio = f"{times[1] / times[0]:.1f}" if times[0] and times[1] else "–"
        rows.append([outcome.label, *(number(t) if t else "–" for t in times), ratio])
    caption = "median milliseconds; the whole update has a product, a triangular solve and the normalisation as well"
    return Table(caption, ("", RANK_TWO, PRODUCT, FIT, f"{PRODUCT} / {RANK_TWO}"), rows)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    picture = Picture(figsize=(7, 4.5), layout="constrained")
    panel = picture.subplots()
    found = [outcome.row for outcome in outcomes]
    curves = {text: [(row["n"], row[name]) for row in found if name in row] for name, text in LEGEND.items()}
    lines(panel, curves, STYLES)
    sizes = [row["n"] for row in found if "n" in row]
    panel.set_xticks(sizes, [f"{n:,}" for n in sizes])
    panel.set_xticks([], minor=True)
    panel.set_title("One update of a dense triangular Q")
    panel.set_xlabel("parameters n")
    panel.set_ylabel("milliseconds")
    return picture


BENCHMARK = Benchmark(
    "dense",
    "One update of a dense triangular Q",
    "Q ← Q − μ triu(x yᵀ + y xᵀ) Q in O(n²), in place, against the O(n³) product of triu(S) with Q, and the whole "
    "update of Q from a pair (δθ, δg). float64 and one thread on a CPU, float32 on a GPU.",
    tasks,
    table,
    draw,
    peers=(),
)
