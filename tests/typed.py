"""What type checkers know of the public interface: ``make lint`` checks this file, and nothing runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import psgd


def loops(model: nn.Module, scheduler: type[torch.optim.lr_scheduler.StepLR]) -> None:
    optimizer = psgd.whiten(model, 0.001, weight_decay=0.1)
    assert_type(optimizer, psgd.PSGD)
    optimizer.step()
    scheduler(optimizer, 10)

    def closure() -> Tensor:
        return torch.zeros(())

    assert_type(psgd.newton(model).step(closure), Tensor)
    assert_type(psgd.newton(model).step(lambda: 0.5), float)


def parameters(model: nn.Module) -> None:
    psgd.PSGD(model.parameters(), lr=0.1)
    psgd.PSGD(model.named_parameters(), probe=psgd.Whitening())
    psgd.PSGD([{"params": [torch.zeros(3)], "lr": 0.1}], preconditioner=psgd.Dense(), blocks=psgd.Joint())
    psgd.PSGD(3)  # type: ignore[arg-type]
    print(psgd.nonexistent)  # type: ignore[attr-defined]
