"""The pictures of docs/method.md and docs/architecture.md: ``python docs/pictures.py`` draws them into docs/pictures/.

They are computed, not sketched: criteria by ``psgd.closed_form``, fitting by the groups that the optimizer uses, and
stacks, buckets and pools by an optimizer of a small model.
"""

from __future__ import annotations

import argparse
import io
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor, nn

import psgd
from psgd import PSGD, Dense, Diagonal, Kronecker, LimitedMemory, LowRank, closed_form
from psgd.engine import Stack

FOLDER = Path(__file__).parent / "pictures"
INK, SOFT, THIRD = "#3f51b5", "#e4572e", "#2a9d8f"
#: colours of the packages in the pictures of the architecture: pale ones, for dark letters
ROOMS = {
    "tools": "#eceff1",
    "optimizer": "#c5cae9",
    "engine": "#ffe0b2",
    "ranks": "#f8bbd0",
    "state": "#dcedc8",
    "probes": "#b2dfdb",
    "groups": "#b3e5fc",
    "ops": "#e0e0e0",
}
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


def layers() -> Figure:
    """Packages of the library from top to bottom, each of which imports only from those below."""
    figure, axis = _empty(6.4, 5.3, (0, 100), (0, 84))
    rows: list[tuple[str, list[list[tuple[str, str]]]]] = [
        ("tools", [[("tools", name)] for name in ("cli", "bench", "experiments")]),
        ("", [[("tools", name) for name in ("planning", "minimizing", "monitor", "lightning", "diagnostics")]]),
        ("a step that reads\nlike the paper's", [[("optimizer", "optimizer: PSGD, with sample")]]),
        ("durable", [[("state", "state")]]),
        ("fast | distributed", [[("engine", "engine"), ("ranks", "ranks")]]),
        ("the paper", [[("probes", name) for name in ("probes", "criteria", "blocks")]]),
        ("", [[("groups", "groups")]]),
        ("", [[("groups", name) for name in ("tangent", "normalize", "closed_form")]]),
        ("primitives", [[("ops", "ops")]]),
        ("", [[("none", "torch"), ("none", "triton")]]),
    ]
    left, right, height = 22, 99, 5.4
    for k, (label, columns) in enumerate(rows):
        y = 77 - 8.4 * k
        axis.text(left - 2, y + height / 2, label, ha="right", va="center", color="0.35", fontsize=8)
        names = [cell for column in columns for cell in column]
        width = (right - left + 1.5) / len(names)
        for i, (room, name) in enumerate(names):
            _box(axis, left + i * width, y, width - 1.5, height, name, ROOMS.get(room, "white"))
            if len(columns) > 1 and i:  # tools of the first row import each other
                _arrow(axis, (left + i * width - 1.5, y + height / 2), (left + i * width, y + height / 2))
        if k:
            _arrow(axis, ((left + right) / 2, y + 8.4), ((left + right) / 2, y + height + 0.1))
    axis.text((left + right) / 2 + 1, 77 - 8.4 * 2 + 6.6, "imports", fontsize=7, color="0.35", va="center")
    return figure


