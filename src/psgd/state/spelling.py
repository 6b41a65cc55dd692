"""Misspelt names of options: the error suggests the option that was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: names of options in other optimizers, and the corresponding options of PSGD
_ELSEWHERE = {
    "beta": "momentum",
    "beta1": "momentum",
    "betas": "momentum",  # in a param group; `_INSTEAD` has a longer answer for the constructor
    "learning_rate": "lr",
    "lr_preconditioner": "precond_lr",
    "preconditioner_lr": "precond_lr",
    "step_size": "lr",
    "wd": "weight_decay",
}


_AUTOMATIC = "leave it out, as steps are batched, and on a GPU captured as CUDA graphs, automatically"
_NO_LINE_SEARCH = "leave it out, as each call of step takes one step, without a line search"

#: options of other optimizers that have no counterpart of the same kind, and what to use instead
_INSTEAD = {
    "amsgrad": "leave it out, as clip_outliers and max_rms limit steps",
    "betas": "use momentum for the first of them; precond_lr comes closest to the second",
    "capturable": _AUTOMATIC,
    "dampening": "leave it out, as momentum is an average with the weights momentum and 1 − momentum",
    "differentiable": "leave it out, as steps are not differentiable",
    "eps": "use the damping of a probe, such as probe=Whitening(damping=…), which is relative to the gradients",
    "foreach": _AUTOMATIC,
    "fused": _AUTOMATIC,
    "history_size": "use preconditioner=Dense() for up to some thousand parameters, or LowRank(rank) for more",
    "line_search_fn": _NO_LINE_SEARCH,
    "max_eval": _NO_LINE_SEARCH,
    "max_iter": _NO_LINE_SEARCH,
    "nesterov": "leave it out, as momentum is a plain average of gradients",
    "tolerance_change": _NO_LINE_SEARCH,
    "tolerance_grad": _NO_LINE_SEARCH,
}

#: options of the default structure
OF_STRUCTURE = ("max_dense", "max_skew", "inverse_free")


def meant(name: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """Option that a name probably stands for, or None.

    >>> meant("precond_rl", ["lr", "precond_lr"])
    'precond_lr'
    """
    plain = name.lower()
    if plain in known:
        return plain
    if _ELSEWHERE.get(plain) in known:
        return _ELSEWHERE[plain]
    return next(iter(get_close_matches(plain, known, n=1, cutoff=cutoff)), None)


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: for a misspelt keyword, or one of other optimizers, it raises ``TypeError`` with advice."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in known:
                continue
            if name in _INSTEAD:
                raise TypeError(f"{name}: an option of other optimizers; {_INSTEAD[name]}")
            if name in OF_STRUCTURE:
                raise TypeError(f"{name}: PSGD has no such option; did you mean preconditioner=Kronecker({name}=…)?")
            if (right := meant(name, known, cutoff=0.7)) is not None:
                raise TypeError(f"{name}: PSGD has no such option; did you mean {right}?")
        return function(*args, **kwargs)

    return checked


def check_keys(names: Iterable[str], known: Collection[str], index: int) -> None:
    """Raise if a key of a param group is nearly the name of an option.

    All other keys are allowed: schedulers add keys such as ``initial_lr`` or ``max_momentum``, and users may add their
    own. A key that contains the whole name of an option, such as ``my_weight_decay``, is therefore allowed too.
    """
    for name in names:
        parts = f"_{name}_"
        if name in known or any(f"_{option}_" in parts for option in known):
            continue
        if (right := meant(name, known, cutoff=0.85)) is not None:
            raise TypeError(f"{name!r} in param group {index}: PSGD has no such option; did you mean {right!r}?")
