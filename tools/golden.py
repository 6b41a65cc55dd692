"""A golden record: what many configurations of the optimizer compute, to the bit, for changes that must not alter it.

Write a record before a change and compare after it:

    PYTHONPATH=src python tools/golden.py cpu --out cpu.json
    PYTHONPATH=src python tools/golden.py cpu --against cpu.json

The modes are ``cpu``; ``graphs``, with the CUDA graphs that ``tests/emulated.py`` emulates; ``ranks``, with two and
four processes; and ``cuda``, which needs nothing but torch. Each case trains a small network for a few steps and keeps
a hash of parameters and state, two sums that tell how far apart two results are, and, where it is measured, the peak
memory of its steps. The bits depend on the machine and on the version of torch, so that records are not committed.
Only names that the package exports are used here.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import psgd
from psgd import PSGD, Dense, Diagonal, FiniteDifference, HessianVector, Kronecker, LimitedMemory, LowRank, Whitening

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Record = dict[str, Any]
STEPS = 12
#: what a peak may change by, relative to what it was
PEAK_TOLERANCE = 0.01
STRUCTURES = {
    "Dense()": Dense(),
    "LimitedMemory(3)": LimitedMemory(3),
    "LowRank(2)": LowRank(2),
    "Diagonal()": Diagonal(),
    "Kronecker(inverse_free=False)": Kronecker(inverse_free=False),
    "Kronecker()": Kronecker(),
    "Kronecker(max_dense=4)": Kronecker(max_dense=4),
}
BATCHED = "FiniteDifference(batched=True)"
#: made for a network and a damping
PROBES: dict[str, Callable[[nn.Module, float | None], Any]] = {
    "FiniteDifference()": lambda model, damping: FiniteDifference(damping=damping),
    "HessianVector()": lambda model, damping: HessianVector(damping=damping),
    "Whitening()": lambda model, damping: Whitening(damping=damping),
    "Whitening(of_average=False)": lambda model, damping: Whitening(of_average=False, damping=damping),
    BATCHED: lambda model, damping: FiniteDifference(batched=True, module=model, damping=damping),
}
#: Options of PSGD; ``dtype`` is that of the parameters, ``missing`` leaves some out of some losses, ``groups`` says how
#: they are divided into param groups, and ``damping`` is for the probe.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "update_every": {"update_every": 3},
    "update_anneal": {"update_every": 4, "update_anneal": 6},
    "momentum=0": {"momentum": 0.0},
    "momentum=0.8": {"momentum": 0.8},
    "weight_decay": {"weight_decay": 0.1},
    "max_norm": {"max_norm": 0.1},
    "max_rms": {"max_rms": 0.02},
    "damping": {"damping": 0.1},
    "precond_lr": {"precond_lr": 0.5},
    "maximize": {"maximize": True},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 Q": {"precond_dtype": torch.bfloat16},
    "complex": {"dtype": torch.complex64},
    "two groups": {"groups": "two"},
    "missing": {"missing": True},
    "Affine": {"blocks": psgd.Affine(), "groups": "layers"},
    "Joint": {"blocks": psgd.Joint()},
    "many": {"groups": "two", "missing": True, "max_norm": 0.2, "max_rms": 0.1, "update_every": 2, "momentum": 0.5},
}
ON_RANKS = ("plain", "update_every", "momentum=0", "momentum=0.8", "weight_decay", "max_norm", "two groups")
FEW_ON_RANKS = ("plain", "two groups")
#: where the criteria c1 and c2 are tried on a GPU
WITH_CRITERIA = ("plain", "maximize", "complex")


@dataclass(frozen=True)
class Case:
    structure: str
    probe: str
    criterion: str = "c3"
    variant: str = "plain"
    #: outputs of the large layers of the network, and how long its inputs are
    width: int = 6
    inputs: tuple[int, int] = (2, 3)
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    def makes_sense(self) -> bool:
        """Whether it is allowed and not another one.

        Whitening has nothing for c1 and c2 to fit, ``Q`` of few bits is for factors that are never inverted, and
        without a probe that whitens there is no momentum anyway.
        """
        free = self.structure in ("Kronecker()", "Kronecker(max_dense=4)")
        whitens = self.probe.startswith("Whitening")
        return (
            (self.criterion == "c3" or not whitens)
            and (self.variant != "bfloat16 Q" or free)
            and (self.variant != "momentum=0" or whitens)
        )

    def __str__(self) -> str:
        size = [] if self.width == 6 else [f"width {self.width}"]
        return "/".join([self.structure, self.probe, self.criterion, self.variant, *size])


class Layer(nn.Module):
    """``tanh(W x + b)``; the weight may have several axes, as in a convolution."""

    def __init__(self, outputs: int, *inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, *inputs) / torch.Size(inputs).numel() ** 0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.flatten(1) @ self.weight.flatten(1).T + self.bias)


class Net(nn.Module):
    """Layers of which some are alike, one with a weight of three axes, and a scale."""

    def __init__(self, width: int = 6, inputs: tuple[int, int] = (2, 3), scale: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Layer(width - 1, *inputs), Layer(width, width - 1), Layer(width, width), Layer(width, width)]
        self.layers = nn.ModuleList([*layers, Layer(3, width)])
        self.scale = nn.Parameter(torch.ones(scale))

    def forward(self, x: Tensor, step: int | None = None) -> Tensor:
        """The outputs; at some steps, where one is given, without some of the parameters."""
        for k, layer in enumerate(self.layers):
            if not (step in (2, 3, 8) and k == 2):
                x = layer(x)
        return x if step == 5 else x * self.scale


def groups_of(model: nn.Module, how: str | None) -> Any:
    """The param groups of a network: one, two that differ in their numbers, or one for each layer."""
    params = list(model.parameters())
    if how == "layers":
        return psgd.Affine.groups(model)
    if how == "two":
        other = {"lr": 0.02, "update_every": 2, "weight_decay": 0.05, "momentum": 0.7}
        return [{"params": params[:6]}, {"params": params[6:], **other}]
    return params


def optimizer_of(case: Case, model: nn.Module, **more: Any) -> PSGD:
    variant = VARIANTS[case.variant]
    options = {k: v for k, v in variant.items() if k not in ("dtype", "missing", "groups", "damping")}
    options["preconditioner"] = STRUCTURES[case.structure]
    options["criterion"] = getattr(psgd, case.criterion)
    probe = options["probe"] = PROBES[case.probe](model, variant.get("damping"))
    lr = 0.02 if isinstance(probe, Whitening) else 0.1
    return PSGD(groups_of(model, variant.get("groups")), lr=lr, **options, **case.more, **more)


def one_step(case: Case, model: nn.Module, optimizer: PSGD, x: Tensor, y: Tensor, step: int, around: Any) -> None:
    """Take one step by the closure that the probe wants; ``optimizer.step`` is called within a context."""
    variant = VARIANTS[case.variant]
    hidden = (step,) if variant.get("missing") else ()

    def loss_of() -> Tensor:
        loss = (model(x, *hidden) - y).abs().square().mean()
        return -loss if variant.get("maximize") else loss

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    if isinstance(optimizer.probe, Whitening):
        closure()
        with around():
            optimizer.step()
    else:
        by_itself = isinstance(optimizer.probe, HessianVector) or optimizer.probe.batched
        with around():
            optimizer.step(loss_of if by_itself else closure)


def data(case: Case, step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(8, *case.inputs, generator=generator, dtype=torch.float64)
    dtype = VARIANTS[case.variant].get("dtype", torch.float32)
    if dtype.is_complex:
        x = torch.complex(x, x.roll(1, 0))
    y = 0.5 * torch.sin(x.flatten(1)[:, :3])
    return x.to(device, dtype), y.to(device, dtype)


def trained(case: Case, device: str = "cpu", steps: int = STEPS, around: Any = nullcontext) -> tuple[nn.Module, PSGD]:
    """The network and its optimizer after some steps."""
    model = Net(case.width, case.inputs).to(device, VARIANTS[case.variant].get("dtype", torch.float32))
    optimizer = optimizer_of(case, model)
    for step in range(steps):
        one_step(case, model, optimizer, *data(case, step, device), step, around)
    return model, optimizer


def summary(model: nn.Module, optimizer: PSGD) -> Record:
    """The hash of whole parameters and of the state here, the sum of the former and of the squares of the latter."""
    entries = sorted(optimizer.state_dict()["state"].items(), key=lambda item: str(item[0]))
    state = [entry[name] for _, entry in entries for name in sorted(entry)]
    state = [t.to_local() if hasattr(t, "to_local") else torch.as_tensor(t) for t in state]
    tensors = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]
    digest = hashlib.sha256()
    for t in (*tensors, *state):
        digest.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    total = sum(float((torch.view_as_real(t) if t.is_complex() else t).double().sum()) for t in tensors)
    squares = sum(float(t.abs().double().square().sum()) for t in state)
    return {"hash": digest.hexdigest()[:16], "params": repr(total), "state": repr(squares)}


def cases(structures: Iterable[str] = STRUCTURES) -> Iterator[Case]:
    """All that make sense; the gradients at once in the plain variant only."""
    for structure in structures:
        for probe in PROBES:
            for criterion in ("c1", "c2", "c3") if probe != BATCHED else ("c3",):
                for variant in VARIANTS if probe != BATCHED else ("plain",):
                    case = Case(structure, probe, criterion, variant)
                    if case.makes_sense():
                        yield case


def peak_cases() -> Iterator[Case]:
    for structure in ("Kronecker()", "Kronecker(inverse_free=False)"):
        for probe in ("Whitening()", "Whitening(of_average=False)", "FiniteDifference()", "HessianVector()"):
            yield Case(structure, probe, width=200, inputs=(16, 16))
    for variant in ("update_every", "missing", "bfloat16 Q", "two groups"):
        yield Case("Kronecker()", "Whitening()", variant=variant, width=200, inputs=(16, 16))
    for structure in ("LimitedMemory(3)", "LowRank(2)", "Diagonal()"):
        yield Case(structure, "FiniteDifference()", width=200, inputs=(16, 16))
    yield Case("Dense()", "FiniteDifference()", width=20, inputs=(4, 5))


def on_cpu(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Record]]:
    for case in cases():
        if wanted(str(case)):
            yield str(case), summary(*trained(case))
    for case in peak_cases():
        if wanted(str(case)):
            yield str(case), with_peak(case)


def with_peak(case: Case) -> Record:
    """What a case computes, and the most bytes that are alive in its last steps, counted beyond those before each."""
    from tests.peak import Peak

    modes: list[Any] = []

    def measured() -> Any:
        modes.append(Peak())
        return modes[-1]

    gc.collect()
    gc.disable()
    try:
        result = trained(case, steps=6, around=measured)
    finally:
        gc.enable()
    return {**summary(*result), "peak": max(mode.peak for mode in modes[3:])}


def on_graphs(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Record]]:
    """More steps, as only what happens three times is recorded; the number of recorded ones is kept too."""
    from tests.emulated import emulated_graphs

    for case in cases(name for name in STRUCTURES if name.startswith("Kronecker")):
        if wanted(str(case)):
            with emulated_graphs() as count:
                result = trained(case, steps=20)
            yield str(case), {**summary(*result), "replays": count["replays"]}


def on_ranks(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Record]]:
    """Two and four ranks; on four, most structures with a few variants only, as processes wait for each other."""
    from tests.processes import imported_before
    from tests.ranks.ranks import Ranks

    structures = ("Kronecker()", "Dense()", "Kronecker(inverse_free=False)", "Diagonal()")
    ranks = Ranks(imported_before())
    try:
        for size, kind, structure in product((2, 4), ("ddp", "ddp, shared", "fsdp"), structures):
            few = size == 4 and structure != "Kronecker()"
            tried = product(("FiniteDifference()", "Whitening()", "Whitening(of_average=False)"), ON_RANKS)
            chosen = [Case(structure, probe, variant=v) for probe, v in tried if v in FEW_ON_RANKS or not few]
            named = {
                name: case for case in chosen if case.makes_sense() and wanted(name := f"{size} ranks/{kind}/{case}")
            }
            if named:
                found = ranks.run(size, job, kind, list(named.values()))
                yield from zip(named, map(joined, *found), strict=True)
    finally:
        ranks.close()


def joined(*records: Record) -> Record:
    """What all ranks found, as one record."""
    every = hashlib.sha256("".join(record["hash"] for record in records).encode()).hexdigest()[:16]
    state = sum(float(record["state"]) for record in records)
    return {"hash": every, "params": records[0]["params"], "state": repr(state)}


def job(kind: str, chosen: list[Case]) -> list[Record]:
    """What one rank does: train on its part of every mini-batch."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    records = []
    for case in chosen:
        inner = Net(scale=(1,))
        model, more = wrapped(inner, kind)
        torch.manual_seed(100 + rank)  # nobody may count on a common seed
        optimizer = optimizer_of(case, inner, **more)
        for step in range(6):
            x, y = (t.chunk(size)[rank] for t in data(case, step))
            one_step(case, model, optimizer, x, y, step, nullcontext)
        records.append(summary(inner, optimizer))
    return records


