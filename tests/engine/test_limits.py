"""Limits of gradients and steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgd.engine import limits

YES = torch.tensor(True)


def of_steps(lengths: list[float], most: float = 2.0) -> list[float]:
    """Lengths of the steps of one block after they were limited, which had one of length 1 before."""
    total, count, taken = torch.ones(1), torch.ones(1), []
    for length in lengths:
        factor, total, count = limits.of_steps(torch.tensor([length]), total, count, most, YES)
        taken.append(float(factor) * length)
    return taken


def test_steps_of_ordinary_lengths_are_not_limited():
    lengths = [1.0, 1.9, 0.3, 2.0, 0.0, 1.5]
    assert of_steps(lengths) == lengths


def test_lengths_grow_in_proportion_to_the_number_of_steps():
    """Whatever ``P`` asks for: the hundredth step is about a hundred times as long as the first, and not 2¹⁰⁰ times."""
    taken = of_steps([1e30] * 100)
    assert taken[9] == pytest.approx(11, rel=0.1)
    assert 50 < taken[-1] < 400


def test_the_step_of_a_limited_gradient_does_not_count():
    total, count, half = torch.tensor([100.0]), torch.tensor([100.0]), torch.tensor([0.5])
    factor, new_total, new_count = limits.of_steps(torch.tensor([1e6]), total, count, 2.0, YES, half)
    assert float(factor) == pytest.approx(2e-6)
    assert (new_total, new_count) == (total, count)


def test_zeros_before_do_not_forbid_a_step():
    total, count = torch.zeros(1), torch.zeros(1)
    for length in (0.0, 0.0, 3.0):
        factor, total, count = limits.of_steps(torch.tensor([length]), total, count, 2.0, YES)
    assert (float(factor), float(total), float(count)) == (1.0, 3.0, 1.0)


def test_the_first_step_waits_until_Q_is_fitted():
    zero = torch.zeros(1)
    factor, total, count = limits.of_steps(torch.tensor([1e6]), zero, zero, 2.0, YES, fitted=False)
    assert (float(factor), float(total), float(count)) == (0, 0, 0)
    assert limits.of_steps(torch.tensor([3.0]), zero + 2, zero + 1, 2.0, YES, fitted=False)[0] == 1


def test_what_is_not_finite_or_not_taken_leaves_no_trace():
    total, count = torch.tensor([6.0, 6.0, 6.0]), torch.tensor([2.0, 2.0, 2.0])
    lengths = torch.tensor([torch.inf, torch.nan, 5.0])
    for ok in (YES, ~YES):
        _, new_total, new_count = limits.of_steps(lengths, total, count, 2.0, ok)
        changed = int(ok)
        assert (new_total[:2] == 6).all()
        assert (new_count[:2] == 2).all()
        assert (new_total[2] != 6) == changed
        assert (new_count[2] != 2) == changed


def of_gradients(lengths: list[float]) -> list[float]:
    longest, taken = torch.zeros(1), []
    for length in lengths:
        factor, longest = limits.of_gradients(torch.tensor([length]), longest, 3.0, YES, look=True)
        taken.append(length if factor is None else float(factor) * length)
    return taken


def test_an_outlier_is_shortened_and_a_new_scale_is_accepted_after_some_steps():
    assert of_gradients([1.0, 1e6, 1.0])[1] == pytest.approx(3.0)
    assert of_gradients([1.0] + [50.0] * 5)[-1] == 50.0
    assert of_gradients([1.0, 1e6, 1e6])[2] == pytest.approx(9.0)


def test_factors_exist_only_where_a_gradient_is_shortened():
    """The host looks at lengths on a CPU; what is not finite is no reason to say that all are as they should be."""
    longest = torch.tensor([1.0, 2.0])
    for lengths, limited in [([3.0, 6.0], False), ([3.0, 6.1], True), ([torch.nan, 1.0], True)]:
        factor, _ = limits.of_gradients(torch.tensor(lengths), longest, 3.0, YES, look=True)
        assert (factor is not None) == limited
    factor, _ = limits.of_gradients(torch.tensor([1.0, 9.0]), longest, 3.0, YES, look=True)
    assert factor is not None
    assert factor.tolist() == [1.0, pytest.approx(2 / 3)]
    factor, _ = limits.of_gradients(torch.tensor([1.0, 1.0]), longest, 3.0, YES, look=False)
    assert factor is not None  # a host that must not look cannot know


def test_gradients_of_zero_leave_the_limit_as_it_is():
    assert of_gradients([1.0] + [0.0] * 500 + [1.0])[-1] == 1.0


@pytest.mark.parametrize("look", [False, True])
def test_a_step_that_is_skipped_leaves_the_limit_as_it_is(look):
    longest = torch.tensor([1.0, 2.0])
    for lengths in ([1.5, 2.5], [0.0, 9.0]):
        _, new = limits.of_gradients(torch.tensor(lengths), longest, 3.0, ~YES, look)
        assert torch.equal(new, longest)


def test_blocks_do_not_see_each_other():
    def factors(lengths: Tensor) -> Tensor:
        before = torch.ones(len(lengths))
        return limits.of_steps(lengths, before, before, 2.0, YES)[0]

    together = factors(torch.tensor([1.0, torch.nan, 8.0]))
    assert together[0] == 1
    assert together[2] == 0.25
