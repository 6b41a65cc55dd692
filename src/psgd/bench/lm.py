"""A small character-level GPT: steps and time that each optimizer needs to reach a validation loss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure as Picture
from torch import Tensor

from ..experiments.figure import Table
from . import protocol
from .benchmark import Benchmark, Plan
from .charts import OURS, plain
from .gpt import GPT, Shape, Text
from .isolate import Outcome, Row, SkippedError, Task
from .peers import PSGD_FLOAT32, Peer
from .timing import wait_for

#: places where a text is searched if none is given
TEXTS = (Path("tinyshakespeare.txt"), Path("../shared/data/text/tinyshakespeare.txt"))
TARGET = 1.5
WARMUP = 100
STEPS = 1200
#: steps between two evaluations of the validation loss
EVERY = 25
TINY = Shape(layers=2, heads=2, width=64, context=64, batch=16, dropout=0.1)
#: seconds allowed for a run
SECONDS = 120.0

#: optimizers that it can be compared with
COMPARED = ("AdamW", "Muon", "heavyball.SOAP", "pytorch_optimizer.SOAP")


def work(
    *, peer: Peer, text: Path | None, shape: Shape, steps: int, device: str, seeds: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each evaluation of each run, see ``protocol``; only training is timed."""
    torch.set_float32_matmul_precision("high")
    data = Text(found(text), device)
    yield from protocol.runs(
        peer.lr,
        seeds,
        lambda lr, seed, _: train(peer, lr, data, shape, steps, device, seed),
        lambda rows: (reached(rows)[0], lowest(rows)),
    )


def train(peer: Peer, lr: float, data: Text, shape: Shape, steps: int, device: str, seed: int) -> Iterator[Row]:
    """Train until the target is reached, and yield a row for each evaluation."""
    torch.manual_seed(seed)
    model = GPT(data.vocabulary, shape).to(device)
    optimizer = peer.optimizer(model.parameters(), lr, model.hidden())
    start = [group["lr"] for group in optimizer.param_groups]
    batches = data.batches(seed, shape)
    kept = data.validation(shape, 32 if shape == TINY else None)
    kind = torch.device(device).type
    seconds, begin = 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        for group, full in zip(optimizer.param_groups, start, strict=True):
            group["lr"] = full * min(1.0, step / WARMUP)
        x, y = next(batches)
        with torch.autocast(kind, torch.bfloat16):
            loss = model.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            wait_for(device)
            seconds += time.perf_counter() - begin
            value = validation_loss(model, kept, kind)
            yield {"lr": lr, "seed": seed, "step": step, "seconds": seconds, "loss": value}
            if not math.isfinite(value) or value < TARGET:
                return
            begin = time.perf_counter()


@torch.no_grad()
def validation_loss(model: GPT, kept: Sequence[tuple[Tensor, Tensor]], kind: str) -> float:
    model.eval()
    with torch.autocast(kind, torch.bfloat16):
        total = sum(float(model.loss(x, y)) * len(x) for x, y in kept)
    model.train()
    return total / sum(len(x) for x, _ in kept)


def found(text: Path | None) -> Path:
    for path in TEXTS if text is None else [text]:
        if path.is_file():
            return path
    raise SkippedError("skipped: there is no text; --text FILE names one")


def tasks(plan: Plan) -> list[Task]:
    seeds = protocol.TEST_SEEDS[: 1 if plan.quick else None]
    settings = {
        "text": plan.text,
        "shape": TINY if plan.quick or not plan.cuda else Shape(),
        "steps": 50 if plan.quick else STEPS,
        "device": plan.device,
        "seeds": seeds,
    }
    limit = plan.limit or SECONDS * protocol.most_runs(len(seeds))
    return [Task(peer.name, work, {"peer": peer, **settings}, limit) for peer in (PSGD_FLOAT32, *plan.peers)]


def reached(rows: Sequence[Row]) -> tuple[float, float]:
    """Steps and seconds of a run to the target; infinite if it was not reached."""
    return next(((row["step"], row["seconds"]) for row in rows if row["loss"] < TARGET), (math.inf, math.inf))


def lowest(rows: Sequence[Row]) -> float:
    return min((row["loss"] for row in rows if math.isfinite(row["loss"])), default=math.inf)


def runs(outcome: Outcome, role: str) -> list[list[Row]]:
    """Rows of the runs with the tuned learning rate, or with the default, one list for each seed."""
    by_seed: dict[int, list[Row]] = {}
    for row in outcome.rows:
        if row["role"] == role:
            by_seed.setdefault(row["seed"], []).append(row)
    return list(by_seed.values())


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        rows.append([outcome.label, *_cells(runs(outcome, protocol.TUNED))])
        rows.append([f"{outcome.label}, default", *_cells(runs(outcome, protocol.DEFAULT))])
    columns = ("", "learning rate", f"steps to {TARGET}", "seconds", "ms per step", "loss at 500", "lowest loss")
    caption = f"{protocol.TEXT} Validation loss; seconds are those of training alone."
    return Table(caption, columns, rows)


def _cells(judged: Sequence[list[Row]]) -> list[str]:
    if not judged:
        return ["–"] * 6
    ends = [reached(rows) for rows in judged if reached(rows)[0] < math.inf]
    at_500 = [row["loss"] for rows in judged for row in rows if row["step"] == 500]
    count = "" if len(ends) == len(judged) else f"{len(ends)} of {len(judged)}: "
    return [
        f"{judged[0][0]['lr']:g}",
        count + protocol.spread([steps for steps, _ in ends], digits=4) if ends else "–",
        protocol.spread([seconds for _, seconds in ends]) if ends else "–",
        protocol.spread([1000 * rows[-1]["seconds"] / rows[-1]["step"] for rows in judged]),
        protocol.spread(at_500, digits=4) if at_500 else "–",
        protocol.spread([lowest(rows) for rows in judged], digits=4),
    ]


def draw(outcomes: Sequence[Outcome]) -> Picture:
    """Draw the validation loss of all seeds at the tuned learning rates."""
    picture = Picture(figsize=(11, 4.5), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    colors = iter(("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown"))
    for outcome in outcomes:
        color = OURS if outcome.label.startswith("PSGD") else next(colors)
        for number, rows in enumerate(runs(outcome, protocol.TUNED)):
            label = None if number else f"{outcome.label}, {rows[0]['lr']:g}"
            for panel, along in zip(panels, ("step", "seconds"), strict=True):
                panel.plot([row[along] for row in rows], [row["loss"] for row in rows], color=color, label=label)
    for panel, along in zip(panels, ("steps", "seconds of training"), strict=True):
        plain(panel)
        panel.axhline(TARGET, color="black", linewidth=0.5)
        panel.set_xlabel(along)
        panel.set_ylim(1.45, 2.4)
    panels[0].set_ylabel("validation loss")
    if panels[0].lines[1:]:
        panels[0].legend(frameon=False, fontsize="small")
    return picture


BENCHMARK = Benchmark(
    "lm",
    "A character-level GPT",
    f"6 layers, width 384, context 256, batch 64, dropout 0.2, bf16 autocast; step size growing over {WARMUP} steps, "
    "then constant; the same mini-batches for all. On a CPU, or quick, a much smaller model. The learning rate is "
    f"tuned for the fewest steps. {protocol.TEXT}",
    tasks,
    table,
    draw,
    peers=COMPARED,
)
