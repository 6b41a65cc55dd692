"""Numbers for the blocks of several stacks at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, Diagonal, Kronecker, Whitening
from psgd.blocks import PerTensor
from psgd.engine.bucket import Direction, Fleet
from psgd.engine.stack import Stack
from psgd.groups import Structure

YES, NO = torch.tensor(True), torch.tensor(False)
SHAPES = [(3, 4), (3, 4), (5,)]  # two blocks in the first stack, one in the second


def fleet_of(
    group_of: list[int] | None = None,
    momentum: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    structure: Structure = Kronecker(),
) -> Fleet:
    params = [torch.zeros(shape, dtype=dtype, device=device) for shape in SHAPES]
    blocks = PerTensor().divide(list(enumerate(params)))
    stacks = []
    for same in (blocks[:2], blocks[2:]):
        group = structure.init(same[0].shape, batch=len(same), dtype=dtype, device=device)
        stacks.append(Stack(same, group, {}, dtype))
        if momentum:
            stacks[-1].start_average()
    return Fleet(stacks, group_of or [0, 0, 0])


def grads_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randn(shape, generator=generator, dtype=dtype) for i, shape in enumerate(SHAPES)}


def numbers(*lrs, **options) -> list[dict]:
    return [{"lr": lr, "max_rms": math.inf, "max_norm": None, **options} for lr in lrs]


# -- options ----------------------------------------------------------------------------------------------------------


def test_where_all_blocks_agree_an_option_is_a_plain_number():
    assert fleet_of().number(numbers(0.1), "lr") == 0.1
    both = fleet_of([0, 1, 0]).number(numbers(0.1, 0.1), "lr")
    assert isinstance(both, float)
    assert both == 0.1


def test_groups_without_a_block_here_do_not_count():
    assert fleet_of([1, 1, 1]).number(numbers(0.5, 0.1, 0.7), "lr") == 0.1


def test_where_they_differ_there_is_one_number_for_each_block():
    fleet = fleet_of([2, 0, 2])
    each = fleet.number(numbers(0.1, 0.5, 0.3), "lr")
    assert isinstance(each, Tensor)
    torch.testing.assert_close(each, torch.tensor([0.3, 0.1, 0.3], dtype=torch.float64))


def test_none_is_replaced():
    assert fleet_of().number(numbers(0.1), "max_norm", math.inf) == math.inf
    each = fleet_of([0, 0, 1]).number([{"max_norm": None}, {"max_norm": 2.0}], "max_norm", 9.0)
    assert each.tolist() == [9.0, 9.0, 2.0]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_tensor_is_taken_as_it_is(shape: tuple[int, ...]):
    lr = torch.full(shape, 0.25, requires_grad=True)
    number = fleet_of([0, 1, 1]).number(numbers(lr, lr), "lr")
    assert isinstance(number, Tensor)
    assert number.shape == ()
    assert not number.requires_grad
    assert number == 0.25


@pytest.mark.parametrize("order", ["tensor first", "number first", "two tensors"])
def test_tensors_and_numbers_mix(order: str):
    a, b = torch.tensor(0.25), torch.tensor([0.5])
    values = {"tensor first": (a, 0.5), "number first": (0.25, b), "two tensors": (a, b)}[order]
    each = fleet_of([1, 0, 1]).number(numbers(*values), "lr")
    assert each.tolist() == [0.5, 0.25, 0.5]


@pytest.mark.parametrize("order", ["tensor first", "number first", "two tensors"])
def test_the_host_never_looks_at_a_tensor(order: str):
    """On the device `meta` a tensor has no value: any look at one raises."""
    a, b = torch.tensor(0.25, device="meta"), torch.tensor([0.5], device="meta")
    values = {"tensor first": (a, 0.5), "number first": (0.25, b), "two tensors": (a, b)}[order]
    each = fleet_of([1, 0, 1], device="meta").number(numbers(*values), "lr")
    assert isinstance(each, Tensor)
    assert each.shape == (3,)


def test_numbers_are_split_by_stack():
    fleet = fleet_of()
    assert fleet.split(0.5) == [0.5, 0.5]
    scalar = torch.tensor(2.0)
    assert fleet.split(scalar) == [scalar, scalar]
    first, second = fleet.split(torch.tensor([1.0, 2.0, 3.0]))
    assert first.tolist() == [1.0, 2.0]
    assert second.tolist() == [3.0]


def test_only_a_fleet_of_inverse_free_groups_has_pools():
    assert fleet_of().pools is not None
    assert fleet_of(structure=Diagonal()).pools is None
    assert fleet_of(structure=Kronecker(inverse_free=False)).pools is None


# -- averages ---------------------------------------------------------------------------------------------------------


def test_without_momentum_there_is_no_average():
    fleet, grads = fleet_of(), grads_of()
    fleet.average_(grads, 0.0, YES)
    gs, weight = fleet.averages(grads)
    assert weight is None
    for g, stack in zip(gs, fleet.stacks, strict=True):
        assert torch.equal(g, stack.pack(grads))


@pytest.mark.parametrize(
    "momentum", [0.0, 0.9, torch.tensor([0.9, 0.5, 0.0], dtype=torch.float64)], ids=["none", "one", "each"]
)
def test_an_average_divided_by_its_weight_is_unbiased(momentum):
    """It is ``Σ β^(t−s) g_s / Σ β^(t−s)``: of a constant the constant itself, from the first step on."""
    fleet = fleet_of(momentum=True)
    history: list[dict[int, Tensor]] = []
    betas = momentum.tolist() if isinstance(momentum, Tensor) else [momentum] * 3
    for t in range(5):
        history.append(grads_of(t))
        given = history[-1]
        fleet.average_(given, momentum, YES)
        means, weight = fleet.averages(given)
        assert weight is not None
        ours = [*means[0], means[1][0]]
        for i, beta in enumerate(betas):
            weights = [beta ** (t - s) for s in range(t + 1)]
            right = sum(w * g[i] for w, g in zip(weights, history, strict=True)) / sum(weights)
            torch.testing.assert_close(ours[i] / weight[i], right)


@pytest.mark.parametrize("momentum", [0.9, torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)], ids=["one", "each"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_gradients_that_are_not_usable_leave_the_average_alone(momentum, layout: str):
    fleet = fleet_of(momentum=True)
    fleet.average_(grads_of(), momentum, YES)
    before = [{name: value.clone() for name, value in stack.average.items()} for stack in fleet.stacks]
    bad = {i: g * torch.nan for i, g in grads_of(1).items()}
    if layout == "transposed":
        bad = {i: g.T.contiguous().T if g.ndim > 1 else g for i, g in bad.items()}
    given = bad
    fleet.average_(given, momentum, NO)
    _, weight = fleet.averages(given)
    for stack, old in zip(fleet.stacks, before, strict=True):
        for name, value in stack.average.items():
            assert torch.equal(value, old[name])
    assert torch.equal(weight, torch.cat([old["momentum_weight"] for old in before]))


def test_before_the_first_usable_gradient_the_average_is_zero_not_nan():
    fleet = fleet_of(momentum=True)
    given = {i: g * torch.nan for i, g in grads_of().items()}
    fleet.average_(given, 0.9, NO)
    means, weight = fleet.averages(given)
    for mean, w in zip(means, fleet.split(weight), strict=True):
        assert torch.equal((mean.flatten(1) / w[:, None]), torch.zeros_like(mean.flatten(1)))


def test_how_gradients_lie_in_memory_does_not_matter():
    """Those that lie like the average are taken in by one kernel, the others one by one."""
    plain, other = fleet_of(momentum=True), fleet_of(momentum=True)
    for t in range(3):
        grads = grads_of(t)
        plain.average_(grads, 0.7, YES)
        other.average_({i: g.T.contiguous().T if g.ndim > 1 else g for i, g in grads.items()}, 0.7, YES)
    for a, b in zip(plain.stacks, other.stacks, strict=True):
        for name in a.average:
            torch.testing.assert_close(a.average[name], b.average[name])


def test_stacks_with_and_without_an_average_go_together():
    fleet = fleet_of(momentum=True)
    fleet.stacks[1].average = {}
    given = grads_of()
    fleet.average_(given, 0.9, YES)
    means, weight = fleet.averages(given)
    assert torch.equal(means[1], fleet.stacks[1].pack(given))
    torch.testing.assert_close(weight, torch.tensor([0.1, 0.1, 1.0], dtype=torch.float64))


def test_gradients_less_precise_than_their_average_are_taken_in():
    fleet = fleet_of(momentum=True, dtype=torch.float32)
    grads = {i: g.to(torch.bfloat16) for i, g in grads_of().items()}
    given = grads
    fleet.average_(given, 0.9, YES)
    means, weight = fleet.averages(given)
    torch.testing.assert_close(means[0][1] / weight[1], grads[1].float())


# -- limits -----------------------------------------------------------------------------------------------------------

LENGTH = torch.tensor([2.0, 0.5, 30.0], dtype=torch.float64)


def test_without_a_limit_nothing_is_shortened():
    assert fleet_of().shorter(numbers(0.1), LENGTH).tolist() == [1.0, 1.0, 1.0]
    assert fleet_of().shortest(numbers(0.1), LENGTH.norm()) == 1.0


@pytest.mark.parametrize("max_rms", [0.01, 0.3, 100.0])
def test_max_rms_limits_the_root_mean_square_of_each_block(max_rms: float):
    rate = fleet_of().shorter(numbers(0.1, max_rms=max_rms), LENGTH)
    root = torch.tensor([12.0, 12.0, 5.0], dtype=torch.float64).sqrt()
    torch.testing.assert_close(rate * LENGTH / root, (LENGTH / root).clamp_max(max_rms))


def test_max_rms_may_differ_between_groups():
    groups = [*numbers(0.1, max_rms=0.1), *numbers(0.1)]
    rate = fleet_of([0, 1, 1]).shorter(groups, LENGTH)
    torch.testing.assert_close(rate, torch.tensor([0.1 * 12**0.5 / 2, 1.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("max_norm", [0.5, 10.0, 1000.0])
def test_max_norm_limits_the_length_of_all_blocks_together(max_norm: float):
    total = LENGTH.norm()
    rate = fleet_of().shortest(numbers(0.1, max_norm=max_norm), total)
    assert rate.shape == ()  # the direction stays
    torch.testing.assert_close((rate * LENGTH).norm(), total.clamp_max(max_norm))


def test_max_norm_may_differ_between_groups():
    groups = [*numbers(0.1, max_norm=3.0), *numbers(0.1)]
    rate = fleet_of([0, 1, 0]).shortest(groups, LENGTH.norm())
    shorter = 3 / LENGTH.norm().item()
    torch.testing.assert_close(rate, torch.tensor([shorter, 1.0, shorter], dtype=torch.float64))


def test_a_length_of_zero_is_no_division_by_zero():
    zero = torch.zeros(3, dtype=torch.float64)
    assert fleet_of().shorter(numbers(0.1, max_rms=1.0), zero).tolist() == [1.0, 1.0, 1.0]
    assert fleet_of().shortest(numbers(0.1, max_norm=1.0), zero.norm()) == 1.0


# -- directions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "structure", [Kronecker(), Kronecker(max_dense=3), Kronecker(max_dense=0), Diagonal()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_direction_has_the_length_of_its_step(structure: Structure, dtype: torch.dtype):
    stack = fleet_of(structure=structure).stacks[0]
    for buffer in stack.group.buffers().values():
        buffer.add_(torch.rand(buffer.shape, dtype=buffer.dtype, generator=torch.Generator().manual_seed(0)))
    g = torch.randn(2, 3, 4, dtype=torch.float64)
    right = stack.group.precondition(g)
    _, length = Direction.of(stack, g)
    torch.testing.assert_close(length, right.flatten(1).norm(dim=1))
    rate = torch.tensor([0.5, 2.0], dtype=torch.float64)
    step = Direction.of(stack, g)[0].step(rate, (3, 4), dtype)
    assert step.dtype == dtype
    torch.testing.assert_close(step, (right * rate[:, None, None]).to(dtype))


def test_factors_of_a_fleet_lie_side_by_side():
    """Also where parameters of two dtypes, which are two fleets, take turns."""
    kinds = [((8, 8), torch.bfloat16), ((4, 8), torch.float32), ((16, 8), torch.bfloat16), ((8, 16), torch.float32)] * 2
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in kinds]
    optimizer = PSGD(params, lr=0.1, probe=Whitening())
    fleets = optimizer._by_device(optimizer.stacks)
    assert len(fleets) == 2
    assert not any(pool.copied for fleet in fleets for pool in fleet.pools.pools)
