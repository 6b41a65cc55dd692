"""Accuracy and speed of fitting ``Q`` in several local coordinates: the reason for the choice of dense factors.

The Hessian is ``H_0 ⊗ H_1``, so a Kronecker product can be its inverse. The error is the root mean square of ``log λ``
over the eigenvalues of ``P |H|``: zero if all are one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure as Picture
from torch import Tensor

from .. import Kronecker, c3
from ..experiments.figure import Table
from ..groups.near_symmetric import norm_
from .benchmark import Benchmark, Plan
from .charts import BASELINE, OURS, THEIRS, number, plain
from .isolate import Outcome, Row, SkippedError, Task

SHAPE = (48, 32)
CONDITION = 100.0
SCENARIOS = ("static", "noisy", "time-varying")
#: size of the noise relative to that of ``δg``
NOISE = 0.1
#: angle in radians, about, by which ``H_0`` turns at a step
TURN = 1e-3

#: function from ``(v, H v)`` to ``[P_0, P_1]``
Update = Callable[[Tensor, Tensor], list[Tensor]]


def group_fit(structure: Kronecker, lr: float, dtype: torch.dtype) -> Update:
    """Update of the optimizer."""
    if dtype == torch.bfloat16 and structure.inverts:
        raise SkippedError("triangular solves are too coarse in bfloat16")
    Q = structure.init(SHAPE, dtype=dtype, device="cpu")

    def update(v: Tensor, hv: Tensor) -> list[Tensor]:
        Q.descend_(c3(Q, v[None].clone(), hv[None].clone()), lr)
        return [factor.P()[0] for factor in Q.factors]

    return update


def qep(lr: float, dtype: torch.dtype) -> Update:
    """``dQ = Q E P``: no inverse and no symmetry, but a step that a large ``P`` makes small."""
    Q = [torch.eye(n, dtype=dtype) for n in SHAPE]

    def update(v: Tensor, hv: Tensor) -> list[Tensor]:
        P = [q.T @ q for q in Q]
        for i, (A, B) in enumerate(_sides(P[0] @ hv @ P[1], v)):
            size = _norm(P[i]) * (_norm(A @ A.T) + _norm(B @ B.T))
            Q[i] = Q[i] - lr / size * (Q[i] @ ((A @ A.T - B @ B.T) @ P[i]))
        return [q.T @ q for q in Q]

    return update


def quad(lr: float, dtype: torch.dtype) -> Update:
    """``P ← (I − μ S) P (I − μ S)``: keeps ``P`` itself, so that preconditioning needs half of the products."""
    P = [torch.eye(n, dtype=dtype) for n in SHAPE]

    def update(v: Tensor, hv: Tensor) -> list[Tensor]:
        for i, (A, B) in enumerate(_sides(P[0] @ hv @ P[1], v)):
            S = (A @ A.T - B @ B.T) * (lr / (_norm(A @ A.T) + _norm(B @ B.T)))
            half = P[i] - S @ P[i]
            new = half - half @ S
            P[i] = (new + new.T) / 2
        return P

    return update


def _sides(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(a, b), (a.T, b.T)]


def _norm(S: Tensor) -> Tensor:
    return norm_(S[None])[0][0].to(S.dtype)


TRIANGULAR, INVERSE_FREE, QEP, QUAD = "E Q, triangular", "Q½ E Q1½ (ours)", "Q E P", "P directly"
#: styles of the curves: ours is wide and below the others, so that all are visible if they coincide
STYLES: dict[str, dict[str, Any]] = {
    TRIANGULAR: {"color": THEIRS},
    INVERSE_FREE: {"color": OURS, "linewidth": 4, "zorder": 1.9},
    QEP: {"color": BASELINE},
    QUAD: {"color": "tab:green", "linestyle": "--"},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def start(kind: str, lr: float, dtype: torch.dtype) -> Update:
    if kind in (TRIANGULAR, INVERSE_FREE):
        return group_fit(Kronecker(inverse_free=kind == INVERSE_FREE), lr, dtype)
    return (qep if kind == QEP else quad)(lr, dtype)


def hessian(n: int, generator: torch.Generator) -> Tensor:
    """Positive definite matrix with eigenvalues from 1 down to ``1 / CONDITION``."""
    V, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return (V * torch.logspace(0, -math.log10(CONDITION), n, dtype=torch.float64)) @ V.T


def error(P: Sequence[Tensor], H: Sequence[Tensor]) -> float:
    eigenvalues = []
    for p, h in zip(P, H, strict=True):
        L = torch.linalg.cholesky(h)
        values = torch.linalg.eigvalsh(L.T @ p.to(torch.float64) @ L)
        eigenvalues.append(values.abs().clamp_min(1e-30).log())
    return float((eigenvalues[0][:, None] + eigenvalues[1]).square().mean().sqrt())


def work(*, kind: str, dtype: str, lr: float, steps: int, every: int) -> Iterator[Row]:
    for scenario in SCENARIOS:
        generator = torch.Generator().manual_seed(0)
        H = [hessian(n, generator) for n in SHAPE]
        update = start(kind, lr, DTYPES[dtype])
        seconds = 0.0
        for step in range(1, steps + 1):
            v = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
            hv = H[0] @ v @ H[1]
            other = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
            if scenario == "noisy":
                hv = hv + NOISE * hv.std() * other
            if scenario == "time-varying":
                turn = torch.randn(SHAPE[0], SHAPE[0], generator=generator, dtype=torch.float64)
                R = torch.linalg.matrix_exp((turn - turn.T) * (TURN / math.sqrt(SHAPE[0])))
                H[0] = R @ H[0] @ R.T
            begin = time.perf_counter()
            P = update(v.to(DTYPES[dtype]), hv.to(DTYPES[dtype]))
            seconds += time.perf_counter() - begin
            if step % every == 0:
                value = error(P, H)
                milliseconds = 1000 * seconds / step
                yield {"scenario": scenario, "step": step, "milliseconds": milliseconds, "error": value}


def tasks(plan: Plan) -> list[Task]:
    steps = 250 if plan.quick else 2000
    return [
        Task(
            f"{kind}, {dtype}",
            work,
            {"kind": kind, "dtype": dtype, "lr": 0.1, "steps": steps, "every": steps // 50},
            plan.limit or 300.0,
        )
        for dtype in DTYPES
        for kind in STYLES
    ]


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        last = {row["scenario"]: row for row in outcome.rows}
        cells = [number(last[s]["error"]) if s in last else "–" for s in SCENARIOS]
        times = [row["milliseconds"] for row in last.values()]
        rows.append([outcome.label, *cells, number(min(times)) if times else "–"])
    caption = "error after the last step, and milliseconds for an update on one CPU thread"
    return Table(caption, ("", *SCENARIOS, "ms"), rows)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    picture = Picture(figsize=(11, 6), layout="constrained")
    panels = picture.subplots(len(DTYPES), len(SCENARIOS), sharex=True, sharey="row")
    for line, dtype in zip(panels, DTYPES, strict=True):
        for panel, scenario in zip(line, SCENARIOS, strict=True):
            plain(panel)
            for kind, style in STYLES.items():
                found = [o for o in outcomes if o.label == f"{kind}, {dtype}"]
                points = [(r["step"], r["error"]) for o in found for r in o.rows if r["scenario"] == scenario]
                if points:
                    panel.plot(*zip(*points, strict=True), label=kind, **style)
            panel.set_yscale("log")
            panel.set_title(f"{scenario}, {dtype}", fontsize="medium")
    for panel in panels[-1]:
        panel.set_xlabel("update")
    for line in panels:
        line[0].set_ylabel("rms of log λ(PH)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return picture


BENCHMARK = Benchmark(
    "fit",
    "Fitting a Kronecker-factored Q in different local coordinates",
    "Pairs (v, Hv) of a Hessian H0 ⊗ H1 of 48 and 32 dimensions, each of condition 100, step size 0.1: fixed, with "
    "a tenth of noise on Hv, and slowly turning. The paper's triangular factors against three fits without inverses.",
    tasks,
    table,
    draw,
    peers=(),
)
