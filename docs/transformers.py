"""The page on transformers: ``python docs/transformers.py`` draws its picture and prints its table of plans."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from psgd import Kronecker, plan
from psgd.experiments.drawing import images

DOCS = Path(__file__).parent
RUNS = DOCS / "results" / "bench" / "lm-52m-protocol.json"
#: for each optimizer its label and color
DRAWN = {
    "PSGD": ("psgd.whiten(model), its default 0.001", "tab:blue"),
    "Muon": ("Muon, 0.01", "tab:green"),
    "pytorch_optimizer.SOAP": ("SOAP, 0.003", "tab:purple"),
    "AdamW": ("AdamW, 0.001", "tab:orange"),
}
#: optimizers whose runs shared the GPU with others, so that their seconds mean nothing
SHARED = {"pytorch_optimizer.SOAP"}
#: tokens of a mini-batch with which the cost of a step is compared
TOKENS = 500_000


def whole_runs() -> list[dict[str, Any]]:
    """Runs with the whole schedule."""
    runs: list[dict[str, Any]] = json.loads(RUNS.read_text("utf-8"))["runs"]
    return [run for run in runs if run["steps"] == 1200]


def draw() -> Figure:
    picture = Figure(figsize=(9, 3.6), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    labelled = set()
    for run in whole_runs():
        label, color = DRAWN[run["optimizer"]]
        for panel, along in zip(panels, ("step", "seconds"), strict=True):
            if along == "seconds" and run["optimizer"] in SHARED:
                continue
            panel.plot(
                [row[along] for row in run["rows"]],
                [row["loss"] for row in run["rows"]],
                color=color,
                label=None if label in labelled else label,
            )
        labelled.add(label)
    for panel, along in zip(panels, ("steps", "seconds of training"), strict=True):
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel(along)
    panels[0].set_ylabel("validation loss")
    panels[0].set_ylim(1.7, 5.0)
    panels[0].legend(frameon=False)
    return picture


def table() -> str:
    """Memory of the state and work of a step for models of several sizes, by the planner."""
    transformer = runpy.run_path(str(DOCS / "plan.py"))["Transformer"]
    models = {
        "124 M": (transformer(12, 768, 12, 12, 3072, vocabulary=50304, tied=True), 2048),
        "1 B": (transformer(16, 2048, 32, 8, 8192, tied=True), 2048),
        "7 B": (transformer(32, 4096, 32, 32, 11008, vocabulary=32000), 4096),
    }
    lines = [
        "| parameters | `max_dense` | averages | `Q`, float32 | `Q`, bfloat16 | TFLOP a step | of a gradient |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (model, longest) in models.items():
        full, half = (
            plan(model.shapes(), preconditioner=Kronecker(max_dense=longest), precond_dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
        averages = sum(block.average_bytes for block in full.blocks)
        flops = sum(block.flops for block in full.blocks)
        share = flops / (6 * sum(block.numel for block in full.blocks) * TOKENS)
        Q = [sum(block.precond_bytes for block in each.blocks) / 2**30 for each in (full, half)]
        lines.append(
            f"| {name} | {longest} | {averages / 2**30:.2f} GiB | {Q[0]:.2f} GiB | {Q[1]:.2f} GiB "
            f"| {flops / 1e12:.1f} | {100 * share:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "transformers.svg").write_bytes(images(draw(), "transformers")["svg"])
    print(table())
