"""Optimizers for language models: each with its own default learning rate and weight decay, and with both to be chosen.

Matrices decay, embeddings among them, and vectors do not, for all optimizers alike. Weight decay is decoupled: a step
multiplies by 1 − lr · weight_decay.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .. import whiten
from .gpt import GPT
from .isolate import MissingPackageError, SkippedError
from .peers import KNOWN, Steps, Together

#: momentum and decay rate of squares of AdamW, as is usual for language models
BETAS = (0.9, 0.95)
#: longest axis with a dense factor for packages whose own limit would make a vocabulary of 8192 dense
LONGEST = 4096


@dataclass(frozen=True)
class Contestant:
    """An optimizer that can be sent to another process.

    Args:
        name: name of its peer, see ``peers.KNOWN``
        make: a function at the top of a module, or a ``partial`` of one, of a model, a learning rate and a weight decay
        weight_decay: default of its weight decay, as its package has it
    """

    name: str
    make: Callable[[GPT, float, float], Steps]
    weight_decay: float

    @property
    def lr(self) -> float:
        return KNOWN[self.name].lr

    def optimizer(self, model: GPT, lr: float, weight_decay: float) -> Steps:
        peer = KNOWN[self.name]
        if not peer.installed:
            raise MissingPackageError(str(peer.package))
        return self.make(model, lr, weight_decay)


def groups(model: GPT, weight_decay: float, without: bool = False) -> list[dict[str, Any]]:
    """Param groups of matrices and of vectors; ``without`` the matrices of hidden layers or with them."""
    left_out = {id(p) for p in model.hidden()} if without else set()
    params = [p for p in model.parameters() if id(p) not in left_out]
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def psgd(model: GPT, lr: float, weight_decay: float, *, precond_dtype: torch.dtype | None = None) -> Steps:
    return whiten(model, lr, weight_decay=weight_decay, precond_dtype=precond_dtype)


def adamw(model: GPT, lr: float, weight_decay: float) -> Steps:
    return torch.optim.AdamW(groups(model, weight_decay), lr=lr, betas=BETAS, fused=_on_cuda(model))


def muon(model: GPT, lr: float, weight_decay: float) -> Steps:
    """Muon for the hidden matrices, with steps as long as those of AdamW, and AdamW for the rest."""
    if not hasattr(torch.optim, "Muon"):
        raise SkippedError("skipped: torch.optim.Muon needs torch 2.9 or newer")
    hidden = torch.optim.Muon(model.hidden(), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    rest = groups(model, weight_decay, without=True)
    return Together([hidden, torch.optim.AdamW(rest, lr=lr, betas=BETAS, fused=_on_cuda(model))])


def imported(model: GPT, lr: float, weight_decay: float, *, package: str, name: str, **options: Any) -> Steps:
    """Optimizer of another package with its defaults, except for some options."""
    module = importlib.import_module(package)
    if package == "heavyball" and not _on_cuda(model):
        module.utils.compile_mode = None  # tuning would cost minutes on a CPU
    return getattr(module, name)(groups(model, weight_decay), lr=lr, **options)


def _on_cuda(model: GPT) -> bool:
    return all(p.is_cuda for p in model.parameters())


def _other(package: str, name: str, weight_decay: float, **options: Any) -> Contestant:
    return Contestant(f"{package}.{name}", partial(imported, package=package, name=name, **options), weight_decay)


#: all of them, in the order of tables
CONTESTANTS: dict[str, Contestant] = {
    one.name: one
    for one in (
        Contestant("PSGD", psgd, 0.0),
        Contestant("PSGD-bf16", partial(psgd, precond_dtype=torch.bfloat16), 0.0),
        Contestant("AdamW", adamw, 0.01),
        Contestant("Muon", muon, 0.1),
        _other("heavyball", "SOAP", 0.01),
        _other("pytorch_optimizer", "SOAP", 0.01, max_precondition_dim=LONGEST),
        _other("heavyball", "PSGDKron", 0.0),
        _other("heavyball", "PSGDPRO", 0.0),
        _other("kron_torch", "Kron", 0.0, max_size_triangular=LONGEST),
    )
}
