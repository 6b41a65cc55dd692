"""A small character-level GPT: steps and time that each optimizer needs to reach a validation loss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure as Picture
from torch import Tensor

from .. import PSGD, Whitening
from ..experiments.figure import Table
from .benchmark import Benchmark, Plan
from .charts import OURS, number, plain
from .gpt import GPT, Shape, Text
from .isolate import Outcome, Row, SkippedError, Task
from .peers import PEERS, Peer, Steps, Together
from .timing import wait_for

#: places where a text is searched if none is given
TEXTS = (Path("tinyshakespeare.txt"), Path("../shared/data/text/tinyshakespeare.txt"))
TARGET = 1.5
WARMUP = 100
STEPS = 1200
#: steps between two evaluations of the validation loss
EVERY = 25
TINY = Shape(layers=2, heads=2, width=64, context=64, batch=16, dropout=0.1)


def psgd(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float, **options: object) -> Steps:
    """PSGD with its defaults, except for a weight decay."""
    return PSGD(params, lr, probe=Whitening(), weight_decay=1.0, **options)  # type: ignore[arg-type]


def adamw(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float) -> Steps:
    return torch.optim.AdamW(params, lr, betas=(0.9, 0.99), weight_decay=0.1, fused=all(p.is_cuda for p in params))


def muon(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float) -> Steps:
    """Muon with its defaults for the hidden matrices, and AdamW at 0.001 for the rest."""
    chosen = {id(p) for p in hidden}
    rest = [p for p in params if id(p) not in chosen]
    return Together([torch.optim.Muon(hidden, lr), adamw(rest, [], 1e-3)])


#: optimizers, each with three learning rates, the most likely one first
COMPARED: list[tuple[Peer, tuple[float, float, float]]] = [
    (Peer("PSGD", psgd, 7e-4), (7e-4, 5.5e-4, 9e-4)),
    (Peer("AdamW", adamw, 1e-3), (1e-3, 5e-4, 2e-3)),
    (Peer("Muon", muon, 0.02), (0.02, 0.01, 0.04)),
    (PEERS["heavyball.SOAP"], (3e-3, 1e-3, 1e-2)),
    (PEERS["pytorch_optimizer.SOAP"], (3e-3, 1e-3, 1e-2)),
]


def work(*, peer: Peer, lr: float, text: Path | None, shape: Shape, steps: int, device: str) -> Iterator[Row]:
    """Yield a row for each evaluation; only training is timed."""
    torch.set_float32_matmul_precision("high")
    data = Text(found(text), device)
    torch.manual_seed(0)
    model = GPT(data.vocabulary, shape).to(device)
    optimizer = peer.optimizer(model.parameters(), lr, model.hidden())
    start = [group["lr"] for group in optimizer.param_groups]
    batches = data.batches(0, shape)
    kept = data.validation(shape, 32 if shape == TINY else None)
    kind = torch.device(device).type
    seconds, begin = 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        for group, lr in zip(optimizer.param_groups, start, strict=True):
            group["lr"] = lr * min(1.0, step / WARMUP)
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
            yield {"step": step, "seconds": seconds, "loss": value}
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
    names = {peer.name for peer in plan.peers}
    steps = 50 if plan.quick else STEPS
    shape = TINY if plan.quick or not plan.cuda else Shape()
    return [
        Task(
            f"{peer.name}, {lr:g}",
            work,
            {"peer": peer, "lr": lr, "text": plan.text, "shape": shape, "steps": steps, "device": plan.device},
            plan.limit or 600.0,
        )
        for turn in range(3)
        for peer, rates in COMPARED
        if peer.name == "PSGD" or peer.name in names
        for lr in rates[turn : turn + 1]
    ]


def reached(outcome: Outcome) -> tuple[float, float]:
    """Steps and seconds to the target; infinite if it was not reached."""
    return next(((r["step"], r["seconds"]) for r in outcome.rows if r["loss"] < TARGET), (math.inf, math.inf))


def best(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes with the best learning rate of each optimizer: the fewest steps, then the least time or lowest loss."""
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(name_of(outcome), []).append(outcome)
    return [min(same, key=lambda o: (*reached(o), lowest(o))) for same in by_name.values()]


def name_of(outcome: Outcome) -> str:
    return str(outcome.task.settings["peer"].name)


def lowest(outcome: Outcome) -> float:
    return min((row["loss"] for row in outcome.rows if math.isfinite(row["loss"])), default=math.inf)


def table(outcomes: Sequence[Outcome]) -> Table:
    chosen = best(outcomes)
    names = list(dict.fromkeys(name_of(outcome) for outcome in outcomes))
    rows = []
    for outcome in sorted(outcomes, key=lambda o: (names.index(name_of(o)), o.task.settings["lr"])):
        steps, seconds = reached(outcome)
        last = outcome.rows[-1] if outcome.rows else None
        at_500 = next((r["loss"] for r in outcome.rows if r["step"] == 500), None)
        rows.append(
            [
                f"{outcome.label}{' (best)' if outcome in chosen else ''}",
                number(steps) if math.isfinite(steps) else "–",
                f"{seconds:.1f}" if math.isfinite(seconds) else "–",
                f"{1000 * last['seconds'] / last['step']:.1f}" if last else "–",
                f"{at_500:.3f}" if at_500 is not None else "–",
                f"{lowest(outcome):.3f}" if last else "–",
            ]
        )
    columns = ("", f"steps to {TARGET}", "seconds", "ms per step", "loss at 500", "lowest loss")
    return Table("validation loss; seconds are those of training alone", columns, rows)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    picture = Picture(figsize=(11, 4.5), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    colors = iter(("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown"))
    for outcome in best(outcomes):
        color = OURS if outcome.label.startswith("PSGD") else next(colors)
        for panel, along in zip(panels, ("step", "seconds"), strict=True):
            points = [(row[along], row["loss"]) for row in outcome.rows]
            if points:
                panel.plot(*zip(*points, strict=True), color=color, label=outcome.label)
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
    "then constant; one seed, the same mini-batches for all. On a CPU, or quick, a much smaller model.",
    tasks,
    table,
    draw,
    peers=[peer.name for peer, _ in COMPARED if peer.name in PEERS],
)
