"""The run that docs/monitor.md shows: trains, draws the picture, and measures the overhead.

`python docs/monitor.py FOLDER` leaves `run.csv`, `monitor.png` and `watch.svg`, a picture of the terminal, in a folder,
by default the current one.
"""

from __future__ import annotations

import html
import io
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from rich.console import Console, Group
from torch import Tensor, nn

import psgd
from psgd import PSGD, Monitor, Whitening
from psgd.cli import watch
from psgd.experiments import monitored
from psgd.monitor import read

STEPS, EVERY = 3000, 50


def network(*sizes: int) -> nn.Sequential:
    layers = [layer for m, n in pairwise(sizes) for layer in (nn.Linear(m, n), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def batch(teacher: nn.Module, size: int = 128) -> tuple[Tensor, Tensor]:
    """Inputs whose sizes differ a hundredfold, as features often do."""
    z = torch.randn(size, 16)
    with torch.no_grad():
        return z * torch.logspace(-1, 1, 16), teacher(z)


def run(path: Path) -> None:
    """A network learns what another one does; the spectrum of PH is found at every eighth record."""
    torch.manual_seed(0)
    teacher, model = network(16, 32, 1), network(16, 64, 64, 1)
    optimizer = psgd.newton(model, adapt_lr=0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    with Monitor(optimizer, path, every=EVERY, overwrite=True) as monitor:
        for step in range(STEPS):
            x, y = batch(teacher)

            def loss_of(x: Tensor = x, y: Tensor = y) -> Tensor:
                return (model(x) - y).square().mean()

            def closure(loss_of: Callable[[], Tensor] = loss_of) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of()
                loss.backward()
                return loss

            if step % (8 * EVERY) == 0:
                monitor.spectrum(loss_of)
            optimizer.step(closure)
            schedule.step()


def on_terminal(path: Path) -> str:
    """Picture of what ``psgd watch --once`` prints in 100 columns."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(Group(*watch.picture(read(path), 100, watch.ROWS)))
    picture = console.export_svg(title=f"psgd watch {path.name}")
    picture = dots(picture)
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # which would be fetched from elsewhere


def dots(picture: str) -> str:
    """Draw the dots of braille characters, which look different in every font and are missing in some.

    A character is 12.2 wide and 24.4 high here, and has two columns of four dots.
    """

    def drawn(found: re.Match[str]) -> str:
        kind, x, y = found[1], float(found[2]), float(found[3])
        lit = []
        for place, character in enumerate(html.unescape(found[4])):
            for bit in range(8):
                if 0x2800 <= ord(character) < 0x2900 and (ord(character) - 0x2800) >> bit & 1:
                    column, row = (bit // 3, bit % 3) if bit < 6 else (bit - 6, 3)
                    lit.append((x + 12.2 * place + 3.05 + 6.1 * column, y - 16.5 + 6.1 * row))
        return "".join(f'<circle class="{kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="1.9"/>' for cx, cy in lit)

    text = r'<text class="([^"]+)" x="([\d.]+)" y="([\d.]+)"[^>]*>((?:[\u2800-\u28ff]|&#160;| )+)</text>'
    return re.sub(text, lambda found: drawn(found) if re.search("[\u2801-\u28ff]", found[4]) else found[0], picture)


def overhead(every: int, rounds: int = 9, steps: int = 100) -> tuple[float, float]:
    """Milliseconds of CPU time of a training step without and with a monitor, by turns: medians over some rounds."""
    found: tuple[list[float], list[float]] = ([], [])
    torch.manual_seed(0)
    teacher, model = network(16, 32, 1), network(16, 64, 64, 1)
    optimizer = PSGD(model.named_parameters(), lr=0.001, probe=Whitening())
    x, y = batch(teacher)
    path = Path("overhead.csv")
    for turn in range(2 * (rounds + 1)):
        monitor = Monitor(optimizer, path, every=every, overwrite=True) if turn % 2 else None
        start = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.loss(loss)
        if turn > 1:
            found[turn % 2].append(1000 * (time.process_time() - start) / steps)
        if monitor is not None:
            monitor.close()
    path.unlink()
    return median(found[0]), median(found[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    run(folder / "run.csv")
    monitored.draw(read(folder / "run.csv")).savefig(folder / "monitor.png", dpi=90)
    (folder / "watch.svg").write_text(on_terminal(folder / "run.csv"), encoding="utf-8")
    for every in (50, 1):
        plain, watched = overhead(every)
        print(f"every={every}: {plain:.3f} ms without, {watched:.3f} ms with a monitor")
