"""Comparison of facts between ranks, which costs one all-reduce of two numbers if all ranks agree."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .real import as_real

#: types of values whose ``repr`` is the same on all ranks, and which need no conversion
_PLAIN = frozenset([bool, int, float, str, tuple, type(None)])


class RanksDifferError(RuntimeError):
    """Error that all ranks of a group raise together, because they differ or one of them failed."""


class Fact(NamedTuple):
    """Values that must be the same on all ranks.

    Args:
        describe: function from the index of a value to its description; called only for errors
        values: numbers, tensors with one number, or objects that are compared by their ``repr``
    """

    describe: Callable[[int], str]
    values: Sequence[Any]


def compare(
    what: str, facts: Sequence[Fact], advice: str, error: Exception | None, group: Any, device: torch.device
) -> None:
    """Raise on all ranks unless all have the same facts; a rank with an error raises that error.

    Ranks exchange a digest of the facts, and the host waits for it. It does not wait for other work of a device if the
    group has a CPU backend, as after ``init_process_group()``, and all numbers are on the host. The facts themselves
    are exchanged only if digests differ, for an error that names the first fact that differs.

    Args:
        what: name of the operation that the ranks are about to start
        facts: facts, equally many on every rank, or none if there is an error
        advice: advice at the end of the error message
        error: error of this rank, or None
        group: process group of the ranks
        device: device of the tensors that are sent, if the group has no CPU backend
    """
    told, there = _plain_facts(facts)
    told.append(error and dist.get_rank(group))
    digest = _digest(told, there, torch.device("cpu") if _on_host(group) else device)
    both = torch.stack([digest, ~digest])  # the largest complement belongs to the smallest digest
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, complement = both.tolist()
    if error is None and largest == ~complement:
        return
    words = ([[repr(_plain(v, read=True)) for v in fact.values] for fact in facts], error and _in_words(error))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, words, group=group)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, which would keep tensors of the closure alive
    raise RanksDifferError(f"{what}: {_difference(facts, everyone)}; {advice}")


def checksum(t: Tensor) -> Tensor:
    """Sum of the elements of a tensor, with their bits read as integers, on its device: equal bits have equal sums."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    t = as_real(t.detach()).contiguous()
    return t.view(whole[t.element_size()]).sum(dtype=torch.int64)


def _on_host(group: Any) -> bool:
    """Whether ranks can exchange tensors on the CPU; the answer is the same on all ranks."""
    return "cpu:" in dist.get_backend_config(group)


def _plain_facts(facts: Sequence[Fact]) -> tuple[list[Any], list[Tensor]]:
    """Values on the host, with the device type in place of tensors on other devices, and these tensors."""
    told: list[Any] = []
    there: list[Tensor] = []
    for fact in facts:
        values = list(fact.values)
        if not _PLAIN.issuperset(map(type, values)):
            values = [_plain(v) for v in values]
            there += [v for v in values if isinstance(v, Tensor)]
            values = [v.device.type if isinstance(v, Tensor) else v for v in values]
        told.append(values)
    return told, there


def _digest(told: Sequence[Any], there: Sequence[Tensor], device: torch.device) -> Tensor:
    digest = int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:8], "big", signed=True)
    total = torch.tensor(digest, dtype=torch.int64, device=device)
    if there:
        bits = torch.stack([_bits(v).to(device) for v in there])
        # Odd factors are invertible modulo 2^64, so a change of one number always changes the sum.
        total = total + (bits * (2 * torch.arange(len(bits), device=device) + 1)).sum()
    return total


def _plain(value: Any, read: bool = False) -> Any:
    """Value as a Python number, if it is a number; a tensor on another device is returned unchanged unless ``read``."""
    if isinstance(value, Tensor) and (read or value.device.type == "cpu"):
        return value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _bits(number: Tensor) -> Tensor:
    number = number.detach().reshape(())
    return number.double().view(torch.int64) if number.is_floating_point() else number.long()


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _difference(facts: Sequence[Fact], everyone: Sequence[tuple[list[list[str]], str | None]]) -> str:
    """Description of the first fact that differs between ranks, or of the error of a rank that failed."""
    for rank, (_, failed) in enumerate(everyone):
        if failed:
            return f"rank {rank} failed, so no rank goes on ({failed})"
    for k, fact in enumerate(facts):
        values = [told[k] for told, _ in everyone]
        for i in range(max(map(len, values))):
            each = [told[i] if i < len(told) else "missing" for told in values]
            if len(set(each)) > 1:
                return f"{fact.describe(i)} is {_by_rank(each)}"
    return "something differs whose description does not"


def _by_rank(values: Sequence[str]) -> str:
    """Values with their ranks, the most frequent one first."""
    ranks = {value: [r for r, other in enumerate(values) if other == value] for value in dict.fromkeys(values)}
    most_first = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return " and ".join(f"{value} on rank{'s'[: len(on) > 1]} {_listed(on)}" for value, on in most_first[:4])


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
