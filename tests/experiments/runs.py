"""Runs that take no time, for the tests of what is done with runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from psgd.experiments.claim import Claim, Verdict
from psgd.experiments.figure import Figure, Table
from psgd.experiments.run import Result, Row, Run, of_first_seed


def work(
    *, seed: int, device: str, count: int, slope: float = 1.0, die: bool = False, sleep: float = 0.0, mark: str = ""
) -> Iterator[Row]:
    """Random numbers; ``mark`` is a file to which each execution adds a line."""
    generator = torch.Generator().manual_seed(seed)
    if mark:
        with open(mark, "a") as file:
            file.write(f"{seed} {slope}\n")
    for k in range(1, count + 1):
        if die and k == 2:
            os._exit(1)
        time.sleep(sleep)
        noise = torch.rand((), generator=generator).item()
        yield {"iteration": k, "loss": slope / k + 1e-3 * noise, "threads": torch.get_num_threads()}


def fails(*, seed: int, device: str) -> Iterator[Row]:
    yield {"iteration": 1}
    raise ArithmeticError("no such number")


def run(label: str = "a", seed: int = 0, **settings: Any) -> Run:
    settings = {"count": 3, **settings}
    return Run("toy", label, seed, work, settings, settings["count"], 0.01)


def result(label: str = "a", seed: int = 0, **columns: list[float]) -> Result:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Result(label, seed, {"method": "SGD"}, rows, 1.5, {"psgd": "1", "torch": "2", "python": "3", **MACHINE})


MACHINE = {"processor": "abacus", "cores": 2, "device": "cpu"}


def small_first(a: Result, b: Result) -> Verdict:
    return Verdict(a.last("loss") < b.last("loss"), f"{a.last('loss'):.3f} < {b.last('loss'):.3f}")


def toy(mark: Path | None = None, sleep: float = 0.0, count: int = 3) -> Figure:
    """A figure with two runs for each seed."""
    from matplotlib.figure import Figure as Picture

    def draw(results: Any) -> Picture:
        picture = Picture(figsize=(2, 2))
        picture.subplots().plot(of_first_seed(results)["a"].column("loss"))
        return picture

    def runs(size: Any, seed: int) -> list[Run]:
        common = {"count": size["count"], "mark": str(mark or ""), "sleep": sleep}
        return [run("a", seed, slope=1.0, **common), run("b", seed, slope=2.0, **common)]

    return Figure(
        "toy",
        "A toy",
        "What it is about.",
        quick={"count": count, "seeds": 2},
        full={"count": 2 * count, "seeds": 3},
        runs=runs,
        draw=draw,
        claims=[
            Claim("a_below_b", "a is below b.", ("a", "b"), small_first),
            Claim("b_below_a", "b is below a.", ("b", "a"), small_first, note="It is not."),
        ],
        tables=lambda results: [Table("A table", ("x",), [["1"]])],
    )
