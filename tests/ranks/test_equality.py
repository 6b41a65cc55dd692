"""Several ranks, on a part of every mini-batch each, do what one process does on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from psgd import Dense, Diagonal, FiniteDifference, Joint, Kronecker, LowRank, Whitening, plan

from . import jobs
from .ranks import Ranks

#: A finite difference magnifies what rounding leaves of another order of summation; less where it is not as small.
PROBES = {"whitening": Whitening(), "difference": FiniteDifference(std=1e-3)}
STEPS = 20

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


#: every kind on two ranks; those that divide work or parameters also on three, which do not divide evenly, and four
SIZES = [(2, "ddp"), (2, "ddp, shared"), (2, "fsdp"), (3, "fsdp"), (4, "ddp, shared")]


@pytest.mark.parametrize(("size", "kind"), SIZES)
@pytest.mark.parametrize("probe", PROBES)
def test_as_one_process(ranks, size, kind, probe):
    results = check(ranks, size, kind, probe=PROBES[probe])
    if kind == "ddp":  # each has all of Q, the same to the bit
        for result in results:
            for mine, first in zip(result["Q"].values(), results[0]["Q"].values(), strict=True):
                assert all(torch.equal(mine[name], first[name]) for name in first)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="backward of such a model fails in torch on a CPU")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("probe", PROBES)
def test_copies_of_divided_parameters(ranks, size, probe):
    check(ranks, size, "hsdp", probe=PROBES[probe], steps=STEPS)


@pytest.mark.parametrize("probe", PROBES)
def test_tensor_parallelism_and_fully_shard(ranks, probe):
    check(ranks, 4, "fsdp, tp", probe=PROBES[probe], steps=20, weight_decay=0.1, max_norm=0.5)


OPTIONS = [
    {"preconditioner": Diagonal()},
    {"preconditioner": Dense(), "blocks": Joint()},
    {"preconditioner": LowRank(3), "blocks": Joint()},
    {"preconditioner": Kronecker(inverse_free=False)},
    {"preconditioner": Kronecker(max_dense=6), "momentum": 0.9, "weight_decay": 0.1, "max_norm": 0.5},
    {"update_every": 3, "momentum": 0.5},
]
#: all of them with every kind, and with both probes, which take turns
TURNS = [
    (kind, options, list(PROBES)[(i + j) % len(PROBES)])
    for i, options in enumerate(OPTIONS)
    for j, kind in enumerate(["ddp", "ddp, shared", "fsdp"])
]


@pytest.mark.parametrize(("kind", "options", "probe"), TURNS, ids=str)
def test_structures_and_options(ranks, kind, options, probe):
    check(ranks, 3, kind, steps=12, probe=PROBES[probe], **options)


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared", "fsdp"])
def test_single_precision(ranks, kind):
    check(ranks, 2, kind, dtype=torch.float32, probe=Whitening(), steps=25)


def test_gradients_in_buckets(ranks):
    check(ranks, 2, "ddp, views", probe=PROBES["difference"], steps=20)


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared"])
@pytest.mark.parametrize("probe", ["exact", "batched"])
def test_probes_that_find_gradients_by_themselves(ranks, kind, probe):
    check(ranks, 2, kind, probe=probe, steps=20)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parameters_divided_along_any_axis(ranks, size):
    options = {"lr": 0.02, "probe": Whitening(), "weight_decay": 0.1}
    one = jobs.columns_alone(15, **options)["params"]
    for result in ranks.run(size, jobs.columns, 15, **options):
        for mine, expected in zip(result["params"], one, strict=True):
            assert torch.linalg.vector_norm(mine - expected) <= 1e-10 * expected.norm()


def test_memory_and_work_are_divided(ranks):
    """By about the number of ranks: no rank has more than one and a half times its part."""
    options = {"lr": 0.02, "probe": Whitening()}
    (alone,) = ranks.run(1, jobs.shares, "ddp, shared", **options)
    for size in (2, 4):
        for kind in ("ddp, shared", "fsdp"):
            for nbytes, flops in ranks.run(size, jobs.shares, kind, **options):
                assert nbytes <= 1.5 * alone[0] / size
                assert flops <= 1.5 * alone[1] / size


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared"])
@pytest.mark.parametrize("probe", PROBES)
def test_accumulation_without_averaging_in_between(ranks, kind, probe):
    options = {"lr": 0.02, "precond_lr": 0.1, "probe": PROBES[probe]}
    one = jobs.train("alone", torch.float64, 20, **options)["params"]
    for result in ranks.run(3, jobs.accumulated, kind, 20, **options):
        for mine, expected in zip(result["params"], one, strict=True):
            assert torch.linalg.vector_norm(mine - expected) <= 1e-10 * expected.norm()


@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference(std=0.1)], ids=str)
def test_mixed_precision(ranks, probe):
    """Gradients of bfloat16 are not those of float32, but the ranks agree, and it trains."""
    options = {"lr": 0.02, "precond_lr": 0.1, "probe": probe}
    first, *others = ranks.run(2, jobs.train, "fsdp, bf16", torch.float32, 40, **options)
    start = jobs.model_of(torch.float32)
    x, y = jobs.batch(1000, torch.float32)
    model = jobs.model_of(torch.float32)
    for p, trained in zip(model.parameters(), first["params"], strict=True):
        p.data.copy_(trained)
    assert (model(x) - y).square().mean() < 0.7 * (start(x) - y).square().mean()
    for other in others:
        assert all(map(torch.equal, first["params"], other["params"]))


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"preconditioner": Diagonal(), "update_every": 5}], ids=str)
def test_the_owners_are_those_of_the_plan(ranks, kind, options):
    momentum = options.get("momentum", 0.9) > 0
    planned = plan(jobs.model_of(torch.float32), world_size=3, **{**options, "momentum": momentum})
    for owners in ranks.run(3, jobs.owners, kind, probe=Whitening(), **options):
        assert [owners[i] for i in range(6)] == [block.owner for block in planned.blocks]


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_parameters_that_join_later(ranks, kind):
    options = {"lr": 0.02, "probe": Whitening()}
    one = jobs.a_group_added_later("alone", 10, **options)["params"]
    for result in ranks.run(2, jobs.a_group_added_later, kind, 10, **options):
        for mine, expected in zip(result["params"], one, strict=True):
            assert torch.linalg.vector_norm(mine - expected) <= 1e-10 * expected.norm()


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared", "fsdp"])
@pytest.mark.parametrize("probe", PROBES)
def test_groups_with_structures_of_their_own(ranks, kind, probe):
    options = {"lr": 0.02, "probe": PROBES[probe]}
    one = jobs.structures_of_their_own("alone", 6, **options)["params"]
    for result in ranks.run(2, jobs.structures_of_their_own, kind, 6, **options):
        assert close(result["params"], one)


def close(mine: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.linalg.vector_norm(a - b) <= 1e-10 * b.norm() for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize("shapes", [[(4, 4)], [(4, 4), (3,), (2, 5)]], ids=str)
@pytest.mark.parametrize("rate", [0.1, torch.tensor([0.1])], ids=["number", "tensor"])
def test_more_ranks_than_blocks(ranks, shapes, rate):
    options = {"lr": rate, "max_norm": 0.5, "weight_decay": 0.1}
    one = jobs.with_gradients(shapes, 5, **options)
    assert all(close(mine, one) for mine in ranks.run(4, jobs.with_gradients, shapes, 5, **options))


def test_groups_that_update_at_different_paces(ranks):
    shapes = [(4, 4), (5, 5)]
    one = jobs.with_gradients(shapes, 7, (1, 2), lr=0.1)
    assert all(close(mine, one) for mine in ranks.run(2, jobs.with_gradients, shapes, 7, (1, 2), lr=0.1))


def test_numbers_that_change_do_not_change_owners(ranks):
    shapes = [(8, 8), (3, 20), (5,), (8, 8), (16, 4), (7, 7), (30,), (6, 9)]
    assert all(ranks.run(3, jobs.reloaded_with_other_numbers, shapes))


def test_tensor_parallel_layers(ranks):
    one = jobs.sequence_parallel(5)
    assert all(close(mine, one) for mine in ranks.run(2, jobs.sequence_parallel, 5))


@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference()], ids=repr)
def test_a_loss_that_is_divided_among_the_ranks(ranks, probe):
    divided, plain = (ranks.run(2, jobs.with_loss, each, probe) for each in (True, False))
    for mine, theirs in zip(divided, plain, strict=True):
        assert mine["skipped"] == theirs["skipped"] == 1
        assert all(map(torch.equal, mine["params"], theirs["params"]))
