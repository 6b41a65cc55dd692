"""What goes wrong on one rank is an error on all of them, and nobody waits for ever."""

from __future__ import annotations

import time

import pytest
import torch

from psgd import PSGD, Whitening
from psgd.state.options import NAMES

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
    expected = "whether parameter 0 has a gradient is True on ranks 0, 2 and False on rank 1"
    for error in fails(ranks, 3, expected, jobs.one_without_a_gradient, kind).values():
        assert expected in error


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_a_gradient_that_is_not_finite_on_one_rank(ranks, kind):
    assert ranks.run(2, jobs.a_bad_gradient_on_one_rank, kind, False) == [(False, 6)] * 2
    errors = fails(ranks, 2, "is not finite", jobs.a_bad_gradient_on_one_rank, kind, True)
    assert "failed on another rank" in errors[0]


@pytest.mark.parametrize("what", ["group", "wrong number", "closure"])
def test_ranks_that_are_about_to_do_otherwise(ranks, what):
    messages = {
        "group": "the shape of parameter 2 is (4, 4) on rank 0 and (4, 5) on rank 1",
        "wrong number": "rank 0 failed, so no rank goes on (ValueError: momentum=2.0",
        "closure": "rank 0 failed, so no rank goes on (ValueError: closure: it left no gradient",
    }
    fails(ranks, 2, messages[what], jobs.about_to_do_otherwise, what)


#: numbers of a step, with another value that one rank has
NUMBERS = {
    "lr": (0.01, 0.02),
    "precond_lr": (0.1, 0.2),
    "momentum": (0.9, 0.8),
    "weight_decay": (0.1, 0.0),
    "update_every": (1, 2),
    "update_anneal": (0, 10),
    "max_rms": (1.1, 1.0),
    "max_norm": (1.0, None),
    "seed": (0, 1),
    "maximize": (False, True),
    "precond_boost": (1.0, 2.0),
    "clip_outliers": (3.0, 4.0),
    "clip_steps": (2.0, 4.0),
    "adapt_lr": (0.1, 0.2),
}


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_a_number_that_differs_is_named(ranks, kind):
    others = {"error_if_nonfinite": (False, True), "param group": (None, None)}
    options = {**NUMBERS, "lr": (torch.tensor(0.01), torch.tensor(0.02)), **others}
    assert set(NUMBERS) == set(NAMES)
    for found in ranks.run(3, jobs.with_another, kind, options):
        for name, (usual, another) in NUMBERS.items():
            if name != "lr":
                assert f"{name} of param group 1 is {usual} on ranks 0, 1 and {another} on rank 2" in found[name]
        assert "lr of param group 1 is 0.00999" in found["lr"]
        assert "error_if_nonfinite is False on ranks 0, 1 and True on rank 2" in found["error_if_nonfinite"]
        assert "param group of parameter 1 is 1 on ranks 0, 1 and 0 on rank 2" in found["param group"]


@pytest.mark.parametrize("probe", ["exact", "batched"])
def test_a_parameter_frozen_on_one_rank(ranks, probe):
    for found in ranks.run(2, jobs.frozen_on_one_rank, probe):
        for answer in found.values():
            assert "whether parameter 2 has a gradient is True on rank 0 and False on rank 1" in answer


def test_a_structure_of_a_group_that_differs_is_named(ranks):
    for found in ranks.run(2, jobs.another_structure):
        for answer in found.values():
            assert "preconditioner of param group 1 is 'Kronecker(max_dense=2048, max_skew=256, " in answer


def test_replicas_that_differ(ranks):
    for found in ranks.run(2, jobs.compared_replicas, 0.01):
        assert found["same"] == ""
        assert "lr of param group 0 is 0.01 on rank 0 and 0.005 on rank 1" in found["lr"]
        assert "whether parameter 0 requires a gradient is True on rank 0 and False on rank 1" in found["frozen"]
        assert "the checksum of parameter 0 is" in found["gradient"]


def test_other_models_on_other_ranks(ranks):
    fails(ranks, 2, "the shape of parameter 0 is (3, 4) on rank 0 and (3, 5) on rank 1", jobs.other_models, "ddp")


def test_a_mesh_that_does_not_match(ranks):
    fails(ranks, 3, "but ranks [0, 1] share the work", jobs.another_mesh)
    fails(ranks, 4, "PSGD wants one mesh that all others are parts of", jobs.two_meshes)


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_a_checkpoint_of_another_model(ranks, kind):
    errors = fails(ranks, 2, "this optimizer has", jobs.checkpoint_of_another_model, kind)
    assert "failed on another rank" in errors[1]


@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
@pytest.mark.parametrize("what", ["lr", "Q"])
def test_a_checkpoint_that_one_rank_refuses_is_loaded_on_none(ranks, kind, what):
    assert ranks.run(2, jobs.a_load_that_fails_on_one_rank, kind, what) == [6, 6]


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
