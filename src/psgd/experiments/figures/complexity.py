"""The end of Section VI.E: what an iteration costs, and how much of it is spent on the preconditioner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure as Picture
from torch import Tensor, nn

from ... import Affine
from .. import digits, recurrent, training
from ..claim import Claim, Verdict
from ..figure import Figure, Size, Table
from ..run import Result, Results, Row, Run

RNN, MNIST = "recurrent network", "MNIST network"
#: update interval that is longer than a run
NEVER = 10**9
#: number of mini-batches between two updates of Q
EVERY = (1, 2, 5, 10, NEVER)
#: number of mini-batches in a turn, so that each turn has its share of updates
TURN = 10


def measure(*, seed: int, device: str, model: str, rounds: int, length: int) -> Iterator[Row]:
    """Measure seconds of one iteration of each kind; all kinds take turns, so that a busy machine slows all of them."""
    start: Callable[[int, str], Start] = partial(_rnn, length) if model == RNN else _mnist
    kinds: dict[str, Callable[[], Any]] = {"gradient": _gradient(*start(seed, device))}
    for name, method, every in (("SGD", "SGD", 1), *((_name(every), "c3", every) for every in EVERY)):
        network, loss, data = start(seed, device)
        optimizer = training.optimizer(method, network, 0.01, seed=seed, blocks=Affine(), update_every=every)
        kinds[name] = partial(next, training.losses(optimizer, partial(loss, network), data))
    for number in range(rounds + 1):
        row: Row = {"round": number}
        for name, iterate in kinds.items():
            begin = time.perf_counter()
            for _ in range(TURN):
                iterate()
            row[name] = (time.perf_counter() - begin) / TURN
        if number:  # the first is the warm-up
            yield row


def _name(every: int) -> str:
    return f"PSGD, update every {every}" if every < NEVER else "PSGD, no update"


Start = tuple[nn.Module, Callable[..., Tensor], Iterator[tuple[Tensor, ...]]]


def _rnn(length: int, seed: int, device: str) -> Start:
    task = recurrent.ADDITION
    model, generator = task.start(seed)
    return model.to(device), task.loss, task.batches(generator, length, device)


def _mnist(seed: int, device: str) -> Start:
    """MNIST network on noise: the time does not depend on the images."""
    generator = torch.Generator().manual_seed(seed)
    model = digits.network([300], generator).to(device)
    images = (2 * torch.rand(600, digits.PIXELS, generator=generator) - 1).to(device)
    labels = torch.randint(digits.CLASSES, (600,), generator=generator).to(device)

    def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(x), y)

    return model, loss, digits.batches(images, labels, generator)


def _gradient(model: nn.Module, loss: Callable[..., Tensor], data: Iterator[tuple[Tensor, ...]]) -> Callable[[], None]:
    def iterate() -> None:
        model.zero_grad()
        value = loss(model, *next(data))
        value.backward()
        float(value.detach())

    return iterate


def runs(size: Size, seed: int) -> list[Run]:
    return [
        Run(
            "complexity",
            name,
            seed,
            measure,
            {"model": name, "rounds": size["rounds"], "length": size["length"]},
            size["rounds"],
            size["rounds"] * 2.5,
            alone=True,
        )
        for name in (RNN, MNIST)
    ]


def _seconds(result: Result, name: str) -> float:
    return median(result.column(name))


def update_share(result: Result, every: int = 1) -> float:
    """Share of an iteration for updating Q: without the gradients and the step itself."""
    whole = _seconds(result, _name(every))
    rest = _seconds(result, "PSGD, no update") + _seconds(result, "gradient") / every
    return max(whole - rest, 0) / whole


def relative(result: Result, every: int = 1) -> float:
    return _seconds(result, _name(every)) / _seconds(result, "SGD")


def draw(results: Results) -> Picture:
    picture = Picture(figsize=(9, 3.8), layout="constrained")
    for panel, result in zip(picture.subplots(1, 2), results[0].values(), strict=True):
        names = ["SGD", *map(_name, reversed(EVERY))]
        values = [1000 * _seconds(result, name) for name in names]
        bars = panel.barh(names, values, color=["tab:orange"] + ["tab:blue"] * len(EVERY))
        panel.bar_label(bars, [f"{value / values[0]:.2f}×" for value in values], padding=3, fontsize="small")
        panel.set_xlim(0, 1.18 * max(values))
        panel.set_title(result.label, fontsize="medium")
        panel.set_xlabel("milliseconds per iteration")
        panel.spines[["top", "right"]].set_visible(False)
    return picture


def tables(results: Results) -> list[Table]:
    rows = [
        [
            result.label,
            str(every) if every < NEVER else "never",
            f"{1000 * _seconds(result, _name(every)):.2f}",
            f"{relative(result, every):.2f}×",
            f"{update_share(result, every):.1%}",
        ]
        for result in results[0].values()
        for every in EVERY
    ]
    columns = ("model", "Q updated every … mini-batches", "ms per iteration", "relative to SGD", "in updates of Q")
    return [Table("Cost of an iteration with one thread", columns, rows)]


def share_is(paper: float) -> Callable[[Result], Verdict]:
    """Check that a share is not more than one and a half times that of the paper."""

    def check(result: Result) -> Verdict:
        share = update_share(result)
        return Verdict(share < 1.5 * paper, f"{share:.1%}")

    return check


def doubles(result: Result) -> Verdict:
    return Verdict(relative(result) < 2.5, f"{relative(result):.2f} times an iteration of SGD")


def cheap_when_rare(result: Result) -> Verdict:
    text = ", ".join(f"every {every}: {relative(result, every):.2f}×" for every in EVERY[:-1])
    return Verdict(relative(result, 10) < 0.7 * relative(result), text)


def gradients_dominate(result: Result) -> Verdict:
    """Whether both gradients of an iteration together need more than half of its time."""
    share = 2 * _seconds(result, "gradient") / _seconds(result, _name(1))
    return Verdict(share > 0.5, f"{share:.0%}")


FIGURE = Figure(
    name="complexity",
    title="What an iteration costs",
    about="Time of an iteration for the recurrent network of Figure 6 (length 100, float64) and for the network of "
    "Figure 8 (float32), mini-batches of 100, one thread, all kinds taking turns. An update of Q also needs a second "
    "gradient. For MNIST the factors for 785 inputs cost more than a gradient of 100 images does.",
    quick={"rounds": 8, "length": 100, "seeds": 1},
    full={"rounds": 25, "length": 100, "seeds": 1},
    runs=runs,
    draw=draw,
    tables=tables,
    claims=(
        Claim(
            "rnn_share",
            "Recurrent network: updates of Q take no more than about 0.5 % of the time.",
            (RNN,),
            share_is(0.005),
        ),
        Claim("mnist_share", "MNIST: updates of Q take about 15 % of the time, or less.", (MNIST,), share_is(0.15)),
        Claim("rnn_doubles", "Recurrent network: an iteration costs no more than roughly two of SGD.", (RNN,), doubles),
        Claim("mnist_doubles", "MNIST: an iteration costs no more than roughly two of SGD.", (MNIST,), doubles),
        Claim("rnn_gradients", "Recurrent network: gradients dominate the time.", (RNN,), gradients_dominate),
        Claim("mnist_gradients", "MNIST: gradients dominate the time.", (MNIST,), gradients_dominate),
        Claim(
            "rare_updates_rnn",
            "Updating Q less often saves time: recurrent network.",
            (RNN,),
            cheap_when_rare,
        ),
        Claim("rare_updates_mnist", "Updating Q less often saves time: MNIST.", (MNIST,), cheap_when_rare),
    ),
)
