"""Train a network of the experiments with some settings, several at a time, and add the curves to a JSON file.

    python tools/settings.py runs.json rnn2d 'states=[20,40]' 'states=[20,40];lr=0.0006' --device cuda --jobs 6
    python tools/settings.py runs.json addition lr=0.01 lr=0.02 lr=0.03 --seeds 100 101 102 --jobs 9
    python tools/settings.py runs.json long-memory 'problem=XOR;length=200' --seeds 101 102

A setting is a list of ``NAME=VALUE`` between semicolons; what it leaves out is as in the experiment, and the setting
``default`` leaves out everything. ``rnn2d`` trains with the first 50,000 training images and tests the last 10,000, so
that the test images have no say; ``addition`` is Figure 6 with the settings of the paper; ``long-memory`` is the recipe
for the eight problems.

Finished runs that are in the file are not repeated. If the command is ended by SIGTERM or Ctrl-C, the file has all
finished runs, and the curves of the others so far. Neither matplotlib nor the command ``psgd`` is needed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from psgd.experiments import long_memory, pool, recurrent, rnn2d
from psgd.experiments.run import Row, Run
from psgd.experiments.store import write_bytes

#: seconds between two writings of curves that are not finished
PAUSE = 10.0


class Training(NamedTuple):
    """A function that trains, its settings, the setting that counts its rows, and how many of these one row has."""

    work: Callable[..., Iterator[Row]]
    settings: Mapping[str, Any]
    total: str
    each: int
    #: number of rows between two lines of progress, and the columns that are printed
    every: int
    columns: Sequence[str]
    #: class of the settings, if they have one: a wrong name is found before anything is trained
    kind: Callable[..., Any] = dict
    digits: bool = False


TRAININGS = {
    "rnn2d": Training(
        rnn2d.tune,
        asdict(rnn2d.FULL),
        "epochs",
        1,
        10,
        ("epoch", "loss", "test loss", "error", "error without average"),
        kind=rnn2d.Settings,
        digits=True,
    ),
    "addition": Training(
        recurrent.train,
        {"length": 100, "method": "c3", "precond_lr": 0.01, "max_norm": 1.0, "iterations": 12_000, "stop": True},
        "iterations",
        recurrent.EVERY,
        10,
        ("iteration", "loss"),
    ),
    "long-memory": Training(
        long_memory.train,
        {"length": 100, "method": "PSGD", **long_memory.RECIPE, "iterations": 8_000},
        "iterations",
        long_memory.EVERY,
        5,
        ("iteration", "loss", "wrong", "memory"),
    ),
}


def parse(text: str) -> dict[str, Any]:
    """Settings of a text ``NAME=VALUE;…``; what is not JSON is a string."""
    found: dict[str, Any] = {}
    for part in text.split(";") if text != "default" else []:
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not NAME=VALUE")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value
    return found


def plan(training: str, texts: Sequence[str], seeds: Sequence[int], device: str, data: Path | None) -> list[Run]:
    """Runs of all settings and seeds; those of the first seed come first."""
    chosen = TRAININGS[training]
    place = {"data": data} if chosen.digits else {}
    runs = []
    for seed in seeds:
        for text in texts:
            settings = {**chosen.settings, **parse(text)}
            chosen.kind(**settings)
            rows = settings[chosen.total] // chosen.each
            runs.append(Run(training, text, seed, chosen.work, settings, rows, 1.0, device=device, place=place))
    return runs


class Record:
    """The JSON file: runs by their keys, each with its rows, and whether it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._written = time.monotonic()

    def finished(self, run: Run) -> bool:
        return bool(self.entries.get(run.key, {}).get("finished"))

    def take_in(self, event: pool.Event) -> None:
        run = event.run
        if isinstance(event, pool.Finished):
            result = event.result
            seconds, more = result.seconds, {"finished": True, "environment": dict(result.environment)}
            rows = result.rows
        else:
            seconds, more = event.seconds, {"finished": False}
            rows = [] if event.rows == 1 else self.entries[run.key]["rows"]
            rows.append(event.row)
        self.entries[run.key] = {**run.identity, **more, "seconds": seconds, "rows": rows}
        if more["finished"] or time.monotonic() > self._written + PAUSE:
            self.write()

    def write(self) -> None:
        write_bytes(self.path, json.dumps(self.entries, indent=None).encode())
        self._written = time.monotonic()


def line(event: pool.Event) -> str | None:
    """Line of progress, for some rows and for the end."""
    training = TRAININGS[event.run.figure]
    if isinstance(event, pool.Finished):
        row, seconds, state = event.result.rows[-1], event.result.seconds, "finished"
    elif event.rows % training.every == 0:
        row, seconds, state = event.row, event.seconds, ""
    else:
        return None
    values = ", ".join(f"{name} {row[name]:.5g}" for name in training.columns if name in row)
    return f"{event.run.label} seed {event.run.seed}: {values}, {seconds:.0f} s {state}".rstrip()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file that curves are added to")
    parser.add_argument("training", choices=TRAININGS)
    parser.add_argument("settings", nargs="+", metavar="NAME=VALUE[;NAME=VALUE]", help="settings, or default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--jobs", type=int, default=6, help="number of runs at the same time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="folder with MNIST")
    arguments = parser.parse_args(words)
    try:
        runs = plan(arguments.training, arguments.settings, arguments.seeds, arguments.device, arguments.data)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    record = Record(arguments.out)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for event in pool.carry_out([run for run in runs if not record.finished(run)], arguments.jobs):
            record.take_in(event)
            if text := line(event):
                print(text, flush=True)
    finally:
        record.write()
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
