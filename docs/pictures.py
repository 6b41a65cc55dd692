"""The pictures of docs/method.md: ``python docs/pictures.py`` draws them into docs/pictures/.

They are computed, not sketched: criteria by ``psgd.closed_form``, fitting by the groups that the optimizer uses.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import psgd
from psgd import Dense, Diagonal, Kronecker, LimitedMemory, LowRank, closed_form

FOLDER = Path(__file__).parent / "pictures"
INK, SOFT, THIRD = "#3f51b5", "#e4572e", "#2a9d8f"
STYLE = {
    "font.size": 9,
    "svg.fonttype": "path",  # the same letters wherever it is looked at
    "svg.hashsalt": "psgd",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def geometry() -> Figure:
    """Figure 1 of the paper: gradients of a saddle, as they are and preconditioned."""
    H = -torch.tensor([[1.5, 2.5], [2.5, 1.5]])
    P = torch.tensor([[1.25, -0.75], [-0.75, 1.25]])
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    line = torch.linspace(-1, 1, 9)
    theta = torch.stack(torch.meshgrid(line, line, indexing="xy")).flatten(1)
    for axis, matrix, title in zip(figure.subplots(1, 2), (H, P @ H), ("$-H\\theta$", "$-PH\\theta$"), strict=True):
        u, v = -(matrix @ theta)
        axis.quiver(*theta.tolist(), u.tolist(), v.tolist(), color=INK, width=0.006, angles="xy", scale=26)
        for eigenvalue, direction in zip(*_eigen(matrix), strict=True):
            axis.axline((0, 0), tuple(direction.tolist()), color=SOFT, lw=0.8, ls=":")
            axis.annotate(
                f"{eigenvalue:+.3g}",
                (0.95 * direction).tolist(),
                color=SOFT,
                ha="center",
                va="center",
                backgroundcolor="white",
            )
        axis.set(title=title, aspect="equal", xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), xticks=[], yticks=[])
    return figure


def _eigen(M: Tensor) -> tuple[list[float], Tensor]:
    values, vectors = torch.linalg.eig(M)
    return values.real.tolist(), vectors.real.T


def noise() -> Figure:
    """What the three criteria make of one curvature when changes of the gradient are noisy: ``P`` times curvature."""
    curvature = torch.logspace(-2, 1, 61, dtype=torch.float64)
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, sigma in zip(axes, (0.05, 0.5), strict=True):
        for name, colour in (("c1", THIRD), ("c2", SOFT), ("c3", INK)):
            found = [optimum(name, float(h), sigma) * float(h) for h in curvature]
            axis.loglog(curvature.tolist(), found, color=colour, label=name, lw=1.6)
        axis.axvline(sigma, color="0.6", lw=0.8, ls=":")
        axis.set(title=f"noise {sigma:g}", xlabel="curvature", ylim=(1e-4, 3))
    axes[0].set_ylabel("curvature after preconditioning")
    axes[0].legend(frameon=False)
    return figure


def optimum(criterion: str, h: float, sigma: float) -> float:
    """The best ``P`` for ``δg = h δθ + σ ε`` in one dimension, from covariances."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return float(getattr(closed_form, criterion)(one, (h * h + sigma * sigma) * one, h * one))


