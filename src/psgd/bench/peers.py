"""Optimizers that are compared: our own, torch's, and those of other packages if they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import PSGD, Kronecker, Whitening
from .isolate import MissingPackageError, SkippedError


class Steps(Protocol):
    """Interface of an optimizer for the benchmarks."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> Any: ...
    def step(self, closure: Any = None) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class Make(Protocol):
    """Function that makes the optimizer; ``hidden`` are the parameters that are matrices of hidden layers."""

    def __call__(self, params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float, /) -> Steps: ...


@dataclass(frozen=True)
class Peer:
    """An optimizer that can be sent to another process.

    Args:
        name: name in tables and for ``--peers``
        make: a function at the top of a module, or a ``partial`` of one; it imports what it needs
        lr: default of its learning rate, as its package has it
        package: name of its package, if that is neither torch nor ours
        closure: whether ``step`` wants a closure that it can call several times
    """

    name: str
    make: Make
    lr: float
    package: str | None = None
    closure: bool = False

    def optimizer(
        self, params: Iterable[Tensor], lr: float | None = None, hidden: Sequence[Tensor] | None = None
    ) -> Steps:
        """Optimizer for these parameters; by default all matrices count as hidden."""
        params = list(params)
        if hidden is None:
            hidden = [p for p in params if p.ndim == 2]
        if not self.installed:
            raise MissingPackageError(str(self.package))
        return self.make(params, hidden, self.lr if lr is None else lr)

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str | None:
        """Version of the package, if there is one and it is installed."""
        if self.package is None or not self.installed:
            return None
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "unknown"


# ---------------------------------------------------------------- ours


def whitening(
    params: Sequence[Tensor],
    hidden: Sequence[Tensor],
    lr: float,
    *,
    max_dense: int = 2048,
    inverse_free: bool = True,
    precond_dtype: torch.dtype | None = None,
    update_every: int | None = None,
) -> Steps:
    """PSGD in an ordinary loop, with defaults for everything but the structure."""
    return PSGD(
        params,
        lr,
        probe=Whitening(),
        preconditioner=Kronecker(max_dense, inverse_free=inverse_free),
        precond_dtype=precond_dtype,
        update_every=update_every,
    )


def _ours(name: str, **options: Any) -> Peer:
    return Peer(name, partial(whitening, **options), lr=1e-3)


#: update interval longer than any run: only the first step updates Q
NEVER = 10**9

PSGD_FLOAT32 = _ours("PSGD")
PSGD_BF16 = _ours("PSGD, bf16 Q", precond_dtype=torch.bfloat16)
PSGD_TRIANGULAR = _ours("PSGD, triangular", inverse_free=False)
PSGD_NO_UPDATE = _ours("PSGD, no update", update_every=NEVER)
PSGD_8192_BF16 = _ours("PSGD, up to 8192, bf16 Q", max_dense=8192, precond_dtype=torch.bfloat16)
#: PSGD with a name for tables that have another PSGD
PSGD_WHITENING = _ours("PSGD, whitening")
OURS = (PSGD_FLOAT32, PSGD_BF16, PSGD_TRIANGULAR, PSGD_NO_UPDATE, PSGD_8192_BF16)


# ---------------------------------------------------------------- torch's


def _on_cuda(params: Sequence[Tensor]) -> bool:
    return all(p.is_cuda for p in params)


def sgd(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float, *, momentum: float = 0.0) -> Steps:
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


def adam(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float) -> Steps:
    return torch.optim.Adam(params, lr=lr, fused=_on_cuda(params))


def adamw(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float) -> Steps:
    return torch.optim.AdamW(params, lr=lr, fused=_on_cuda(params))


def rmsprop(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float) -> Steps:
    return torch.optim.RMSprop(params, lr=lr)