def buckets() -> Figure:
    """Blocks, stacks, buckets and pools of a small transformer, as an optimizer of it has them."""
    optimizer, names = _transformer()
    together: defaultdict[int, list[Stack]] = defaultdict(list)
    for stack in optimizer.stacks:
        group = next(g for g, each in enumerate(optimizer.param_groups) if _owns(each, optimizer, stack))
        together[group].append(stack)
    sizes = sorted({n for stack in optimizer.stacks for n in stack.group.dims})
    colours = dict(zip(sizes, (INK, THIRD, SOFT), strict=True))
    figure, axis = _empty(6.4, 4.8, (0, 128), (8, 100))
    heads = ("blocks\none for each parameter", "stacks\nequal shapes", "pools\nfactors of one size")
    for x, head in zip((15, 57, 105), heads, strict=True):
        axis.text(x, 99, head, ha="center", va="top", fontsize=8)
    top = 89.0
    for group, stacks in together.items():
        heights = [max(_scaled(stack.blocks[0].shape)[0] + 6, 3.4 * len(stack.blocks) + 2) for stack in stacks]
        bottom = top - sum(heights) - 5
        _box(axis, 33, bottom, 94, top - bottom, "", "#f5f5f5", edge="0.6")
        about = f"bucket: param group {group}, one device, one precision"
        axis.text(34.5, top - 1.2, about, fontsize=8, va="top", color="0.25")
        y = top - 5
        for stack, height in zip(stacks, heights, strict=True):
            middle = y - height / 2
            for row, block in enumerate(stack.blocks):
                text = names[block.params[0]]
                axis.text(
                    27, middle + 3.2 * ((len(stack.blocks) - 1) / 2 - row), text, ha="right", va="center", fontsize=8
                )
            _arrow(axis, (28, middle), (37, middle))
            _stack(axis, 40, middle, stack.blocks[0].shape, len(stack.blocks), [colours[n] for n in stack.group.dims])
            shape = " × ".join(map(str, stack.blocks[0].shape))
            axis.text(53, middle, f"{len(stack.blocks)} blocks, {shape}", va="center", fontsize=8)
            y -= height
        pools = optimizer.preconditioner.together([stack.group for stack in stacks]).pools  # type: ignore[attr-defined]
        pools = sorted(pools, key=lambda pool: -pool.Q.shape[-1])
        heights = [_scaled(pool.Q.shape[1:])[0] for pool in pools]
        gap = (top - 5 - bottom - sum(heights)) / (len(pools) + 1)
        y = top - 5
        for pool, height in zip(pools, heights, strict=True):
            count, n = pool.Q.shape[:2]
            y -= gap + height
            _stack(axis, 86, y + height / 2, (n, n), min(count, 4), [colours[n]] * 2, fill=True)
            axis.text(102.5, y + height / 2, f"{count} factors, {n} × {n}", va="center", fontsize=8)
        _arrow(axis, (79, (top - 5 + bottom) / 2), (83.5, (top - 5 + bottom) / 2))
        top = bottom - 3
    return figure


def _transformer() -> tuple[PSGD, list[str]]:
    """Optimizer of a transformer of two layers, with a param group for matrices and one for vectors; and names."""
    width = 32
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (2 * width, width), "down": (width, 2 * width)}
    matrices = {f"{k}.{name}": nn.Parameter(torch.zeros(shape)) for k in range(2) for name, shape in shapes.items()}
    vectors = {f"{k}.norm{i}": nn.Parameter(torch.zeros(width)) for k in range(2) for i in (1, 2)}
    groups = [{"params": list(matrices.values()), "weight_decay": 0.1}, {"params": list(vectors.values())}]
    return PSGD(groups, probe=psgd.Whitening()), [*matrices, *vectors]


def _owns(group: Mapping[str, Sequence[Tensor]], optimizer: PSGD, stack: Stack) -> bool:
    return any(p is optimizer.parameters()[stack.positions[0]] for p in group["params"])


