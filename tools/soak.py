"""A soak: many steps of a small network in which everything that can go wrong does, again and again.

    PYTHONPATH=src python tools/soak.py --steps 1000000
    PYTHONPATH=src python tools/soak.py --device cuda --seconds 3600

Two optimizers train the same network on the same mini-batches. One of them meets, at random: a gradient of NaN or
infinity, a loss multiplied by up to 1e12, a gradient of 1e30, gradients that are zero for a while, and parameters
without a gradient for a while. Every ``--checkpoint`` steps it is saved, and a new one goes on from the file. At the
end its loss must be close to that of the other, memory must not have grown, and all of ``Q`` must be finite. With
``--seconds`` it ends after that time, however many steps that are, and memory is compared with that after a tenth of
the time. In both cases it then goes on without new faults for ``CALM`` steps, as the loss is higher after one.
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import resource
import sys
import time

import torch
from torch import Tensor, nn

from psgd import PSGD, Whitening

#: number of steps without a fault at the end, before losses are compared
CALM = 100
FAULTS = ("NaN", "infinity", "loss", "huge", "zeros", "missing")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def optimizer_of(model: nn.Module, lr: float) -> PSGD:
    return PSGD(model.parameters(), lr=lr, probe=Whitening())


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


class Faults:
    """What goes wrong at a step, decided in advance."""

    def __init__(self, rate: float) -> None:
        self.random = random.Random(0)
        self.rate = rate
        self.kind = ""
        self.left = 0

    def next(self) -> str:
        """Name of the fault of a step, or an empty string; zeros and missing gradients last for some steps."""
        if self.left:
            self.left -= 1
            return self.kind
        if self.random.random() >= self.rate:
            return ""
        self.kind = self.random.choice(FAULTS)
        self.left = self.random.randrange(50) if self.kind in ("zeros", "missing") else 0
        return self.kind

    def spoil(self, fault: str, params: list[nn.Parameter]) -> None:
        """Change the gradients as a fault does."""
        grad = params[0].grad
        assert grad is not None
        if fault in ("NaN", "infinity"):
            grad.view(-1)[0] = {"NaN": torch.nan, "infinity": torch.inf}[fault]
        elif fault == "loss":
            factor = 10.0 ** self.random.uniform(1, 12)
            for p in params:
                p.grad = p.grad * factor if p.grad is not None else None
        elif fault == "huge":
            grad.fill_(1e30)
        elif fault == "zeros":
            grad.zero_()
        elif fault == "missing":
            params[0].grad = None


def memory() -> int:
    """Resident memory of the process and memory that tensors have on the GPU, in KiB."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return (resident + (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)) // 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="number of steps of the network that meets faults")
    parser.add_argument("--rate", type=float, default=0.01, help="probability that a fault begins at a step")
    parser.add_argument("--checkpoint", type=int, default=10_000, help="steps from one checkpoint to the next")
    parser.add_argument("--calm", type=int, default=10, help="the other network takes one of so many of these steps")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu", help="device of the networks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which it ends")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 6, generator=generator)
    y = torch.sin(x @ torch.randn(6, 2, generator=generator))
    x, y = x.to(arguments.device), y.to(arguments.device)
    model, calm = network().to(arguments.device), network().to(arguments.device)
    optimizer, other = optimizer_of(model, arguments.lr), optimizer_of(calm, arguments.lr)
    faults, counts = Faults(arguments.rate), dict.fromkeys(FAULTS, 0)
    resident, calm_steps, began = 0, 0, time.monotonic()
    for step in itertools.count(1):
        rows = torch.randint(0, 256, (32,), generator=generator).to(arguments.device)
        optimizer.zero_grad()
        loss_of(model, x[rows], y[rows]).backward()
        if fault := faults.next():
            counts[fault] += 1
            faults.spoil(fault, list(model.parameters()))
        optimizer.step()
        if step % arguments.calm == 0:
            other.zero_grad()
            loss_of(calm, x[rows], y[rows]).backward()
            other.step()
        if step % arguments.checkpoint == 0:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file)
            model = network().to(arguments.device)
            optimizer = optimizer_of(model, arguments.lr)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        seconds = time.monotonic() - began
        if step >= arguments.steps or seconds > arguments.seconds:
            faults.rate, faults.left, calm_steps = 0.0, 0, calm_steps + 1
        last = calm_steps > CALM
        early = step < arguments.steps / 10 and seconds < arguments.seconds / 10
        if not resident and not early and step % arguments.checkpoint == 0:
            resident = memory()
        if last or step % max(arguments.steps // 20, 1) == 0:
            with torch.no_grad():
                losses = loss_of(model, x, y).item(), loss_of(calm, x, y).item()
            print(f"{step} steps, {seconds:.0f} s: {losses[0]:.4f}, calm {losses[1]:.4f}, {memory()} KiB", flush=True)
        if last:
            break
    skipped = int(optimizer.state[model[0].weight]["skipped"])
    finite = all(bool(v.isfinite().all()) for state in optimizer.state.values() for v in state.values())
    growth = memory() - resident
    print(f"faults {counts}, {skipped} steps skipped, memory grew by {growth} KiB since a tenth of the steps")
    good = finite and losses[0] < 1.25 * losses[1] + 1e-3 and growth < 4096
    # NaN, infinity and 1e30 cost the one step each, and nothing else costs one.
    good = good and skipped <= counts["NaN"] + counts["infinity"] + counts["huge"]
    print("held" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
