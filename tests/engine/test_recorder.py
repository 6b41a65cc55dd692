"""Recorded steps are steps, whatever changes between them.

Recording is emulated, and so are the kernels of a table, see ``emulated.py``: what a recording must not contain is
found on a CPU too. ``test_cuda.py`` has the real thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from psgd import PSGD, Diagonal, FiniteDifference, HessianVector, Kronecker, Monitor, Whitening, c2
from psgd.engine.graphs import MOST
from psgd.groups.pooled import Pooled

from ..emulated import Emulated, emulated_graphs, graphs_made, without_kernels


@pytest.fixture(autouse=True)
def counted() -> Iterator[Counter[str]]:
    """Number of steps that were recorded or replayed."""
    with emulated_graphs() as total:
        yield total


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


def unused_at_first(optimizer: PSGD, params: Params, step: int) -> None:
    for p in (params[0], params[2]) if step < 20 else ():
        p.grad = None


def memory_moves(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        for p in params:
            p.data = p.data.clone()


def other_damping(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        optimizer.probe = type(optimizer.probe)(damping=0.5)


def other_numbers(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        numbers = {"precond_lr": 0.2, "precond_boost": 1.0}  # so that the chores are those of before
        optimizer.param_groups[0].update(max_norm=0.1, momentum=0.5, maximize=True, **numbers)


def momentum_off_and_on(optimizer: PSGD, params: Params, step: int) -> None:
    if step % 12 == 0:
        optimizer.param_groups[0]["momentum"] = 0.0 if step % 24 == 0 else 0.9


def some_are_maximised(optimizer: PSGD, params: Params, step: int) -> None:
    """Also of blocks of one shape, in another param group."""
    if step == 0:
        params.append(nn.Parameter(torch.randn(4, 5, dtype=torch.float64)))
        group = {"params": params[-1], "maximize": True, "precond_lr": 0.05, "weight_decay": 0.1}
        optimizer.add_param_group(group)


def average_of_other_strides(optimizer: PSGD, params: Params, step: int) -> None:
    if step == 25:
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            if "momentum" in state and state["momentum"].ndim == 2:
                state["momentum"] = state["momentum"].T.contiguous().T
        optimizer.load_state_dict(saved)


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
    momentum_off_and_on,
    some_are_maximised,
    average_of_other_strides,
    reload,
    q_is_edited,
    another_group,
]


#: those that change gradients do so whenever there are new ones
OF_GRADIENTS = (bad_gradient, a_layer_of_its_own_shape_rests, never_used, unused_at_first)
#: those that meet what is whitened: averages or gradients
OF_AVERAGES = (nothing, bad_gradient, memory_moves, momentum_off_and_on, average_of_other_strides, reload)
PROBES = [Whitening(), Whitening(of_average=False), FiniteDifference(), HessianVector()]
#: so many that what is done at every eighth step is recorded and replayed, and all that begins anew at step 25 is too
STEPS = 34


def trained(
    probe: Any, change: Callable[[PSGD, Params, int], None], steps: int = STEPS, **options: Any
) -> tuple[Params, list[Emulated]]:
    """Train by gradients ``r (1 + θ)`` with random ``r``, of a loss if the probe wants one.

    Returns:
        the parameters, and all recordings that were made, see ``graphs_made``
    """
    with graphs_made() as made:
        return _trained(probe, change, steps, **options), made


def _trained(probe: Any, change: Callable[[PSGD, Params, int], None], steps: int, **options: Any) -> Params:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    second = options.pop("second", None)  # a param group of its own for every other parameter
    groups = params if second is None else [{"params": params[::2]}, {"params": params[1::2], **second}]
    optimizer = PSGD(groups, lr=0.02, probe=probe, max_rms=1.1, **{"update_every": 1, **options})
    for step in range(steps):

        def slopes(step=step) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(step)
            return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params]

        def set_gradients(step=step, slopes=slopes) -> None:
            for p, r in zip(params, slopes(), strict=True):
                p.grad = r * (1 + p.detach())
            if change in OF_GRADIENTS:
                change(optimizer, params, step)

        def loss(slopes=slopes) -> torch.Tensor:
            return torch.stack([(r * (p + p.square() / 2)).sum() for p, r in zip(params, slopes(), strict=True)]).sum()

        if change not in OF_GRADIENTS:
            change(optimizer, params, step)
        if isinstance(probe, Whitening):
            set_gradients()
            optimizer.step()
        else:
            optimizer.step(loss if isinstance(probe, HessianVector) else set_gradients)
    return params


def trained_by_torch(*args: Any, **options: Any) -> Params:
    """Without kernels, and so without recordings."""
    with without_kernels():
        params, made = trained(*args, **options)
        assert not made
    return params


def test_without_recordings_a_step_is_the_same_too():
    recorded, _ = trained(Whitening(), nothing)
    done, made = trained(Whitening(), nothing, cuda_graph=False)
    assert len(made) == 1  # the same work, launched from the host
    assert len(made[0]) == 0
    assert all(map(torch.equal, recorded, done))


def assert_same(recorded: Params, plain: Params, probe: Any) -> None:
    """But for rounding, which a difference of gradients magnifies."""
    for mine, theirs in zip(recorded, plain, strict=True):
        tolerance = 1e-6 if isinstance(probe, FiniteDifference) or mine.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


#: every change with an update at every step; with rare ones those that meet the keys of recordings, or a P that is kept
RARELY = [nothing, bad_gradient, a_layer_of_its_own_shape_rests, memory_moves]
KINDS = [(change, {}) for change in CHANGES]
KINDS += [
    (change, options)
    for change in RARELY
    for options in ({"update_every": 3}, {"update_every": 4, "update_anneal": 20})
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "options"), KINDS, ids=lambda kind: getattr(kind, "__name__", str(kind)))
@pytest.mark.parametrize("probe", PROBES, ids=repr)
def test_recorded_steps_are_steps(probe, change, options):
    if isinstance(probe, HessianVector) and (change not in (nothing, other_damping, reload) or options):
        pytest.skip("it finds gradients by itself, or FiniteDifference has shown the same")
    if isinstance(probe, Whitening) and not probe.of_average and change not in OF_AVERAGES:
        pytest.skip("what is whitened makes no difference here")
    recorded, made = trained(probe, change, **options)
    plain = trained_by_torch(probe, change, **options)
    assert_same(recorded, plain, probe)
    graphs = made[-1]
    assert len(graphs) <= MOST
    assert graphs.remembered <= MOST
    if change is not schedule_of_another_number:
        assert graphs.count > 3
        assert sum(each.count for each in made) > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.0}, {"momentum": 0.5}, {"criterion": c2}, {"adapt_lr": 0.1}],
    ids=["no momentum", "momentum", "c2", "adapt_lr"],
)
@pytest.mark.parametrize("probe", PROBES, ids=repr)
def test_with_and_without_an_average(probe, options):
    if isinstance(probe, Whitening) and "criterion" in options:
        pytest.skip("draws random numbers")
    recorded, made = trained(probe, nothing, **options)
    plain = trained_by_torch(probe, nothing, **options)
    assert_same(recorded, plain, probe)
    assert made[-1].count > 20


@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES, ids=repr)
def test_groups_with_structures_of_their_own_are_recorded_if_all_can_be(probe):
    with_another = {"preconditioner": Kronecker(max_dense=4), "update_every": 2}
    recorded, made = trained(probe, nothing, second=with_another)
    plain = trained_by_torch(probe, nothing, second=with_another)
    assert_same(recorded, plain, probe)
    assert made[-1].count > 10
    without = {"steps": 6, "second": {"preconditioner": Diagonal()}}
    some, made = trained(probe, nothing, **without)
    assert not made
    assert_same(some, trained_by_torch(probe, nothing, **without), probe)


def test_numbers_and_parameters_of_two_dtypes_are_recorded_too():
    def train() -> Params:
        torch.manual_seed(0)
        kinds = [((4, 4), torch.bfloat16), ((4,), torch.float32), ((), torch.float32), ((4, 4), torch.float32)]
        params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape, dtype in kinds]
        optimizer = PSGD(params, lr=0.01, probe=Whitening())
        for _ in range(40):
            for p in params:
                p.grad = torch.randn(p.shape).to(p.dtype)
            optimizer.step()
        return params

    with graphs_made() as made:
        recorded = train()
    assert made[-1].count > 10
    with without_kernels():
        plain = train()
    for mine, theirs in zip(recorded, plain, strict=True):
        tolerance = 0.02 if mine.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_a_pair_that_is_too_small_is_an_error():
    class Odd(HessianVector):
        def __call__(self, *args):
            result = super().__call__(*args)
            result.pairs = {i: (dtheta, dgrad[:3]) for i, (dtheta, dgrad) in result.pairs.items()}
            return result

    with pytest.raises(RuntimeError, match="invalid"):
        trained(Odd(), nothing)


def test_a_probe_with_a_damping_of_its_own_is_not_recorded():
    class Odd(FiniteDifference):
        def damp(self, dtheta, dgrad):
            return super().damp(dtheta, dgrad)

    _, made = trained(Odd(), nothing, steps=10)
    assert not made


def test_after_a_recording_that_failed_steps_are_steps():
    class Failing(Emulated):
        def _record(self, key, function) -> bool:
            """Python does everything, and the device nothing."""
            tensors = [t for t in everything if t.numel() > 0]
            before = [t.detach().clone() for t in tensors]
            function()
            for t, value in zip(tensors, before, strict=True):
                t.data.copy_(value)
            return False

    plain = trained_by_torch(Whitening(), nothing, update_every=3)
    everything: list[torch.Tensor] = []

    def remember(optimizer: PSGD, params: Params, step: int) -> None:
        everything[:] = [*params, *(t for state in optimizer.state.values() for t in state.values())]
        everything.extend(
            f._kept[1] for stack in optimizer.stacks for f in stack.group.factors if getattr(f, "_kept", 0)
        )

    with emulated_graphs(Failing):
        params, _ = trained(Whitening(), remember, update_every=3)
    assert_same(params, plain, Whitening())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_another_order_are_recorded_too(dtype, counted):
    """Those of few bits are averaged in more."""
    results = []
    for transposed in (False, True):
        counted.clear()
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(6, 6, dtype=dtype)), nn.Parameter(torch.randn(6, dtype=dtype))]
        optimizer = PSGD(params, lr=0.02, probe=Whitening())
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                grad = torch.randn(p.shape, generator=generator).to(dtype)
                p.grad = grad.T.contiguous().T if transposed and step % 2 and grad.ndim > 1 else grad
            optimizer.step()
        assert counted["replays"] > 10
        results.append(params)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_recorded_steps_that_are_watched_are_the_same_steps():
    """And no more of them are recorded."""
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        optimizer = PSGD(params, lr=0.02, probe=Whitening(), update_every=3)
        found: list[Any] = []
        monitor = Monitor(optimizer, found.append, every=4) if watched else None
        with graphs_made() as made:
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
        graphs = made[-1]
        assert graphs.count > 10
        results.append((params, graphs.count, len(graphs)))
    assert results[0][1:] == results[1][1:]
    assert all(map(torch.equal, results[0][0], results[1][0]))


def test_two_gradients_at_once_are_recorded(counted):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    optimizer = PSGD(model.parameters(), lr=0.1, probe=FiniteDifference(module=model, batched=True))
    losses = [float(optimizer.step(lambda: (model(x) - y).square().mean())) for _ in range(40)]
    assert losses[-1] < 0.7 * losses[0]
    assert counted["replays"] > 30


def test_steps_are_recorded_if_a_whole_param_group_never_has_gradients(counted: Counter[str]):
    used, unused = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = PSGD([{"params": used.parameters()}, {"params": unused.parameters()}], lr=0.01, probe=Whitening())
    before = [p._version for p in unused.parameters()]
    for _ in range(40):
        optimizer.zero_grad()
        used(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert counted["replays"] > 20
    assert [p._version for p in unused.parameters()] == before


@pytest.mark.slow
@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference()], ids=repr)
def test_parameters_that_never_have_gradients_do_not_keep_others_from_being_recorded(probe):
    """Of a shape that others have, and of one that no other has; when they get gradients, they are recorded too."""
    recorded, made = trained(probe, unused_at_first)
    plain = trained_by_torch(probe, unused_at_first)
    assert_same(recorded, plain, probe)
    first, *_, last = made
    assert first.count > 10
    assert last is not first
    assert last.count > 3


def test_blocks_that_rest_keep_their_state_to_the_bit(counted: Counter[str]):
    theta, unused = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    optimizer = PSGD([theta, unused], lr=0.01, probe=Whitening(), update_every=1)
    for step in range(30):
        theta.grad = torch.randn(4, 3)
        unused.grad = torch.randn(4, 3) if step < 5 else None
        if step == 5:
            before = [unused.detach().clone(), *(t.clone() for k, t in optimizer.state[unused].items() if k != "step")]
        optimizer.step()
    after = [unused, *(t for k, t in optimizer.state[unused].items() if k != "step")]
    assert all(map(torch.equal, before, after))
    assert counted["replays"] > 15


def test_autograd_is_told_of_steps_that_are_replayed(counted: Counter[str]):
    """Parameters and ``Q`` change in memory, which it cannot see: their versions change too."""
    theta = nn.Parameter(torch.randn(4, 3))
    optimizer = PSGD([theta], lr=0.01, probe=Whitening(), update_every=1)
    for _ in range(40):
        theta.grad = torch.randn(4, 3)
        tensors = [theta, optimizer.stacks[0].group.buffers()["Q0_root"]]
        before = [t._version for t in tensors]
        optimizer.step()
        assert all(t._version > version for t, version in zip(tensors, before, strict=True))
    assert counted["replays"] > 20


class FadingWhitening(Whitening):
    """Whitening with steps of ``Q`` that depend on how often it was called, which a recording cannot know."""

    calls = 0

    def fit_(self, Q, measured, criterion, lr, ok):
        self.calls += 1
        return super().fit_(Q, measured, criterion, lr / self.calls, ok)


class OwnDescent(FiniteDifference):
    """Differences with a descent of their own."""

    def descend_(self, Q, pairs, sign, criterion, lr, ok):
        super().descend_(Q, pairs, sign, criterion, 0.5 * lr, ok)


@pytest.mark.parametrize("kind", [FadingWhitening, OwnDescent])
def test_a_probe_with_a_fit_of_its_own_is_recorded_only_if_it_says_so(kind):
    recorded, made = trained(kind(), nothing, steps=12)
    assert not made
    assert_same(recorded, trained_by_torch(kind(), nothing, steps=12), kind())


def test_another_probe_is_another_recording():
    def replace_probe(optimizer: PSGD, params: Params, step: int) -> None:
        if step == 25:
            optimizer.probe = Whitening(of_average=False, damping=0.3)

    recorded, _ = trained(Whitening(), replace_probe)
    assert_same(recorded, trained_by_torch(Whitening(), replace_probe), Whitening())


def test_a_direction_that_is_not_in_its_buffer_is_not_read_from_there(monkeypatch):
    """A fast path may ignore where its result is to be: it is then slower, not wrong."""
    precondition = Pooled.precondition
    monkeypatch.setattr(Pooled, "precondition", lambda self, gs, keep=False, outs=None: precondition(self, gs, keep))
    mine, _ = trained(FiniteDifference(), nothing)
    assert_same(mine, trained_by_torch(FiniteDifference(), nothing), FiniteDifference())


@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference()], ids=repr)
def test_a_param_group_may_rest_for_a_step_without_ending_the_recordings(probe, counted: Counter[str]):
    def train() -> Params:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 5), (5,), (4, 5))]
        optimizer = PSGD([{"params": params[:2]}, {"params": params[2:], "momentum": 0.5}], lr=0.01, probe=probe)
        for step in range(60):
            used = params[:2] if step % 4 == 3 else params

            def closure(used=used):
                optimizer.zero_grad()
                loss = sum((p - 1).square().sum() + p.sin().sum() for p in used)
                loss.backward()
                return loss

            optimizer.step(closure)
        return params

    with graphs_made() as made:
        recorded = train()
    assert len(made) == 1
    assert counted["replays"] > 30
    with without_kernels():
        plain = train()
    assert_same(recorded, plain, probe)
