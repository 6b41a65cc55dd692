"""Laws of steps that users can trust: gradients of zero move nothing, and an outlier costs a few steps."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, Dense, Diagonal, FiniteDifference, Kronecker, LimitedMemory, LowRank, Whitening
from psgd.groups.all_factors import power_to_one
from psgd.groups.base import Scaled, Structure
from psgd.probes import Probe
from tests.emulated import emulated_graphs

STRUCTURES = [
    Kronecker(),
    Kronecker(max_dense=4),
    Kronecker(max_dense=0),
    Kronecker(inverse_free=False),
    Dense(),
    Diagonal(),
    LowRank(2),
    LimitedMemory(2),
]
PROBES = [Whitening(), Whitening(of_average=False), FiniteDifference()]
SHAPE = (8, 6)
PARTS = {"tensor": (slice(None), slice(None)), "rows": (slice(3), slice(None)), "columns": (slice(None), slice(2))}
#: every structure with every probe and with every part, which take turns: each part meets each probe, too
TURNS = [
    (structure, probe, list(PARTS)[(i + j) % len(PARTS)])
    for i, structure in enumerate(STRUCTURES)
    for j, probe in enumerate(PROBES)
]


class Noisy:
    """Quadratic functions with new noise at every step, of which a part becomes zero.

    Each has its minimum near the present parameters, so that gradients stay of one size however far these have moved.
    """

    def __init__(self, probe: Probe, structure: Structure, **options) -> None:
        self.theta = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
        self.optimizer = PSGD([self.theta], lr=1.0, probe=probe, preconditioner=structure, momentum=0.9, **options)
        self.generator = torch.Generator().manual_seed(0)
        self.alive = torch.ones(SHAPE, dtype=torch.float64)

    def step(self) -> None:
        H = torch.rand(SHAPE, generator=self.generator, dtype=torch.float64) + 0.1
        noise = torch.randn(SHAPE, generator=self.generator, dtype=torch.float64)
        here = self.theta.detach().clone()

        def loss() -> Tensor:
            moved = self.theta - here
            return (self.alive * (H * moved.square() / 2 + noise * moved)).sum()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        self.optimizer.step(closure)


def rms(v: Tensor) -> float:
    return v.square().mean().sqrt().item()


def fading(noisy: Noisy) -> Tensor:
    """Path of the average alone while it fades, ``Σ βᵏ · d``, for the direction ``d`` of the last step."""
    before = noisy.theta.detach().clone()
    noisy.step()
    return (noisy.theta.detach() - before).abs() * 0.9 / (1 - 0.9)


@pytest.mark.parametrize(
    ("structure", "probe", "part"), TURNS, ids=[f"{s}-{type(p).__name__}-{p.of_average}-{part}" for s, p, part in TURNS]
)
def test_zero_gradients_move_nothing_but_what_the_average_has_left(structure, probe, part):
    noisy = Noisy(probe, structure)
    for _ in range(50):
        noisy.step()
    path = fading(noisy)
    start = noisy.theta.detach().clone()
    noisy.alive[PARTS[part]] = 0
    for _ in range(100):
        noisy.step()
    dead = noisy.alive == 0
    # The last step stands for the average, and is long or short by chance.
    assert rms((noisy.theta.detach() - start)[dead]) < 2 * rms(path)
    late = noisy.theta.detach().clone()
    for _ in range(20):
        noisy.step()
    # What is left is the coupling with parts that are alive, which the next updates of Q remove.
    moved = noisy.theta.detach() - late
    # The columns of a low rank couple all parts, and are followed by longer steps of Q at first.
    share = 0.5 if isinstance(structure, LowRank) else 0.25
    assert rms(moved[dead]) < (share * rms(moved[~dead]) if part != "tensor" else 1e-3)


@pytest.mark.parametrize("structure", [Kronecker(), Kronecker(max_dense=4)], ids=str)
def test_what_was_zero_takes_ordinary_steps_again(structure):
    noisy = Noisy(Whitening(), structure)
    for alive in (1.0, 0.0, 1.0):
        noisy.alive[:3] = alive
        for _ in range(100):
            before = noisy.theta.detach().clone()
            noisy.step()
            assert rms((noisy.theta.detach() - before)[:3]) < 3.5


def test_recorded_steps_have_the_same_law():
    def path() -> list[Tensor]:
        noisy = Noisy(Whitening(), Kronecker(max_dense=6))
        states = []
        for t in range(24):
            noisy.alive[:3] = float(t % 12 < 6)
            noisy.step()
            states.append(noisy.theta.detach().clone())
        return states

    plain = path()
    with emulated_graphs() as counts:
        recorded = path()
    assert counts["replays"] > 5
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(a, b)


# -- outliers ---------------------------------------------------------------------------------------------------------


class Regression:
    """A small network that learns from mini-batches, until one loss is multiplied, or one gradient is huge."""

    def __init__(self, **options) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(256, 8)
        self.y = torch.sin(self.x @ torch.randn(8, 3))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = PSGD(self.net.parameters(), **options)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, factor: float = 1.0, huge: float | None = None) -> None:
        rows = torch.randint(0, 256, (64,), generator=self.generator)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = factor * (self.net(self.x[rows]) - self.y[rows]).square().mean()
            loss.backward()
            if huge is not None:
                self.net[0].weight.grad.fill_(huge)
            return loss

        self.optimizer.step(closure)

    def loss(self) -> float:
        with torch.no_grad():
            return (self.net(self.x) - self.y).square().mean().item()

    @property
    def skipped(self) -> int:
        return int(self.optimizer.state[self.net[0].weight]["skipped"])


OUTLIERS = [{"factor": 1e2}, {"factor": 1e8}, {"huge": 1e30}]
recipes = pytest.mark.parametrize(
    "options",
    [
        {"lr": 3e-3, "probe": Whitening()},
        {"lr": 3e-3, "probe": Whitening(of_average=False)},
        {"lr": 3e-3, "probe": Whitening(), "preconditioner": Dense()},
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.0, "clip_steps": math.inf},
        {"lr": 0.05, "preconditioner": Dense()},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)


@recipes
def test_one_outlier_costs_a_few_steps(options):
    calm = Regression(**options)
    for _ in range(60):
        calm.step()
    before = calm.loss()
    runs = [copy.deepcopy(calm) for _ in OUTLIERS]
    for _ in range(21):
        calm.step()
    for run, outlier in zip(runs, OUTLIERS, strict=True):
        run.step(**outlier)
        assert run.loss() < 1.5 * before, outlier
        for _ in range(20):
            run.step()
        assert run.loss() < max(before, 1.05 * calm.loss()), outlier
        assert run.skipped <= 1


def test_an_outlier_does_not_open_the_door_to_the_next():
    run, calm = (Regression(lr=3e-3, probe=Whitening()) for _ in range(2))
    for t in range(140):
        run.step(factor=1e8 if t in (100, 110) else 1.0)
        calm.step()
    assert run.loss() < 1.1 * calm.loss()


def test_a_gradient_whose_length_is_not_finite_is_named():
    run = Regression(lr=3e-3, probe=Whitening(), error_if_nonfinite=True)
    run.step()
    with pytest.raises(FloatingPointError, match="parameter 0"):
        run.step(huge=1e30)
    run.step()


def test_gradients_that_stay_long_are_soon_as_long_as_they_are():
    """A clipped gradient lifts the limit: after a few steps a loss that was multiplied for good is taken as it is."""
    theta = nn.Parameter(torch.zeros(4, 4))
    optimizer = PSGD([theta], lr=0.0, probe=Whitening())
    torch.manual_seed(0)
    for factor in [1.0] * 20 + [1e6] * 20:
        theta.grad = factor * torch.randn(4, 4)
        optimizer.step()
    assert optimizer.state[theta]["grad_length"] > 3e6


def test_outliers_can_be_left_as_they_are():
    theta = nn.Parameter(torch.zeros(3))
    optimizer = PSGD([theta], lr=0.1, probe=Whitening(), clip_outliers=math.inf)
    for factor in (1.0, 1e4):
        theta.grad = factor * torch.ones(3)
        optimizer.step()
    # The average of 1 and 1e4, without bias, has weights 0.9 and 1 over 1.9.
    state = optimizer.state[theta]
    torch.testing.assert_close(state["momentum"] / state["momentum_weight"], torch.full((3,), (0.9 + 1e4) / 1.9))


# -- sizes of steps ---------------------------------------------------------------------------------------------------


def test_rows_that_are_seen_for_the_first_time_take_no_longer_steps_than_others_may():
    torch.manual_seed(0)
    theta = nn.Parameter(torch.zeros(5000, 16))
    optimizer = PSGD([theta], lr=1.0, probe=Whitening())
    longest = 0.0
    for t in range(60):
        theta.grad = torch.zeros_like(theta)
        rows = torch.randint(0, 50 if t < 40 else 5000, (64,))
        theta.grad[rows] = 1e-3 * torch.randn(64, 16)
        before = theta.detach().clone()
        optimizer.step()
        longest = max(longest, (theta.detach() - before).square().mean(1).amax().sqrt().item())
    assert longest < 3.4


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("structure", [Kronecker(), Kronecker(max_dense=4)], ids=str)
def test_p_starts_at_the_scale_of_the_first_gradients(structure, scale):
    torch.manual_seed(0)
    theta = nn.Parameter(torch.zeros(8, 12, dtype=torch.float64))
    optimizer = PSGD([theta], lr=1.0, probe=Whitening(), preconditioner=structure)
    for t in range(3):
        theta.grad = scale * torch.randn(8, 12, dtype=torch.float64)
        before = theta.detach().clone()
        optimizer.step()
        if t:
            assert 0.2 < rms(theta.detach() - before) < 1.2


def test_p_starts_at_the_scale_of_the_first_gradients_but_never_at_zero():
    """A ``P g`` that overflows makes ``Q`` smaller, but leaves it what it is."""
    theta = nn.Parameter(torch.zeros(4, 4))
    optimizer = PSGD([theta], lr=0.0, probe=Whitening())
    theta.grad = torch.randn(4, 4)
    optimizer.step()
    for name in ("Q0_root", "Q1_root"):
        optimizer.state[theta][name].mul_(1e10)
    for _ in range(30):
        theta.grad = torch.randn(4, 4) * 1e3
        optimizer.step()
        for name in ("Q0_root", "Q1_root"):
            Q = optimizer.state[theta][name]
            assert bool(Q.isfinite().all())
            assert Q.norm() > 0


def step_of(optimizer: PSGD, theta: nn.Parameter, grad: Tensor) -> float:
    before = theta.detach().clone()
    theta.grad = grad.clone()
    optimizer.step()
    return rms(theta.detach() - before)


def test_a_mini_batch_that_touches_few_rows_leaves_the_scale_of_p():
    torch.manual_seed(0)
    theta = nn.Parameter(torch.zeros(1000))
    optimizer = PSGD([theta], lr=1.0, probe=Whitening())
    for t in range(80):
        grad = 0.01 * torch.randn(1000)
        if t > 40 and t % 3 == 0:
            grad[1:] = 0
        size = step_of(optimizer, theta, grad)
        assert t < 10 or size > 0.4


@pytest.mark.parametrize(
    "options", [{"probe": Whitening(of_average=False)}, {"probe": Whitening(), "momentum": 0.0}], ids=str
)
@pytest.mark.parametrize("max_dense", [2048, 4])
def test_outliers_do_not_change_the_scale_of_p(options, max_dense):
    torch.manual_seed(0)
    theta = nn.Parameter(torch.zeros(16, 24))
    optimizer = PSGD([theta], lr=1.0, preconditioner=Kronecker(max_dense), **options)
    sizes = [
        step_of(optimizer, theta, 0.01 * torch.randn(16, 24) * (1e6 if t > 60 and t % 10 == 0 else 1))
        for t in range(120)
    ]
    usual = sorted(sizes[30:60])[15]
    assert min(sizes[61:]) > 0.2 * usual
    assert max(sizes[61:]) < 6 * usual


def test_gradients_of_zero_leave_the_limit_of_outliers():
    torch.manual_seed(0)
    theta = nn.Parameter(torch.zeros(4, 6))
    optimizer = PSGD([theta], lr=1.0, probe=Whitening())
    for grad in [torch.randn(4, 6) for _ in range(50)] + [torch.zeros(4, 6)] * 1000:
        step_of(optimizer, theta, grad)
    assert step_of(optimizer, theta, torch.randn(4, 6)) > 0.05


def test_a_negative_q_is_of_the_same_size():
    torch.manual_seed(0)
    theta = nn.Parameter(torch.zeros(4, 3))
    optimizer = PSGD([theta], lr=1.0, probe=Whitening())
    optimizer.state[theta]["Q0_root"].neg_()
    for _ in range(40):
        assert 0.1 < step_of(optimizer, theta, torch.randn(4, 3)) < 1.2
        assert optimizer.state[theta]["Q0_root"].abs().max() < 100


def test_slices_are_limited():
    v = torch.ones(2, 3, 4)
    scale = torch.tensor([1.0, 10.0, 0.0]).expand(2, 3).reshape(2, 3, 1)
    for divisor in (None, torch.tensor([1.0, 2.0])):
        a = Scaled(v.clone(), scale.clone())
        a.length()
        length = a.limit_slices_(5.0, divisor)
        limits = torch.tensor([5.0, 5.0 if divisor is None else 10.0])
        torch.testing.assert_close(a.scale[:, 1, 0], limits)
        torch.testing.assert_close(a.scale[:, 0, 0], torch.ones(2))
        torch.testing.assert_close(length, (4 + 4 * limits**2).sqrt())


def test_sizes_that_are_not_finite_change_no_scale():
    length = torch.tensor([torch.inf, torch.nan, 0.0, 3.0, 3.0 * 2**10, 3.0 * 2**-10])
    nine = torch.full((6,), 9.0)
    assert power_to_one(length, nine, nine).tolist() == [0, 0, 0, 0, -5, 5]


def test_powers_of_two_scale_all_numbers_of_a_run():
    """So a loss multiplied by a power of two has the same steps to the last bit once ``P`` has its scale."""

    def path(factor: float) -> Tensor:
        torch.manual_seed(0)
        theta = nn.Parameter(torch.zeros(6, 5, dtype=torch.float64))
        optimizer = PSGD([theta], lr=1.0, probe=Whitening())
        for _ in range(30):
            theta.grad = factor * torch.randn(6, 5, dtype=torch.float64)
            start = theta.detach().clone()
            optimizer.step()
        return theta.detach() - start

    torch.testing.assert_close(path(2.0**-20), path(2.0**-40), rtol=1e-6, atol=0)


@pytest.mark.parametrize("update_every", [1, 1000])
@pytest.mark.parametrize("max_dense", [30, 0], ids=["one diagonal", "both diagonal"])
def test_a_step_is_not_long_along_a_direction_that_a_diagonal_factor_leaves(max_dense: int, update_every: int):
    """Gradients have a direction in common; a dense factor would shorten it.

    White noise of ``m × n`` numbers of size one has a spectral norm of about ``√m + √n``; twice that is allowed, for a
    root mean square of 1.1.
    """
    torch.manual_seed(0)
    common = torch.randn(20, 1) @ torch.randn(1, 80)
    theta = nn.Parameter(torch.zeros(20, 80))
    structure = Kronecker(max_dense)
    optimizer = PSGD([theta], lr=1.0, probe=Whitening(), preconditioner=structure, update_every=update_every)
    norms = []
    for _ in range(60):
        theta.grad = common * torch.randn(()) + 0.3 * torch.randn(20, 80)
        before = theta.detach().clone()
        optimizer.step()
        norms.append(float(torch.linalg.matrix_norm(theta.detach() - before, 2)))
    limit = 2 * 1.1 * (20**0.5 + 80**0.5)
    assert 0.8 * limit < max(norms) < 1.05 * limit


@pytest.mark.parametrize("update_every", [1, 1000])
def test_nor_in_the_first_steps_when_the_average_is_young(update_every: int):
    """An average of few gradients is divided by the sum of its weights, and so is its spectral norm."""
    torch.manual_seed(0)
    common = torch.randn(20, 1) @ torch.randn(1, 80)
    theta = nn.Parameter(torch.zeros(20, 80))
    # with a step size of nearly zero Q stays as it starts
    options = {
        "preconditioner": Kronecker(30),
        "update_every": update_every,
        "precond_lr": 1e-6,
    }  # Q stays as it starts
    optimizer = PSGD([theta], 1.0, probe=Whitening(), **options)
    for _ in range(5):
        theta.grad = common + 0.1 * torch.randn(20, 80)
        before = theta.detach().clone()
        optimizer.step()
        assert torch.linalg.matrix_norm(theta.detach() - before, 2) < 1.05 * 2 * 1.1 * (20**0.5 + 80**0.5)