def wrapped(model: Net, kind: str) -> tuple[nn.Module, dict[str, Any]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if kind.startswith("ddp"):
        shard = {"shard": dist.group.WORLD} if kind == "ddp, shared" else {}
        return nn.parallel.DistributedDataParallel(model), shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), {}


def on_cuda(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Record]]:
    """Each case twice, as not all that a GPU does is the same every time."""
    chosen = [c for c in cases() if c.structure.startswith("Kronecker") or c.variant == "plain"]
    chosen = [c for c in chosen if c.criterion == "c3" or c.variant in WITH_CRITERIA]
    for case in (*chosen, *peak_cases()):
        for graph in (True, False):
            name = f"{case}/{'graph' if graph else 'no graph'}"
            if wanted(name):
                each = Case(**{**vars(case), "more": {"cuda_graph": graph}})
                first, second = cuda_record(each), cuda_record(each)
                yield name, {**second, "repeats": first["hash"] == second["hash"]}


def cuda_record(case: Case) -> Record:
    """What a case computes, and the most bytes allocated from its fourth step on, beyond those before."""
    before: list[int] = []

    def counted() -> Any:
        if len(before) == 3:
            torch.cuda.reset_peak_memory_stats()
        before.append(torch.cuda.memory_allocated())
        return nullcontext()

    gc.collect()
    result = trained(case, "cuda", around=counted)
    peak = torch.cuda.max_memory_allocated() - before[3]
    return {**summary(*result), "peak": peak}


