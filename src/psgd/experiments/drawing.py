"""Style of curves in all figures: a colour for each method, a dash for each of its learning rates."""

from __future__ import annotations

import io
from collections.abc import Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from torch import Tensor

from .run import Result

COLORS = {
    "SGD": "tab:orange",
    "c1": "tab:green",
    "c2": "tab:red",
    "c3": "tab:blue",
    "RMSProp": "tab:brown",
    "Adam": "tab:purple",
    "Newton": "black",
}
DASHES = ("-", "--", ":", "-.")


def plot(panel: Axes, results: Mapping[str, Result], x: str, y: str, *, legend: bool = True) -> None:
    """Draw one curve for each result that has one; curves of one method have one colour."""
    seen: dict[str, int] = {}
    for result in results.values():
        method = str(result.settings["method"])
        dash = DASHES[seen.setdefault(method, 0) % len(DASHES)]
        seen[method] += 1
        rows = [row for row in result.rows if y in row]
        marker = "." if len(rows) == 1 else None
        panel.plot(
            [row[x] for row in rows],
            [row[y] for row in rows],
            dash,
            color=COLORS.get(method),
            marker=marker,
            linewidth=1.2,
            label=result.label,
        )
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    if legend:
        panel.legend(fontsize="x-small", frameon=False)


def images(picture: Picture, name: str) -> dict[str, bytes]:
    """Picture as PNG and as SVG; the same picture of the same name gives the same bytes."""
    files = {}
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        for kind, metadata in (("png", None), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            picture.savefig(buffer, format=kind, dpi=150, metadata=metadata)
            files[kind] = buffer.getvalue()
    return files


def draw_pattern(panel: Axes, values: Tensor) -> None:
    """Draw class 1 white and class 0 black, as in the paper's Figure 4; grey means that a network is undecided."""
    panel.imshow(values.numpy(), cmap="gray", vmin=0, vmax=1, origin="lower", extent=(0, 1, 0, 1))
    panel.set_xticks((0, 0.5, 1), ("0", "0.5", "1"))
    panel.set_yticks((0, 0.5, 1), ("0", "0.5", "1"))
    panel.set_xlabel("$x_1$")
    panel.set_ylabel("$x_2$")
