"""Cost of one ``optimizer.step()`` for the shapes of GPT-2 with 124 million parameters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean, median
from typing import Any

import torch
from matplotlib.figure import Figure as Picture
from torch import Tensor

from ..experiments.figure import Table
from . import peers
from .benchmark import Benchmark, Plan
from .charts import OURS, THEIRS, bars, number
from .isolate import Outcome, Row, SkippedError, Task
from .peers import Peer
from .timing import milliseconds, wait_for

WARMUP, STEPS = 5, 40
#: number of first steps on a GPU in which optimizers may compile or record
WARMUP_ON_GPU = 50
#: number of sets of random gradients that are used in turn
GRADIENTS = 4


@dataclass(frozen=True)
class Transformer:
    """Shapes of a GPT-2: two embeddings, four matrices in each layer, and vectors."""

    layers: int
    width: int
    vocabulary: int
    context: int = 1024

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, {self.vocabulary:,} words"

    def hidden(self) -> list[tuple[int, ...]]:
        """Matrices of the layers."""
        w = self.width
        return [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)] * self.layers

    def others(self) -> list[tuple[int, ...]]:
        """Embeddings, biases, and the scales and shifts of the normalisations."""
        w = self.width
        vectors = [(w,), (w,), (3 * w,), (w,), (w,), (w,), (4 * w,), (w,)]
        return [(self.vocabulary, w), (self.context, w), *vectors * self.layers, (w,), (w,)]


MODELS = {
    "gpt2": Transformer(layers=12, width=768, vocabulary=50304),
    "52m": Transformer(layers=14, width=512, vocabulary=8192, context=512),
    "small": Transformer(layers=2, width=128, vocabulary=1000),
}


def state_bytes(optimizer: peers.Steps) -> int:
    """Bytes of the state; memory that several tensors share counts once."""
    storages: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for part in value.values():
                look(part)
        elif isinstance(value, list | tuple):
            for part in value:
                look(part)

    for state in optimizer.state.values():
        look(state)
    return sum(storages.values())


def work(*, peer: Peer, model: Transformer, device: str, steps: int) -> Iterator[Row]:
    """Measure the first step, a typical step and memory: a row for each, so that a time limit keeps what is known."""
    if peer.closure:
        raise SkippedError("a step evaluates the loss as often as its line search wants, so there is no such number")
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(0)

    def parameters(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return [(0.02 * torch.randn(shape, generator=generator)).to(device).requires_grad_() for shape in shapes]

    hidden, others = parameters(model.hidden()), parameters(model.others())
    params = [*hidden, *others]
    optimizer = peer.optimizer(params, hidden=hidden)
    gradients = cycle([[1e-3 * torch.randn_like(p) for p in params] for _ in range(GRADIENTS)])

    def give_gradients() -> None:
        """Set gradients before every step, as some optimizers remove them."""
        for p, g in zip(params, next(gradients), strict=True):
            p.grad = g

    cuda = device.startswith("cuda")
    wait_for(device)
    if cuda:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    give_gradients()
    torch.cuda.empty_cache()
    begin = time.perf_counter()
    optimizer.step()
    wait_for(device)
    yield {"first s": time.perf_counter() - begin, "state MB": state_bytes(optimizer) / 1e6}
    warmup = WARMUP_ON_GPU if cuda else WARMUP
    times = milliseconds(optimizer.step, device, repeat=steps, warmup=warmup, before=give_gradients)
    row: Row = {"median ms": median(times), "mean ms": fmean(times)}
    if cuda:
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()  # what is still reserved afterwards is kept for the next steps
        row["peak MB"] = (max(peak, torch.cuda.memory_reserved(device)) - before) / 1e6
    if not all(bool(torch.isfinite(p).all()) for p in params):
        raise FloatingPointError("its parameters are not finite after these steps")
    yield row


def tasks(plan: Plan) -> list[Task]:
    model = MODELS[plan.model or ("gpt2" if plan.cuda else "small")]
    settings = {"model": model, "device": plan.device, "steps": STEPS // 2 if plan.quick else STEPS}
    return [
        Task(peer.name, work, {"peer": peer, **settings}, plan.limit or 300.0) for peer in (*peers.OURS, *plan.peers)
    ]


def table(outcomes: Sequence[Outcome]) -> Table:
    columns = ["median ms", "mean ms", "first s", "state MB"]
    if any("peak MB" in o.row for o in outcomes):
        columns.append("peak MB")
    rows = [[o.label, *(number(o.row[name]) if name in o.row else "–" for name in columns)] for o in outcomes]
    shapes = ", ".join({str(o.task.settings["model"]) for o in outcomes})
    caption = f"{shapes}; first: time of the first step; peak: memory beyond parameters and gradients"
    return Table(caption, ("", *columns), rows)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    times = {o.label: o.row.get("mean ms") for o in outcomes}
    picture = Picture(figsize=(8, 1.2 + 0.32 * len(times)), layout="constrained")
    panel = picture.subplots()
    ours = {peer.name for peer in peers.OURS}
    colors = {name: OURS if name in ours else THEIRS for name in times}
    late = {o.label: o.failure for o in outcomes if o.failure and o.failure.startswith("timed out")}
    bars(panel, times, colors, "milliseconds per step (mean)", late)
    shapes = ", ".join({str(o.task.settings["model"]) for o in outcomes})
    panel.set_title(f"One step of the optimizer: {shapes}")
    return picture


BENCHMARK = Benchmark(
    "step",
    "One step of the optimizer at the shapes of a transformer",
    "Milliseconds for optimizer.step() with random gradients and float32 parameters; tf32 is allowed. The mean differs "
    "from the median where some steps cost more than others.",
    tasks,
    table,
    draw,
    models=tuple(MODELS),
)