MODES = {"cpu": on_cpu, "graphs": on_graphs, "ranks": on_ranks, "cuda": on_cuda}


def header(mode: str) -> dict[str, str]:
    device = torch.cuda.get_device_name() if mode == "cuda" else platform.processor() or platform.machine()
    return {"mode": mode, "torch": torch.__version__, "machine": f"{platform.system()}, {device}"}


def relative(new: str, old: str) -> str:
    a, b = float(new), float(old)
    return "same" if new == old else f"{abs(a - b) / max(abs(b), 1e-300):.1e}"


def differences(new: Record, old: Record) -> list[str]:
    """What is not as it was, in words; nothing if a result does not repeat anyway."""
    found = []
    if new["hash"] != old["hash"] and new.get("repeats", True) and old.get("repeats", True):
        far = ", ".join(f"{name} {relative(new[name], old[name])}" for name in ("params", "state"))
        found.append(f"other bits (relative: {far})")
    if new.get("replays") != old.get("replays"):
        found.append(f"{new.get('replays')} recorded steps instead of {old.get('replays')}")
    if "peak" in new and "peak" in old and abs(new["peak"] - old["peak"]) > PEAK_TOLERANCE * old["peak"]:
        found.append(f"peak {new['peak']} bytes instead of {old['peak']}")
    return found


