"""Measurements of one step, on which all ranks agree, and the work of the step that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .engine import Pairs, Tensors, Work, flags
from .ops import as_real, part_of
from .ops.agreement import Fact
from .probes import ClosureChecks, Draw, Evaluation, Gradients, Probe, is_due, rate_of_Q
from .ranks import Ranks
from .state import Store, checks, facts

_ADVICE = "PSGD wants it to be the same on all ranks"


@dataclass
class Sample:
    """Measurements of the probe in one step.

    Args:
        now: number of steps before this one
        evaluation: loss, gradients and pairs
        grads: gradients by position, without missing and empty ones
        due: further work of the update of ``Q``, see ``Probe.chores``, for each param group whose ``Q`` is due
    """

    now: int
    evaluation: Evaluation
    grads: dict[int, Tensor]
    due: dict[int, Hashable]


def measure(
    closure: Callable[[], Any] | None,
    probe: Probe,
    store: Store,
    ranks: Ranks,
    error_if_nonfinite: bool,
    observed: ClosureChecks,
) -> Sample:
    """Evaluate the closure by the probe; with several ranks, an error on one rank raises on all of them.

    If anything fails, all gradients are restored.
    """
    sample = Sample(int(store.clock), Evaluation(None, []), {}, {})
    start, caught = Gradients(()), ranks.catch()
    try:
        with caught:
            _check(closure, probe, store)
            start = Gradients(store.params)
            now = sample.now = int(store.clock)  # the check may have started the state anew
            draw = _noise(store, now)
            sample.due = {
                g: probe.chores(now, rate_of_Q(group, now))
                for g, group in enumerate(store.groups)
                if is_due(group, now)
            }
            moved = [i for i, g in enumerate(store.group_of) if g in sample.due and 0 not in store.kinds[i][0]]
            watched = observed.watch(closure, probe, store.params)
            sample.evaluation = probe(watched, store.params, moved, lambda i: part_of(draw(i), store.params[i]), start)
            sample.grads = checks.gradients(store.kinds, sample.evaluation.grads, store.name)
            observed.judge(sample.evaluation)
        step = f"step {sample.now}"
        ranks.same(step, lambda: facts_of_step(sample, store, error_if_nonfinite), _ADVICE, caught.error)
        sample.grads = ranks.align(sample.grads, store.params)
        if error_if_nonfinite:
            loss = ranks.deciding_loss(sample.evaluation.loss)
            with ranks.catch() as caught:
                checks.finite(loss, sample.grads, sample.now, store.name)
            ranks.together(caught.error, step)
    except BaseException:
        start.restore()
        raise
    finally:
        del caught  # the traceback of an error refers to this frame, which would keep tensors of the closure alive
    return sample


def work_of(sample: Sample, probe: Probe, store: Store, ranks: Ranks) -> Work:
    """Work of the step, with whole gradients and pairs of the blocks of this rank."""
    evaluation = sample.evaluation
    decisions = flags.loss_is_finite(ranks.deciding_loss(evaluation.loss))
    for group in store.groups:
        decisions += flags.rate_is_valid(group["lr"])
    mine, evaluation.pairs, checked = ranks.gather(sample.grads, evaluation.pairs, store.params)
    due = sample.due
    if not probe.whitens:  # without a pair there is nothing to fit to
        measured = {store.group_of[i] for i in evaluation.pairs}
        due = {g: chores for g, chores in due.items() if g in measured}
    return Work(
        store.buckets(mine),
        Tensors(mine),
        Pairs(evaluation.pairs),
        due,
        [_young(group, sample.now) for group in store.groups],
        _noise(store, sample.now),
        given=mine,
        flags=[*decisions, *checked],
    )


def _young(group: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """Param group with the step size of ``Q`` at this step, see ``rate_of_Q``."""
    rate = rate_of_Q(group, step)
    return group if rate == group["precond_lr"] else {**group, "precond_lr": rate}


def _noise(store: Store, step: int) -> Callable[[int], Tensor]:
    """Function that returns normal numbers for the parameter at a position, from seed, step and position alone."""
    draw = Draw(step)
    return lambda i: draw(as_real(store.params[i]), store.options_of(i)["seed"], i)


def _check(closure: Callable[[], Any] | None, probe: Probe, store: Store) -> None:
    store.notice_changes()
    store.check_numbers()
    if closure is None and probe.needs_closure:
        raise ValueError(f"closure=None: {type(probe).__name__} wants step(closure); Whitening works without one")
    if closure is not None and not callable(closure):
        raise TypeError(f"closure={closure!r}: step wants a function, or None")
    store.check_kinds()


def facts_of_step(sample: Sample, store: Store, error_if_nonfinite: bool) -> list[Fact]:
    """Facts that must agree in a step: else ranks would move parameters differently, or wait for each other forever."""
    pairs = sample.evaluation.pairs
    return [
        Fact(lambda _: "the number of steps taken", [store.clock]),
        Fact(lambda _: "error_if_nonfinite", [error_if_nonfinite]),
        *facts.of_groups(store),
        Fact(
            lambda i: f"whether {store.name(i)} has a gradient", [i in sample.grads for i in range(len(store.params))]
        ),
        Fact(
            lambda i: f"whether a pair was measured for {store.name(i)}", [i in pairs for i in range(len(store.params))]
        ),
    ]
