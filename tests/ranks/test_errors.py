"""What goes wrong on one rank is an error on all of them, and nobody waits for ever."""

from __future__ import annotations

import time

import pytest
import torch

from psgd import PSGD, Whitening

from . import jobs
from .ranks import FailedOnRanksError, Ranks


def fails(ranks: Ranks, size: int, message: str, job, *args, on: set[int] | None = None) -> dict[int, str]:
    with pytest.raises(FailedOnRanksError) as caught:
        ranks.run(size, job, *args)
    errors = caught.value.errors
    assert set(errors) == (set(range(size)) if on is None else on)
    assert any(message in error for error in errors.values()), errors[0]
    return errors


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_a_parameter_without_a_gradient_on_one_rank(ranks, kind):
    for error in fails(ranks, 3, "same parameters must have gradients", jobs.one_without_a_gradient, kind).values():
        assert "not the same on all 3 ranks" in error


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_a_gradient_that_is_not_finite_on_one_rank(ranks, kind):
    assert ranks.run(2, jobs.a_bad_gradient_on_one_rank, kind, False) == [(False, 6)] * 2
    errors = fails(ranks, 2, "is not finite", jobs.a_bad_gradient_on_one_rank, kind, True)
    assert "failed on another rank" in errors[0]


@pytest.mark.parametrize("what", ["group", "number", "wrong number", "closure"])
def test_ranks_that_are_about_to_do_otherwise(ranks, what):
    messages = {"wrong number": "momentum=2.0", "closure": "it left no gradient"}
    fails(ranks, 2, messages.get(what, "not the same on all 2 ranks"), jobs.about_to_do_otherwise, what)


def test_other_models_on_other_ranks(ranks):
    fails(ranks, 2, "build the same model on every rank", jobs.other_models, "ddp")


def test_a_mesh_that_does_not_match(ranks):
    fails(ranks, 3, "PSGD wants the same ranks, or shard=None", jobs.another_mesh)
    fails(ranks, 2, "PSGD wants one mesh", jobs.two_meshes)


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_a_checkpoint_of_another_model(ranks, kind):
    errors = fails(ranks, 2, "this optimizer has", jobs.checkpoint_of_another_model, kind)
    assert "failed on another rank" in errors[1]


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_a_checkpoint_that_one_rank_refuses_is_loaded_on_none(ranks, kind):
    assert ranks.run(2, jobs.a_load_that_fails_on_one_rank, kind) == [6, 6]


def test_what_cannot_be_shared():
    p = torch.zeros(2, 2, requires_grad=True)
    with pytest.raises(TypeError, match="PSGD wants a process group, a device mesh or None"):
        PSGD([p], shard=3)


def test_a_shared_optimizer_is_not_copied(ranks):
    (answers,) = ranks.run(1, jobs.copies)
    assert len(answers) == 2
    assert all("use its state_dict()" in answer for answer in answers)


def test_a_rank_that_dies_in_the_middle_of_a_step(ranks, forks, tmp_path):
    """The others stop with an error, and the checkpoint can be resumed."""
    mortal = Ranks(forks, 3)
    options = {"lr": 0.01, "probe": Whitening()}
    try:
        begin = time.monotonic()
        for rank in range(3):
            mortal.send(rank, 3, jobs.killed_while_others_wait, 1, str(tmp_path / "checkpoint"), timeout=10.0)
        answers = [mortal.receive(rank) for rank in (0, 2)]
        assert time.monotonic() - begin < 40
        assert not any(good for good, _ in answers)
        assert all("onnection" in error or "imed out" in error or "imeout" in error for _, error in answers), answers
    finally:
        mortal.close()
    results = ranks.run(2, jobs.resumed, "ddp, shared", torch.float64, 2, 6, str(tmp_path / "checkpoint"), **options)
    alone = jobs.train("alone", torch.float64, 6, **options)["params"]
    for mine, one in zip(results[0]["params"], alone, strict=True):
        assert torch.linalg.vector_norm(mine - one) <= 1e-10 * one.norm()
