"""Several processes: time of a step and memory of the optimizer on each, for the ways to divide it among them."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure as Picture
from torch import nn
from torch.nn.functional import cross_entropy

from .. import PSGD, Whitening
from ..experiments.figure import Table
from .benchmark import Benchmark, Plan
from .charts import BASELINE, OURS, lines, number
from .gpt import GPT, Shape
from .isolate import Outcome, Row, Task
from .step import state_bytes
from .timing import milliseconds

SIZES = (1, 2, 4)
PLAIN, SHARED, FSDP = "DDP", "DDP, shared", "FSDP2"
KINDS = (PLAIN, SHARED, FSDP)
#: end of the name of a kind whose steps are not captured as CUDA graphs, for GPUs
LAUNCHED = ", no graphs"
STYLES = {PLAIN: (BASELINE, "-"), SHARED: (OURS, "-"), FSDP: ("tab:green", "--")}
STYLES |= {kind + LAUNCHED: (color, ":") for kind, (color, _) in STYLES.items()}

#: models for a GPU, for a CPU, and for a first look; all processes together have 16 windows of text
LARGE = Shape(layers=12, heads=12, width=768, context=256, batch=16, dropout=0.0)
SMALL = Shape(layers=4, heads=4, width=128, context=32, batch=16, dropout=0.0)
TINY = Shape(layers=2, heads=2, width=64, context=16, batch=16, dropout=0.0)
VOCABULARY = 512
#: vocabulary of the large model, which then has the shapes of GPT-2 with 124 million parameters
MANY_WORDS = 50304

#: measured numbers: a whole step of training, the optimizer's part of it, and bytes of its state
STEP, OPTIMIZER, MOST, ALL = "step", "optimizer", "most bytes", "all bytes"


def work(
    *, kind: str, size: int, shape: Shape, device: str, repeat: int, vocabulary: int = VOCABULARY
) -> Iterator[Row]:
    """Yield one row, measured by ``size`` processes; times are those of the slowest."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="psgd-bench-") as folder:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            settings = (kind, rank, size, shape, device, repeat, vocabulary)
            # These end with this process: its whole group is killed when it is done.
            context.Process(target=_serve, args=(theirs, Path(folder, "store"), settings), daemon=True).start()
            theirs.close()
            pipes.append(ours)
        rows: list[Row] = []
        while len(rows) < size:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    row = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"one of {size} processes has ended before it was done") from None
                if isinstance(row, str):  # an error, for which the others would wait forever
                    raise RuntimeError(f"on one of {size} processes: {row}")
                pipes.remove(pipe)
                rows.append(row)
    yield {
        "processes": size,
        "parameters": rows[0]["parameters"],
        ALL: sum(row["bytes"] for row in rows),
        MOST: max(row["bytes"] for row in rows),
        STEP: max(row[STEP] for row in rows),
        OPTIMIZER: max(row[OPTIMIZER] for row in rows),
    }


def _serve(pipe: Connection, store: Path, settings: tuple[str, int, int, Shape, str, int, int]) -> None:
    try:
        pipe.send(_measured(store, *settings))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(traceback.format_exception_only(type(error), error)[-1].strip())


