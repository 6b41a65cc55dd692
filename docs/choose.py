"""What each preconditioner and probe costs and gains on one small network: ``python docs/choose.py`` prints the table.

A network with 24 inputs, 32 hidden nodes and 10 classes learns what another one says of its inputs, whose sizes differ
by a factor of 100. Mini-batches of 128 are always new. For every choice the best of three step sizes counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from psgd import (
    PSGD,
    Dense,
    Diagonal,
    FiniteDifference,
    HessianVector,
    Kronecker,
    LimitedMemory,
    LowRank,
    Whitening,
    c1,
    c2,
    c3,
    plan,
)
from psgd.groups import Structure
from psgd.probes import Probe

INPUTS, HIDDEN, CLASSES, BATCH = 24, 32, 10, 128
STRUCTURES: Sequence[Structure] = (
    Kronecker(),
    Kronecker(inverse_free=False),
    Kronecker(max_dense=0),
    Dense(),
    LowRank(10),
    LimitedMemory(10),
    Diagonal(),
)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


@dataclass(frozen=True)
class Choice:
    """An optimizer with the step sizes to try."""

    name: str
    rates: Sequence[float]
    make: Callable[[nn.Module, float], torch.optim.Optimizer]
    closure: bool = False
    #: whether the closure calls ``backward``
    backward: bool = True
    numbers: int = 0


def ours(structure: Structure, probe: Probe, name: str, **options: object) -> Choice:
    whitening = isinstance(probe, Whitening)
    if structure.inverts:
        options = {"precond_lr": 0.1, **options}  # the default, 0.01, takes more steps than there are here
    found = plan(network(), preconditioner=structure, momentum=False)
    return Choice(
        name,
        (0.01, 0.03, 0.1) if whitening else (0.1, 0.3, 1.0),
        lambda model, lr: PSGD(
            model.parameters(),
            lr=lr,
            preconditioner=structure,
            probe=probe,
            **({} if whitening else {"max_norm": 1.0, "momentum": 0.9}),
            **options,  # type: ignore[arg-type]
        ),
        closure=not whitening,
        backward=not isinstance(probe, HessianVector),
        numbers=found.bytes // 4,
    )


def choices() -> list[Choice]:
    probes = (("Whitening", Whitening()), ("FiniteDifference", FiniteDifference()))
    found = [ours(s, probe, f"`{_short(s)}`, `{name}()`") for name, probe in probes for s in STRUCTURES]
    found.append(ours(Kronecker(), HessianVector(), "`Kronecker()`, `HessianVector()`"))
    for criterion in (c1, c2, c3):
        name = f"`Dense()`, `HessianVector()`, `{criterion.__name__}`"
        found.append(ours(Dense(), HessianVector(), name, criterion=criterion))
    found.append(Choice("Adam", (0.01, 0.03, 0.1), lambda model, lr: torch.optim.Adam(model.parameters(), lr)))
    momentum = 0.9
    found.append(
        Choice("SGD with momentum", (0.1, 0.3, 1.0), lambda m, lr: torch.optim.SGD(m.parameters(), lr, momentum))
    )
    return found


def train(choice: Choice, lr: float, steps: int) -> tuple[float, float]:
    """Cross entropy on 4,096 new samples, and the milliseconds of processor time of a typical step."""
    torch.manual_seed(0)
    teacher, model = network(), network()
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(4)
    scale = torch.logspace(0.5, -1.5, INPUTS)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        z = torch.randn(count, INPUTS)
        with torch.no_grad():
            return z * scale, teacher(z).argmax(1)

    test = draw(4096)
    optimizer = choice.make(model, lr)
    times = []
    for step in range(steps):
        x, y = draw(BATCH)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            if choice.backward:
                optimizer.zero_grad()
                loss.backward()
            return loss

        for group in optimizer.param_groups:  # linearly to zero
            group["lr"] = lr * (1 - step / steps)
        start = time.process_time()
        if choice.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        times.append(1000 * (time.process_time() - start))
    with torch.no_grad():
        return nn.functional.cross_entropy(model(test[0]), test[1]).item(), median(times)


def row(choice: Choice, steps: int) -> str:
    runs = [(*train(choice, lr, steps), lr) for lr in choice.rates]
    loss, ms, lr = min(runs)
    numbers = f"{choice.numbers:,}" if choice.numbers else ""
    return f"| {choice.name} | {numbers} | {ms:.1f} | {lr:g} | {loss:.3f} |"


def _short(structure: Structure) -> str:
    return {
        Kronecker(): "Kronecker()",
        Kronecker(inverse_free=False): "Kronecker(inverse_free=False)",
        Kronecker(max_dense=0): "Kronecker(max_dense=0)",
        LowRank(10): "LowRank(10)",
        LimitedMemory(10): "LimitedMemory(10)",
    }.get(structure, repr(structure))


HEAD = ["| | numbers in `Q` | ms a step | `lr` | cross entropy |", "|---|---:|---:|---:|---:|"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print("\n".join(HEAD))
    for choice in choices():
        print(row(choice, steps), flush=True)
