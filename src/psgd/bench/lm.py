"""Language models of up to 124 million parameters: what each optimizer reaches with a whole schedule, and its time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..experiments.environment import environment
from . import corpus, protocol
from .benchmark import Benchmark, Plan
from .contestants import CONTESTANTS, Contestant
from .gpt import Shape
from .isolate import Row, SkippedError, Task
from .lm_report import ABOUT, DATA, draw, table
from .lm_training import Trainer
from .protocol import Search, Setting
from .record import Record
from .tokens import tokens

#: weight decays that every optimizer is tried with
WEIGHT_DECAYS = (0.1, 1.0)
#: share of the estimated time of a run that is added before it is compared with the time that is left
RESERVE = 0.1


@dataclass(frozen=True)
class Size:
    """A model with its text and its schedule.

    Args:
        name: name on the command line
        shape: sizes of the model and of its mini-batches
        vocabulary: number of tokens of the tokenizer
        most: most bytes of text
        steps: number of steps of a run
        every: number of steps between two evaluations
        judged: most tokens of the held-out text that an evaluation uses
        seconds: seconds allowed for a run
    """

    name: str
    shape: Shape
    vocabulary: int
    most: int
    steps: int
    every: int
    judged: int
    seconds: float

    @property
    def batch_tokens(self) -> int:
        return self.shape.batch * self.shape.context


SIZES: dict[str, Size] = {
    size.name: size
    for size in (
        Size(
            "small",
            Shape(layers=2, heads=2, width=64, context=64, batch=16, dropout=0.0, tied=False),
            vocabulary=1024,
            most=8_000_000,
            steps=300,
            every=50,
            judged=32_768,
            seconds=120.0,
        ),
        Size(
            "52m",
            Shape(layers=14, heads=8, width=512, context=512, batch=64, dropout=0.0, tied=False),
            vocabulary=8192,
            most=200_000_000,
            steps=1200,
            every=100,
            judged=524_288,
            seconds=600.0,
        ),
        Size(
            "124m",
            Shape(layers=12, heads=12, width=768, context=1024, batch=64, dropout=0.0),
            vocabulary=50_304,
            most=500_000_000,
            steps=1600,
            every=100,
            judged=524_288,
            seconds=1800.0,
        ),
    )
}


def work(
    *,
    contestant: Contestant,
    size: Size,
    text: Path | None,
    device: str,
    rates: int,
    seeds: Sequence[int],
    default_seeds: Sequence[int],
    steps: int,
    tuning_steps: int,
    runs: Path | None,
    until: float | None,
) -> Iterator[Row]:
    """Yield a row for the data, then a row for each evaluation of each run, see ``protocol``."""
    data = tokens(corpus.read(text, size.most), size.vocabulary)
    if min(len(data.train), len(data.validation)) <= size.shape.context:
        raise SkippedError("skipped: the text is too short; --text FILE names another")
    yield {"role": DATA, **data.facts()}
    trainer = Trainer(size.shape, size.every, size.judged, data, device)
    record = Record(runs)
    fixed = {
        "size": size.name,
        "optimizer": contestant.name,
        "text": data.sha256,
        "vocabulary": data.vocabulary,
        "tokenizer": data.kind,
        **{name: value for name, value in environment(device).items() if name in ("torch", "device")},
    }

    def train(setting: Setting, seed: int, role: str, best: Any) -> Iterator[Row]:
        decay = contestant.weight_decay if setting.weight_decay is None else setting.weight_decay
        setting, length = Setting(setting.lr, decay), tuning_steps if role == protocol.TUNING else steps
        identity = {**fixed, **setting._asdict(), "seed": seed, "steps": length}
        name = f"{size.name} {contestant.name} {setting.lr:g} {decay:g} {length} {seed}"
        rows = record.load(name, identity)
        if rows is not None:
            yield from rows
            return
        _check_time(trainer.seconds_per_step(contestant) * length, until)
        rows = []
        for row in trainer.train(contestant, setting, seed, length):
            rows.append(row)
            yield row
        record.save(name, identity, rows)

    search = Search(contestant.lr, rates, WEIGHT_DECAYS)
    yield from protocol.runs(search, seeds, train, last, default_seeds=default_seeds)


def _check_time(seconds: float, until: float | None) -> None:
    """Raise if a run of so many seconds would end too late."""
    if until is not None and time.time() + (1 + RESERVE) * seconds > until:
        raise SkippedError("not finished: no time for another run; the same command continues")


def last(rows: Sequence[Row]) -> float:
    """Loss at the end of a run; infinite if it diverged."""
    return rows[-1]["loss"] if rows and math.isfinite(rows[-1]["loss"]) else math.inf


def tasks(plan: Plan) -> list[Task]:
    size, effort = SIZES[plan.model or "small"], plan.effort
    seeds = _first(effort.seeds, 1 if plan.quick else 3)
    rates = _first(effort.rates, 3 if plan.quick else len(protocol.HALF_DECADES))
    steps = _first(effort.steps, size.steps // 5 if plan.quick else size.steps)
    settings: Mapping[str, Any] = {
        "size": size,
        "text": plan.text,
        "device": plan.device,
        "rates": rates,
        "seeds": protocol.TEST_SEEDS[:seeds],
        "default_seeds": protocol.TEST_SEEDS[: _first(effort.default_seeds, seeds)],
        "steps": steps,
        "tuning_steps": _first(effort.tuning_steps, steps),
        "runs": plan.runs,
        "until": plan.until,
    }
    named = {peer.name for peer in plan.peers}
    ours = [name for name in CONTESTANTS if name.startswith("PSGD")]
    if named.isdisjoint(ours):
        named.update(ours)
    limit = plan.limit or size.seconds * protocol.most_runs(seeds, rates, len(WEIGHT_DECAYS))
    return [
        Task(name, work, {"contestant": one, **settings}, limit) for name, one in CONTESTANTS.items() if name in named
    ]


def _first(given: int | None, usual: int) -> int:
    return usual if given is None else given


BENCHMARK = Benchmark(
    "lm",
    "A language model",
    f"{ABOUT} Every optimizer is tried with the weight decays {' and '.join(f'{decay:g}' for decay in WEIGHT_DECAYS)} "
    f"and, with each, with {len(protocol.HALF_DECADES)} learning rates, half a decade apart, around its own default.",
    tasks,
    table,
    draw,
    models=list(SIZES),
    peers=list(CONTESTANTS),
    parts=("rates", "seeds", "default_seeds", "steps", "tuning_steps", "total"),
)
