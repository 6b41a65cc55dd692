"""Style of the pictures of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

OURS, THEIRS, BASELINE = "tab:blue", "tab:orange", "tab:grey"


def number(value: float) -> str:
    """Number with three digits, and without powers of ten for thousands."""
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def plain(panel: Axes) -> None:
    """Give a panel a faint grid, and no frame."""
    panel.grid(alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def bars(
    panel: Axes,
    values: Mapping[str, float | None],
    colors: Mapping[str, str],
    unit: str,
    missing: Mapping[str, str] | None = None,
) -> None:
    """Draw one bar for each name, the first on top, on a logarithmic scale and with its number.

    ``missing`` says why a value is None; otherwise it was not measured.
    """
    names = list(values)
    found = [value for value in values.values() if value is not None and value > 0]
    low, high = (min(found), max(found)) if found else (1.0, 1.0)
    left = 10 ** floor(log10(low / 1.5))
    for place, name in enumerate(names):
        value = values[name]
        if value is not None and value > 0:
            panel.barh(place, value, color=colors.get(name, THEIRS), height=0.7)
            panel.text(value * 1.05, place, number(value), va="center", fontsize="small")
        else:
            why = (missing or {}).get(name, "not measured")
            panel.text(left * 1.05, place, why, va="center", fontsize="small", color="tab:red")
    panel.set_xscale("log")
    panel.set_xlim(left, 4 * high)
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlabel(unit)
    plain(panel)
    panel.grid(visible=False, axis="y")


def lines(
    panel: Axes,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    styles: Mapping[str, tuple[str, str]],
    base: int = 10,
) -> None:
    """Draw one curve for each name, in its colour and dash, on logarithmic scales; ``base`` is that of the x axis."""
    plain(panel)
    if not any(curves.values()):
        panel.text(0.5, 0.5, "nothing was measured", ha="center", color="tab:red", transform=panel.transAxes)
        return
    for name, points in curves.items():
        color, dash = styles[name]
        panel.plot([x for x, _ in points], [y for _, y in points], dash, color=color, marker=".", label=name)
    panel.set_xscale("log", base=base)
    panel.set_yscale("log")
    panel.legend(frameon=False, fontsize="small")
