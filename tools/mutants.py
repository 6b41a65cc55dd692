"""Mutants: defects in a copy of the package, one at a time, each of which the tests that own the place must catch.

    python tools/mutants.py --list
    python tools/mutants.py --only probes/
    python tools/mutants.py

A mutant that survives says that a law has no test. Either the law gets one, or the mutant is marked as equivalent, with
the reason. Only mutants that can be caught on a CPU are in the table; the kernels belong to ``tests/test_cuda.py``.

The working tree is only read: sources and tests are copied, and a mutant replaces a text in the copy. Each text must
occur exactly once in its file, which ``tests/test_mutants.py`` checks, so that the table cannot become obsolete without
anybody noticing. The tests are first run without a mutant, as a test that fails anyway catches everything. The exit
code is 1 if a mutant survives or could not be judged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/psgd")
#: parts of the working tree that tests need
COPIED = ("src", "tests", "pyproject.toml")
#: seconds for the tests of one mutant; one that never ends is caught too
LIMIT = 180
#: exit code of pytest if a test failed, and one of our own
FAILED, NOT_RUN = 1, 99
#: processes that begin with what all tests import
WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload(["torch._dynamo", "pytest", "hypothesis", "numpy", "scipy.linalg"])


class Mutant(NamedTuple):
    """A defect, and the tests that own the place."""

    name: str
    #: file of the package
    file: str
    #: text that occurs exactly once in the file
    old: str
    new: str
    #: tests below ``tests/``, as pytest names them, divided by spaces
    tests: str
    #: reason why no test can notice it, for a mutant that is to stay in the table nevertheless
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def of(file: str, tests: str, *rows: tuple[str, ...]) -> list[Mutant]:
    """Mutants of one file that the same tests own; a row has a name, the old and the new text, and perhaps a reason."""
    return [Mutant(name, file, old, new, tests, *reason) for name, old, new, *reason in rows]


#: all mutants, by file and by the tests that own them
MUTANTS = [
    # Formulas.
    *of(
        "tangent.py",
        "test_tangent.py",
        ("S is not symmetric", "return half + half.mT", "return half + half"),
        (
            "rows of S have one of two terms",
            "torch.baddbmm(torch.bmm(x[:, :size], y.mT), y[:, :size], x.mT)",
            "2 * torch.bmm(x[:, :size], y.mT)",
        ),
        ("half of the diagonal", "return 2 * (self.x * self.y).sum(-1)", "return (self.x * self.y).sum(-1)"),
        ("an infinite part is usable", "between(size, 0.0, torch.inf)", "size > 0"),
        ("a useless part stays", ".masked_fill_(~usable.view(shape), 0)", ""),
        ("the spectral norm without its absolute value", "(x * y).sum(-1).abs() +", "(x * y).sum(-1) +"),
        (
            "the spectral estimate may fall below the diagonal",
            "torch.maximum(length.amax((1, 2)).to(x.dtype), self.max_diag())",
            "length.amax((1, 2)).to(x.dtype)",
        ),
        ("fold moves the wrong axis", ".movedim(1, axis + 1)", ".movedim(axis + 1, 1)"),
        ("largest without a sign", "return torch.maximum(v.amax(axes), -v.amin(axes))", "return v.amax(axes)"),
    ),
    *of(
        "criteria.py",
        "laws/test_descent.py::test_descent_is_along_the_projected_gradient_of_autograd",
        (
            "c1 with Q and its transpose swapped",
            "e1 = dgrad - Q.solve(Q.solve_t(dtheta))",
            "e1 = dgrad - Q.solve_t(Q.solve(dtheta))",
        ),
        (
            "c2 sees the gradient in the other coordinates",
            "Tangent(Q.a(dgrad), Q.a(e2))",
            "Tangent(Q.b(dgrad), Q.a(e2))",
        ),
        ("c3 goes uphill", "(a - b).mul_(0.5)", "(b - a).mul_(0.5)"),
    ),
    *of(
        "criteria.py",
        "test_criteria.py::test_the_misfit_of_c3_is_how_far_the_lengths_are_apart",
        (
            "the misfit has a sign",
            "(log_length(Q.a(dgrad)) - log_length(Q.b(dtheta))).abs()",
            "(log_length(Q.a(dgrad)) - log_length(Q.b(dtheta)))",
        ),
    ),
    *of(
        "criteria.py",
        "monitor/test_monitor.py::test_lengths_do_not_overflow",
        ("a length without its scale", "return size.log() + torch", "return torch"),
    ),
    *of(
        "criteria.py",
        "probes/test_base.py",
        ("c1 is recorded", "WITHOUT_SOLVES = frozenset([c2, c3])", "WITHOUT_SOLVES = frozenset([c1, c2, c3])"),
    ),
    *of(
        "tangent.py",
        "test_tangent.py",
        (
            "the largest of the longest is the largest of all",
            "return found if bool((found >= lengths[:, 0] * lengths[:, -1]).all()) else None",
            "return found",
        ),
    ),
    *of(
        "ops/look.py",
        "ops/test_look.py",
        ("the host waits for a device", 'return device.type == "cpu"', "return True"),
        ("the bounds themselves lie between", "least < number < most", "least <= number <= most"),
        ("a flag that is false is seen to be true", "return can_look(flag.device) and bool(flag)", "return True"),
    ),
    *of(
        "normalize.py",
        "test_normalize.py",
        ("MaxDiag is MaxAbs", "return tangent.max_diag()", "return tangent.max_abs()"),
        ("Spectral is MaxAbs", "return tangent.spectral()", "return tangent.max_abs()"),
    ),
    *of(
        "closed_form.py",
        "test_closed_form.py",
        ("c3 without a square root", "half * D.clamp_min(0).sqrt() @", "half * D.clamp_min(0) @"),
        ("c2 with the covariance of c1", '*_eigen(R_g, "R_g"), R_theta_g', '*_eigen(R_theta, "R_g"), R_theta_g'),
        ("the cross covariance is transposed", "dtheta.mT @ dgrad / count", "dgrad.mT @ dtheta / count"),
    ),
    # Groups.
    *of(
        "groups/factor.py",
        "groups/test_factor.py",
        ("the norm has no lower clamp", "lr / norm.clamp_min(2.0**-20)", "lr / norm"),
    ),
    *of(
        "groups/factor.py",
        "laws/test_descent.py::test_a_q_over_the_limit_is_made_smaller_by_a_power_of_two",
        (
            "Q has no limit",
            "torch.where(usable & (size > limit), (limit / size).log2().floor().exp2(), scale)",
            "scale",
        ),
        ("blocks that are not usable are scaled", "usable & (size > limit)", "size > limit"),
    ),
    *of(
        "groups/factor.py",
        "laws/test_descent.py::test_the_diagonal_does_not_vanish",
        ("the diagonal has no lower clamp", ".clamp_min_(float(torch.finfo(new.dtype).max) ** -0.375)", ""),
    ),
    *of(
        "groups/factor.py",
        "laws/test_descent.py::test_one_step_is_the_formula_of_the_paper",
        ("the diagonal goes uphill", "old * (1 - step", "old * (1 + step"),
    ),
    *of(
        "groups/group.py",
        "laws/test_descent.py::test_a_q_over_the_limit_is_made_smaller_by_a_power_of_two",
        ("the limit is that of a single factor", "(0.375 / len(self.factors))", "0.375"),
    ),
    *of(
        "groups/group.py",
        "laws/test_maps.py::test_maps_are_those_of_the_dense_matrix",
        ("a Kronecker product in the other order", "torch.kron(q, f)", "torch.kron(f, q)"),
    ),
    *of(
        "groups/group.py",
        "groups/test_flops.py::test_steps_of_the_optimizer",
        (
            "preconditioning counted at updates only",
            "fit / update_every + precondition)",
            "(fit + precondition) / update_every)",
        ),
    ),
    *of(
        "groups/balance.py",
        "laws/test_descent.py::test_factors_are_kept_in_balance_and_the_product_keeps_every_bit",
        ("scale moves the wrong way", "(mean(logs) - logs)", "(logs - mean(logs))"),
        ("balancing changes the product", "return powers - is_first * total(powers)", "return powers"),
    ),
    *of(
        "groups/diagonal.py",
        "laws/test_maps.py::test_p_of_a_factor_is_its_square",
        ("P of a diagonal is Q", "return self.diag.square()", "return self.diag"),
    ),
    *of(
        "groups/diagonal.py",
        "laws/test_maps.py::test_solve_undoes_apply",
        ("a diagonal multiplies to solve", "return v / self.diag[:, :, None]", "return v * self.diag[:, :, None]"),
    ),
    *of(
        "groups/triangular.py",
        "laws/test_maps.py::test_maps_are_those_of_the_dense_matrix",
        ("a triangular solve without the transpose", "products.solve_t(self.full, v)", "products.solve(self.full, v)"),
    ),
    *of(
        "ops/triangular_products.py",
        "ops/test_triangular_products.py",
        (
            "rows without their diagonal block",
            "Q[:, rows, start:], v[:, start:]",
            "Q[:, rows, rows.stop :], v[:, rows.stop :]",
        ),
        (
            "columns up to their block",
            "Q[:, :stop, start:stop].mT, v[:, :stop]",
            "Q[:, :start, start:stop].mT, v[:, :start]",
        ),
        (
            "rows of a triangle up to their block",
            "E[:, :, :stop], Q[:, :stop, start",
            "E[:, :, :start], Q[:, :start, start",
        ),
        (
            "equations from the right without the transpose",
            "(Q.mT, v.mT, upper=False, left=False)",
            "(Q, v.mT, upper=True, left=False)",
        ),
    ),
    *of(
        "groups/triangular.py",
        "laws/test_descent.py::test_one_step_is_the_formula_of_the_paper",
        ("all of S moves a triangular Q", "E[:, :, : stop - start].triu_()", "pass"),
    ),
    *of(
        "groups/triangular.py",
        "groups/test_triangular.py::test_blocked_update_is_the_product",
        (
            "rows of a block without their diagonal",
            "torch.bmm(u, w).triu_(), u], -1)",
            "torch.bmm(u, w).triu_(1), u], -1)",
        ),
        (
            "sums over the rows below, and those of the block",
            "old = torch.cat([part, sums[1:]]",
            "old = torch.cat([part, sums[:-1]]",
        ),
        ("only the rows that are handled at the same time", "below[:, left:] = sums[0]", "pass"),
    ),
    *of(
        "groups/limited_memory.py",
        "laws/test_maps.py::test_apply_t_is_the_adjoint_of_apply",
        ("the transpose lacks its dense part", "self.Q12.mT @ head + self._tail * tail], 1)", "self._tail * tail], 1)"),
    ),
    *of(
        "groups/limited_memory.py",
        "laws/test_descent.py::test_one_step_is_the_formula_of_the_paper",
        ("the dense part moves without Q22", "tangent.S12 * self.Q22[:, None, :]", "tangent.S12"),
        ("all of S11 moves Q", "S11 = tangent.S11.triu()", "S11 = tangent.S11"),
        ("the norm without the diagonal below", "return torch.maximum(largest, self.max_diag())", "return largest"),
    ),
    *of(
        "groups/limited_memory.py",
        "groups/test_limited_memory.py",
        ("as many rows as elements are not dense", "if self.size >= n:", "if self.size > n:"),
    ),
    *of(
        "groups/low_rank.py",
        "laws/test_maps.py::test_maps_are_those_of_the_dense_matrix",
        ("K without its transpose", "_solve(self._K().mT, self.U", "_solve(self._K(), self.U"),
    ),
    *of(
        "groups/low_rank.py",
        "groups/test_low_rank.py::test_u_and_v_are_kept_in_balance_and_q_keeps_every_bit",
        ("U and V are balanced twice over", "ratio.log2() / 2", "ratio.log2()"),
    ),
    *of(
        "groups/low_rank.py",
        "groups/test_low_rank.py::test_q_stays_invertible_and_solves_accurate_for_ever",
        (
            "steps that lose all digits are taken",
            "(usable & (new._sensitivity() <= self._sensitivity().clamp_min(most)))",
            "usable",
        ),
    ),
    *of(
        "groups/low_rank.py",
        "groups/test_low_rank.py::test_a_norm_of_rounding_does_not_lengthen_a_step",
        ("the norm has no lower clamp", "lr / norm.clamp_min(2.0**-20)", "lr / norm"),
    ),
    *of(
        "groups/low_rank.py",
        "laws/test_descent.py::test_a_q_over_the_limit_is_made_smaller_by_a_power_of_two",
        ("d has no limit", "usable & (size > limit)", "usable & (size < 0)"),
    ),
    *of(
        "groups/low_rank.py",
        "groups/test_low_rank.py::test_each_part_moves_along_its_relative_gradient",
        (
            "d moves along the wrong transpose",
            "self._apply_t(torch.cat([y, x], -1))",
            "self._apply(torch.cat([y, x], -1))",
        ),
    ),
    *of(
        "groups/low_rank.py",
        "groups/test_low_rank.py::test_one_step_is_the_formula",
        ("V moves along the tangent at the old U", "LowRankTangent(tangent, new.U)", "LowRankTangent(tangent, self.U)"),
    ),
    *of(
        "groups/low_rank.py",
        "groups/test_low_rank.py::test_norms_are_those_of_the_matrix",
        ("the smaller of two eigenvalues", "square = half + (half", "square = half - (half"),
    ),
    *of(
        "groups/low_rank.py",
        "groups/test_low_rank.py::test_size_and_small_blocks",
        ("the limit of small blocks is off by one", "if n <= 2 * self.rank + 1:", "if n < 2 * self.rank + 1:"),
    ),
    *of(
        "groups/kronecker.py",
        "groups/test_kronecker.py",
        ("the longest dense axis is off by one", "return n <= self.max_dense and", "return n < self.max_dense and"),
        ("long vectors get dense factors", " and n * n <= self.max_skew * math.prod(shape)", ""),
    ),
    *of(
        "groups/kronecker.py",
        "test_optimizer.py::test_defaults_are_spelled_out "
        "test_optimizer.py::test_defaults_of_whitening_are_for_everyday_training",
        ("whitening has no boost", "not whitening else 3.0", "not whitening else 1.0"),
    ),
    *of(
        "groups/kronecker.py",
        "planning/test_plan.py::test_a_budget_is_kept_and_used",
        ("a plan makes the shortest axes diagonal first", "sorted(dense, reverse=True)", "sorted(dense)"),
    ),
    *of(
        "groups/near_symmetric.py",
        "groups/test_near_symmetric.py",
        ("a turn has no limit", "torch.minimum(slope / bend, 0.5 * 2**0.5 / size)", "slope / bend"),
        ("a turn by the wrong multiple", "slope = size.square() / 2", "slope = size.square() / 4"),
        ("the norm is that of the longest row", "iterations: int = 2", "iterations: int = 0"),
    ),
    *of(
        "groups/near_symmetric.py",
        "groups/test_pooled.py::test_a_missed_norm_stretches_no_direction",
        ("the safe share is too small", "return 1.25 * lr", "return 0.25 * lr"),
    ),
    *of(
        "groups/near_symmetric.py",
        "laws/test_together.py::test_what_is_kept_follows_q",
        (
            "an old P is kept",
            "self._kept is not None and self._kept[0] == self.root._version",
            "self._kept is not None",
        ),
    ),
    *of(
        "groups/near_symmetric.py",
        "laws/test_maps.py::test_maps_are_those_of_the_dense_matrix",
        ("a solve without the transpose", "return _solve(self.root.mT, v)", "return _solve(self.root, v)"),
    ),
    *of(
        "groups/pool.py",
        "groups/test_pooled.py::test_a_missed_norm_stretches_no_direction",
        ("no safe bound of a step", "torch.maximum(bound, frobenius * safe(lr))", "bound"),
    ),
    *of(
        "groups/pool.py",
        "groups/test_pool.py",
        ("parts in another order are seen as one", " and part.is_contiguous()", ""),
    ),
    *of(
        "groups/pool.py",
        "groups/test_pooled.py::test_memory_makes_no_difference",
        ("copies are not put back", "    if copied:", "    if not copied:"),
    ),
    *of(
        "groups/whitener.py",
        "groups/test_pooled.py::test_one_step_is_that_of_dense_matrices",
        (
            "the norm of the other factors is not squared",
            "self.factors.sum_of_others(norms).mul_(2)",
            "self.factors.sum_of_others(norms)",
        ),
        ("white noise has the wrong sign", "pool.diagonal(S).sub_(", "pool.diagonal(S).add_("),
    ),
    *of(
        "groups/whitener.py",
        "groups/test_pooled.py::test_what_is_not_usable_changes_no_bit",
        ("a gradient that vanished is followed", "between(rms, eps**2, eps**-2)", "between(rms, 0.0, eps**-2)"),
        ("a gradient that exploded is followed", "between(rms, eps**2, eps**-2)", "(rms > eps**2)"),
    ),
    *of(
        "groups/all_factors.py",
        "groups/test_pooled.py::test_factors_whose_tangent_overflows_become_smaller",
        ("factors with an infinite tangent stay", "powers.sub_(8 * (usable & ~finite))", "pass"),
    ),
    *of(
        "groups/all_factors.py",
        "laws/test_descent.py::test_a_q_over_the_limit_is_made_smaller_by_a_power_of_two",
        ("factors have no limit", "self.most).clamp_min_(0)", "self.most).clamp_min_(0).mul_(0)"),
        ("factors of blocks without a step are limited", "powers.sub_(usable * (logs", "powers.sub_((logs"),
    ),
    *of(
        "groups/pooled.py",
        "groups/test_inverse_free.py::test_a_short_step_moves_each_factor_along_its_tangent",
        ("the sides of a difference have the wrong size", "y.mul_(0.5)", "y.mul_(1.0)"),
    ),
    *of(
        "groups/near_symmetric.py",
        "groups/test_pooled.py::test_a_thin_step_is_that_of_the_tangent_it_does_not_form",
        ("a thin step without the transpose", "torch.bmm(a.mT, rounded)", "torch.bmm(a.mT, rounded.mT)"),
    ),
    *of(
        "groups/whitener.py",
        "groups/test_pooled.py::test_a_weight_divides_the_gradient",
        ("no weight divides a gradient that has thin factors alone", "g = g / along(", "g = g * along("),
    ),
    *of(
        "groups/whitener.py",
        "groups/test_pooled.py::test_what_is_returned_is_of_before_the_step",
        (
            "Q Qᵀ instead of Qᵀ Q for thin factors",
            "multiply_axis(Q.mT, multiply_axis(Q, v.to(Q.dtype), axis), axis, into)",
            "multiply_axis(Q, multiply_axis(Q.mT, v.to(Q.dtype), axis), axis, into)",
        ),
    ),
    *of(
        "groups/whitener.py",
        "groups/test_pooled.py::test_a_weight_divides_the_gradient",
        ("a weight multiplies", "mine[smallest] / along(", "mine[smallest] * along("),
    ),
    *of(
        "groups/inverse_free.py",
        "groups/test_inverse_free.py::test_chores_take_turns",
        ("damping has too small a variance", "damping=kinds**0.5 * complete", "damping=1.0 * complete"),
        ("long steps are not tidied up after", "tidy=complete or lr > 2 * SHORT", "tidy=complete"),
        ("a young Q is seldom tidied up", "KINDS if lr <= SHORT else KINDS // 2", "KINDS"),
    ),
    *of(
        "groups/inverse_free.py",
        "laws/test_maps.py::test_parts_of_the_preconditioned_gradient_multiply_to_it",
        (
            "Q Qᵀ instead of Qᵀ Q",
            "[(factor.root, axis), (factor.root.mT, axis)]",
            "[(factor.root.mT, axis), (factor.root, axis)]",
        ),
    ),
    *of(
        "groups/condition.py",
        "monitor/test_monitor.py::test_condition_is_that_of_the_matrix",
        ("the condition the other way round", "values[:, 0] / values[:, -1]", "values[:, -1] / values[:, 0]"),
        (
            "the condition of P",
            "(highest.amax((1, 2)) * lowest.amax((1, 2))).sqrt()",
            "(highest.amax((1, 2)) * lowest.amax((1, 2)))",
        ),
    ),
    *of(
        "groups/condition.py",
        "groups/test_condition.py",
        ("the inverse without its transpose", "v.to(self.LU.dtype), adjoint=True)", "v.to(self.LU.dtype))"),
    ),
    *of(
        "groups/condition.py",
        "monitor/test_monitor.py::test_change_is_that_of_the_matrix",
        ("half of the inner product", "(squares - 2 * inner + 1)", "(squares - inner)"),
        ("any scale counts as no change", ".log2().round().exp2()", ""),
    ),
    *of(
        "groups/axes.py",
        "groups/test_axes.py",
        ("the last axis without the transpose", "shaped(v, flat), M.mT", "shaped(v, flat), M"),
    ),
    *of(
        "groups/axes.py",
        "groups/test_pooled.py::test_one_step_is_that_of_dense_matrices",
        ("a product is always added", "beta = int(add)", "beta = 1"),
    ),
    *of(
        "ops/slices.py",
        "laws/test_together.py::test_a_direction_has_the_length_of_its_step",
        ("a length without its scale", "keepdim=True, dtype=dtype) * scale\n", "keepdim=True, dtype=dtype)\n"),
    ),
    *of(
        "ops/slices.py",
        "ops/test_slices.py",
        ("a product without its scale", ".view_as(scale) * scale).to", ".view_as(scale)).to"),
        ("columns are multiplied as rows", "M = v.mT if by_column else", "M ="),
        ("lengths before the scale is applied", "torch.mul(v, scale, out=out)\n", "out.copy_(v)\n"),
    ),
    *of(
        "groups/base.py",
        "groups/test_base.py",
        (
            "a direction that is known hides a long slice",
            "longest = self.slices.flatten(1).amax(1)",
            "longest = torch.zeros(())",
        ),
    ),
    *of(
        "engine/diagonal.py",
        "ops/test_streams.py",
        ("tasks free what others may read", "(a.scale, a.slices, a.stretch) for", "(a.scale, a.slices) for"),
    ),
    # Zero gradients and outliers.
    *of(
        "probes/whitening.py",
        "laws/test_trust.py::test_zero_gradients_move_nothing_but_what_the_average_has_left",
        ("zero gradients count", "support=support,", "support=None,"),
    ),
    *of(
        "probes/base.py",
        "laws/test_trust.py::test_zero_gradients_move_nothing_but_what_the_average_has_left",
        ("flat slices count", "if slices is not None:", "if slices == 0:"),
    ),
    *of(
        "groups/base.py",
        "laws/test_trust.py::test_slices_are_limited",
        ("slices are not limited", "(bound / self.slices).clamp_(max=1)", "torch.ones_like(self.slices)"),
    ),
    *of(
        "groups/all_factors.py",
        "laws/test_trust.py",
        ("an infinite size makes Q zero", " & (over < torch.inf)", ""),
        ("P starts as the identity", "(-0.5 * rms.log2()).round()", "torch.zeros_like(rms)"),
        ("P starts at the wrong scale", "(-0.5 * rms.log2()).round()", "(-rms.log2()).round()"),
    ),
    *of(
        "engine/bucket.py",
        "laws/test_trust.py",
        (
            "outliers are averaged",
            "grads.average_(self, 1 - momentum, limit, ok)",
            "grads.average_(self, 1 - momentum, None, ok)",
        ),
        (
            "outliers move the parameters",
            "None if limit is None else 1 / limit, averaged=False",
            "None, averaged=False",
        ),
    ),
    *of(
        "engine/pace.py",
        "engine/test_pace.py",
        ("the learning rate falls below what was asked for", ".clamp(1, MOST)", ".clamp(0, MOST)"),
        ("an outlier changes the learning rate at once", "(slope / square).clamp(-1, 1)", "slope / square"),
        ("a step that is skipped changes the learning rate", "torch.where(ok & (square", "torch.where((square"),
        ("noise makes steps longer", "CAUTION = 3", "CAUTION = 1"),
    ),
    *of(
        "engine/pace.py",
        "engine/test_pace.py",
        ("the slope counts the new gradient twice", " - (1 - beta) * dots(Pg, gs)", ""),
        ("the slope is of no unbiased average", "dots(Pg, gs)) / weight, 0.0)", "dots(Pg, gs)), 0.0)"),
    ),
    *of(
        "engine/limits.py",
        "engine/test_limits.py",
        (
            "zeros lower the limit of outliers",
            "torch.where(ok & (lengths > 0), new",
            "torch.where(ok, new",
        ),
        ("zeros that the host sees lower it, too", "positive = all(numbers)", "positive = True"),
        ("a step that is skipped lifts the limit", "if positive and bool(ok)", "if positive"),
        ("an outlier lifts its limit at once", "lengths = lengths * factor", "pass"),
        ("the limit never rises", "torch.maximum(longest * FADING, lengths)", "longest"),
        (
            "a long step lifts the average at once",
            "FORGETTING * total + lengths * factor",
            "FORGETTING * total + lengths",
        ),
        (
            "steps that are not finite are counted",
            "between(lengths, torch.finfo(lengths.dtype).eps ** 2, torch.inf)",
            "(lengths > torch.finfo(lengths.dtype).eps ** 2)",
        ),
        ("steps of zero are counted", "torch.finfo(lengths.dtype).eps ** 2", "-1.0"),
        ("the first step does not wait", "float(fitted)", "1.0"),
        ("a step that waits is counted", "counted = counted & ~new", "pass"),
        ("outliers count", "counted = counted & (gradient == 1)", "pass"),
    ),
    *of(
        "groups/group.py",
        "laws/test_start.py",
        ("every Q starts again", "new = usable & torch.stack", "new = usable | torch.stack"),
        ("each factor has the whole size", "size ** (1 / len(self.factors))", "size"),
    ),
    *of(
        "probes/base.py",
        "laws/test_start.py",
        ("the start is the inverse", "ratio = dtheta / dgrad", "ratio = dgrad / dtheta"),
        ("the start is P instead of Q", "group.start_(ratio.sqrt(), ok", "group.start_(ratio, ok"),
    ),
    *of(
        "probes/whitening.py",
        "laws/test_start.py",
        ("whitening starts at the square", "start_one_(group, drawn**0.5,", "start_one_(group, drawn,"),
    ),
    *of(
        "probes/schedule.py",
        "probes/test_schedule.py",
        ("Q stays young", "2 ** -(math.floor(2 * math.log2(age)) / 2)", "1.0"),
        ("Q is never young", "factor = boost *", "factor = 0 *"),
        ("a boost over one", "max(lr, 0.9)", "10.0"),
    ),
    *of(
        "recipes.py",
        "test_recipes.py",
        ("biases decay", "if p.ndim < 2]", "if p.ndim < 2 and False]"),
        ("frozen parameters are taken", "if p.requires_grad and p not in taken]", "if p not in taken]"),
    ),
    # Probes.
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_perturbation_is_that_of_the_paper_and_leaves_no_bit_changed",
        ("δθ of another size", ".eps) ** 0.5 if self.std", ".eps) ** 0.4 if self.std"),
        (
            "θ is not restored",
            "            try:\n                torch._foreach_copy_(thetas, saved)",
            "            try:\n                pass",
        ),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_dropout_sees_the_same_mask_in_both_gradients",
        ("the second call draws other numbers", "            random_before.restore()\n", ""),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_random_numbers_go_on_from_the_first_call",
        ("the random state after the second call stays", "            random_after.restore()\n", ""),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_buffers_are_updated_once_with_module_and_twice_without",
        ("buffers are updated twice", "b.copy_(old)", "pass"),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_closure_that_adds_to_gradients_is_measured_right",
        (
            "the second call adds to the first gradients",
            "            start.restore()\n            random_before",
            "            random_before",
        ),
        ("gradients that are added to are not copied", "if shared or grad is start.grads[i]:", "if shared:"),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_gradients_in_one_flat_buffer_are_not_overwritten",
        ("gradients in a flat buffer are not copied", "grads[i] = grad.clone()", "grads[i] = grad"),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_delta_theta_is_what_rounding_let_through",
        (
            "δθ as it was before rounding",
            "result.pairs[i] = (theta - old,",
            "result.pairs[i] = (noise(i) * self._std(theta),",
        ),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_a_step_under_autocast_sees_the_perturbed_weights",
        (
            "autocast remembers the old weights",
            "torch.clear_autocast_cache()  # it would return the old weights",
            "pass",
        ),
    ),
    *of(
        "probes/finite_difference.py",
        "probes/test_probes.py::test_gradients_that_live_in_a_buffer_of_the_user_stay_there "
        "probes/test_probes.py::test_closure_that_adds_to_gradients_is_measured_right",
        ("the user's buffer keeps the second gradient", "tensor.copy_(grad)", "pass"),
    ),
    *of(
        "probes/hessian_vector.py",
        "probes/test_probes.py::test_pairs_satisfy_the_secant_equation",
        ("a product has the wrong sign", "as_real(product.detach())", "as_real(-product.detach())"),
    ),
    *of(
        "probes/hessian_vector.py",
        "probes/test_probes.py::test_hessian_vector_keeps_no_graph_where_nothing_is_to_be_differentiated_twice",
        ("a graph where Q is not updated", "create_graph=bool(moved)", "create_graph=True"),
    ),
    *of(
        "probes/whitening.py",
        "probes/test_whitening.py",
        ("P of after the update", "return whitened if of_average else None", "return None"),
        (
            "damping at every update",
            "self.relative_damping(Q.dtype) * chores.damping",
            "self.relative_damping(Q.dtype)",
        ),
    ),
    *of(
        "probes/whitening.py",
        "test_everyday.py::test_the_first_step_is_the_same_whatever_the_momentum",
        ("the average is whitened with its bias", "                fitted.weight,", "                None,"),
    ),
    *of(
        "probes/whitening.py",
        "engine/test_flags.py::test_an_exception_in_the_closure_leaves_everything_as_it_was",
        ("gradients are not saved before the closure", "            start.save()\n", ""),
    ),
    *of(
        "probes/base.py",
        "probes/test_base.py",
        ("another default of the damping", ".eps) ** 0.75 if self", ".eps) ** 0.5 if self"),
    ),
    *of(
        "probes/base.py",
        "probes/test_probes.py::test_pairs_that_say_nothing_are_known_as_such",
        (
            "an infinite curvature says something",
            "between(curvature, eps**2, eps**-2)",
            "(curvature > eps**2)",
        ),
    ),
    *of(
        "probes/base.py",
        "probes/test_probes.py::test_damping_is_relative_to_the_block",
        ("damping is not relative", "ratio = damping * curvature", "ratio = damping * torch.ones_like(curvature)"),
    ),
    *of(
        "probes/base.py",
        "test_optimizer.py::test_maximize_is_minimising_the_negative",
        ("to maximise has no sign", "pair[1] = pair[1] * sign", "pass"),
    ),
    *of(
        "probes/measured.py",
        "engine/test_bucket.py::test_an_average_divided_by_its_weight_is_unbiased",
        ("a weight multiplies", "yield m / w.view(", "yield m * w.view("),
    ),
    *of(
        "probes/closures.py",
        "probes/test_probes.py::test_closure_that_adds_to_gradients_is_measured_right",
        (
            "a gradient that is added to is not seen",
            "p.grad is not grad or p.grad._version != version",
            "p.grad is not grad",
        ),
    ),
    *of(
        "probes/two_at_once.py",
        "probes/test_two_at_once.py::test_pairs_are_those_of_two_passes",
        ("δg the other way round", "both[i][1] - both[i][0]", "both[i][0] - both[i][1]"),
    ),
    *of(
        "probes/two_at_once.py",
        "probes/test_two_at_once.py::test_dropout_sees_the_same_mask_in_both",
        ("another mask for each of two", 'randomness="same"', 'randomness="different"'),
    ),
    *of(
        "probes/two_at_once.py",
        "probes/test_two_at_once.py::test_pairs_are_those_of_two_passes "
        "probes/test_two_at_once.py::test_training_is_that_of_two_passes",
        ("buffers of the moved parameters", "b.copy_(after[name][0])", "b.copy_(after[name][1])"),
    ),
    *of(
        "probes/two_at_once.py",
        "probes/test_two_at_once.py::test_buffers_that_are_replaced_come_out_too",
        ("new buffers of the moved parameters", "after[name][0].clone()", "after[name][1].clone()"),
    ),
    *of(
        "probes/restore.py",
        "engine/test_flags.py::test_an_exception_in_the_closure_leaves_everything_as_it_was",
        ("values of gradients are not restored", "grad.copy_(value)", "pass"),
    ),
    *of(
        "probes/restore.py",
        "probes/test_probes.py::test_closure_that_adds_to_gradients_is_measured_right",
        ("copies of what was written to are freed", "grad._version == self.versions[i]", "True"),
    ),
    *of(
        "probes/restore.py",
        "probes/test_probes.py::test_dropout_sees_the_same_mask_in_both_gradients",
        ("the state of the CPU is not restored", "torch.set_rng_state(self.cpu)", "pass"),
    ),
    *of(
        "probes/closure_checks.py",
        "probes/test_closure_checks.py",
        ("rounding counts as a mini-batch", "+ _ROUNDING * abs(size)", ""),
        ("multiples of the loss count as a mini-batch", "and opposite >= _OPPOSITE", ""),
        ("ranks have one loss", " * math.sqrt(number_of_ranks())", ""),
        ("gradients cleared in place are told", "grad._version == before + 1", "True"),
        ("gradients accumulated on purpose are told", "left() is grad and grad._version == version", "True"),
        ("restored buffers are told", "id(b) not in self._known and", ""),
        ("all steps are observed", "or self._steps >= STEPS", ""),
    ),
    *of(
        "probes/noise.py",
        "probes/test_noise.py",
        ("seed and step are one number", "mix(seed, self.step, position)", "mix(seed + self.step, position)"),
        ("64 bits", "return h >> 1", "return h"),
    ),
    *of(
        "probes/schedule.py",
        "probes/test_schedule.py",
        ("the rate falls for ever", "within = min(step, anneal)", "within = step"),
        ("the first step is not due", "return step == 0 or after", "return after"),
    ),
    # Operations.
    *of(
        "ops/parameters.py",
        "ops/test_parameters.py::test_what_is_called_off_changes_no_bit",
        ("a step that is called off is taken", "step.masked_fill_(~ok[step.device], 0)", "pass"),
    ),
    *of(
        "ops/parameters.py",
        "ops/test_parameters.py::test_subtract_is_plain_arithmetic",
        ("a fused step does not decay", "_fused_(thetas, steps, 1.0, decay,", "_fused_(thetas, steps, 1.0, 0.0,"),
    ),
    *of(
        "ops/parameters.py",
        "ops/test_parameters.py::test_average_is_plain_arithmetic",
        ("an average that grows", "-weight, -1.0, ok)", "-weight, 1.0, ok)"),
    ),
    *of(
        "ops/parameters.py",
        "ops/test_parameters.py::test_a_sum_beyond_half_precision_is_finite",
        (
            "a sum in half precision",
            "wide = torch.promote_types(tensors[0].dtype, torch.float32)",
            "wide = tensors[0].dtype",
        ),
    ),
    *of(
        "ops/parameters.py",
        "ops/test_parameters.py::test_others_are_not",
        ("elements in any order are fused", " and t.is_contiguous() for t in", " for t in"),
    ),
    *of(
        "ops/tensor_table.py",
        "ops/test_tensor_table.py",
        (
            "one aligned address is enough",
            "all(address % 16 == 0 for address in addresses)",
            "any(address % 16 == 0 for address in addresses)",
        ),
        ("starts may be odd", "for number in (*numels, *starts))", "for number in numels)"),
        ("the last chunk is missing", "range(-(-numel // CHUNK))", "range(numel // CHUNK)"),
    ),
    *of(
        "ops/power.py",
        "ops/test_power.py",
        ("a vector of length zero", "length.clamp_min(tiny)", "length"),
        ("one product less", "for _ in range(iterations):", "for _ in range(iterations - 1):"),
    ),
    *of(
        "ops/triangular.py",
        "ops/test_triangular.py",
        ("the kernel takes any dtype", "Q.dtype == torch.float32 and ", ""),
    ),
    *of(
        "ops/real.py",
        "ops/test_real.py",
        (
            "half precision is precise enough",
            "reduce(torch.promote_types, dtypes, torch.float32)",
            "reduce(torch.promote_types, dtypes)",
        ),
    ),
    *of(
        "ops/factors.py",
        "ops/test_factors.py",
        ("a step of zero is one", "torch.where(step > 0,", "torch.where(step >= 0,"),
        (
            "a diagonal is added to the change",
            "unsqueeze(2).to(Q.dtype), value=-1",
            "unsqueeze(2).to(Q.dtype), value=1",
        ),
        ("the asymmetry has the wrong sign", "return Q - Q.mT", "return Q.mT - Q"),
    ),
    # Engine.
    *of(
        "engine/flags.py",
        "engine/test_motion.py",
        ("one finite length is enough", "all(map(math.isfinite", "any(map(math.isfinite"),
        ("the shortest direction is finite", "lengths.amax()", "lengths.amin()"),
    ),
    *of(
        "engine/motion.py",
        "engine/test_motion.py",
        ("the length of all buckets is a sum", "for length in each]).norm()", "for length in each]).sum()"),
        (
            "max_norm lengthens",
            '(own["max_norm"] / total.to(rates[k].device)).clamp(max=1)',
            '(own["max_norm"] / total.to(rates[k].device))',
        ),
        ("to maximise is to minimise", '(-lr if own["maximize"] else lr)', "lr"),
        ("max_norm before max_rms", "[length * rate for length, rate in", "[length for length, rate in"),
        (
            "weight decay without the learning rate",
            'return group["weight_decay"] * (lr',
            'return group["weight_decay"] + 0 * (lr',
        ),
        (
            "the first dtype is the widest",
            "wide = max((length.dtype for length in each), key=lambda dtype: torch.finfo(dtype).bits)",
            "wide = each[0].dtype",
        ),
    ),
    *of(
        "engine/flags.py",
        "engine/test_flags.py::test_a_step_is_taken_if_all_flags_are_true",
        ("one flag is enough", "reduce(torch.logical_and, here)", "reduce(torch.logical_or, here)"),
    ),
    *of(
        "probes/closures.py",
        "engine/test_flags.py::test_a_loss_that_is_no_tensor_counts_too",
        ("an infinite loss is finite", "or math.isfinite(number)", "or not math.isnan(number)"),
    ),
    *of(
        "engine/stack.py",
        "engine/test_stack.py",
        ("other rows are chosen", "buffer.index_select(0, rows)", "buffer[: len(rows)].clone()"),
        (
            "a block with some gradients has none",
            "if any(i in given for i in block.params)",
            "if all(i in given for i in block.params)",
        ),
        ("gradients keep their own dtype", "block.pack(parts).to(self.dtype)", "block.pack(parts)"),
    ),
    *of(
        "engine/bucket.py",
        "engine/test_bucket.py",
        ("max_rms lengthens", "self.root_numel / length).clamp_(max=1)", "self.root_numel / length)"),
        ("max_rms of a sum", "max_rms * self.root_numel / length", "max_rms * self.numel / length"),
        (
            "momentum is the weight of the gradient",
            "grads.average_(self, 1 - momentum, limit, ok)",
            "grads.average_(self, momentum, limit, ok)",
        ),
        ("a weight of zero", ".clamp_min(torch.finfo(self.dtype).tiny)", ""),
        (
            "the length before the division",
            "d.length.to(self.dtype) / m.weight, m.weight",
            "d.length.to(self.dtype), m.weight",
        ),
    ),
    *of(
        "engine/tables.py",
        "engine/test_recorder.py::test_recorded_steps_are_steps[Whitening(of_average=True)-nothing-{}]",
        ("rows of a stack begin at one place", "starts.append(start + row * numel)", "starts.append(start)"),
    ),
    *of(
        "engine/bucket.py",
        "engine/test_recorder.py::test_a_direction_that_is_not_in_its_buffer_is_not_read_from_there",
        ("another buffer is read", "            buffer = None  # a group", "            pass  # a group"),
    ),
    *of(
        "engine/recorder.py",
        "engine/test_recorder.py::test_recorded_steps_are_steps[Whitening(of_average=True)-other_numbers-{}]",
        ("a recording does not depend on numbers", "return numbers, tables,", "return tables,"),
    ),
    *of(
        "engine/recorder.py",
        "engine/test_recorder.py::test_recorded_steps_are_steps[FiniteDifference()-other_damping-{}]",
        ("a recording does not depend on the probe", "averaging, fitted, low", "averaging, low"),
    ),
    *of(
        "engine/recorder.py",
        "engine/test_recorder.py::test_recorded_steps_are_steps[Whitening(of_average=True)-memory_moves-{}]",
        ("a recording does not depend on tables", "return numbers, tables,", "return numbers,"),
    ),
    *of(
        "engine/recorder.py",
        "engine/test_recorder.py::test_recorded_steps_are_steps[Whitening(of_average=True)-bad_gradient-{}]",
        (
            "the lengths of gradients are not looked at",
            "recorded.find_lengths(), before)",
            "recorded.find_lengths()[:0], before)",
        ),
    ),
    *of(
        "engine/recorder.py",
        "engine/test_recorder.py::test_autograd_is_told_of_steps_that_are_replayed",
        ("autograd is not told", "        torch.autograd.graph.increment_version(changed)\n", ""),
    ),
    *of(
        "engine/recorder.py",
        "ranks/test_recorded.py::test_changes_between_steps",
        (
            "a recording of ranks looks at flags of its own",
            '(ok,) = graphs.hold("ok", [work.ok[device]], torch.bool)',
            '(ok,) = graphs.hold("ok", [finite[0]], torch.bool)',
        ),
        ("ranks do not agree on lengths", "agree([*work.flags, *finite])", "agree(work.flags)"),
        ("lengths of some buckets are those of others", '("lengths", tables, aligned)', '("lengths", aligned)'),
    ),
    *of(
        "state/resting.py",
        "state/test_resting.py",
        ("blocks are stacked again and again", "self._patience *= 2", "pass"),
        ("one step is enough", "or self._times < self._patience", ""),
    ),
    *of(
        "engine/graphs.py",
        "engine/test_graphs.py",
        (
            "the first recording is dropped, however much used",
            "self._graphs[key] = self._graphs.pop(key)",
            "self._graphs[key]",
        ),
    ),
    *of(
        "engine/tensors.py",
        "engine/test_tensors.py",
        ("pairs are kept", "list(self.by_position.pop(i))", "list(self.by_position[i])"),
    ),
    *of(
        "engine/tensors.py",
        "engine/test_recorder.py::test_recorded_steps_are_steps[Whitening(of_average=True)-bad_gradient-{}]",
        (
            "a weight counts what is not usable",
            "torch.where(ok, torch.lerp(old, torch.ones_like(old), rest), old)",
            "torch.lerp(old, torch.ones_like(old), rest)",
        ),
    ),
    # Blocks, and the sample of a step.
    *of(
        "blocks.py",
        "test_blocks.py",
        ("blocks are joined along the first axis", "strict=True)], self.dim)", "strict=True)], 0)"),
        ("the bias of a transposed convolution is beside it", "p.ndim >= 2 and not transposed", "p.ndim >= 2"),
    ),
    *of(
        "sample.py",
        "engine/test_flags.py::test_an_exception_in_the_closure_leaves_everything_as_it_was",
        ("gradients are not restored after an error", "        start.restore()\n", ""),
    ),
    # State.
    *of(
        "state/checkpoint.py",
        "state/test_store.py::test_loading_neither_changes_nor_aliases_its_argument",
        ("a loaded state is that of the checkpoint", "copy=True)", "copy=False)"),
    ),
    *of(
        "state/checkpoint.py",
        "state/test_store.py::test_pickle_does_not_carry_whole_stacks "
        "state/test_store.py::test_deepcopy_continues_alike_and_apart",
        ("copies share their tensors", "{k: v.clone() for", "{k: v for"),
    ),
    *of(
        "state/checkpoint.py",
        "state/test_store.py::test_a_bad_state_dict_is_named_and_changes_nothing",
        ("whole numbers are loaded as fractions", " or _kind_of(value) != _kind_of(like)", ""),
    ),
    *of(
        "state/checkpoint.py",
        "state/test_store.py::test_numbers_of_the_checkpoint_win_over_the_constructor",
        (
            "defaults win over the checkpoint",
            "{**defaults, **without, **group}",
            "{**without, **group, **defaults}",
        ),
    ),
    *of(
        "state/options.py",
        "state/test_checks.py::test_numbers",
        (
            "momentum may be one",
            '"momentum": (lambda v: _number(v) and 0 <= v < 1,',
            '"momentum": (lambda v: _number(v) and 0 <= v <= 1,',
        ),
        ("a learning rate may be infinite", "0 <= value < math.inf", "0 <= value"),
    ),
    *of(
        "state/checkpoint.py",
        "state/test_choices.py",
        ("structures are pickled into a checkpoint", "{name: repr(choice) for name", "{name: choice for name"),
        ("choices come from the checkpoint", "map(choices.without, theirs)", "theirs"),
    ),
    *of(
        "state/loading.py",
        "state/test_choices.py",
        ("choices are lost where a checkpoint is loaded", "group.update(choices.only(before))", "pass"),
    ),
    *of(
        "state/choices.py",
        "state/test_choices.py",
        ("groups have the choices of the optimizer", "group.get(name, usual)", "usual"),
    ),
    *of(
        "state/store.py",
        "state/test_choices.py",
        ("choices may change", "            self._check_choices()\n", "            pass\n"),
        ("a group without parameters hides that it was taken out", " and len(self.groups) == len(self.choices)", ""),
        ("structures share templates", "key = id(structure), shape", "key = 0, shape"),
    ),
    *of(
        "state/layout.py",
        "state/test_choices.py",
        (
            "all groups are fitted with one structure",
            "self.store.choices[kind[0]].preconditioner",
            "self.store.choices[0].preconditioner",
        ),
    ),
    *of(
        "state/facts.py",
        "ranks/test_errors.py::test_a_structure_of_a_group_that_differs_is_named",
        ("choices of groups may differ between ranks", "[group.get(name) for group in own]", "[]"),
    ),
    *of(
        "engine/bucket.py",
        "laws/test_trust.py::test_a_step_is_not_long_along_a_direction_that_a_diagonal_factor_leaves",
        (
            "no limit of the spectrum",
            "            limit = torch.minimum(limit, spectra)\n",
            "            pass\n",
        ),
    ),
    *of(
        "engine/diagonal.py",
        "laws/test_trust.py::test_a_step_is_not_long_along_a_direction_that_a_diagonal_factor_leaves",
        ("the spectrum of a vector", "white = n**0.5 + (stack.blocks[0].numel / n) ** 0.5", "white = n**0.5"),
    ),
    *of(
        "engine/diagonal.py",
        "laws/test_trust.py::test_nor_in_the_first_steps_when_the_average_is_young",
        ("the divisor is forgotten", "else norm.to(length.dtype) / divisor", "else norm.to(length.dtype)"),
    ),
    *of(
        "groups/base.py",
        "groups/test_base.py",
        ("the scale counts once", "squares = scale.square()", "squares = scale"),
        ("the square of the spectral norm", "return square.amax((1, 2)).sqrt()", "return square.amax((1, 2))"),
    ),
    *of(
        "state/defaults.py",
        "state/test_defaults.py",
        ("curvature is updated rarely too", "if not (whitening or costs_much):", "if False:"),
        ("few numbers are updated most rarely", "every >= least and of_updates >= MUCH", "every >= least"),
        (
            "structures that draw random numbers too",
            "if not all(group.whitens for group in groups.values()):",
            "if False:",
        ),
        ("updates are rare on every device", 'all(device.type == "cpu" for *_, device in blocks)', "True"),
    ),
    *of(
        "engine/limits.py",
        "engine/test_limits.py",
        (
            "the host always looks",
            "if look and all(map(operator.le",
            "if all(map(operator.le",
        ),
        ("nobody is shortened if one is not", "all(map(operator.le", "any(map(operator.le"),
    ),
    *of(
        "engine/tensors.py",
        "engine/test_recorder.py",
        (
            "a recording looks at lengths",
            "    def can_look(self, bucket: Bucket) -> bool:\n        return False",
            "    def can_look(self, bucket: Bucket) -> bool:\n        return True",
        ),
    ),
    *of(
        "state/adding.py",
        "state/test_choices.py::test_step_sizes_of_Q_are_those_of_the_structure_unless_given",
        (
            "step sizes are those of the optimizer's structure",
            "fill(group, structure,",
            "fill(group, store.choices_of(index, {}).preconditioner,",
        ),
    ),
    *of(
        "state/loading.py",
        "state/test_store.py::test_hooks_see_the_state_before_and_after_loading",
        ("hooks of users see the state of before", ", prepend=True", ""),
    ),
    *of(
        "state/store.py",
        "state/test_store.py::test_resume_is_exact_to_the_bit",
        ("the number of steps is not loaded", "        self.clock.fill_(steps)\n", ""),
    ),
    *of(
        "state/store.py",
        "state/test_store.py::test_a_state_that_a_tool_has_dropped_is_missed",
        ("a trainable block may be missing", "not p.requires_grad and i not in needed", "not p.requires_grad"),
    ),
    *of(
        "state/store.py",
        "test_optimizer.py::test_named_parameters_name_the_culprit",
        ("names of the first group", "i - self.group_of.index(self.group_of[i])", "i"),
    ),
    *of(
        "state/checks.py",
        "state/test_checks.py::test_choices_that_do_not_go_together",
        ("bfloat16 is inverted", "precond_dtype == torch.bfloat16 and structure.inverts", "False"),
        (
            "a normalisation that does nothing is taken",
            "if normalize is not None and structure.own_normalization:",
            "if False:",
        ),
        ("secants of gradients are fitted", "probe.whitens and value in OF_SECANTS", "False"),
    ),
    *of(
        "state/skips.py",
        "state/test_skips.py",
        ("it is told again and again", "            self._done = True\n", ""),
        ("counts of a checkpoint are counted", "if counter is not self._counter:", "if self._counter is None:"),
        ("some skipped steps are told", "== now[1] - before[1]", ">= now[1] - before[1] > 0"),
    ),
    *of(
        "state/spelling.py",
        "state/test_spelling.py",
        ("keys with an option in them are refused", 'any(f"_{option}_" in parts for option in known)', "False"),
        ("keys of schedulers are refused", ", cutoff=0.85", ""),
    ),
    # Ranks.
    *of(
        "ranks/assign.py",
        "ranks/test_assign.py",
        ("the cheapest first", "key=lambda i: -costs[i]", "key=lambda i: costs[i]"),
        ("each piece of work counts one", "load + costs[i]", "load + 1"),
        ("memory costs nothing", "return flops + FLOPS_PER_BYTE * nbytes", "return flops"),
    ),
    *of(
        "ranks/team.py",
        "ranks/test_equality.py::test_structures_and_options",
        (
            "the length of all ranks is not a root",
            "return square.to(mine.device).sqrt()",
            "return square.to(mine.device)",
        ),
    ),
    *of(
        "ranks/team.py",
        "ranks/test_errors.py::test_a_gradient_that_is_not_finite_on_one_rank",
        (
            "a step of one rank is enough",
            "dist.all_reduce(number, dist.ReduceOp.MIN",
            "dist.all_reduce(number, dist.ReduceOp.MAX",
        ),
    ),
    # Planning.
    *of(
        "planning/plan.py",
        "planning/test_plan.py::test_a_budget_is_kept_and_used",
        ("a budget must not be used up", "if found.bytes_per_rank <= most:", "if found.bytes_per_rank < most:"),
    ),
    *of(
        "planning/result.py",
        "planning/test_plan.py::test_ranks_are_the_sums_of_their_blocks",
        ("the balance of one rank", "max(costs) * len(costs) / sum(costs)", "max(costs) / sum(costs)"),
        (
            "the rank that has least",
            "return max(rank.bytes for rank in self.ranks)",
            "return min(rank.bytes for rank in self.ranks)",
        ),
    ),
    *of(
        "planning/shapes.py",
        "planning/test_plan.py::test_shared_parameters_are_planned_once",
        (
            "shared parameters are planned twice",
            'known.setdefault(p, torch.empty(p.shape, dtype=p.dtype, device="meta"))',
            'torch.empty(p.shape, dtype=p.dtype, device="meta")',
        ),
    ),
    # Minimisation.
    *of(
        "minimizing/line_search.py",
        "minimizing/test_minimize.py::test_line_search_finds_a_flat_place",
        ("a steep rise is flat", "flat = abs(s) <=", "flat = s <="),
    ),
    *of(
        "minimizing/line_search.py",
        "minimizing/test_line_search.py",
        ("the other root of the cubic", "(q.slope + root - middle)", "(q.slope - root - middle)"),
    ),
    *of(
        "minimizing/descent.py",
        "minimizing/test_descent.py",
        ("the wrong conjugate direction", "- 2 * stretch * float(g.dot(d))", "+ 2 * stretch * float(g.dot(d))"),
    ),
    *of(
        "minimizing/descent.py",
        "minimizing/test_minimize.py::test_solves_with_default_settings",
        ("a slow function stops it", "(coarse and self.slow)", "self.slow"),
    ),
    *of(
        "minimizing/metric.py",
        "minimizing/test_metric.py",
        ("units the other way round", "self.unit = size / change", "self.unit = change / size"),
        ("a pair fits without a limit of its step", "lr = min(rate, self.cap)", "lr = rate"),
    ),
    *of(
        "minimizing/objective.py",
        "minimizing/test_minimize.py::test_what_fun_does_to_its_argument_does_not_matter",
        ("fun may change the point", "x.detach().reshape(self.shape).clone()", "x.detach().reshape(self.shape)"),
    ),
    *of(
        "minimizing/objective.py",
        "minimizing/test_objective.py",
        (
            "the next sample has the last value",
            "        self.sample += 1\n        self._last = None",
            "        self.sample += 1",
        ),
    ),
    *of(
        "minimizing/stochastic.py",
        "minimizing/test_stochastic.py",
        ("the steps do not become shorter", "rate * min(1.0, 2 * (1 - done))", "rate"),
        ("the result is the last point", "now.x = mean / count", "pass"),
    ),
    # Monitor.
    *of(
        "monitor/measure.py",
        "monitor/test_monitor.py::test_numbers_are_those_of_the_step",
        (
            "parameters of before are those of after",
            "as_real(local(self.params[i].detach())).clone()",
            "as_real(local(self.params[i].detach()))",
        ),
        (
            "the length of a step, not its RMS",
            "(torch.stack(squares).sum() / count).sqrt()",
            "torch.stack(squares).sum().sqrt()",
        ),
        ("Q of before is that of after", "{name: buffer.clone() for name", "{name: buffer for name"),
    ),
    *of(
        "monitor/taken.py",
        "monitor/test_monitor.py::test_the_step_size_is_that_of_the_step",
        ("the learning rate of after", "rate.detach().clone() if", "rate.detach() if"),
    ),
    *of(
        "monitor/taken.py",
        "monitor/test_monitor.py::test_blocks_of_one_shape_have_numbers_of_their_own",
        ("conditions of another block", "[row::count]", "[row:]"),
    ),
    *of(
        "monitor/history.py",
        "monitor/test_monitor.py::test_a_resumed_run_adds_to_its_file",
        ("a step that was taken again is there twice", "del column[again:]", "pass"),
    ),
    *of(
        "monitor/files.py",
        "monitor/test_monitor.py::test_a_resumed_run_adds_to_its_file",
        ("half a line stays", "                _cut(file)\n", ""),
    ),
    *of(
        "monitor/watcher.py",
        "monitor/test_monitor.py::test_the_loss_is_told_after_the_step",
        ("the last step is recorded again", "-(-step // self.every) * self.every", "step // self.every * self.every"),
    ),
    # Diagnostics.
    *of(
        "ops/lanczos.py",
        "ops/test_lanczos.py::test_lanczos_stays_orthogonal",
        ("vectors are made orthogonal once", "for _ in range(2):", "for _ in range(1):"),
        ("vectors are made orthogonal to the last two alone", "V = torch.stack(basis)", "V = torch.stack(basis[-2:])"),
    ),
    *of(
        "ops/lanczos.py",
        "test_diagnostics.py::test_matrix_free_estimates_know_their_errors",
        ("the spread is a variance", "return variance.sqrt()", "return variance"),
    ),
    *of(
        "diagnostics/operators.py",
        "test_diagnostics.py::test_matrix_free_equals_exact_on_small_problems",
        ("Q H Qᵀ with Q and its transpose swapped", "stack.group.apply_t(part) for", "stack.group.apply(part) for"),
    ),
    *of(
        "diagnostics/matrices.py",
        "test_diagnostics.py::test_exact_properties_of_known_matrices",
        ("noise through Q", "(P @ P @ R).trace()", "(P @ R).trace()"),
    ),
]


class WrongTableError(Exception):
    """A text of the table does not occur exactly once in its file."""


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Text of the file with the mutant in it."""
    text = (root / PACKAGE / mutant.file).read_text("utf-8")
    count = text.count(mutant.old)
    if count != 1:
        raise WrongTableError(f"{mutant}: its old text occurs {count} times instead of once:\n{mutant.old}")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of sources and tests, for as many runs at a time."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for k in range(count):
            tree = Path(folder) / str(k)
            for name in COPIED:
                source, target = ROOT / name, tree / name
                if source.is_dir():
                    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy2(source, target)
            trees.put(tree)
        yield trees


