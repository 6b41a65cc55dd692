"""State that is on several ranks, saved and loaded by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import pytest
import torch

from psgd import FiniteDifference, Whitening

from . import jobs

PROBES = {"whitening": Whitening(), "difference": FiniteDifference(std=1e-3)}
OPTIONS = {"lr": 0.02, "precond_lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
@pytest.mark.parametrize("probe", PROBES)
def test_saved_on_four_ranks_and_resumed_on_fewer(ranks, kind, probe, tmp_path):
    options = {**OPTIONS, "probe": PROBES[probe]}
    alone = jobs.train("alone", torch.float64, 20, **options)["params"]
    ranks.run(4, jobs.saved, kind, torch.float64, 10, str(tmp_path / "checkpoint"), **options)
    for size in (1, 2, 3):
        results = ranks.run(size, jobs.resumed, kind, torch.float64, 10, 20, str(tmp_path / "checkpoint"), **options)
        for result in results:
            for mine, one in zip(result["params"], alone, strict=True):
                assert torch.linalg.vector_norm(mine - one) <= 1e-10 * one.norm()


@pytest.mark.parametrize("kind", ["ddp", "ddp, shared", "fsdp"])
def test_resumed_on_as_many_ranks_it_is_the_same_run_to_the_bit(ranks, kind, tmp_path):
    options = {**OPTIONS, "probe": Whitening()}
    straight = ranks.run(2, jobs.train, kind, torch.float32, 20, **options)
    ranks.run(2, jobs.saved, kind, torch.float32, 10, str(tmp_path / "checkpoint"), **options)
    again = ranks.run(2, jobs.resumed, kind, torch.float32, 10, 20, str(tmp_path / "checkpoint"), **options)
    for one, other in zip(straight, again, strict=True):
        assert all(map(torch.equal, one["params"], other["params"]))
        for mine, theirs in zip(one["Q"].values(), other["Q"].values(), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_from_one_process_to_several_and_back(ranks, tmp_path):
    options = {**OPTIONS, "probe": Whitening()}
    alone = jobs.train("alone", torch.float64, 15, **options)["params"]
    first, second = str(tmp_path / "one"), str(tmp_path / "four")
    ranks.run(1, jobs.saved, "ddp", torch.float64, 5, first, **options)
    ranks.run(4, jobs.resumed_and_saved, "fsdp, tp", torch.float64, 5, 10, first, second, **options)
    (result,) = ranks.run(1, jobs.resumed, "ddp", torch.float64, 10, 15, second, **options)
    for mine, one in zip(result["params"], alone, strict=True):
        assert torch.linalg.vector_norm(mine - one) <= 1e-10 * one.norm()
