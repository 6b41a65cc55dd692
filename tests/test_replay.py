"""Recorded steps are steps, whatever changes between them.

Recording is emulated: operations are logged while they are done, and a replay does them again on the same tensors, as a
CUDA graph does. So what a recording must not contain is found on a CPU too; ``test_cuda.py`` has the real thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import psgd.fleet
import psgd.recorded
from psgd import PSGD, Monitor, Whitening
from psgd.kernels import Table
from psgd.replay import MOST, Replays


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.done.append((function, args, kwargs or {}, result))
        return result


class Recording:
    """What a graph would do. The first replay is the recording itself, which has been done already."""

    def __init__(self, done: list[tuple[Any, ...]]) -> None:
        self.done = done
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        if self.replays == 1:
            return
        written = [t for _, *rest in self.done for t in tree_leaves(rest) if isinstance(t, torch.Tensor)]
        with torch.autograd._unsafe_preserve_version_counter(tuple(written)):
            for function, args, kwargs, result in self.done:
                again = function(*args, **kwargs)
                if not any(r.alias_info is not None for r in function._schema.returns):
                    for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                        if isinstance(old, torch.Tensor):
                            old.copy_(new)


class Emulated(Replays):
    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(device, nbytes)
        self.count = 0

    def _record(self, key, function) -> bool:
        with Log() as log:
            function()
        self._keep(key, Recording(log.done))
        return True

    def __call__(self, key, function) -> None:
        super().__call__(key, function)
        self.count += key in self._graphs


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    def aim(self, params):
        thetas = [params[i] for stack in self.stacks for i in stack.positions]
        if self.table is None or [t.data_ptr() for t in thetas] != self.table.pointers:
            self.table = self._new_table(thetas)
            if self.table is not None:
                self.table.thetas = [t.detach().reshape(-1) for t in thetas]
        return self.table

    def subtract_(self, v, scale, rate, decay, usable):
        for b, (theta, (_, numel, start, first, n, after)) in enumerate(
            zip(self.thetas, self.blocks.tolist(), strict=True)
        ):
            i = torch.arange(numel)
            step = v[start : start + numel] * scale[first : first + n][(i // after) % n] * rate[b] + theta * decay[b]
            theta.copy_(torch.where(usable, theta - step, theta))

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(psgd.fleet.Fleet, "aim", aim)
    monkeypatch.setattr(Table, "subtract_", subtract_)
    monkeypatch.setattr(psgd.recorded, "Replays", Emulated)


SHAPES = [(4, 5), (5,), (7, 3), (4, 5), (6, 6), (300, 2)]
Params = list[nn.Parameter]


def nothing(optimizer: PSGD, params: Params, step: int) -> None:
    pass


def schedule(optimizer: PSGD, params: Params, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)


def schedule_of_another_number(optimizer: PSGD, params: Params, step: int) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1 * step


def device_step_size(optimizer: PSGD, params: Params, step: int) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02 / (1 + step))


def bad_gradient(optimizer: PSGD, params: Params, step: int) -> None:
    if step % 7 == 3:
        assert params[0].grad is not None
        params[0].grad[0, 0] = torch.nan


def a_layer_of_its_own_shape_rests(optimizer: PSGD, params: Params, step: int) -> None:
    if step in (9, 30, 31):
        params[2].grad = None


def never_used(optimizer: PSGD, params: Params, step: int) -> None:
    params[2].grad = None


def memory_moves(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        for p in params:
            p.data = p.data.clone()


def other_damping(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        optimizer.probe = Whitening(damping=0.5)


def other_numbers(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        optimizer.param_groups[0].update(max_norm=0.1, precond_lr=0.2, momentum=0.5, maximize=True)


def reload(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        optimizer.load_state_dict(optimizer.state_dict())


def q_is_edited(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        optimizer.state[params[4]]["Q0_root"].mul_(2)


def another_group(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        torch.manual_seed(7)
        params.append(nn.Parameter(torch.randn(4, 5)))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.005})


CHANGES: list[Callable[[PSGD, Params, int], None]] = [
    nothing,
    schedule,
    schedule_of_another_number,
    device_step_size,
    bad_gradient,
    a_layer_of_its_own_shape_rests,
    never_used,
    memory_moves,
    other_damping,
    other_numbers,
    reload,
    q_is_edited,
    another_group,
]


@pytest.mark.parametrize("options", [{}, {"update_every": 3}, {"update_every": 4, "update_anneal": 20}], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_recorded_steps_are_steps(change, options):
    def train(cuda_graph: bool) -> tuple[Params, PSGD]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
        optimizer = PSGD(params, lr=0.02, probe=Whitening(), cuda_graph=cuda_graph, **options)
        for step in range(60):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * (1 + p.detach())
            change(optimizer, params, step)
            optimizer.step()
        return params, optimizer

    recorded, optimizer = train(True)
    plain, _ = train(False)
    for mine, theirs in zip(recorded, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    if change is never_used:
        assert optimizer._whole is None
        return
    assert optimizer._whole is not None
    replays = optimizer._whole.replays
    assert len(replays._graphs) <= MOST
    assert len(replays._seen) <= MOST
    if change is not schedule_of_another_number:
        assert replays.count > 10


def test_recorded_steps_that_are_watched_are_the_same_steps():
    """And no more of them are recorded."""
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        optimizer = PSGD(params, lr=0.02, probe=Whitening(), update_every=3)
        found: list[Any] = []
        monitor = Monitor(optimizer, found.append, every=4) if watched else None
        for step in range(40):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        if monitor is not None:
            monitor.close()
            assert len(found) == 10
            numbers = [v for record in found for b in record.blocks for v in (b.q_step, b.residual, b.update_rms)]
            assert all(v is not None and v > 0 for v in numbers)
        assert optimizer._whole is not None
        replays = optimizer._whole.replays
        assert replays.count > 10
        results.append((params, replays.count, len(replays._graphs)))
    assert results[0][1:] == results[1][1:]
    assert all(map(torch.equal, results[0][0], results[1][0]))


def test_the_least_used_recording_is_dropped():
    replays = Emulated(torch.device("cpu"), 0)
    for key in range(2 * MOST):
        for _ in range(4):
            replays((key,), lambda: None)
    assert len(replays._graphs) == MOST
    assert (2 * MOST - 1,) in replays._graphs
    assert (0,) not in replays._graphs


def test_numbers_stay_at_their_places():
    replays = Emulated(torch.device("cpu"), 0)
    first = replays.hold("lr", [0.1, torch.tensor(0.2)], torch.float64)
    assert [float(place) for place in first] == pytest.approx([0.1, 0.2])
    second = replays.hold("lr", [0.3, torch.tensor([0.4])], torch.float64)
    assert [place.data_ptr() for place in first] == [place.data_ptr() for place in second]
    assert [float(place) for place in second] == pytest.approx([0.3, 0.4])
