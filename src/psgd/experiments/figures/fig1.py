"""Figure 1: the gradient field of an indefinite quadratic function, before and after preconditioning."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from ...diagnostics import preconditioned_eigenvalues
from ..claim import Claim, Verdict
from ..figure import Figure, Size
from ..run import Result, Results, Row, Run, of_first_seed

#: Hessian of −(0.75 θ₁² + 2.5 θ₁θ₂ + 0.75 θ₂²)
H = ((-1.5, -2.5), (-2.5, -1.5))
P = ((1.25, -0.75), (-0.75, 1.25))
BEFORE, AFTER = "before", "after preconditioning"


def eigenvalues(*, seed: int, device: str, H: list[list[float]], P: list[list[float]]) -> Iterator[Row]:
    """Yield a row for each eigenvalue of PH."""
    found = preconditioned_eigenvalues(torch.tensor(P, dtype=torch.float64), torch.tensor(H, dtype=torch.float64))
    for index, value in enumerate(found.tolist()):
        yield {"direction": index, "eigenvalue": value}


def runs(size: Size, seed: int) -> list[Run]:
    identity = ((1.0, 0.0), (0.0, 1.0))
    return [
        Run("fig1", label, seed, eigenvalues, {"H": [list(row) for row in H], "P": [list(row) for row in p]}, 2, 0.01)
        for label, p in ((BEFORE, identity), (AFTER, P))
    ]


def draw(results: Results) -> Picture:
    picture = Picture(figsize=(9, 4.8), layout="constrained")
    for panel, (letter, result) in zip(
        picture.subplots(1, 2), zip("ab", of_first_seed(results).values(), strict=True), strict=True
    ):
        _field(panel, result)
        low, high = result.column("eigenvalue")
        panel.set_title(f"({letter}) {result.label}: eigenvalues {low:g} and {high:g}", fontsize="medium")
    return picture


def _field(panel: Axes, result: Result) -> None:
    line = torch.linspace(-1, 1, 11, dtype=torch.float64)
    theta = torch.stack(torch.meshgrid(line, line, indexing="xy"))
    matrix = torch.tensor(result.settings["P"]) @ torch.tensor(result.settings["H"])
    field = torch.einsum("ij,jab->iab", matrix.double(), theta)
    panel.quiver(*theta.numpy(), *field.numpy(), angles="xy", color="tab:blue", width=0.004)
    panel.set_aspect("equal")
    panel.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35))
    panel.set_xlabel(r"$\theta_1$")
    panel.set_ylabel(r"$\theta_2$")


def keeps_signs(before: Result, after: Result) -> Verdict:
    old, new = before.column("eigenvalue"), after.column("eigenvalue")
    same = all((a < 0) == (b < 0) for a, b in zip(old, new, strict=True))
    return Verdict(same and min(map(abs, new)) > 0, f"{old[0]:g} → {new[0]:g}, {old[1]:g} → {new[1]:g}")


def equal_amplitude(after: Result) -> Verdict:
    low, high = sorted(map(abs, after.column("eigenvalue")))
    return Verdict(high - low < 1e-9 * high, f"amplitudes {low:g} and {high:g}")


FIGURE = Figure(
    name="fig1",
    title="A preconditioner keeps the geometry",
    about="Gradient vectors of the quadratic function −(0.75 θ₁² + 2.5 θ₁θ₂ + 0.75 θ₂²), which has a saddle at zero, "
    "and the same vectors after the preconditioner [1.25, −0.75; −0.75, 1.25]. The saddle stays a saddle, and both of "
    "its directions become equally steep. The paper's caption gives the eigenvalues before as 0.5 along the diagonal "
    "and −2 along the anti-diagonal; those of the Hessian of this function are −4 and 1.",
    quick={"seeds": 1},
    full={"seeds": 1},
    runs=runs,
    draw=draw,
    claims=(
        Claim("signs_are_kept", "No eigenvalue changes its sign.", (BEFORE, AFTER), keeps_signs),
        Claim("equal_amplitude", "Afterwards both eigenvalues have the same amplitude.", (AFTER,), equal_amplitude),
    ),
)
