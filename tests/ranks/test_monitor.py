"""Who writes what, where there are several ranks; and watching changes nothing there either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from psgd import PSGD, Monitor, Whitening
from psgd.monitor import read

from . import jobs


def watched(kind: str, folder: str) -> list[list[float]]:
    """Train, and return all parameters: with a monitor where there is a folder for it."""
    model, options = jobs.wrapped(jobs.model_of(torch.float64), kind)
    optimizer = PSGD(model.named_parameters(), lr=0.01, probe=Whitening(), **options)
    monitor = Monitor(optimizer, Path(folder) / "run.csv", every=2) if folder else None
    size = jobs.BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    for step in range(4):
        x, y = jobs.batch(step, torch.float64)
        optimizer.zero_grad()
        (model(x[mine]) - y[mine]).square().mean().backward()
        optimizer.step()
    if monitor is not None:
        monitor.close()
        assert monitor.last is not None
        assert monitor.last.step == 2
    whole: Any = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().flatten().tolist() for p in whole]


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared", "fsdp"])
def test_each_rank_writes_its_own_blocks(ranks, kind, tmp_path):
    with_monitor = ranks.run(2, watched, kind, str(tmp_path))
    assert with_monitor == ranks.run(2, watched, kind, "")
    names = {path.name for path in tmp_path.iterdir()}
    if kind == "ddp":
        assert names == {"run.csv"}
    else:
        assert names == {"run.rank0.csv", "run.rank1.csv"}
    found = [read(path) for path in tmp_path.iterdir()]
    blocks = [name for history in found for name in history.blocks()]
    assert sorted(name.removeprefix("module.") for name in blocks) == sorted(
        f"{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")
    )
    for history in found:
        for metric in ("residual", "q_step", "condition"):
            assert len(history.over_blocks(metric).steps) == 2
