"""The first picture of the README: MNIST by PSGD, Adam and momentum, over steps and over seconds.

``python docs/first.py --data DIR`` trains the network of ``psgd bench problems --model mnist`` with the learning rates
that the protocol found there (``docs/results/bench/problems/mnist.json``) and its three test seeds, on one thread, and
writes ``docs/first.svg``. It takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

from psgd.bench import peers, protocol
from psgd.bench.objectives import start_mnist
from psgd.bench.peers import Peer
from psgd.experiments.drawing import images
from psgd.experiments.training import losses

DOCS = Path(__file__).parent
#: for each optimizer its label and color
DRAWN = {
    "PSGD, whitening": ("psgd.whiten(model), default", "tab:blue"),
    "Adam": ("Adam, tuned", "tab:orange"),
    "momentum": ("SGD with momentum, tuned", "tab:green"),
}
#: optimizers by the names that they have in the results
PEERS = {peer.name: peer for peer in (peers.PSGD_WHITENING, peers.ADAM, peers.MOMENTUM)}
#: steps between two evaluations, and seconds of training
EVERY, SECONDS = 24, 12.0

#: steps, seconds and errors of one run
Curve = tuple[list[int], list[float], list[float]]


def rates() -> dict[str, float]:
    """Learning rate of each optimizer: the tuned one, and for PSGD the default."""
    found = {}
    for run in json.loads((DOCS / "results" / "bench" / "problems" / "mnist.json").read_text("utf-8"))["measurements"]:
        name = run["label"].partition(", ")[2]
        role = protocol.DEFAULT if name == "PSGD, whitening" else protocol.TUNED
        found[name] = next(row["lr"] for row in run["rows"] if row["role"] == role)
    return found


def curve(peer: Peer, lr: float, seed: int, seconds: float = SECONDS) -> Curve:
    """Test error of one run; only steps are timed."""
    torch.manual_seed(seed)
    start = start_mnist("cpu", seed)
    steps = losses(peer.optimizer(start.params, lr), start.loss, start.data)
    done, taken, errors = [0], [0.0], [start.judge()]
    while taken[-1] < seconds:
        begin = time.perf_counter()
        for _ in range(EVERY):
            next(steps)
        taken.append(taken[-1] + time.perf_counter() - begin)
        done.append(done[-1] + EVERY)
        errors.append(start.judge())
    return done, taken, errors


def draw(found: dict[str, list[Curve]]) -> Figure:
    """Draw all seeds of each optimizer, over steps and over seconds."""
    picture = Figure(figsize=(9, 3.4), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for name, curves in found.items():
        label, color = DRAWN[name]
        for number, (steps, seconds, errors) in enumerate(curves):
            for panel, along in zip(panels, (steps, seconds), strict=True):
                percent = [100 * error for error in errors]
                panel.plot(along, percent, color=color, linewidth=1.3, alpha=0.8, label=None if number else label)
    for panel, label, right in zip(panels, ("steps", "seconds of training"), (1500, SECONDS), strict=True):
        panel.set(xlabel=label, xlim=(0, right), yscale="log", ylim=(1.7, 10))
        panel.set_yticks((2, 2.5, 3, 5, 10), ("2", "2.5", "3", "5", "10"))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.axhline(2.5, color="grey", linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test error in %")
    panels[1].legend(frameon=False, fontsize="small")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the files of MNIST")
    options = parser.parse_args()
    if options.data is not None:
        os.environ["PSGD_DATA"] = str(options.data)
    torch.set_num_threads(1)
    best, found = rates(), {}
    for name in DRAWN:
        found[name] = [curve(PEERS[name], best[name], seed) for seed in protocol.TEST_SEEDS]
        at = [next((k for k, e in enumerate(errors) if e < 0.025), None) for *_, errors in found[name]]
        print(name, best[name], [(c[0][k], round(c[1][k], 1)) for c, k in zip(found[name], at, strict=True) if k])
    (DOCS / "first.svg").write_bytes(images(draw(found), "first")["svg"])


if __name__ == "__main__":
    main()
