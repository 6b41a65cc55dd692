"""What ranks are told to do: train a small model on their part of every mini-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from psgd import PSGD, HessianVector

BATCH = 12


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(x[:, :3]).to(dtype)


def wrapped(model: nn.Sequential, kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model as users wrap it, and what the optimizer has to be told."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "alone":
        return model, {}
    if kind.startswith("ddp"):
        views = kind == "ddp, views"
        shard = {"shard": dist.group.WORLD} if kind == "ddp, shared" else {}
        return DistributedDataParallel(model, gradient_as_bucket_view=views), shard
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "parts"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, {}


def train(
    kind: str, dtype: torch.dtype, steps: int, first: int = 0, state: Any = None, **options: Any
) -> dict[str, Any]:
    """Train, and return the whole parameters and what the optimizer keeps here."""
    model, more = wrapped(model_of(dtype), kind)
    optimizer = PSGD(model.parameters(), **options, **more)
    go(model, optimizer, dtype, first, first + steps)
    return result(model, optimizer)


def go(model: nn.Module, optimizer: PSGD, dtype: torch.dtype, first: int, last: int) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(first, last):
        x, y = (t.chunk(size)[rank] for t in batch(step, dtype))

        def loss_of(x: Tensor = x, y: Tensor = y) -> Tensor:
            return (model(x) - y).square().mean()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        optimizer.step(loss_of if isinstance(optimizer.probe, HessianVector) else closure)


def result(model: nn.Module, optimizer: PSGD) -> dict[str, Any]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "params": [p.detach().clone() for p in whole],
        "Q": {
            i: {k: v.clone() for k, v in optimizer.state[p].items() if k.startswith("Q")}
            for i, p in enumerate(optimizer.parameters())
        },
        "bytes": sum(v.nbytes for entries in optimizer.state.values() for v in entries.values()),
    }
