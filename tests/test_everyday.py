"""Everyday training: ``PSGD(model.parameters(), lr=…, probe=Whitening())`` in the loops that people write."""

from __future__ import annotations

import copy
import itertools
import operator
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, FiniteDifference, Joint, Kronecker, LowRank, Whitening
from psgd.groups.diagonal import DiagonalFactor
from psgd.groups.near_symmetric import NearSymmetric

from .cases import batch, small_model, train


def loop(
    model: nn.Module,
    optimizer: PSGD,
    steps: int = 80,
    first: int = 0,
    context: Callable[[], object] = nullcontext,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> list[float]:
    """The ordinary loop of torch."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step, dtype)
        optimizer.zero_grad()
        with context():
            loss = nn.functional.mse_loss((forward or model)(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def falls(losses: list[float], to: float = 0.5) -> bool:
    tenth = len(losses) // 10
    return sum(losses[-2 * tenth :]) / 2 < to * sum(losses[:tenth])


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: nn.Module, b: nn.Module, **tolerance: float) -> None:
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, **tolerance)


# -- that it trains ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_average", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.0, 0.5, 0.95])
def test_the_ordinary_loop_trains(momentum: float | None, of_average: bool):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(of_average), momentum=momentum)
    assert falls(loop(model, optimizer))


def test_gradients_and_their_average_are_not_the_same_to_whiten():
    """But without momentum they are."""
    for momentum, equal in ((0.9, False), (0.0, True)):
        results = []
        for of_average in (False, True):
            model = small_model()
            loop(model, PSGD(model.parameters(), lr=0.01, probe=Whitening(of_average), momentum=momentum), 5)
            results.append(weights(model))
        assert all(torch.allclose(*pair) for pair in zip(*results, strict=True)) == equal


@pytest.mark.parametrize("of_average", [False, True])
def test_the_first_step_is_the_same_whatever_the_momentum(of_average: bool):
    """An average of one gradient is that gradient: ``Q`` sees it as it is, too.

    Without momentum there is one product with ``P`` less, and it is the ``P`` of before the update that is used.
    """
    moved, Qs = [], []
    for momentum in (0.5, 0.99, 0.0):
        model = small_model(torch.float64)
        optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(of_average), momentum=momentum)
        loop(model, optimizer, 1)
        moved.append(weights(model))
        Qs.append([optimizer.state[p]["Q0_root"].clone() for p in model.parameters()])
    for results in (moved if of_average else moved[:2], Qs):
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("schedule", [{}, {"update_every": 2, "update_anneal": 10}, {"update_every": 8}], ids=str)
def test_once_in_a_while_factors_are_turned_back_to_symmetry(schedule):
    model = small_model(torch.float64)
    optimizer = PSGD(model.parameters(), lr=0.01, precond_lr=0.3, probe=Whitening(), **schedule)
    skew = []
    for step in range(60 * schedule.get("update_every", 1)):
        loop(model, optimizer, 1, first=step)
        Q = optimizer.state[model[3].weight]["Q0_root"]
        skew.append(float(torch.linalg.matrix_norm(Q - Q.mT) / torch.linalg.matrix_norm(Q)))
    assert sum(b < 0.7 * a for a, b in itertools.pairwise(skew)) >= 3
    assert max(skew) < 0.4


@pytest.mark.parametrize("precond_lr", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(8,), (4, 3)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_however_long_its_steps_no_direction_of_q_is_lost(shape: tuple[int, ...], precond_lr: float, seed: int):
    """What is far from symmetry moves ``P`` elsewhere: long steps are turned back at once."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -1, 8)[:, None] if len(shape) == 1 else torch.logspace(0, -1, 12).view(shape)
    turn, _ = torch.linalg.qr(torch.randn(shape[0], shape[0], generator=generator))
    theta = torch.zeros(shape, requires_grad=True)
    optimizer = PSGD([theta], lr=0.0, probe=Whitening(), momentum=0.0, precond_lr=precond_lr)
    for _ in range(800):
        g = torch.randn(shape[0], *(shape[1:] or (1,)), generator=generator)
        theta.grad = (turn @ (g * scales)).view(shape)
        optimizer.step()
    for factor in optimizer.stacks[0].group.factors:
        sizes = torch.linalg.svdvals(factor.dense()[0].double())
        assert sizes.max() < 100 * sizes.min()


RARELY = {"update_every": 2, "update_anneal": 10}


#: every precision with both of what is whitened and with both schedules, which take turns
@pytest.mark.parametrize(("schedule", "of_average"), [({}, False), (RARELY, True)], ids=str)
@pytest.mark.parametrize("precond_dtype", [None, torch.bfloat16, torch.float64])
def test_a_row_that_was_dead_for_long_does_no_harm(schedule, of_average: bool, precond_dtype):
    """Nothing bounds what has no gradient, but the damping."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(12, 8, requires_grad=True)
    optimizer = PSGD([theta], lr=0.01, probe=Whitening(of_average), precond_dtype=precond_dtype, **schedule)
    sizes = []
    for step in range(1200):
        theta.grad = torch.randn(12, 8, generator=generator)
        if step < 1000:
            theta.grad[:3] = 0
        before = theta.detach().clone()
        optimizer.step()
        sizes.append((theta.detach() - before).norm().item())
    state = optimizer.state[theta]
    assert int(state["skipped"]) == 0
    assert max(float(v.abs().max()) for k, v in state.items() if k.startswith("Q")) < 1e4
    assert max(sizes) < 0.01 * 1.1 * 96**0.5 * 1.01
    assert sizes[-1] > 0.3 * sizes[900]


@pytest.mark.parametrize("probe", [Whitening(), Whitening(of_average=False), FiniteDifference()], ids=repr)
@pytest.mark.parametrize("update_every", [1, 2])
def test_q_may_be_more_precise_than_the_parameters(probe, update_every: int):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=probe, precond_dtype=torch.float64, update_every=update_every)
    losses = train(model, optimizer, 0, 60)
    assert sum(losses[-10:]) < sum(losses[:10])


def test_triangular_and_symmetric_factors_are_not_mistaken_for_each_other():
    model = small_model()
    saved = PSGD(model.parameters(), preconditioner=Kronecker(inverse_free=False)).state_dict()
    with pytest.raises(ValueError, match="Q0_full"):
        PSGD(model.parameters()).load_state_dict(saved)


def test_a_closure_takes_the_same_steps():
    loops, closures = small_model(), small_model()
    loop(loops, PSGD(loops.parameters(), lr=0.01, probe=Whitening()), 10)
    optimizer = PSGD(closures.parameters(), lr=0.01, probe=Whitening())
    for step in range(10):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(closures(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert same(weights(loops), weights(closures))


@pytest.mark.parametrize(
    ("dtype", "precond_dtype", "expected"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float32),
        (torch.float64, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("of_average", [False, True])
def test_any_precision_trains(dtype, precond_dtype, expected, of_average: bool):
    model = small_model(dtype)
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(of_average), precond_dtype=precond_dtype)
    losses = loop(model, optimizer)
    for p in model.parameters():
        state = optimizer.state[p]
        assert p.dtype == dtype
        assert {v.dtype for k, v in state.items() if k.startswith("Q")} == {expected}
        assert state["momentum"].dtype == torch.promote_types(dtype, torch.float32)
        assert torch.isfinite(p).all()
        assert int(state["skipped"]) == 0
    assert falls(losses)


def test_parameters_of_several_precisions_train_together():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    model[2].to(torch.float64)
    model[4].to(torch.bfloat16)
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(), precond_dtype=torch.float32)

    def forward(x: Tensor) -> Tensor:
        for layer in model:
            x = layer(x if isinstance(layer, nn.Tanh) else x.to(layer.weight.dtype))
        return x.float()

    assert falls(loop(model, optimizer, 120, forward=forward))


def test_a_step_without_some_gradients_is_not_forgotten_by_the_next():
    """Also where factors of several precisions are in one optimizer."""
    torch.manual_seed(0)
    params = [torch.randn(3, 3), torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 4)]
    params = [p.requires_grad_() for p in params]
    optimizer = PSGD(params, lr=0.01, probe=Whitening(of_average=False), precond_dtype=torch.float32)

    def step(*missing: int, size: float = 10.0) -> Tensor:
        for i, p in enumerate(params):
            p.grad = None if i in missing else torch.randn_like(p) * size
        optimizer.step()
        return optimizer.state[params[2]]["Q0_root"].clone()

    for _ in range(3):
        before = step()
    after = step(0)
    assert not torch.equal(after, before)
    torch.testing.assert_close(step(size=0.0), after)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_gradients_parameters_decay_by_one_minus_lr_times_weight_decay(dtype: torch.dtype, momentum: float):
    model = small_model(dtype)
    start = weights(model)
    optimizer = PSGD(model.parameters(), lr=0.25, weight_decay=0.5, probe=Whitening(), momentum=momentum)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, old in zip(model.parameters(), start, strict=True):
        torch.testing.assert_close(p.detach(), old * (1 - 0.25 * 0.5) ** 3)


def test_groups_decay_each_at_their_own_pace():
    """Also blocks of one shape in different groups, which are handled together."""
    params = [torch.full((3, 4), 2.0, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    groups = [
        {"params": params[:1], "weight_decay": 0.1},
        {"params": params[1:2], "weight_decay": 0.0},
        {"params": params[2:3], "weight_decay": 0.1, "lr": 0.5},
        {"params": params[3:], "weight_decay": 0.2, "lr": torch.tensor(0.3, dtype=torch.float64)},
    ]
    optimizer = PSGD(groups, lr=0.25, probe=Whitening())
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, factor in zip(params, (0.1 * 0.25, 0.0, 0.1 * 0.5, 0.2 * 0.3), strict=True):
        torch.testing.assert_close(p.detach(), torch.full_like(p, 2.0 * (1 - factor)))


def test_weight_decay_does_not_change_what_is_whitened():
    plain, decayed = small_model(torch.float64), small_model(torch.float64)
    start = weights(plain)
    for model, decay in ((plain, 0.0), (decayed, 0.5)):
        loop(model, PSGD(model.parameters(), lr=0.01, weight_decay=decay, probe=Whitening()), 1)
    for p, q, old in zip(plain.parameters(), decayed.parameters(), start, strict=True):
        torch.testing.assert_close(p - q, 0.01 * 0.5 * old)


@pytest.mark.parametrize("of_average", [False, True])
@pytest.mark.parametrize("max_rms", [0.05, 0.5])
def test_max_rms_limits_the_step_of_each_block(max_rms: float, of_average: bool):
    model = small_model(torch.float64)
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(of_average), max_rms=max_rms)
    reached = 0
    for step in range(20):
        before = weights(model)
        loop(model, optimizer, 1, first=step)
        for p, old in zip(model.parameters(), before, strict=True):
            rms = ((p.detach() - old) / 0.01).square().mean().sqrt()
            assert rms <= max_rms * (1 + 1e-6)
            reached += bool(rms > max_rms * (1 - 1e-6))
    assert reached > 0
    assert PSGD(model.parameters(), probe=Whitening()).defaults["max_rms"] == 1.1


def test_updates_of_q_become_rarer():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(), update_every=10, update_anneal=30)
    first = next(model.parameters())
    updated, losses = [], []
    for step in range(60):
        before = optimizer.state[first]["Q0_root"].clone()
        losses += loop(model, optimizer, 1, first=step)
        if not torch.equal(optimizer.state[first]["Q0_root"], before):
            updated.append(step)
    assert updated == [0, 1, 2, 3, 4, 6, 8, 10, 12, 15, 19, 24, 32, 42, 52]
    assert falls(losses)


def test_gradient_accumulation_equals_the_large_batch():
    large, small = small_model(torch.float64), small_model(torch.float64)
    optimizers = [PSGD(model.parameters(), lr=0.01, probe=Whitening()) for model in (large, small)]
    for step in range(10):
        x, y = batch(step, torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(large(x), y).backward()
        for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.functional.mse_loss(small(part), goal) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
    close(large, small, rtol=1e-6, atol=1e-8)


def test_clipping_the_gradients_works_as_ever():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
    losses = []
    for step in range(80):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert falls(losses)


def test_a_joint_block_of_low_rank_trains():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(), preconditioner=LowRank(3), blocks=Joint())
    assert len(optimizer.stacks) == 1
    assert falls(loop(model, optimizer, 150))


# -- mixed precision and compilation ----------------------------------------------------------------------------------


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_autocast_trains():
    model = small_model()
    assert falls(loop(model, PSGD(model.parameters(), lr=0.01, probe=Whitening()), context=autocast))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_step_under_autocast_is_as_precise_as_any():
    inside, outside = small_model(), small_model()
    for model, context in ((outside, nullcontext), (inside, autocast)):
        optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            with context():
                optimizer.step()
    assert same(weights(inside), weights(outside))


@pytest.mark.parametrize("clipped", [False, True])
def test_a_grad_scaler_trains_and_skips_what_overflowed(clipped: bool):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for step in range(80):
        x, y = batch(step)
        optimizer.zero_grad()
        with autocast():
            loss = nn.functional.mse_loss(model(x), y)
        bad = step == 30
        scaler.scale(loss * torch.inf if bad else loss).backward()
        before, state, scale = weights(model), copy.deepcopy(optimizer.state_dict()), scaler.get_scale()
        if clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        assert same(weights(model), before) == bad
        if bad:
            assert scaler.get_scale() == scale / 2
            for i, entries in optimizer.state_dict()["state"].items():
                assert all(torch.equal(v, state["state"][i][k]) for k, v in entries.items())
    assert falls(losses)


@pytest.mark.parametrize("of_average", [False, True])
def test_a_gradient_that_is_not_finite_is_skipped_without_a_scaler(of_average: bool):
    """Parameters, ``Q`` and averages keep every bit, at any step."""
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(of_average), weight_decay=0.1)
    for step in range(20):
        loop(model, optimizer, 1, first=step)
        before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
        model[0].weight.grad[0, 0] = torch.nan if step % 2 else torch.inf
        optimizer.step()
        assert same(weights(model), before)
        for i, entries in optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                if name in ("step", "skipped"):
                    assert int(value) == int(state[i][name]) + 1
                else:
                    assert torch.equal(value, state[i][name]), (step, i, name)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_takes_the_same_steps(backend: str):
    torch._dynamo.reset()
    plain, compiled = small_model(), small_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it imports and traces
        whole = torch.compile(compiled, backend=backend)
        expected = loop(plain, PSGD(plain.parameters(), lr=0.01, probe=Whitening()), 20)
        losses = loop(compiled, PSGD(whole.parameters(), lr=0.01, probe=Whitening()), 20, forward=whole)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_average", [False, True])
def test_an_embedding_trains_with_a_diagonal_for_its_words(of_average: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 4))
    optimizer = PSGD(model.parameters(), lr=0.02, probe=Whitening(of_average))
    embedding = next(s for s in optimizer.stacks if s.blocks[0].shape == (5000, 8)).group.factors
    assert [type(factor) for factor in embedding] == [DiagonalFactor, NearSymmetric]
    state = optimizer.state[model[0].weight]
    assert sum(v.nbytes for k, v in state.items() if k.startswith("Q")) < 2 * 5000 * 8 * 4
    unseen = model[0].weight[4000:].detach().clone()
    losses = []
    for _ in range(60):
        words = torch.randint(20, (64,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), words % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert falls(losses)
    assert torch.equal(model[0].weight[4000:], unseen)


def images(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 6, 6, generator=generator)


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.ConvTranspose2d(8, 3, 3))


def autoencode(model: nn.Module, steps: int, channels_last: bool = False) -> list[float]:
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(), weight_decay=0.01)
    losses = []
    for step in range(steps):
        x = images(step % 4)
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_convolutions_train():
    assert falls(autoencode(convolutions(), 150), to=0.6)


def test_convolutions_train_the_same_in_channels_last():
    plain, last = convolutions(), convolutions().to(memory_format=torch.channels_last)
    assert not last[0].weight.is_contiguous()
    torch.testing.assert_close(autoencode(last, 10, True), autoencode(plain, 10), rtol=1e-4, atol=1e-5)
    assert not last[0].weight.is_contiguous()
    close(plain, last, rtol=1e-3, atol=1e-4)


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precond_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_average", [False, True])
def test_resuming_continues_to_the_bit(tmp_path, dtype: torch.dtype, precond_dtype, of_average: bool):
    def new() -> tuple[nn.Module, PSGD]:
        model = small_model(dtype)
        options = {"lr": 0.01, "probe": Whitening(of_average), "precond_dtype": precond_dtype}
        return model, PSGD(model.parameters(), update_every=3, update_anneal=10, weight_decay=0.01, **options)

    straight = new()
    loop(*straight, 23)
    first = new()
    loop(*first, 11)
    torch.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, tmp_path / "checkpoint.pt")
    second = new()
    saved = torch.load(tmp_path / "checkpoint.pt")
    second[0].load_state_dict(saved["model"])
    second[1].load_state_dict(saved["optimizer"])
    loop(*second, 12, first=11)
    assert same(weights(second[0]), weights(straight[0]))
    for ours, theirs in zip(second[1].state.values(), straight[1].state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype
            assert torch.equal(value, theirs[name]), name


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="the new way is in torch 2.9")
@pytest.mark.parametrize("name", ["cuda.matmul", "mkldnn.matmul"])
def test_precision_asked_for_in_either_way(name):
    """Torch has an old and a new way to allow coarser products, and the old one raises where the new one was used."""
    where = operator.attrgetter(name)(torch.backends)
    before = where.fp32_precision
    where.fp32_precision = "tf32" if name == "cuda.matmul" else "bf16"
    try:
        p = torch.nn.Parameter(torch.ones(3, 3))
        optimizer = PSGD([p], lr=0.1, probe=Whitening())
        p.grad = torch.ones(3, 3)
        optimizer.step()
        assert torch.all(p < 1)
    finally:
        where.fp32_precision = before