def compare(new: dict[str, Record], old: dict[str, Record], wanted: Callable[[str], bool]) -> int:
    """Print every case that differs, and return how many do."""
    count = 0
    for name in [*new, *(name for name in old if name not in new and wanted(name))]:
        if name not in old or name not in new:
            found = ["only in the record" if name in old else "not in the record"]
        else:
            found = differences(new[name], old[name])
        if found:
            count += 1
            print(f"{name}: {'; '.join(found)}")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, help="write a record")
    parser.add_argument("--against", type=Path, help="compare with a record")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="part K of N, for processes that run side by side")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Complex modules are a new feature")
    start = time.perf_counter()

    part, parts = map(int, args.part.split("/"))

    def wanted(name: str) -> bool:
        return args.only in name and zlib.crc32(name.encode()) % parts == part

    found = dict(MODES[args.mode](wanted))
    seconds = time.perf_counter() - start
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"header": header(args.mode), "cases": found}, indent=1) + "\n", "utf-8")
    different = 0
    if args.against is not None:
        saved = json.loads(args.against.read_text("utf-8"))
        if saved["header"] != header(args.mode):
            print(f"the record is of another kind: {saved['header']}, and this is {header(args.mode)}")
        different = compare(found, saved["cases"], wanted)
    odd = sum(not record.get("repeats", True) for record in found.values())
    compared = f", {different} differ" if args.against is not None else ""
    print(f"{args.mode}: {len(found)} cases{compared}, {odd} do not repeat, {seconds:.0f} s")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
