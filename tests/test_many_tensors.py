"""Cost with thousands of tensors: memory and time are linear in their number, with or without all gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from psgd import PSGD, Whitening, plan

from .peak import Peak

#: bytes beyond the documented multiples of parameters and ``Q`` that a tensor costs
PER_TENSOR = 400


def many(count: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """As many parameters of each shape, one after the other, with gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(count) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def new(params: list[Tensor], **options: Any) -> PSGD:
    return PSGD(params, lr=0.01, probe=Whitening(), **options)


def documented(optimizer: PSGD, params: list[Tensor]) -> int:
    """Bytes that a step may use beyond parameters, gradients and state."""
    factors = sum(stack.group.nbytes() for stack in optimizer.stacks)
    return 5 * sum(p.nbytes for p in params) + 2 * factors + PER_TENSOR * len(params)


def state_bytes(optimizer: PSGD) -> int:
    return sum(buffer.nbytes for stack in optimizer.stacks for buffer in stack.buffers().values())


@contextmanager
def one_thread() -> Iterator[None]:
    """What one core computes: the time of a process counts all of its threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds(function: Callable[[], object]) -> float:
    """Time of the processor, which others that use it do not add to."""
    start = time.process_time()
    function()
    return time.process_time() - start


def check_memory(params: list[Tensor]) -> None:
    with Peak() as peak:
        optimizer = new(params)
        optimizer.step()
    state = state_bytes(optimizer)
    assert peak.peak <= 1.1 * (state + documented(optimizer, params))
    assert peak.bytes <= 1.1 * state + PER_TENSOR * len(params)


@pytest.mark.parametrize("shapes", [[(16, 16)], [(16, 16), (16,)], [(4, 3, 2), (5,), (3, 4)], [(1,)]], ids=str)
def test_memory_is_linear_in_the_number_of_tensors(shapes: list[tuple[int, ...]]):
    """From the first step on, and of what stays after it."""
    check_memory(many(2000 // len(shapes), *shapes))


@pytest.mark.slow
def test_memory_of_ten_thousand_tensors():
    check_memory(many(10_000, (16, 16)))


@pytest.mark.slow
def test_the_first_step_of_ten_thousand_tensors():
    params = many(10_000, (16, 16))
    with one_thread():
        few, all_of_them = (min(seconds(lambda p=p: new(p).step()) for _ in range(2)) for p in (params[:2500], params))
    # A second and 20 µs for each tensor on a machine that does nothing else; here others may be at work.
    assert all_of_them < 2 * (1 + 20e-6 * len(params))
    # Four times as many tensors: in proportion it would be 4, and 16 if each tensor met all others.
    assert all_of_them < 10 * few + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("what", ["state_dict", "load_state_dict", "repr", "zero_grad", "plan", "add_param_group"])
def test_nothing_is_quadratic(what: str):
    params = many(5_000, (4, 4))
    optimizer = new(params)
    optimizer.step()
    saved = optimizer.state_dict()
    tasks: dict[str, Callable[[], object]] = {
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: (optimizer.load_state_dict(saved), optimizer.step()),
        "repr": lambda: repr(optimizer),
        "zero_grad": optimizer.zero_grad,
        "plan": lambda: str(plan(params, world_size=4)),
        "add_param_group": lambda: new(params[:1]).add_param_group({"params": params[1:]}),
    }
    with one_thread():  # if others were at work, look once more
        assert any(seconds(tasks[what]) < 0.5 + 500e-6 * len(params) for _ in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("missing", [1, 300])
def test_a_step_without_a_few_gradients_costs_little_more_than_a_full_one(missing: int):
    """Two optimizers take turns, so that both do the same chores; others lack a gradient at every step.

    What few blocks had is copied, and copied back, which costs at most as much again: many small tensors are made, and
    Python looks for garbage among them. The least time is that without disturbance.
    """
    full, part = many(3000, (16, 16)), many(3000, (16, 16))
    first, second = new(full), new(part)
    with_all, with_some = [], []
    with one_thread():
        for step in range(14):
            without = part[step * 7 : step * 7 + missing]
            grads = [p.grad for p in without]
            for p in without:
                p.grad = None
            with_some.append(seconds(second.step))
            with_all.append(seconds(first.step))
            for p, grad in zip(without, grads, strict=True):
                p.grad = grad
    assert min(with_some) < 2 * min(with_all)


@pytest.mark.slow
def test_a_mixture_of_experts():
    """6,000 tensors, of which other ones have gradients at every step: few, about half, or most.

    An optimizer that has only some of the experts takes the same steps with them, and at every step those without
    gradients keep their bits.
    """
    shapes = [(8, 6), (8,)]
    params = many(3000, *shapes)
    experts = list(zip(params[::2], params[1::2], strict=True))
    watched = range(0, len(experts), 75)
    few = [p.detach().clone().requires_grad_() for e in watched for p in experts[e]]
    optimizer, small = new(params, weight_decay=0.1), new(few, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    grads = [p.grad for p in params]

    def bits(owner: PSGD, p: Tensor) -> list[Tensor]:
        state = [value for name, value in owner.state[p].items() if name not in ("step", "skipped")]
        return [value.detach().clone() for value in (p, *state)]

    most_memory = 0
    for step, share in enumerate([1.0, 0.05, 0.5, 0.95, 0.02, 0.7, 0.999, 0.3]):
        active = torch.rand(len(experts), generator=generator) <= share
        for i, p in enumerate(params):
            p.grad = grads[i] * (1 + 0.1 * step) if active[i // 2] else None
        for k, p in enumerate(few):
            e = watched[k // 2]
            p.grad = None if experts[e][k % 2].grad is None else experts[e][k % 2].grad.clone()
        resting = [p for e in watched for p in experts[e] if p.grad is None]
        before = [bits(optimizer, p) for p in resting]
        with Peak() as peak:
            optimizer.step()
        if step:  # the first one also makes the stacks
            most_memory = max(most_memory, peak.peak)
        small.step()
        for p, old in zip(resting, before, strict=True):
            assert all(map(torch.equal, bits(optimizer, p), old))
    assert most_memory <= 1.1 * documented(optimizer, params)
    for k, p in enumerate(few):
        for ours, theirs in zip(bits(optimizer, experts[watched[k // 2]][k % 2]), bits(small, p), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not optimizer.state[params[0]]["skipped"]