def muon(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float) -> Steps:
    """Muon for the hidden matrices, with steps as long as those of AdamW, and AdamW for the rest."""
    if not hasattr(torch.optim, "Muon"):
        raise SkippedError("skipped: torch.optim.Muon needs torch 2.9 or newer")
    chosen = {id(p) for p in hidden}
    rest = [p for p in params if id(p) not in chosen]
    parts: list[Steps] = []
    if hidden:
        parts.append(torch.optim.Muon(hidden, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    if rest:
        parts.append(adamw(rest, [], lr))
    return Together(parts)


def lbfgs(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float) -> Steps:
    """LBFGS with one iteration per step; its line search may evaluate the loss often, unlike by torch's default."""
    return torch.optim.LBFGS(  # type: ignore[return-value]  # its closure is not optional
        params, lr=lr, max_iter=1, max_eval=30, line_search_fn="strong_wolfe"
    )


class Together:
    """Several optimizers, each for its own parameters, as one."""

    def __init__(self, parts: Sequence[Steps]) -> None:
        self.parts = list(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


# ---------------------------------------------------------------- those of other packages


def imported(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float, *, package: str, name: str) -> Steps:
    """Optimizer of another package with its defaults, except for the learning rate."""
    return getattr(importlib.import_module(package), name)(params, lr=lr)


def heavyball(
    params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float, *, package: str, name: str, kept: Sequence[str]
) -> Steps:
    """Optimizer of heavyball with its defaults on a GPU; on a CPU not compiled, as tuning would cost minutes there.

    Its state (``kept`` names the options) is float32, which it cannot multiply with float64: there it is float64.
    """
    module = importlib.import_module(package)
    if not _on_cuda(params):
        module.utils.compile_mode = None
    double = all(p.dtype == torch.float64 for p in params)
    return getattr(module, name)(params, lr=lr, **{option: "float64" for option in kept if double})


def _other(package: str, name: str, lr: float, make: Callable[..., Steps] = imported, **options: Any) -> Peer:
    return Peer(f"{package}.{name}", partial(make, package=package, name=name, **options), lr, package)


SGD = Peer("SGD", sgd, lr=1e-3)
MOMENTUM = Peer("momentum", partial(sgd, momentum=0.9), lr=1e-3)
ADAM = Peer("Adam", adam, lr=1e-3)
RMSPROP = Peer("RMSprop", rmsprop, lr=1e-2)
LBFGS = Peer("LBFGS", lbfgs, lr=1.0, closure=True)

#: all peers but our own, in the order of the tables
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        SGD,
        MOMENTUM,
        ADAM,
        Peer("AdamW", adamw, lr=1e-3),
        RMSPROP,
        Peer("Muon", muon, lr=1e-3),
        LBFGS,
        _other("heavyball", "PSGDKron", 1e-3, heavyball, kept=("q_dtype", "storage_dtype")),
        _other("heavyball", "PSGDPRO", 1e-3, heavyball, kept=("q_dtype", "storage_dtype")),
        _other("heavyball", "SOAP", 3e-3, heavyball, kept=("storage_dtype",)),
        _other("kron_torch", "Kron", 3e-4),
        _other("pytorch_optimizer", "SOAP", 3e-3),
        _other("pytorch_optimizer", "Shampoo", 1e-3),
    )
}


#: variants of PSGD that can be chosen by name, by benchmarks that have them
OWN: dict[str, Peer] = {peer.name: peer for peer in (PSGD_FLOAT32, _ours("PSGD-bf16", precond_dtype=torch.bfloat16))}
#: all that has a name on the command line
KNOWN: dict[str, Peer] = OWN | PEERS


class UnknownPeerError(ValueError):
    """Error of a name that none of the peers has; its message lists them."""

    def __init__(self, name: str, among: Collection[str]) -> None:
        names = [peer for peer in KNOWN if peer in among]
        packages = dict.fromkeys(package for peer in names if (package := KNOWN[peer].package))
        super().__init__(f"{name!r} is none of {', '.join(names)}; a package ({', '.join(packages)}); all; none")


def chosen(text: str, among: Collection[str] = PEERS) -> list[Peer]:
    """Peers of a list with commas: names in any case, packages for all that they have, ``all`` or ``none``.

    Args:
        text: the list
        among: names that can be chosen
    """
    found: dict[str, Peer] = {}
    for word in (word.strip().lower() for word in text.split(",")):
        if word == "none":
            continue
        matching = [KNOWN[name] for name in among if word in ("all", name.lower(), KNOWN[name].package)]
        if not matching:
            raise UnknownPeerError(word, among)
        found.update((peer.name, peer) for peer in matching)
    return [peer for name, peer in KNOWN.items() if name in found]