def step() -> Figure:
    """Functions that a step calls, one after the other, with the package of each and what it computes."""
    figure, axis = _empty(6.4, 5.2, (0, 128), (0, 102))
    _box(axis, 3, 19.5, 124, 36.5, "", "#fafafa", edge="0.6")
    axis.text(125.5, 54.3, "PSGD._advance(work)", ha="right", va="top", color="0.25", fontsize=8)
    _box(axis, 3, 1, 124, 17.5, "", "#fafafa", edge="0.6")
    axis.text(125.5, 5.5, "PSGD._move(work, directions)", ha="right", va="top", color="0.25", fontsize=8)
    _box(axis, 5, 20.5, 120, 29.5, "", "white", edge="0.6")
    axis.text(123.5, 48.6, "for each bucket", ha="right", va="top", color="0.25", fontsize=8)
    rows = [
        (95, 1, "optimizer", "PSGD.step(closure)", ""),
        (86.5, 3, "probes", "measure: probe(closure, …)", "loss, gradients g, pairs (δθ, δg) if Q is due"),
        (78, 3, "ranks", "ranks.gather(grads, pairs, params)", "whole gradients of this rank's blocks"),
        (69.5, 3, "state", "store.buckets(grads)", "buckets whose blocks have gradients"),
        (61, 3, "engine", "recorder.run(work, …)", "calls _advance and _move, or replays recordings"),
        (41, 7, "engine", "bucket.average_(grads, β, ok)", "m ← β m + (1 − β) g"),
        (32, 7, "probes", "probe.fit_(bucket.Q, measured, …)", "Q ← (I − μ ∇E / ‖∇E‖) Q"),
        (23, 7, "engine", "bucket.precondition(m, …)", "d = QᵀQ m, if fit_ returned none"),
        (11.5, 5, "engine", "Motion(buckets, directions, …)", "rate: lr, less for max_rms and max_norm"),
        (3, 5, "ranks", "ranks.move_(motion, params, …)", "θ ← θ − (rate · d + decay · θ)"),
    ]
    for y, x, room, call, about in rows:
        _box(axis, x, y, 52 - x, 6, call, ROOMS[room], mono=True)
        axis.text(80 if y in (32, 23) else 54, y + 3, about, va="center", fontsize=8)
    for y, call in ((32, "Q.whiten_\nQ.descend_"), (23, "Q.precondition")):
        _box(axis, 56, y, 22, 6, call, ROOMS["groups"], mono=True, size=6.5)
        _arrow(axis, (52, y + 3), (56, y + 3))
    for above, below in pairwise(row[0] for row in rows):
        _arrow(axis, (20, above), (20, below + 6))
    for i, room in enumerate(("optimizer", "probes", "ranks", "state", "engine", "groups")):
        _box(axis, 62 + 11 * i, 95.5, 10, 4.5, room, ROOMS[room], size=6.5)
    return figure


def _empty(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Axes]:
    """Figure of some inches with a plane to draw on, without axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=x, ylim=y)
    axis.axis("off")
    return figure, axis


def _box(
    axis: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    colour: str,
    *,
    edge: str = "0.35",
    mono: bool = False,
    size: float = 8,
) -> None:
    """Box with round corners and a text in its middle."""
    style = "round,pad=0,rounding_size=1"
    axis.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=colour, edgecolor=edge, linewidth=0.7))
    family = "monospace" if mono else None
    middle = (x + width / 2, y + height / 2)
    axis.text(*middle, text, ha="center", va="center", fontsize=7 if mono and size == 8 else size, family=family)


def _arrow(axis: Axes, start: tuple[float, float], stop: tuple[float, float]) -> None:
    style = {"arrowstyle": "->", "color": "0.4", "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", stop, start, arrowprops=style)


def _scaled(shape: Sequence[int]) -> tuple[float, float]:
    """Height and width of a block in a picture."""
    rows, columns = shape if len(shape) == 2 else (shape[0], 1)
    return rows / 8, max(columns / 8, 1.0)


def _stack(
    axis: Axes, x: float, y: float, shape: Sequence[int], count: int, colours: Sequence[str], fill: bool = False
) -> None:
    """Arrays one behind the other; the sides of the first have the colours of their sizes."""
    height, width = _scaled(shape)
    for k in reversed(range(count)):
        corner = (x + 1.1 * k, y - height / 2 + 0.7 * k)
        face = colours[0] if fill else "white"
        axis.add_patch(
            Rectangle(corner, width, height, facecolor=face, alpha=0.35 if fill else 1, edgecolor="none", zorder=2)
        )
        axis.add_patch(Rectangle(corner, width, height, facecolor="none", edgecolor="0.5", linewidth=0.6, zorder=2))
    left, bottom = x, y - height / 2
    axis.plot([left, left], [bottom, bottom + height], color=colours[0], lw=2.4, zorder=3)
    if len(colours) > 1:
        axis.plot([left, left + width], [bottom, bottom], color=colours[1], lw=2.4, zorder=3)


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "geometry": geometry,
    "noise": noise,
    "fitting": fitting,
    "groups": groups,
    "rank-two": rank_two,
    "layers": layers,
    "buckets": buckets,
    "step": step,
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
