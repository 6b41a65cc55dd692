"""Table and picture of ``psgd bench lm``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from matplotlib.figure import Figure as Picture

from ..experiments.figure import Table
from . import protocol
from .charts import OURS, THEIRS, plain
from .isolate import Outcome, Row

#: role of the row that describes the data
DATA = "data"
#: optimizer whose final loss the others are measured by
REFERENCE = "AdamW"

ABOUT = (
    "A GPT, trained on the source code of the Python installation or on a text, with a whole schedule: warm-up, then "
    "linear decay to 0. The setting with the lowest validation loss at the end is the best. The same mini-batches for "
    "all; on a GPU bf16 autocast and a compiled model. Times are medians of steps, without evaluations. Weight decay "
    "is that of matrices."
)


def judged(outcome: Outcome, role: str) -> list[list[Row]]:
    """Rows of the runs with the best setting, or with the default, one list for each seed."""
    by_seed: dict[int, list[Row]] = {}
    for row in outcome.rows:
        if row["role"] == role:
            by_seed.setdefault(row["seed"], []).append(row)
    return list(by_seed.values())


def target(outcomes: Sequence[Outcome]) -> float | None:
    """Median of the final losses of the reference at its best setting; None if there are none."""
    losses = [
        run[-1]["loss"] for outcome in outcomes if outcome.label == REFERENCE for run in judged(outcome, protocol.TUNED)
    ]
    return median(losses) if losses else None


def reached(run: Sequence[Row], loss: float) -> tuple[float, float]:
    """Steps and seconds to a loss, linear between evaluations; infinite if it was not reached.

    >>> reached([{"step": 100, "seconds": 5.0, "loss": 4.0}, {"step": 200, "seconds": 10.0, "loss": 2.0}], 3.0)
    (150.0, 7.5)
    """
    before: Row | None = None
    for row in run:
        if row["loss"] <= loss:
            if before is None:
                return row["step"], row["seconds"]
            share = (before["loss"] - loss) / (before["loss"] - row["loss"])
            step, seconds = (before[name] + share * (row[name] - before[name]) for name in ("step", "seconds"))
            return step, seconds
        before = row
    return math.inf, math.inf


def table(outcomes: Sequence[Outcome]) -> Table:
    loss = target(outcomes)
    rows = []
    for outcome in outcomes:
        rows.append([outcome.label, *_cells(judged(outcome, protocol.TUNED), loss)])
        rows.append([f"{outcome.label}, default", *_cells(judged(outcome, protocol.DEFAULT), loss)])
    columns = (
        "",
        "learning rate",
        "weight decay",
        "final loss",
        "ms, gradient",
        "ms, optimizer",
        "seconds",
        f"steps to {REFERENCE}'s loss",
        "seconds to it",
    )
    return Table(caption(outcomes), columns, rows)


def _cells(runs: Sequence[list[Row]], loss: float | None) -> list[str]:
    if not runs:
        return ["–"] * 8
    finals = [run[-1]["loss"] for run in runs if math.isfinite(run[-1]["loss"])]
    count = "" if len(finals) == len(runs) else f"{len(finals)} of {len(runs)}: "
    ends = [] if loss is None else [reached(run, loss) for run in runs]
    ends = [end for end in ends if end[0] < math.inf]
    few = "" if len(ends) == len(runs) else f"{len(ends)} of {len(runs)}: "
    return [
        f"{runs[0][0]['lr']:g}",
        f"{runs[0][0]['weight_decay']:g}",
        count + protocol.spread(finals, digits=4) if finals else "diverged",
        protocol.spread([median(row["gradient_ms"] for row in run) for run in runs]),
        protocol.spread([median(row["optimizer_ms"] for row in run) for run in runs]),
        protocol.spread([run[-1]["seconds"] for run in runs]),
        few + protocol.spread([steps for steps, _ in ends], digits=4) if ends else "–",
        protocol.spread([seconds for _, seconds in ends]) if ends else "–",
    ]


def caption(outcomes: Sequence[Outcome]) -> str:
    """What was done, from the settings and from the data."""
    if not outcomes:
        return ABOUT
    settings = outcomes[0].task.settings
    size, shape = settings["size"], settings["size"].shape
    steps, tuning_steps = settings["steps"], settings["tuning_steps"]
    words = [
        f"{size.name}: {shape.layers} layers, width {shape.width}, context {shape.context}, {steps:,} steps of "
        f"{size.batch_tokens:,} tokens."
    ]
    facts = next((row for outcome in outcomes for row in outcome.rows if row["role"] == DATA), None)
    if facts is not None:
        words.append(
            f"{facts['train_tokens']:,} tokens to train on (vocabulary {facts['vocabulary']:,}), of "
            f"{facts['text_bytes'] / 1e6:.0f} MB of text with the SHA-256 {facts['text'][:12]}…."
        )
    length = "" if tuning_steps == steps else f", with schedules of {tuning_steps:,} steps"
    seeds = ", ".join(map(str, settings["seeds"])) or "none"
    words.append(
        f"Protocol: {settings['rates']} learning rates for each optimizer, half a decade apart around its own default, "
        f"each with the same weight decays, and further ones while the best is at an end; compared with seed "
        f"{protocol.TUNING_SEED}{length}. Seeds of the results: {seeds}; median, and the least and largest in brackets."
    )
    return " ".join(words)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    """Draw the validation loss of all seeds at the best settings, over steps and over seconds."""
    picture = Picture(figsize=(11, 4.5), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    colors = iter((THEIRS, "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive"))
    ours = iter((OURS, "tab:cyan"))
    finite: list[list[float]] = []
    for outcome in outcomes:
        color = next(ours if outcome.label.startswith("PSGD") else colors)
        for number, run in enumerate(judged(outcome, protocol.TUNED)):
            label = None if number else f"{outcome.label}, {run[0]['lr']:g}, {run[0]['weight_decay']:g}"
            losses = [row["loss"] for row in run]
            finite.append([loss for loss in losses if math.isfinite(loss)])
            for panel, along in zip(panels, ("step", "seconds"), strict=True):
                panel.plot([row[along] for row in run], losses, color=color, label=label, linewidth=1)
    for panel, along in zip(panels, ("steps", "seconds of training"), strict=True):
        plain(panel)
        panel.set_xlabel(along)
    panels[0].set_ylabel("validation loss")
    if any(finite):
        low = min(min(losses) for losses in finite if losses)
        high = max(losses[len(losses) // 4] for losses in finite if losses)
        panels[0].set_ylim(low - 0.05 * (high - low + 0.1), high + 0.05 * (high - low + 0.1))
        panels[0].legend(frameon=False, fontsize="small")
    return picture
