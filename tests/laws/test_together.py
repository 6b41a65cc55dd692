"""The law of ``Groups``: what is fitted and applied together has the result of each group alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from psgd import MaxAbs, Spectral, c3
from psgd.criteria import Criterion
from psgd.groups import Group, Groups, Structure
from psgd.groups.base import Preconditioned

from ..cases import CRITERIA, Case
from .suite import law_of_structures
from .test_maps import EXACT

#: shapes of blocks with how many there are: factors of one size belong to several of them
BUCKET = [((5,), 2), ((4, 3), 3), ((3, 4), 1), ((2, 3, 4), 2), ((1,), 1), ((4, 3), 2), ((3, 6), 2)]
OK = torch.ones((), dtype=torch.bool)


class Bucket:
    """Groups of one structure, once together and once each alone, and pairs for them."""

    def __init__(self, structure: Structure, normalize: MaxAbs | Spectral | None = None) -> None:
        self.cases = [Case(structure, shape) for shape, _ in BUCKET]
        self.normalize = None if structure.own_normalization else normalize
        self.groups = self.random()
        self.together = structure.together(self.groups, self.normalize)
        self.alone = [structure.together([group], self.normalize) for group in self.random()]
        counts = [count for _, count in BUCKET]
        each = enumerate(zip(self.cases, counts, strict=True))
        self.pairs = [case.vectors(2, count, seed=seed) for seed, (case, count) in each]
        #: for each block whether its pair says anything
        self.informative = [torch.arange(count) != 1 for count in counts]

    def random(self) -> list[Group]:
        return [
            case.group(count, seed=seed) for seed, (case, (_, count)) in enumerate(zip(self.cases, BUCKET, strict=True))
        ]

    def tangents(self, groups: Sequence[Group], criterion: Criterion, chosen: slice = slice(None)):
        each = zip(groups, self.pairs[chosen], self.informative[chosen], strict=True)
        for group, (dtheta, dgrad), informative in each:
            yield criterion(group, dtheta.clone(), dgrad.clone()), informative

    def gradients(self) -> list[Tensor]:
        return [dgrad.clone() for _, dgrad in self.pairs]

    def check(self) -> None:
        for group, alone in zip(self.groups, self.alone, strict=True):
            torch.testing.assert_close(group.buffers(), alone.groups[0].buffers(), **EXACT)


def check(together: Preconditioned, alone: Sequence[Preconditioned]) -> None:
    """Compare ``P g`` of groups together with that of each."""
    torch.testing.assert_close(together.length, torch.cat([one.length for one in alone]), **EXACT)
    for ours, one in zip(together.arrays, alone, strict=True):
        values = [each.v if each.scale is None else each.v * each.scale for each in (ours, one.arrays[0])]
        torch.testing.assert_close(*values, **EXACT)


@law_of_structures(criterion=CRITERIA)
def test_fitting_together_is_fitting_each_alone(structure: Structure, criterion: Criterion):
    """Three steps, also for blocks whose pair says nothing: these keep every bit."""
    bucket = Bucket(structure, Spectral())
    for _ in range(3):
        bucket.together.descend_(bucket.tangents(bucket.groups, criterion), 0.2, OK)
        for i, alone in enumerate(bucket.alone):
            alone.descend_(bucket.tangents(alone.groups, criterion, slice(i, i + 1)), 0.2, OK)
    bucket.check()
    for group, old, informative in zip(bucket.groups, bucket.random(), bucket.informative, strict=True):
        for name, buffer in group.buffers().items():
            assert torch.equal(buffer[~informative], old.buffers()[name][~informative])
        assert not torch.equal(group.dense()[0], old.dense()[0])


@law_of_structures(criterion=CRITERIA)
def test_alone_is_what_the_group_does_itself(structure: Structure, criterion: Criterion):
    bucket = Bucket(structure, MaxAbs())
    for i, (alone, group) in enumerate(zip(bucket.alone, bucket.random(), strict=True)):
        alone.descend_(bucket.tangents(alone.groups, criterion, slice(i, i + 1)), 0.2, OK)
        ((tangent, informative),) = bucket.tangents([group], criterion, slice(i, i + 1))
        group.descend_(tangent, 0.2, bucket.normalize, informative)
        torch.testing.assert_close(group.buffers(), alone.groups[0].buffers(), **EXACT)


@law_of_structures(keep=[False, True])
def test_preconditioning_together_is_preconditioning_each_alone(structure: Structure, keep: bool):
    bucket = Bucket(structure)
    for _ in range(2):  # what is kept may be used the second time
        gs = bucket.gradients()
        alone = [one.precondition([g], keep) for one, g in zip(bucket.alone, gs, strict=True)]
        check(bucket.together.precondition(gs, keep), alone)
        for g, group, one in zip(gs, bucket.groups, alone, strict=True):
            expected = group.precondition(g).reshape(len(g), -1)
            torch.testing.assert_close(one.length, torch.linalg.vector_norm(expected, dim=1), **EXACT)


@law_of_structures(dtype=[torch.float32, torch.float64])
def test_a_direction_has_the_length_of_its_step(structure: Structure, dtype: torch.dtype):
    """``rate · P g`` with a rate for each block, in the dtype of the parameters."""
    bucket, gs = Bucket(structure), Bucket(structure).gradients()
    result = bucket.together.precondition(gs)
    assert result.divisor is None
    lengths = result.length.split(bucket.together.counts)
    for array, length, group, g in zip(result.arrays, lengths, bucket.groups, gs, strict=True):
        right, rate = group.precondition(g), torch.linspace(0.5, 2, len(g), dtype=torch.float64)
        torch.testing.assert_close(length, torch.linalg.vector_norm(right.flatten(1), dim=1), **EXACT)
        torch.testing.assert_close(array.length(), length, **EXACT)
        step = array.times(rate, g.shape[1:], dtype)
        assert step.shape == g.shape
        torch.testing.assert_close(step, (right * rate.view(-1, *[1] * (g.ndim - 1))).to(dtype))


@law_of_structures()
def test_what_is_kept_follows_q(structure: Structure):
    """``P`` that is kept for the next step is not used after ``Q`` has changed."""
    bucket = Bucket(structure)
    bucket.together.precondition(bucket.gradients(), keep=True)
    bucket.together.descend_(bucket.tangents(bucket.groups, c3), 0.2, OK)
    fresh = [group.bind(group.buffers()) for group in bucket.groups]
    again = structure.together(fresh, bucket.normalize).precondition(bucket.gradients())
    torch.testing.assert_close(
        bucket.together.precondition(bucket.gradients(), keep=True).length, again.length, **EXACT
    )


@law_of_structures(damping=[0.0, 1e-3])
def test_whitening_together_is_whitening_each_alone(structure: Structure, damping: float):
    """Also of averages that are to be divided by weights. Structures that need random numbers for it raise."""
    bucket = Bucket(structure)
    weights = [torch.linspace(0.5, 1, len(group.dense()), dtype=torch.float64) for group in bucket.groups]
    if not bucket.together.whitens:
        with pytest.raises(TypeError, match="only structures that whiten in closed form"):
            bucket.together.whiten_(bucket.gradients(), 0.2, damping, OK)
        return
    for weight in (None, weights):
        joined = None if weight is None else torch.cat(weight)
        for tidy in (False, True):
            result = bucket.together.whiten_(bucket.gradients(), 0.2, damping, OK, joined, tidy)
            each = zip(bucket.alone, bucket.gradients(), weight or [None] * len(weights), strict=True)
            check(result, [one.whiten_([g], 0.2, damping, OK, w, tidy) for one, g, w in each])
    bucket.check()


@law_of_structures()
def test_without_a_step_nothing_changes(structure: Structure):
    """Not one bit, whatever the pairs say."""
    bucket = Bucket(structure)
    bucket.together.descend_(bucket.tangents(bucket.groups, c3), 0.2, ~OK)
    if bucket.together.whitens:
        bucket.together.whiten_(bucket.gradients(), 0.2, 1e-3, ~OK)
    for group, old in zip(bucket.groups, bucket.random(), strict=True):
        assert all(torch.equal(buffer, old.buffers()[name]) for name, buffer in group.buffers().items())


@law_of_structures()
def test_a_subclass_of_groups_says_what_it_is_a_bucket_of(structure: Structure):
    bucket = Bucket(structure)
    assert isinstance(bucket.together, Groups)
    assert bucket.together.counts == [count for _, count in BUCKET]
    assert bucket.together.dtype == torch.float64
    assert bucket.together.whitens == all(group.whitens for group in bucket.groups)