def fitting(steps: int = 800) -> Figure:
    """Multiplicative steps do not see the scale of the Hessian: the error over updates, for three scales."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, relative in zip(axes, (True, False), strict=True):
        for scale, colour in ((0.1, THIRD), (1.0, INK), (10.0, SOFT)):
            axis.semilogy(errors(scale, steps, relative), color=colour, label=f"{scale:g} H", lw=1.2)
        name = "relative: dQ = E Q" if relative else "ordinary: dP = −gradient"
        axis.set(title=name, xlabel="updates", ylim=(1e-2, 30))
    axes[0].set_ylabel("$\\|PH - I\\|_F$")
    axes[0].legend(frameon=False)
    return figure


def errors(scale: float, steps: int, relative: bool) -> list[float]:
    """``‖PH − I‖`` while ``P`` is fitted by criterion 3 to exact pairs; the plain one has a step of its own choice."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    H = scale * (A @ A.T / 3 + 0.3 * torch.eye(3, dtype=torch.float64))
    group = Dense().init((3,), dtype=torch.float64, device="cpu")
    P = torch.eye(3, dtype=torch.float64)
    found = []
    for _ in range(steps):
        dtheta = torch.randn(1, 3, generator=generator, dtype=torch.float64)
        dgrad = dtheta @ H
        if relative:
            group.descend_(psgd.c3(group, dtheta, dgrad), 0.03)
            Q = group.dense()[0]
            P = Q.T @ Q
        else:
            b = torch.linalg.solve(P, dtheta[0])
            P = P - 0.003 * (torch.outer(dgrad[0], dgrad[0]) - torch.outer(b, b))
            values, vectors = torch.linalg.eigh(P)  # it would leave the positive definite matrices
            P = vectors * values.clamp_min(1e-3) @ vectors.T
        found.append(float((P @ H - torch.eye(3)).norm()))
    return found


def groups() -> Figure:
    """Where each structure has numbers: of ``Q`` for a matrix of 4 × 6 parameters, after a step along a random pair."""
    figure = Figure(figsize=(6.4, 1.7), layout="constrained")
    structures = (
        ("Dense", Dense()),
        ("Kronecker", Kronecker(inverse_free=False)),
        ("LowRank(2)", LowRank(2)),
        ("LimitedMemory(4)", LimitedMemory(4)),
        ("Diagonal", Diagonal()),
    )
    for axis, (name, structure) in zip(figure.subplots(1, 5), structures, strict=True):
        group = structure.init((4, 6), dtype=torch.float64, device="cpu")
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            dtheta, dgrad = torch.randn(2, 1, 4, 6, generator=generator, dtype=torch.float64)
            group.descend_(psgd.c3(group, dtheta, dgrad), 0.1)
        Q = group.dense()[0].abs()
        axis.imshow(((Q > 1e-12) * (0.35 + 0.65 * Q / Q.max())).tolist(), cmap="Blues", vmin=0, vmax=1)
        kept = sum(buffer[0].numel() for buffer in group.buffers().values())
        axis.set_title(f"{name}\n{kept} numbers", fontsize=8)
        axis.set(xticks=[], yticks=[])
    return figure


def rank_two() -> Figure:
    """How the update of a dense ``Q`` goes through its rows: each block needs itself and two sums of the rows below."""
    figure = Figure(figsize=(6.4, 2.2), layout="constrained")
    axis = figure.subplots()
    n, size = 8, 2
    for i in range(0, n, size):
        done, now = i > 2 * size, i == 2 * size
        colour = "#c5cae9" if done else INK if now else "#f2f2f2"
        axis.add_patch(Rectangle((i, n - i - size), n - i, size, facecolor=colour, edgecolor="white"))
    axis.annotate("rows at hand: triu(x yᵀ + y xᵀ) Q", (4, 3), (8.6, 3.0), va="center", fontsize=8)
    axis.annotate("below, done: only Σ x Q and Σ y Q are carried up", (6, 1), (8.6, 1.0), va="center", fontsize=8)
    axis.annotate("above: still to come", (2, 6), (8.6, 6.0), va="center", fontsize=8)
    axis.annotate("", (-0.5, 7.5), (-0.5, 0.5), arrowprops={"arrowstyle": "->", "color": "0.4"})
    axis.set(xlim=(-1, 20), ylim=(-0.2, 8.2), aspect="equal")
    axis.axis("off")
    return figure


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "geometry": geometry,
    "noise": noise,
    "fitting": fitting,
    "groups": groups,
    "rank-two": rank_two,
}


def drawn(name: str) -> str:
    """A picture as SVG; the same text whenever it is drawn by the same versions."""
    with matplotlib.rc_context(STYLE):
        file = io.BytesIO()
        PICTURES[name]().savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=False)
    # six digits are more than can be seen, and rounding differs between machines beyond that
    return re.sub(r"-?\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", file.getvalue().decode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PICTURES), help="which; all of them if none is named")
    for name in parser.parse_args().names:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
