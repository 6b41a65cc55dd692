"""What a run on several ranks needs to outlive its processes: how they find each other again, and checkpoints.

Of a checkpoint each rank writes what it has, so that nothing is ever gathered: its parts of the parameters and, where
ranks share the blocks of the optimizer, the state of its own blocks. A run with more or fewer ranks reads what it needs
of them all. The folder must be one that all ranks see.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

#: checkpoints
KEPT = 2


def start() -> torch.device:
    """Join the other ranks, and say where this one computes."""
    store, rank, size = next(dist.rendezvous("env://"))
    # Processes that torchrun starts again get the store of those before them, and with it addresses of the dead.
    store = dist.PrefixStore(f"attempt {attempt()}", store)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    # Sums in an order that is always the same, without which two runs on a GPU differ in their last bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return device


def attempt() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def fail(now: bool) -> None:
    """End one rank as a crash would, the first time."""
    if now and attempt() == 0 and dist.get_rank() == dist.get_world_size() - 1:
        os._exit(1)


def report(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def finished(folder: Path) -> list[Path]:
    """The whole ones, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".part")


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint; it gets its name when all ranks have written all of it, so that it is never half there."""
    path = folder / f"step-{step:08d}"
    part = path.with_suffix(".part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was ended while it was saving
        part.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=part)  # returns when all are done
    if dist.get_rank() == 0:
        part.rename(path)
        _flush(folder)
        for old in finished(folder)[:-KEPT]:
            shutil.rmtree(old)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the latest checkpoint, if there is one, and return the number of steps that have been taken."""
    names = [path.name for path in finished(folder)[-1:]]
    found: list[list[str]] = [names]
    dist.broadcast_object_list(found, src=0)  # all take the same, whatever else happens to the folder
    if not found[0]:
        return 0
    (name,) = found[0]
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / name)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    report(f"resumed from {folder / name} on {dist.get_world_size()} ranks")
    return int(name.removeprefix("step-"))


@torch.no_grad()
def checksum(model: nn.Module) -> str:
    """A text that tells whether two models are the same to the bit."""
    digest = hashlib.sha256()
    for p in model.parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        digest.update(whole.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _flush(folder: Path) -> None:
    """Let a new name outlive a power failure; what has been written is on the disk already."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)
