"""Several ranks, on a part of every mini-batch each, do what one process does on all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psgd import Dense, Diagonal, FiniteDifference, Joint, Kronecker, LowRank, Whitening

from . import jobs
from .ranks import Ranks

#: A finite difference magnifies what rounding leaves of another order of summation; less where it is not as small.
PROBES = {"whitening": Whitening(), "difference": FiniteDifference(std=1e-3)}
STEPS = 100

alone: dict[Any, list[torch.Tensor]] = {}


def check(ranks: Ranks, size: int, kind: str, dtype: torch.dtype = torch.float64, steps: int = STEPS, **options: Any):
    """To 1e-10 in float64, and to the bit among the ranks."""
    options = {"lr": 0.02, "precond_lr": 0.1, **options}
    key = repr((dtype, steps, options))
    if key not in alone:
        alone[key] = jobs.train("alone", dtype, steps, **options)["params"]
    results = ranks.run(size, jobs.train, kind, dtype, steps, **options)
    for result in results:
        for mine, first, one in zip(result["params"], results[0]["params"], alone[key], strict=True):
            assert torch.equal(mine, first)
            assert torch.linalg.vector_norm(mine - one) <= (1e-10 if dtype == torch.float64 else 1e-4) * one.norm()
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["ddp", "ddp, shared", "fsdp"])
@pytest.mark.parametrize("probe", PROBES)
def test_as_one_process(ranks, size, kind, probe):
    results = check(ranks, size, kind, probe=PROBES[probe])
    if kind == "ddp":  # each has all of Q, the same to the bit
        for result in results:
            for mine, first in zip(result["Q"].values(), results[0]["Q"].values(), strict=True):
                assert all(torch.equal(mine[name], first[name]) for name in first)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("probe", PROBES)
def test_copies_of_divided_parameters(ranks, size, probe):
    check(ranks, size, "hsdp", probe=PROBES[probe], steps=30)


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared", "fsdp"])
@pytest.mark.parametrize(
    "options",
    [
        {"preconditioner": Diagonal()},
        {"preconditioner": Dense(), "blocks": Joint()},
        {"preconditioner": LowRank(3), "blocks": Joint()},
        {"preconditioner": Kronecker(inverse_free=False)},
        {"preconditioner": Kronecker(max_dense=6), "momentum": 0.9, "weight_decay": 0.1, "max_norm": 0.5},
        {"update_every": 3, "momentum": 0.5},
    ],
    ids=str,
)
def test_structures_and_options(ranks, kind, options):
    for probe in PROBES.values():
        check(ranks, 3, kind, steps=20, probe=probe, **options)


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared", "fsdp"])
def test_single_precision(ranks, kind):
    check(ranks, 2, kind, dtype=torch.float32, probe=Whitening(), steps=50)


def test_gradients_in_buckets(ranks):
    check(ranks, 2, "ddp, views", probe=PROBES["difference"], steps=20)
