"""Ranks record what each of them does alone; between recordings they communicate as they do without.

Recording is emulated, see ``tests/emulated.py``. ``test_cuda.py`` has the real thing, with one rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psgd import FiniteDifference, Whitening

from . import recording
from .ranks import Ranks

PROBES = {"whitening": Whitening(), "difference": FiniteDifference(std=1e-3)}
KINDS = ["ddp, shared", "fsdp"]


def check(ranks: Ranks, size: int, kind: str, change: str = "nothing", **options: Any) -> list[dict[str, Any]]:
    """Steps that are recorded are those that are launched, bit for bit, and those of torch but for rounding."""
    options = {"lr": 0.02, "update_every": 1, **options}
    recorded, launched, plain = (
        ranks.run(size, recording.train, kind, change, how, **options) for how in ("recorded", "launched", "torch")
    )
    for mine, theirs, third in zip(recorded, launched, plain, strict=True):
        assert not any(number for number, _ in theirs["counts"])
        assert not third["counts"]
        assert mine["state"].keys() == theirs["state"].keys()
        for name, value in mine["state"].items():
            assert torch.equal(value, theirs["state"][name]), name
        each = zip(mine["params"], recorded[0]["params"], theirs["params"], third["params"], strict=True)
        for p, first, same, near in each:
            assert torch.equal(p, first)
            assert torch.equal(p, same)
            assert torch.linalg.vector_norm(p - near) <= 1e-9 * near.norm()
    return recorded


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("probe", PROBES)
def test_each_rank_records_its_part(ranks, size, kind, probe):
    """Two recordings, of lengths and of directions, from the third step on; more as the chores of whitening differ."""
    for result in check(ranks, size, kind, probe=PROBES[probe]):
        ((number, count),) = result["counts"]
        assert 2 <= number <= 4
        assert count >= 2 * (recording.STEPS - 6)


OPTIONS = [
    {"max_norm": 0.1},
    {"momentum": 0.0, "weight_decay": 0.1},
    {"update_every": 3},
    {"max_norm": 0.5, "max_rms": 0.5, "adapt_lr": 0.1},
]
#: every option with each kind and with each probe, which take turns
TURNS = [
    (kind, options, list(PROBES)[(i + j) % len(PROBES)])
    for i, options in enumerate(OPTIONS)
    for j, kind in enumerate(KINDS)
]
# Differences in single precision differ by more than rounding.
TURNS += [(kind, {"precond_dtype": torch.float32}, "whitening") for kind in KINDS]


@pytest.mark.parametrize(("kind", "options", "probe"), TURNS, ids=str)
def test_options(ranks, kind, options, probe):
    for result in check(ranks, 2, kind, probe=PROBES[probe], **options):
        assert sum(count for _, count in result["counts"]) > recording.STEPS // 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [name for name in recording.CHANGES if name != "nothing"])
def test_changes_between_steps(ranks, kind, change):
    results = check(ranks, 2, kind, change, probe=Whitening(), max_norm=1.0)
    for result in results:
        assert sum(count for _, count in result["counts"]) > recording.STEPS // 2
        skipped = {int(value) for (_, name), value in result["state"].items() if name == "skipped"}
        assert skipped == ({3} if change in ("nan_on_one_rank", "too_long_for_its_owner") else {0})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["nan_on_one_rank", "too_long_for_its_owner"])
def test_a_step_that_one_rank_cannot_take_is_taken_by_none(ranks, kind, change):
    """Also if pairs are measured."""
    for result in check(ranks, 2, kind, change, probe=PROBES["difference"]):
        assert {int(value) for (_, name), value in result["state"].items() if name == "skipped"} == {3}
