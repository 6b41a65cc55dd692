"""What a preconditioner does to a Hessian: eigenvalues before and after, for three structures of ``P``.

    python examples/spectrum.py

A small network is trained on inputs of different size, and its Hessian ``H`` is computed. Then ``P`` is learned where
the network is, with a step size of zero, and the eigenvalues of ``PH`` are compared with those of ``H``. Ideal are
eigenvalues of ±1: every direction is then learned at one pace, and the step size needs no tuning. The signs are those
of ``H``, whatever ``P`` is, so no saddle becomes a minimum.
"""

from __future__ import annotations

import argparse
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.functional import hessian as hessian_of
from torch.func import functional_call

from psgd import PSGD, Dense, Diagonal, HessianVector, Joint, Kronecker
from psgd.diagnostics import eigenvalue_spread, preconditioned_eigenvalues, properties

STRUCTURES = {
    "diagonal": {"preconditioner": Diagonal(), "precond_lr": 0.1},
    "Kronecker, one for each tensor": {"preconditioner": Kronecker()},
    "dense": {"preconditioner": Dense(), "blocks": Joint(), "precond_lr": 0.1},
}


def problem(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with 4 inputs and 3 hidden nodes, 19 parameters, and data with noise; inputs from size 1 to 0.1."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    z = torch.randn(300, 4)
    y = torch.sin(z @ torch.randn(4, 1)) + 0.3 * torch.randn(300, 1)
    return model, z * torch.logspace(0, -1, 4), y


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, **options: Any) -> tuple[PSGD, float, float]:
    """The optimizer after so many steps, and the loss before and after; with ``lr=0`` only ``P`` is learned."""
    optimizer = PSGD(model.parameters(), probe=HessianVector(), max_norm=1.0, **options)

    def closure() -> Tensor:
        return (model(x) - y).square().mean()

    first = closure().item()
    for _ in range(steps):
        optimizer.step(closure)
    return optimizer, first, closure().item()


def preconditioner(optimizer: PSGD) -> Tensor:
    """``P = QᵀQ`` of all parameters as one matrix, from the factors that the optimizer keeps in its state."""
    blocks = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            factors = [q for name, q in optimizer.state[p].items() if name.startswith("Q")]
            if factors:  # Joint() keeps its one Q with the first parameter
                Q = reduce(torch.kron, [q.diag() if q.ndim == 1 else q for q in factors])
                blocks.append(Q.mT @ Q)
    return torch.block_diag(*blocks)


def hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the loss, with the parameters in a row as the optimizer has them."""
    sizes = {name: p.shape for name, p in model.named_parameters()}

    def loss(theta: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in sizes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}
        return (functional_call(model, named, x) - y).square().mean()

    return hessian_of(loss, nn.utils.parameters_to_vector(model.parameters()).detach())


def main() -> None:
    parser = argparse.ArgumentParser(description="Look at the eigenvalues of a preconditioned Hessian.")
    parser.add_argument("--steps", type=int, default=2000, help="steps of training for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gallery/spectrum.png"), metavar="FIGURE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a network this small is no faster with more
    torch.set_default_dtype(torch.float64)

    model, x, y = problem(arguments.seed)
    _, first, last = train(model, x, y, arguments.steps, lr=0.1)
    H = hessian(model, x, y)
    print(f"training: loss {first:.4f} -> {last:.4f}")
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, (structure, options) in zip(panels, STRUCTURES.items(), strict=True):
        optimizer, _, _ = train(model, x, y, arguments.steps, lr=0.0, **options)
        P = preconditioner(optimizer)
        found = properties(P, H)
        spread = eigenvalue_spread(torch.linalg.eigvalsh(H)).item()
        print(
            f"{structure}: spread of eigenvalues {spread:.2f} -> {spread / found.eigenvalue_spread_gain:.2f}, "
            f"their mean size {found.mean_abs_eigenvalue:.2f}",
            flush=True,
        )
        for values, color, label in (
            (torch.linalg.eigvalsh(H), "tab:gray", "$H$"),
            (preconditioned_eigenvalues(P, H), "tab:blue", "$PH$"),
        ):
            values = values[values.abs().argsort(descending=True)]
            ranks = torch.arange(1, len(values) + 1)
            for chosen, marker, kind in ((values > 0, ".", label), (values < 0, "x", f"{label}, negative")):
                if chosen.any():
                    panel.semilogy(ranks[chosen].numpy(), values[chosen].abs().numpy(), marker, color=color, label=kind)
        panel.axhline(1, color="black", linewidth=0.6)
        panel.set_title(structure, fontsize="medium")
        panel.set_xlabel("rank")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("absolute eigenvalue")
    panels[0].legend(frameon=False)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
