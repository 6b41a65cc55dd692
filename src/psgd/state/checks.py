"""Checks of users' arguments: each error names the argument, its value and the values that are allowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import Placed
from ..criteria import OF_SECANTS
from ..groups import Structure
from ..ops.distributed import local
from ..ops.real import precise_dtype
from ..probes import Probe
from ..probes.closures import is_finite
from .memory import available_bytes, readable

Kind = tuple[torch.Size, torch.dtype, torch.device]


def choice(name: str, value: Any, kind: type[Any], where: str = "") -> Any:
    """Return ``value`` if it is an object of a class derived from ``kind``; else raise."""
    if not isinstance(value, kind):
        known = ", ".join(f"{c.__name__}()" for c in kind.__subclasses__())
        hint = f" (an object of the class: {value.__name__}())" if isinstance(value, type) else ""
        raise TypeError(f"{name}={value!r}{where}: PSGD wants one of {known}{hint}")
    return value


def named(params: Any, index: int) -> list[Any]:
    """Parameters of a group, each with a name: torch requires names in all groups if one group has them."""
    given = [params] if isinstance(params, Tensor) else list(params)
    return [p if isinstance(p, tuple) else (f"group {index}, parameter {i}", p) for i, p in enumerate(given)]


def one_of(name: str, value: Any, known: Sequence[str]) -> Any:
    """Return ``value`` if it is one of the known words; else raise."""
    if value not in known:
        raise ValueError(f"{name}={value!r}: PSGD wants {' or '.join(map(repr, known))}")
    return value


def function(name: str, value: Any, right: str) -> Any:
    """Return ``value`` if it is a function; else raise, also for a class, which is callable but passed by mistake."""
    if isinstance(value, type) or not callable(value):
        raise TypeError(f"{name}={value!r}: PSGD wants {right}")
    return value


def criterion(value: Any, probe: Probe) -> Any:
    """Return ``value`` if it is a criterion that pairs of the probe can be fitted to; else raise."""
    function("criterion", value, "c1, c2, c3 or a function like them")
    if probe.whitens and value in OF_SECANTS:
        raise ValueError(
            f"criterion={value.__name__}: it fits the secant equation between δθ and δg, and {type(probe).__name__} "
            "measures no such pairs; PSGD wants c3 here, or FiniteDifference() or HessianVector()"
        )
    return value


def precision(value: Any) -> Any:
    """Return ``value`` if it is a dtype that ``Q`` may have, or None; else raise."""
    if value is not None and value not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"precond_dtype={value!r}: PSGD wants torch.bfloat16, torch.float32, torch.float64 or None")
    return value


def normalization(value: Any) -> Any:
    """Return ``value`` if it is a normalisation or None; else raise."""
    return None if value is None else function("normalize", value, "MaxAbs(), MaxDiag(), Spectral() or None")


def fits_structure(structure: Structure, precond_dtype: Any, normalize: Any, where: str) -> None:
    """Raise if ``Q`` cannot have this dtype, or if ``normalize`` is given but the structure has its own rule."""
    if precond_dtype == torch.bfloat16 and structure.inverts:
        raise ValueError(
            f"precond_dtype={precond_dtype!r}{where}: {structure!r} is inverted where it is fitted, which bfloat16 is "
            "too coarse for; PSGD wants torch.float32 there, or Kronecker(inverse_free=True)"
        )
    if normalize is not None and structure.own_normalization:
        raise ValueError(
            f"normalize={normalize!r}{where}: {structure!r} normalises its steps in its own way; PSGD wants None here, "
            "or Kronecker(inverse_free=False)"
        )


def param_groups(params: Any) -> list[Any]:
    """Parameters, named parameters or param groups as a list, because an iterator can be read only once."""
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params: a {type(params).__name__}; PSGD wants parameters, as model.parameters() has them. "
            "psgd.whiten(model) and psgd.newton(model) take a model"
        )
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params={params!r}: PSGD wants an iterable of tensors or of param groups")
    groups = [_listed(item) if isinstance(item, dict) else item for item in params]
    if not groups:
        raise ValueError("params=[]: PSGD wants at least one parameter")
    return groups


def param_group(group: Any, choices: Collection[str], index: int) -> dict[str, Any]:
    """Param group with its parameters in a list; raise if it sets options that only the whole optimizer has."""
    if not isinstance(group, dict):
        raise TypeError(f"param_group={group!r}: PSGD wants a dict with the key 'params'")
    if "params" not in group:
        raise ValueError(f"param_group with the keys {list(group)}: PSGD wants the key 'params' too")
    for name in choices:
        if name in group:
            raise ValueError(
                f"{name}={group[name]!r} in param group {index}: PSGD takes it for all parameters together; "
                "use another optimizer"
            )
    return _listed(group)


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """Param group with its parameters in a list; if they cannot be listed, torch raises the error later."""
    params = group.get("params")
    if isinstance(params, Iterable) and not isinstance(params, (Tensor, set)):
        return {**group, "params": list(params)}
    return dict(group)


def all_tensors(params: Sequence[Any]) -> list[Any]:
    """All tensors of parameters, named parameters or param groups."""
    groups = [item.get("params", []) if isinstance(item, dict) else [item] for item in params]
    return [tensor for group in groups for tensor in tensors_of(group)]


def tensors_of(params: Any) -> list[Any]:
    """Tensors of a param group, which may hold a tensor, tensors, or pairs of a name and a tensor."""
    return [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]


def new_parameters(params: Any, known: Collection[Tensor], where: str) -> None:
    tensors = tensors_of(params)
    if not tensors:
        raise ValueError(f"params=[]{where}: PSGD wants at least one parameter")
    known = set(known)
    for i, p in enumerate(tensors):
        if not isinstance(p, Tensor):
            raise TypeError(f"params: item {i}{where} is {p!r}; PSGD wants tensors")
        if p in known:
            raise ValueError(f"params: parameter {i}{where}, of shape {tuple(p.shape)}, appears twice; once is right")
        known.add(p)
        if not (p.is_floating_point() or p.is_complex()) or p.element_size() < 2:
            raise ValueError(
                f"params: parameter {i}{where} is of dtype {p.dtype}; PSGD wants floating-point or complex ones, of at "
                "least 16 bits"
            )
        if p.layout != torch.strided or p.is_conj():
            found = (
                "conjugated lazily; PSGD wants p.resolve_conj()"
                if p.is_conj()
                else f"{p.layout}; PSGD wants dense ones"
            )
            raise ValueError(f"params: parameter {i}{where} is {found}")


def fits_memory(structure: Structure, blocks: Iterable[Placed], where: str = "") -> None:
    """Raise if ``Q`` of all blocks needs more memory than is free on a device, before anything is allocated."""
    needed: defaultdict[torch.device, int] = defaultdict(int)
    largest: dict[torch.device, tuple[int, tuple[int, ...]]] = {}
    sizes: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    for block, dtype, device in blocks:
        if (block.shape, dtype) not in sizes:
            sizes[block.shape, dtype] = structure.init(block.shape, dtype=dtype, device="meta").nbytes()
        size = sizes[block.shape, dtype]
        needed[device] += size
        largest[device] = max(largest.get(device, (0, ())), (size, block.shape))
    for device, size in needed.items():
        free = available_bytes(device)
        if free is not None and size > free:
            most, shape = largest[device]
            raise ValueError(
                f"preconditioner={structure!r}{where}: Q would take {readable(size)} on {device}, where "
                f"{readable(free)} are free; its largest block, of shape {shape}, takes {readable(most)}. Use "
                "Kronecker(), LimitedMemory() or Diagonal(), or smaller blocks, as PerTensor() makes them"
            )


def gradients(kinds: Sequence[Kind], grads: Sequence[Tensor | None], name: Callable[[int], str]) -> dict[int, Tensor]:
    """Gradients by position, without missing and empty ones; raise if shape, dtype or device of one is wrong."""
    found = {}
    for i, (of_parameter, grad) in enumerate(zip(kinds, grads, strict=True)):
        if grad is None or 0 in of_parameter[0]:
            continue
        if grad.layout != torch.strided:
            raise ValueError(f"params: {name(i)} has a sparse gradient; PSGD wants dense ones")
        if kind(grad) != of_parameter:
            raise ValueError(
                f"params: {name(i)} is {describe(of_parameter)} and its gradient {describe(kind(grad))}; "
                "PSGD wants them alike"
            )
        found[i] = grad
    return found


def kind(t: Tensor) -> Kind:
    return t.shape, t.dtype, t.device


def describe(k: Kind) -> str:
    return f"{k[1]} of shape {tuple(k[0])} on {k[2]}"


def finite(loss: Any, grads: Mapping[int, Tensor], step: int, name: Callable[[int], str]) -> None:
    """Raise if the loss, a gradient or its length is not finite; this makes the host wait for the device."""
    lengths = {i: torch.linalg.vector_norm(local(grad), dtype=precise_dtype([grad])) for i, grad in grads.items()}
    bad = [name(i) for i, length in lengths.items() if not bool(torch.isfinite(length))]
    if bad:
        raise FloatingPointError(f"step {step}: the gradient of {', '.join(bad)} is not finite, or its length is not")
    good = bool(torch.isfinite(loss).all()) if isinstance(loss, Tensor) else is_finite(loss)
    if not good:
        raise FloatingPointError(f"step {step}: the loss is {loss.tolist() if isinstance(loss, Tensor) else loss}")
