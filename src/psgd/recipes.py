"""Functions that create an optimizer with the param groups, the probe and the structure that suit a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Affine
from .groups import Kronecker
from .optimizer import PSGD
from .probes import FiniteDifference, Whitening

#: default of ``newton(adapt_lr=…)``: a learning rate that is 1000 times too small is right after 70 to 150 steps
ADAPT_LR = 0.1


def whiten(
    model: nn.Module,
    lr: float | Tensor | None = None,
    *,
    weight_decay: float = 0.0,
    max_dense: int | None = None,
    **options: Any,
) -> PSGD:
    """Create an optimizer that whitens gradients, in place of ``torch.optim.AdamW(model.parameters(), …)``.

    It works with the ordinary training loop, ``loss.backward(); optimizer.step()``, and suits networks of any size.
    A recurrent network that has to remember for long needs a smaller learning rate and an initialisation of its own:
    see [Recurrent networks](recurrent.md).

    Args:
        model: the model; its frozen parameters are left out
        lr: learning rate; by default 0.001
        weight_decay: decoupled weight decay of matrices and larger arrays. Biases and the scales of normalisations do
            not decay, except for the biases of recurrent layers, which form one block with the weights.
        max_dense: length of the longest axis with a dense factor, 2048 by default, see ``Kronecker``. The row axis of
            an embedding has a diagonal factor if the embedding has more rows than columns.
        options: further options of ``PSGD``

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> optimizer = whiten(model, lr=0.002, weight_decay=0.1)
    >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [(2, 0.1), (4, 0.0)]
    """
    return _optimizer(model, lr, weight_decay, max_dense, {"probe": Whitening(), **options})


def newton(
    model: nn.Module,
    lr: float | Tensor | None = None,
    *,
    weight_decay: float = 0.0,
    max_dense: int | None = None,
    **options: Any,
) -> PSGD:
    """Create an optimizer whose preconditioner is fitted to curvature.

    Each step needs a closure, as with ``torch.optim.LBFGS``: ``optimizer.step(closure)``. It evaluates two gradients of
    the same mini-batch. This optimizer suits smooth functions, ill-conditioned regression, factorisations and networks
    for physics. For these, steps that shrink towards the minimum are worth a second gradient.
    Recurrent networks that have to remember for long learn more reliably with ``whiten`` and an initialisation of their
    own, see [Recurrent networks](recurrent.md).

    Args:
        model: the model; its frozen parameters are left out. Its buffers, such as the statistics of batch
            normalisation, change in the first of the two evaluations only.
        lr: smallest learning rate, by default 0.5. The optimizer takes longer steps while the loss still falls along
            them (``adapt_lr=0.1``, unless ``momentum=0`` or there is weight decay). With ``adapt_lr=0`` the learning
            rate is constant, or follows a schedule of your own.
        weight_decay: see ``whiten``
        max_dense: see ``whiten``
        options: further options of ``PSGD``

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(3, 1)
    >>> x = torch.tensor([[1.0, 0.0, 0.01], [0.0, 1.0, 0.0], [0.0, 0.0, 0.01], [1.0, 1.0, 0.0]])
    >>> optimizer = newton(model)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (model(x) - torch.ones(4, 1)).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(300):
    ...     loss = optimizer.step(closure)
    >>> loss.item() < 1e-6
    True
    """
    _check(model)
    # The slope along the last step does not include weight decay. Where decay and gradient balance, the loss still
    # falls along every step, and the factor would grow until the decay, which it does not multiply, has no effect.
    adapts = {"adapt_lr": ADAPT_LR} if options.get("momentum") != 0 and not weight_decay else {}
    return _optimizer(
        model, lr, weight_decay, max_dense, {"probe": FiniteDifference(module=model), **adapts, **options}
    )


def _optimizer(
    model: nn.Module, lr: float | Tensor | None, weight_decay: float, max_dense: int | None, options: dict[str, Any]
) -> PSGD:
    if "preconditioner" in options:
        if max_dense is not None:
            raise ValueError(
                f"max_dense={max_dense!r}: an option of the default structure, and a preconditioner is given too; "
                f"use preconditioner=Kronecker(max_dense={max_dense!r})"
            )
        return PSGD(param_groups(model, weight_decay), lr, **options)
    structure = Kronecker() if max_dense is None else Kronecker(max_dense=max_dense)
    groups = param_groups(model, weight_decay, structure.max_dense)
    return PSGD(groups, lr, preconditioner=structure, **options)


def param_groups(model: nn.Module, weight_decay: float = 0.0, max_dense: int | None = None) -> list[dict[str, Any]]:
    """Param groups of a model: one that decays, one that does not, and others for recurrent layers and embeddings.

    Each level of a recurrent layer is one block.

    Args:
        model: the model; its frozen parameters are left out
        weight_decay: weight decay of matrices, larger arrays and recurrent layers
        max_dense: length of the longest axis with a dense factor, for embeddings with more rows than columns; None
            leaves these embeddings in the group of the other parameters
    """
    _check(model)
    special = list(_recurrent(model))
    if max_dense is not None:
        special += _embeddings(model, max_dense)
    taken = {p for group in special for _, p in group["params"]}
    rest = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in taken]
    if weight_decay:
        decaying = [(name, p) for name, p in rest if p.ndim >= 2]
        others = [(name, p) for name, p in rest if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": decaying, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
    else:
        groups = [{"params": rest}]
    groups = [group for group in groups if group["params"]]
    return groups + [{**group, "weight_decay": weight_decay} for group in special]


def _embeddings(model: nn.Module, max_dense: int) -> list[dict[str, Any]]:
    """Param groups of embeddings with more rows than columns, one for each width, with a diagonal factor for the rows.

    A mini-batch contains too few rows of an embedding for a dense factor to learn how rows are coupled.
    """
    weights = {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        if p in weights and p.requires_grad and p.shape[1] < p.shape[0]:
            groups.setdefault(min(p.shape[1], max_dense), []).append((name, p))
    return [{"params": named, "preconditioner": Kronecker(max_dense=width)} for width, named in groups.items()]


def _recurrent(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Param groups of recurrent layers, one for each level and direction.

    A level is left out if one of its parameters is frozen, or belongs to an earlier group too.
    """
    seen: set[Tensor] = set()
    for prefix, child in model.named_modules():
        if isinstance(child, (nn.RNNBase, nn.RNNCellBase)):
            for group in Affine.groups(child):
                named = [(f"{prefix}.{name}".lstrip("."), p) for name, p in group["params"]]
                if all(p.requires_grad and p not in seen for _, p in named):
                    yield {"params": named, "blocks": Affine()}
                    seen.update(p for _, p in named)


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        kind = "a tensor" if isinstance(model, torch.Tensor) else type(model).__name__
        raise TypeError(f"model: {kind}; it must be a torch.nn.Module (PSGD(params, …) takes parameters)")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model: {type(model).__name__} has no parameters that require a gradient")
