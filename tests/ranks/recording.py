"""Jobs of ranks that record their part of a step, with emulated CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from psgd import PSGD, Whitening
from psgd.ops.distributed import local

from ..emulated import emulated_graphs, graphs_made, without_kernels
from .jobs import batch, place, result, wrapped

STEPS = 16
Change = Callable[[PSGD, list[Tensor], int], None]


def nothing(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    pass


def schedule(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)


def nan_on_one_rank(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    if step % 5 == 4 and dist.get_rank() == 0:
        spoil(params[0], torch.nan)


def too_long_for_its_owner(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    """Finite elements whose squares overflow: only the rank that owns the block computes the length."""
    if step % 5 == 4:
        spoil(params[0], 1e200)


def one_rests(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    if step in (6, 7, 11):
        params[0].grad = None


def one_rests_for_long(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    """Long enough for its block to be stacked apart from the others."""
    if 3 <= step < 10:
        params[0].grad = None


def reload(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    if step == 8:
        optimizer.load_state_dict(optimizer.state_dict())


def another_group(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    """Two more parameters, one for each of two ranks."""
    if step == 8:
        more = [nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(2)]
        optimizer.add_param_group({"params": more, "lr": 0.01})
    for p in optimizer.param_groups[-1]["params"] if step >= 8 else ():
        p.grad = torch.sin(step + p.detach())


def a_group_rests(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    """Two groups, each with a bucket of its own on each rank: of three steps, one for both and one for each."""
    if step == 0:
        another_group(optimizer, params, 8)
    for p in optimizer.param_groups[-1]["params"]:
        p.grad = None if step % 3 == 2 else torch.sin(step + p.detach())
    for p in params if step % 3 == 1 else ():
        p.grad = None


def momentum_off_and_on(optimizer: PSGD, params: list[Tensor], step: int) -> None:
    optimizer.param_groups[0]["momentum"] = 0.0 if step in (5, 6, 7, 8, 9) else 0.9


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        nothing,
        schedule,
        nan_on_one_rank,
        too_long_for_its_owner,
        one_rests,
        one_rests_for_long,
        reload,
        another_group,
        a_group_rests,
        momentum_off_and_on,
    )
}


def spoil(p: Tensor, value: float) -> None:
    assert p.grad is not None
    local(p.grad).view(-1)[:1] = value


def train(kind: str, change: str, how: str, **options: Any) -> dict[str, Any]:
    """Train; return parameters, state, and for each set of recordings their number and that of steps that used one.

    Args:
        kind: how the model is wrapped
        change: name of what changes between steps
        how: "recorded", "launched" for the same work without recordings, or "torch" for steps without kernels
        options: options of the optimizer
    """
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    model, more = wrapped(nn.Sequential(*layers).double(), kind)
    rank, size = place(model)
    with emulated_graphs(), graphs_made() as made:
        optimizer = PSGD(model.parameters(), cuda_graph=how == "recorded", **options, **more)
        params = optimizer.parameters()
        for step in range(STEPS):
            x, y = (t.chunk(size)[rank] for t in batch(step, torch.float64))

            def closure(x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                CHANGES[change](optimizer, params, step)
                return loss

            if isinstance(optimizer.probe, Whitening):
                loss = closure()
                step_of(optimizer, how, lambda loss=loss: loss)
            else:
                step_of(optimizer, how, closure)
    entries = optimizer.state_dict()["state"]
    state = {(i, k): torch.as_tensor(local(v)).clone() for i, entry in entries.items() for k, v in entry.items()}
    counts = [(len(graphs), graphs.count) for graphs in made]
    return {**result(model, optimizer), "state": state, "counts": counts}


def step_of(optimizer: PSGD, how: str, closure: Callable[[], Any]) -> None:
    if how == "torch":
        with without_kernels():
            optimizer.step(closure)
    else:
        optimizer.step(closure)