@contextmanager
def inserted(mutant: Mutant, tree: Path, number: int) -> Iterator[None]:
    """Have a mutant in a copy for a while."""
    path = tree / PACKAGE / mutant.file
    text, status = path.read_text("utf-8"), path.stat()
    try:
        path.write_text(mutated(mutant, tree), "utf-8")
        # Compiled files are known by the second of the source's last change, so each mutant has its own.
        os.utime(path, (number, number))
        yield
    finally:
        path.write_text(text, "utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def tested(tests: Sequence[str], tree: Path, limit: float) -> tuple[int | None, str]:
    """Exit code of pytest, or None if it took too long, and its output.

    The processes are forked from one that has imported torch, which costs more than most of the tests.
    """
    output = tree / "output.txt"
    process = WORKERS.Process(target=_run, args=(tests, tree, output))
    process.start()
    process.join(limit)
    if process.is_alive():
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None, ""
    return process.exitcode, output.read_text("utf-8", "replace") if output.exists() else ""


def _run(tests: Sequence[str], tree: Path, output: Path) -> None:
    """Run tests with the package of a copy, in a process group of their own."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree / "src"), OMP_NUM_THREADS="1")
    sys.path[:0] = [str(tree), str(tree / "src")]
    code = NOT_RUN
    try:
        import pytest

        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of hypothesis, which is imported already
        found = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
        import psgd

        if not Path(psgd.__file__).is_relative_to(tree):
            raise RuntimeError(f"the package under test is that in {psgd.__file__}")
        code = found
    except BaseException:  # else Python would end with the code of a failed test
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def judged(mutant: Mutant, number: int, trees: SimpleQueue[Path]) -> tuple[bool, str]:
    """Whether all is well with a mutant, and what became of it."""
    tree = trees.get()
    started = time.perf_counter()
    try:
        with inserted(mutant, tree, number):
            code, output = tested(mutant.tests.split(), tree, LIMIT)
    finally:
        trees.put(tree)
    took = f"{time.perf_counter() - started:5.1f} s"
    if code is None or code == FAILED or code < 0:
        if mutant.equivalent:
            return False, f"caught    {took}  {mutant}, though marked as equivalent"
        return True, f"caught    {took}  {mutant}" + (
            " (it never ends)" if code is None else " (it crashes)" * (code < 0)
        )
    if code != 0:
        return False, f"no answer {took}  {mutant}: pytest ended with {code}\n{output}"
    if mutant.equivalent:
        return True, f"equivalent{took}  {mutant}: {mutant.equivalent}"
    return False, f"SURVIVED  {took}  {mutant}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="mutants whose file and name contain this text")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="number of mutants at a time")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in str(mutant)]
    if not chosen or options.jobs < 1:
        parser.error("--only: no mutant has this text" if not chosen else "--jobs wants at least 1")
    try:
        for mutant in chosen:
            mutated(mutant)
    except WrongTableError as error:
        print(error, file=sys.stderr)
        return 1
    if options.list:
        print(*(f"{mutant}  [{mutant.tests}]" for mutant in chosen), sep="\n")
        return 0
    started = time.perf_counter()
    with copies(options.jobs) as trees:
        tree = trees.get()
        code, output = tested(sorted({test for mutant in chosen for test in mutant.tests.split()}), tree, 10 * LIMIT)
        trees.put(tree)
        if code != 0:
            print(f"without a mutant pytest ended with {code}\n{output}", file=sys.stderr)
            return 1
        print(f"the tests pass without mutants, in {time.perf_counter() - started:.0f} s", flush=True)
        bad = 0
        with ThreadPoolExecutor(options.jobs) as workers:
            for well, text in workers.map(lambda pair: judged(pair[1], pair[0], trees), enumerate(chosen, 1)):
                bad += not well
                print(text, flush=True)
    print(f"{len(chosen)} mutants in {time.perf_counter() - started:.0f} s: {len(chosen) - bad} well, {bad} not")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