def _measured(
    store: Path, kind: str, rank: int, size: int, shape: Shape, device: str, repeat: int, vocabulary: int
) -> Row:
    """Measure in the process of a rank."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    cuda = device.startswith("cuda")
    if cuda:
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=5),
        device_id=torch.device(device) if cuda else None,
    )
    torch.manual_seed(0)
    model, optimizer = _divided(GPT(vocabulary, shape).to(device), kind)
    x, y = torch.randint(vocabulary, (2, shape.batch, shape.context)).to(device).tensor_split(size, 1)[rank]

    def gradient() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()

    def step() -> None:
        gradient()
        optimizer.step()

    def together() -> None:
        gradient()
        dist.barrier()  # waiting for others is not counted

    # The same number on all ranks, which wait for each other in every step. On a GPU the first ones compile and record.
    warmup = 50 if cuda else 2
    row = {
        STEP: median(milliseconds(step, device, repeat=repeat, warmup=warmup, before=dist.barrier)),
        OPTIMIZER: median(milliseconds(optimizer.step, device, repeat=repeat, warmup=1, before=together)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": state_bytes(optimizer),
    }
    dist.barrier()
    dist.destroy_process_group()
    return row


def _divided(model: GPT, kind: str) -> tuple[nn.Module, PSGD]:
    """Model as users wrap it, and its optimizer."""
    options: dict[str, Any] = {"probe": Whitening(), "cuda_graph": not kind.endswith(LAUNCHED)}
    kind = kind.removesuffix(LAUNCHED)
    if kind == FSDP:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(model.tokens.weight.device.type, (dist.get_world_size(),))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
        return model, PSGD(model.parameters(), 1e-4, **options)
    wrapped = nn.parallel.DistributedDataParallel(model)
    shard = dist.group.WORLD if kind == SHARED else None
    return wrapped, PSGD(wrapped.parameters(), 1e-4, shard=shard, **options)


def tasks(plan: Plan) -> list[Task]:
    """Tasks of a plan, with one process for each GPU."""
    sizes = [size for size in SIZES if size <= torch.cuda.device_count()] if plan.cuda else SIZES
    shape = TINY if plan.quick else LARGE if plan.cuda else SMALL
    settings: dict[str, Any] = {"shape": shape, "device": plan.device, "repeat": 5 if plan.quick else 10}
    settings["vocabulary"] = MANY_WORDS if shape is LARGE else VOCABULARY
    return [
        Task(_label(kind, size), work, {"kind": kind, "size": size, **settings}, plan.limit or 300.0)
        for kind in (STYLES if plan.cuda else KINDS)
        for size in sizes
    ]


def _label(kind: str, size: int) -> str:
    return f"{kind}, {size} process{'es' if size > 1 else ''}"


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        found = outcome.row
        times = [number(found[name]) if found else "–" for name in (STEP, OPTIMIZER)]
        sizes = [number(found[name] / 1e6) if found else "–" for name in (MOST, ALL)]
        rows.append([outcome.label, *times, *sizes])
    parameters = next((o.row["parameters"] for o in outcomes if o.row), None)
    model = "" if parameters is None else f"{parameters / 1e6:.3g} million parameters; "
    caption = f"{model}median milliseconds of a step of training, and of the optimizer's part of it; megabytes of state"
    return Table(caption, ("", "step, ms", "optimizer, ms", "fullest process, MB", "all, MB"), rows)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    picture = Picture(figsize=(12, 4), layout="constrained")
    titles = {
        STEP: ("A step of training", "milliseconds", 1.0),
        OPTIMIZER: ("The optimizer's part of it", "milliseconds", 1.0),
        MOST: ("Its state on the fullest process", "MB", 1e6),
    }
    for panel, (name, (title, unit, scale)) in zip(picture.subplots(1, 3), titles.items(), strict=True):
        curves: dict[str, list[tuple[float, float]]] = {}
        for outcome in outcomes:
            if found := outcome.row:
                curves.setdefault(outcome.task.settings["kind"], []).append((found["processes"], found[name] / scale))
        lines(panel, curves, STYLES, base=2)
        sizes = sorted({int(x) for points in curves.values() for x, _ in points})
        panel.set_xticks(sizes, [str(n) for n in sizes])
        panel.set_yscale("linear")
        panel.set_ylim(0)
        panel.set_title(title)
        panel.set_xlabel("processes")
        panel.set_ylabel(unit)
    return picture


BENCHMARK = Benchmark(
    "dist",
    "A GPT on several processes",
    "A step of training by DDP where each process keeps and fits all of Q, by DDP where they share its blocks "
    "(shard=), and by FSDP2, where they always do. All see parts of one mini-batch, however many they are. Over gloo, "
    "with one thread each, on a CPU, where times grow if it has fewer cores; over NCCL, with one GPU each, on GPUs, "
    "where steps are also measured without CUDA graphs.",
    tasks,
    table,
    draw,
    peers=(),
)
