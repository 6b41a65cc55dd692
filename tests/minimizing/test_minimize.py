"""``psgd.minimize``: test functions × interfaces × dtypes, each reason to stop, and what SciPy's users rely on."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import scipy.optimize
import torch

from psgd import (
    Dense,
    Diagonal,
    FiniteDifference,
    HessianVector,
    Kronecker,
    LimitedMemory,
    LowRank,
    OptimizeResult,
    Whitening,
    c1,
    c2,
    c3,
    minimize,
)
from psgd.minimizing.line_search import search
from psgd.minimizing.metric import Metric


# Written such that they work with tensors and with arrays alike.
def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def beale(x):
    return sum((aim - x[0] + x[0] * x[1] ** (k + 1)) ** 2 for k, aim in enumerate((1.5, 2.25, 2.625)))


def himmelblau(x):
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def powell(x):
    return (x[0] + 10 * x[1]) ** 2 + 5 * (x[2] - x[3]) ** 2 + (x[1] - 2 * x[2]) ** 4 + 10 * (x[0] - x[3]) ** 4


def saddle(x):
    return x[0] ** 2 - x[1] ** 2 + x[1] ** 4


def bowl(x):
    return ((x - 1) ** 2).sum()


V = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]


def quadratic(x):
    """Of condition 1e8, in directions that are no axes."""
    v = V.to(x.dtype) if isinstance(x, torch.Tensor) else V.numpy()
    scale = torch.logspace(-2, 2, 10, dtype=torch.float64)
    return 0.5 * ((v.T @ x * (scale.to(x.dtype) if isinstance(x, torch.Tensor) else scale.numpy())) ** 2).sum()


def chain(n):
    return [-1.2, 1.0] * (n // 2)


PROBLEMS = {
    "rosenbrock2": (rosenbrock, chain(2)),
    "rosenbrock10": (rosenbrock, chain(10)),
    "beale": (beale, [1.0, 1.0]),
    "himmelblau": (himmelblau, [0.0, 0.0]),
    "himmelblau, from its maximum": (himmelblau, [-0.270845, -0.923039]),
    "powell": (powell, [3.0, -1.0, 0.0, 1.0]),
    "quadratic": (quadratic, [1.0] * 10),
}


def gradient_of(fun):
    """Of a function of arrays, by autograd."""

    def gradient(x):
        theta = torch.tensor(x, requires_grad=True)
        (g,) = torch.autograd.grad(fun(theta), theta)
        return g.numpy()

    return gradient


def by_torch(fun, x0, **options):
    return minimize(fun, torch.tensor(x0, dtype=torch.float64), **options)


def by_jac(fun, x0, **options):
    return minimize(fun, np.array(x0), jac=gradient_of(fun), **options)


def by_both(fun, x0, **options):
    gradient = gradient_of(fun)
    return minimize(lambda x: (fun(x), gradient(x)), np.array(x0), jac=True, **options)


def by_differences(fun, x0, **options):
    return minimize(fun, np.array(x0), **options)


INTERFACES = [by_torch, by_jac, by_both, by_differences]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("interface", INTERFACES)
def test_solves_with_default_settings(name, interface):
    fun, x0 = PROBLEMS[name]
    result = interface(fun, x0)
    assert result.success
    assert result.fun <= 1e-8
    assert abs(result.jac).max() <= 2e-8
    assert float(fun(result.x)) == result.fun


@pytest.mark.parametrize("name", ["rosenbrock2", "beale", "himmelblau", "powell"])
def test_solves_from_random_starts(name):
    fun, x0 = PROBLEMS[name]
    random = np.random.default_rng(0)
    for _ in range(3):
        start = random.uniform(-1, 1, len(x0)) + np.array(x0)
        assert by_torch(fun, start).fun <= 1e-8


def test_solves_rosenbrock_in_40_dimensions_in_about_as_many_gradients_as_bfgs():
    result = by_torch(rosenbrock, chain(40))
    assert result.fun <= 1e-8
    assert abs(result.jac).max() <= 2e-8
    theirs = scipy.optimize.minimize(rosenbrock, chain(40), jac=gradient_of(rosenbrock), method="BFGS")
    assert result.njev < 1.5 * theirs.njev


def test_more_elements_than_a_dense_q_is_for_get_conjugate_directions():
    result = by_torch(rosenbrock, chain(600), maxiter=20)
    assert result.fun < rosenbrock(np.array(chain(600))) / 20
    x0 = torch.linspace(0, 3, 600, dtype=torch.float64)
    scale = torch.logspace(-1, 1, 600, dtype=torch.float64)
    result = minimize(lambda x: (scale * (x - 1) ** 2).sum() + (x - 1).sum() ** 2, x0)
    assert result.success
    assert result.fun <= 1e-8
    assert result.nit < 1000  # from 330 to 690, if rounding differs
    matrix = torch.ones(40, 20, dtype=torch.float64)
    left, right = (torch.diag(torch.logspace(-0.25, 0.25, n, dtype=torch.float64)) for n in (40, 20))
    result = minimize(lambda x: (left @ (x - 2) @ right).square().sum(), matrix)
    assert result.success
    assert result.x.shape == (40, 20)
    assert result.fun <= 1e-8


@pytest.mark.parametrize("kind", [torch.tensor, np.array], ids=["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_is_kept(kind, dtype):
    x0 = kind([-1.2, 1.0], dtype=getattr(torch if kind is torch.tensor else np, dtype))
    result = minimize(rosenbrock, x0, jac=None if kind is torch.tensor else gradient_of(rosenbrock))
    assert result.success
    assert type(result.x) is type(x0)
    assert result.x.dtype == result.jac.dtype == x0.dtype
    assert abs(result.x - 1).max() < (1e-2 if dtype == "float32" else 1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 2)])
def test_shape_is_kept_and_x0_unchanged(shape):
    for x0 in (torch.zeros(shape, dtype=torch.float64), np.zeros(shape)):
        seen = []

        def fun(x, seen=seen):
            seen.append(tuple(x.shape))
            return bowl(x)

        result = minimize(fun, x0)
        assert result.x.shape == result.jac.shape == x0.shape
        assert set(seen) == {shape}
        assert not x0.any()
        assert result.fun <= 1e-12


def test_whole_numbers_become_float64_and_lists_arrays():
    for x0 in ([0, 3], (0.0, 3), np.array([0, 3]), np.array([False, True])):
        result = minimize(bowl, x0)
        assert isinstance(result.x, np.ndarray)
        assert result.x.dtype == np.float64
    assert minimize(bowl, torch.tensor([0, 3])).x.dtype == torch.float64
    assert minimize(bowl, np.zeros(2, dtype=">f4")).x.dtype == np.float32


def test_what_fun_does_to_its_argument_does_not_matter():
    def fun(x):
        value = float(bowl(x))
        x[:] = math.nan
        return value

    assert minimize(fun, np.zeros(3)).fun <= 1e-8


def test_args_go_to_fun_and_jac():
    def fun(x, center, scale):
        return scale * ((x - center) ** 2).sum()

    def jac(x, center, scale):
        return 2 * scale * (x - center)

    assert abs(minimize(fun, np.zeros(2), (3.0, 2.0), jac=jac).x - 3).max() < 1e-6
    assert abs(minimize(lambda x, center: fun(x, center, 1.0), np.zeros(2), 3.0).x - 3).max() < 1e-6


# Reasons to stop


def test_stops_where_the_gradient_is_small():
    done = by_torch(bowl, [1.0, 1.0])
    assert (done.nit, done.nfev, done.njev, done.status, done.success) == (0, 1, 1, 0, True)
    loose, tight = (by_torch(rosenbrock, chain(4), gtol=gtol) for gtol in (1e-2, 1e-6))
    assert 1e-6 < abs(loose.jac).max() <= 1e-2
    assert abs(tight.jac).max() <= 1e-6
    assert loose.nit < tight.nit
    assert by_torch(rosenbrock, chain(4), tol=1e-2).nit == loose.nit
    assert by_torch(rosenbrock, chain(4), options={"gtol": 1e-2}).nit == loose.nit


def test_stops_where_the_function_no_longer_decreases():
    result = by_torch(rosenbrock, chain(4), ftol=1e-3)
    assert (result.status, result.success) == (1, True)
    assert abs(result.jac).max() > 1e-7
    # a kink at the minimum, where the gradient does not vanish
    kink = by_torch(lambda x: x.abs().sum(), [1.0, 2.0])
    assert kink.status == 1
    assert kink.fun < 1e-6


def test_stops_where_rounding_hides_the_rest():
    """The smallest curvatures are hidden at different points, depending on the start and on rounding."""
    for start in (1.0, 1.3, 1.9):
        result = by_torch(lambda x: 1e9 + quadratic(x), [start] * 10)
        assert result.success
        assert result.fun - 1e9 < 2e-2


def test_stops_after_a_short_step():
    result = by_torch(rosenbrock, chain(10), xtol=1e-2)
    assert (result.status, result.success) == (2, True)


def test_stops_after_maxiter():
    for maxiter in (0, 1, 5):
        result = by_torch(rosenbrock, chain(10), maxiter=maxiter)
        assert (result.status, result.success, result.nit) == (3, False, maxiter)
        assert result.fun <= float(rosenbrock(torch.tensor(chain(10), dtype=torch.float64)))


def test_stops_after_maxfun():
    result = by_torch(rosenbrock, chain(10), maxfun=20)
    assert (result.status, result.success) == (4, False)
    assert 20 <= result.nfev < 60


def test_stops_where_the_gradient_is_wrong():
    result = minimize(bowl, np.zeros(3), jac=lambda x: -2 * (x - 1))
    assert (result.status, result.success, result.nit) == (5, False, 0)
    assert not result.x.any()


@pytest.mark.parametrize("fun", [torch.sum, lambda x: -(x**2).sum(), lambda x: -torch.exp(x).sum()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stops_where_there_is_no_minimum(fun, dtype):
    result = minimize(fun, torch.ones(3, dtype=dtype))
    assert (result.status, result.success) == (6, False)
    assert result.nit < 100


@pytest.mark.parametrize("modern", [False, True])
def test_callback_sees_every_iteration_and_can_stop(modern):
    seen = []
    if modern:

        def callback(intermediate_result):
            assert intermediate_result.fun == float(rosenbrock(intermediate_result.x))
            seen.append(intermediate_result.x)
            if len(seen) == 4:
                raise StopIteration
    else:

        def callback(xk):
            seen.append(xk)
            if len(seen) == 4:
                raise StopIteration

    result = by_jac(rosenbrock, chain(4), callback=callback)
    assert (result.status, result.success, result.nit) == (99, False, 4)
    assert (seen[-1] == result.x).all()
    values = [rosenbrock(x) for x in seen]
    assert values == sorted(values, reverse=True)


def test_other_errors_are_not_caught():
    def callback(xk):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        by_torch(rosenbrock, chain(2), callback=callback)


# Difficult functions


def test_leaves_the_neighbourhood_of_a_saddle_point():
    for y in (1e-1, 1e-4, 1e-7):
        result = by_torch(saddle, [0.5, y])
        assert result.fun == pytest.approx(-0.25)
        assert result.nit < 30


def test_a_function_may_be_infinite_or_nan_beyond_a_border():
    def barrier(x):
        return (x**2).sum() - torch.log(x).sum()

    result = by_torch(barrier, [5.0, 0.01, 3.0])
    assert result.success
    assert abs(result.x - 0.5**0.5).max() < 1e-6

    def wall(x):
        return float((x**2).sum() - np.log(x).sum()) if (x > 0).all() else math.inf

    assert abs(minimize(wall, np.array([5.0, 0.01, 3.0])).x - 0.5**0.5).max() < 1e-6


# The preconditioner


@pytest.mark.parametrize(
    "structure",
    [Dense(), Diagonal(), LowRank(2), LimitedMemory(2), Kronecker(), Kronecker(inverse_free=False)],
    ids=lambda s: type(s).__name__,
)
def test_any_structure_solves(structure):
    result = by_torch(rosenbrock, chain(4), preconditioner=structure)
    assert result.success
    assert result.fun < 1e-8 or abs(result.fun - 3.7014) < 1e-3  # a local minimum of the chain of four
    assert result.nit != by_torch(rosenbrock, chain(4), preconditioner=structure, precond_lr=0.01).nit


@pytest.mark.parametrize("criterion", [c1, c2])
def test_any_criterion_solves(criterion):
    result = by_torch(rosenbrock, chain(2), criterion=criterion)
    assert result.fun < 1e-8
    assert result.nit != by_torch(rosenbrock, chain(2)).nit


def test_probes_are_counted_and_spare_iterations():
    plain = by_torch(quadratic, [1.0] * 10)
    assert plain.nhev == 0
    probed = by_torch(quadratic, [1.0] * 10, probe=HessianVector())
    assert probed.fun <= 1e-8
    assert 0 < probed.nhev < plain.nit
    assert by_torch(quadratic, [1.0] * 10, probe=HessianVector(), seed=1).nit != probed.nit
    measured = by_jac(quadratic, [1.0] * 10, probe=FiniteDifference())
    assert measured.fun <= 1e-8
    assert measured.nhev > 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_pair_fits_after_descents(sign):
    """``P δg = ±δθ``, the secant equation, up to the sign of curvature."""
    random = torch.Generator().manual_seed(0)
    s, y = (torch.randn(5, dtype=torch.float64, generator=random) for _ in range(2))
    y *= sign * s.dot(y).sign()
    metric = Metric(Dense(), (5,), s, c3)
    errors = []
    for _ in range(8):
        metric.fit(s, y)
        errors.append(float((metric.precondition(y) - sign * s).norm() / s.norm()))
    assert errors[-1] < 0.02
    assert errors[-1] < errors[0]


def test_pairs_without_curvature_are_passed_over():
    s = torch.ones(3, dtype=torch.float64)
    metric = Metric(Dense(), (3,), s, c3)
    for change in (0 * s, s * 1e-40, s * 1e40, s * math.nan):
        metric.fit(s, change)
        assert metric.unit is None
        assert torch.equal(metric.precondition(s), s)


def test_line_search_finds_a_flat_place():
    trials = []

    def value(x):
        trials.append(float(x))
        return float((x - 3) ** 4)

    x = torch.zeros(1, dtype=torch.float64)
    d = torch.ones(1, dtype=torch.float64)
    found = search(value, lambda x: 4 * (x - 3) ** 3, x, 81.0, d, -108.0, 1e-3, 0.1, 0.0)
    assert abs(float(found.gradient)) <= 10.8
    assert found.value < 81 - 1e-4 * found.alpha * 108
    assert len(trials) < 15
    assert search(value, lambda x: 4 * (x - 3) ** 3, x, 81.0, -d, -108.0, 1.0, 0.1, 0.0) is None


# Noise


def sampled(x, rng):
    """``E`` has its minimum at (1, 2); the two directions differ by a factor of 900 in curvature."""
    if isinstance(x, torch.Tensor):
        a = torch.randn(8, 2, generator=rng, dtype=x.dtype) * torch.tensor([1.0, 30.0])
        noise = torch.randn(8, generator=rng, dtype=x.dtype)
        return ((a @ (x - torch.tensor([1.0, 2.0])) + noise) ** 2).mean()
    a = rng.standard_normal((8, 2)) * [1.0, 30.0]
    return ((a @ (x - [1.0, 2.0]) + rng.standard_normal(8)) ** 2).mean()


@pytest.mark.parametrize("kind", [torch.zeros, np.zeros], ids=["torch", "numpy"])
def test_solves_with_noise(kind):
    x0 = kind(2, dtype=torch.float64 if kind is torch.zeros else float)
    result = minimize(sampled, x0, stochastic=True, maxiter=250)
    assert (result.status, result.success, result.nit) == (7, True, 250)
    assert abs(np.asarray(result.x) - [1, 2]).max() < 0.3
    again, half = (minimize(sampled, x0, stochastic=True, maxiter=n) for n in (250, 20))
    assert (again.x == result.x).all()
    assert not (half.x == result.x).all()


def test_noise_of_ones_own_is_whitened():
    random = np.random.default_rng(0)

    def fun(x):
        a = random.standard_normal((8, 2)) * [1.0, 3.0]
        rest = a @ (x - [1.0, 2.0])
        return (rest**2).mean(), 2 * a.T @ rest / 8

    result = minimize(fun, np.zeros(2), jac=True, stochastic=True, lr=0.02, maxiter=400)
    assert abs(result.x - [1, 2]).max() < 0.1
    assert result.nfev == 400
    with pytest.raises(ValueError, match="rng"):
        minimize(fun, np.zeros(2), jac=True, stochastic=True, probe=FiniteDifference())
    with pytest.raises(ValueError, match="HessianVector"):
        minimize(fun, np.zeros(2), jac=True, stochastic=True, probe=HessianVector())


def test_one_sample_serves_both_gradients_of_a_difference():
    samples = []

    def fun(x, rng):
        samples.append(rng.standard_normal())
        return (samples[-1] - x.sum()) ** 2, -2 * (samples[-1] - x.sum()) * np.ones(2)

    minimize(fun, np.zeros(2), jac=True, stochastic=True, maxiter=3, seed=5)
    assert len(samples) == 6
    assert samples[0] == samples[1] != samples[2] == samples[3]


def test_without_stochastic_one_sample_is_minimised():
    result = minimize(sampled, np.zeros(2))
    assert result.success
    assert abs(result.jac).max() < 1e-6
    assert not (minimize(sampled, np.zeros(2), seed=1).x == result.x).all()


def test_stochastic_stops_by_the_average_of_the_gradient_or_by_evaluations_or_by_callback():
    x0 = torch.zeros(2, dtype=torch.float64)
    assert minimize(sampled, x0, stochastic=True, gtol=30.0).status == 0
    assert minimize(sampled, x0, stochastic=True, maxfun=10).status == 4

    def callback(xk):
        raise StopIteration

    assert minimize(sampled, x0, stochastic=True, callback=callback).nit == 1
    empty = minimize(sampled, x0, stochastic=True, maxiter=0)
    assert empty.nit == 0
    assert math.isfinite(empty.fun)


def test_steps_with_noise_depend_on_lr_and_precond_lr():
    x0 = torch.zeros(2, dtype=torch.float64)
    plain = minimize(sampled, x0, stochastic=True, maxiter=20)
    for change in ({"lr": 0.2}, {"precond_lr": 0.02}, {"seed": 3}, {"preconditioner": Diagonal()}, {"criterion": c1}):
        assert not torch.equal(minimize(sampled, x0, stochastic=True, maxiter=20, **change).x, plain.x)


def test_global_generators_are_left_alone():
    torch.manual_seed(3)
    np.random.seed(3)
    before, theirs = torch.get_rng_state(), np.random.get_state()[1].copy()
    by_torch(rosenbrock, chain(2), probe=HessianVector())
    minimize(sampled, np.zeros(2), stochastic=True, maxiter=5)
    minimize(sampled, torch.zeros(2), stochastic=True, maxiter=5)
    assert torch.equal(before, torch.get_rng_state())
    assert (theirs == np.random.get_state()[1]).all()


# The result


def test_result_has_the_fields_of_scipy():
    ours = by_jac(rosenbrock, chain(2))
    theirs = scipy.optimize.minimize(rosenbrock, chain(2), jac=gradient_of(rosenbrock), method="L-BFGS-B")
    assert set(ours) >= set(theirs) - {"hess_inv"}
    for name in set(ours) & set(theirs):
        assert isinstance(ours[name], (type(theirs[name]), float, int)), name
    assert isinstance(ours, OptimizeResult)
    assert ours.x is ours["x"]
    assert "nit" in dir(ours)
    ours.extra = 3
    assert ours["extra"] == 3
    del ours.extra
    with pytest.raises(AttributeError, match="extra"):
        _ = ours.extra
    for same in (ours.copy(), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert isinstance(same, OptimizeResult)
        assert list(same) == list(ours)
        assert (same.x == ours.x).all()
    lines = repr(ours).splitlines()
    assert lines[0].strip().startswith("message: Converged")
    assert any(line.strip().startswith("x: [1, 1]") for line in lines)
    assert repr(OptimizeResult()) == "OptimizeResult()"


def test_disp_prints_how_it_ended(capsys):
    by_torch(rosenbrock, chain(2), disp=True)
    assert "Converged" in capsys.readouterr().out
    by_torch(rosenbrock, chain(2))
    assert capsys.readouterr().out == ""


def test_same_call_same_bits():
    for interface in (by_torch, by_differences):
        first, second = (interface(rosenbrock, chain(4)) for _ in range(2))
        assert (first.x == second.x).all()
        assert first.nfev == second.nfev


def test_evaluations_are_counted():
    calls = {"f": 0, "g": 0}
    gradient = gradient_of(rosenbrock)

    def fun(x):
        calls["f"] += 1
        return rosenbrock(x)

    def jac(x):
        calls["g"] += 1
        return gradient(x)

    result = minimize(fun, np.array(chain(4)), jac=jac)
    assert (result.nfev, result.njev) == (calls["f"], calls["g"])
    calls["f"] = 0
    assert minimize(fun, np.array(chain(4))).nfev == calls["f"]


def test_import_takes_neither_numpy_nor_scipy_of_its_own():
    code = (
        "import sys, torch, psgd; before = set(sys.modules); "
        "r = psgd.minimize(lambda x: (x ** 2).sum(), torch.ones(2)); assert r.success; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; assert not new & {'numpy', 'scipy'}, new; "
        "assert 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What is asked for wrongly

BAD = [
    (lambda x: x, torch.ones(2), {}, ValueError, "one number"),
    (lambda x: None, torch.ones(2), {}, ValueError, "tensor with one element"),
    (lambda x: x.detach().sum(), torch.ones(2), {}, ValueError, "no graph"),
    (lambda x: x, np.ones(2), {}, ValueError, "one number"),
    (lambda x: None, np.ones(2), {}, ValueError, "one number"),
    (lambda x: (1.0, x), np.ones(2), {}, ValueError, "jac=True"),
    (lambda x: 1j, np.ones(2), {}, ValueError, "real number"),
    (bowl, np.ones(2), {"jac": True}, ValueError, "value, gradient"),
    (bowl, np.ones(2), {"jac": lambda x: np.ones(5)}, ValueError, "shape"),
    (bowl, torch.ones(2), {"jac": lambda x: None}, ValueError, "jac"),
    (bowl, np.ones(2), {"jac": "cs"}, ValueError, "2-point"),
    (lambda x: math.nan, np.ones(2), {}, ValueError, "x0: fun is nan"),
    (lambda x: (math.inf, x), np.ones(2), {"stochastic": True, "jac": True}, ValueError, "x0: fun is inf"),
    (bowl, np.ones(2), {"stochastic": True}, ValueError, "that draws from rng, or jac"),
    (bowl, np.ones(2), {"jac": np.ones(2)}, ValueError, "jac=array"),
    (bowl, np.ones(2, np.clongdouble), {}, ValueError, "real numbers"),
    (bowl, np.ones(2), {"jac": lambda x: x * math.nan}, ValueError, "gradient is not finite"),
    (bowl, np.array([1.0, math.nan]), {}, ValueError, "x0: not all of it is finite"),
    (bowl, np.ones(2, dtype=complex), {}, ValueError, "view_as_real"),
    (bowl, torch.ones(2, dtype=torch.float16), {}, ValueError, "float32 or float64"),
    (bowl, [], {}, ValueError, "empty"),
    (bowl, "abc", {}, TypeError, "numbers"),
    (3, np.ones(2), {}, TypeError, "fun=3"),
    (bowl, np.ones(2), {"bounds": [(0, 1)] * 2}, ValueError, "bounds"),
    (bowl, np.ones(2), {"constraints": {"type": "eq"}}, ValueError, "constraints"),
    (bowl, np.ones(2), {"tol": -1}, ValueError, "tol=-1"),
    (bowl, np.ones(2), {"gtol": "small"}, ValueError, "gtol='small'"),
    (bowl, np.ones(2), {"maxiter": 1.5}, ValueError, "maxiter=1.5"),
    (bowl, np.ones(2), {"maxfun": -1}, ValueError, "maxfun=-1"),
    (bowl, np.ones(2), {"options": {"gtoll": 1}}, ValueError, "gtoll"),
    (bowl, np.ones(2), {"options": {"gtol": 1}, "gtol": 2}, ValueError, "twice"),
    (bowl, np.ones(2), {"callback": 3}, TypeError, "callback=3"),
    (bowl, np.ones(2), {"preconditioner": Dense}, TypeError, "Dense()"),
    (bowl, np.ones(2), {"preconditioner": "dense"}, TypeError, "Dense()"),
    (bowl, np.ones(2), {"criterion": "c3"}, TypeError, "criterion"),
    (bowl, np.ones(2), {"probe": Whitening()}, ValueError, "stochastic=True"),
    (bowl, np.ones(2), {"precond_lr": 1.0}, ValueError, "precond_lr=1.0"),
    (bowl, np.ones(2), {"lr": 0.1}, ValueError, "stochastic=True"),
    (bowl, np.ones(2), {"seed": 0.5}, ValueError, "seed=0.5"),
    (bowl, np.ones(2), {"stochastic": True, "ftol": 1e-3}, ValueError, "ftol"),
    (bowl, np.ones(200_000), {"preconditioner": Dense(), "jac": gradient_of(bowl)}, ValueError, "GiB"),
]


@pytest.mark.parametrize(("fun", "x0", "options", "error", "words"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_errors_say_what_is_wrong(fun, x0, options, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")) as caught:
        minimize(fun, x0, **options)
    assert "\n" not in str(caught.value)


def test_no_bounds_are_no_error():
    assert minimize(bowl, np.zeros(2), bounds=None, constraints=()).success


def test_gradients_whose_squares_overflow_are_followed():
    for x0, scale in ((torch.zeros(2), 1e20), (torch.zeros(2, dtype=torch.float64), 1e160)):
        result = minimize(lambda x, scale=scale: scale * bowl(x), x0, gtol=scale * 1e-3, maxiter=200)
        assert result.nit > 0
        assert result.fun < 1e-3 * scale


def test_a_q_that_became_singular_is_forgotten():
    for seed in range(4):
        x0 = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        result = minimize(rosenbrock, x0, preconditioner=Kronecker(), criterion=c1, maxiter=200)
        assert result.fun < rosenbrock(x0)


def test_inference_mode_around_it_does_not_matter():
    with torch.inference_mode():
        result = minimize(bowl, torch.zeros(2, dtype=torch.float64))
        noisy = minimize(bowl, torch.zeros(2, dtype=torch.float64), stochastic=True, maxiter=50)
    assert result.success
    assert noisy.fun < 1.9


def test_samples_that_are_not_finite_are_no_success():
    calls = []

    def sometimes(x, rng):
        calls.append(x)
        return bowl(x) * (math.nan if len(calls) > 19 else 1.0)

    result = minimize(sometimes, torch.full((2,), 3.0), stochastic=True, maxiter=100)
    assert (result.status, result.success) == (8, False)
    assert not minimize(bowl, torch.zeros(2), stochastic=True, maxiter=0).success


def test_what_fun_does_to_x_in_place_does_not_move_it():
    def rude(x, rng):
        found = bowl(x)
        x.data.add_(1)
        return found

    polite, moved = (
        minimize(f, torch.full((2,), 3.0), stochastic=True, maxiter=20) for f in (lambda x, rng: bowl(x), rude)
    )
    assert torch.equal(polite.x, moved.x)


def test_whitened_steps_are_of_the_size_of_the_start():
    rng = np.random.default_rng(0)

    def noisy(x):
        aim = 1 + 0.1 * rng.standard_normal(2)
        return ((x - aim) ** 2).sum(), 2 * (x - aim)

    result = minimize(noisy, np.array([10.0, 10.0]), jac=True, stochastic=True, maxiter=2000)
    assert np.abs(result.x - 1).max() < 0.1
