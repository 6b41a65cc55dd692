"""What ranks are told to do: train as the examples do, from a checkpoint where there is one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psgd import PSGD

from . import jobs

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import elastic


def train(kind: str, folder: Path, save_at: int, steps: int, **options: Any) -> list[Tensor]:
    model, more = jobs.wrapped(jobs.model_of(torch.float64), kind)
    optimizer = PSGD(model.parameters(), **options, **more)
    first = elastic.resume(folder, model, optimizer)
    jobs.go(model, optimizer, torch.float64, first, save_at)
    elastic.save(folder, save_at, model, optimizer)
    jobs.go(model, optimizer, torch.float64, save_at, steps)
    return jobs.result(model, optimizer)["params"]
