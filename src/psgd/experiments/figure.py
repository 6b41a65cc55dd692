"""A figure: its runs, how it is drawn, what it claims, and the files that it writes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture

from .claim import Claim
from .drawing import images
from .environment import MACHINE, VERSIONS, together
from .run import Result, Results, Run
from .store import write_bytes

#: size of an experiment: numbers by name, among them the number of seeds
Size = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def _no_tables(results: Results) -> list[Table]:
    return []


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    Args:
        name: name on the command line
        title: a heading
        about: what is shown, for the reader of the report
        quick: the size at which all figures together need a quarter of an hour
        full: the paper's size
        runs: returns all runs of a size for one seed, counted from 0; another first seed is added afterwards
        draw: makes the picture
        claims: statements of the paper about it
        tables: makes tables of numbers that a picture shows less well
        digits: whether its runs need MNIST, and its folder as ``data``
    """

    name: str
    title: str
    about: str
    quick: Size
    full: Size
    runs: Callable[[Size, int], list[Run]]
    draw: Callable[[Results], Picture]
    claims: Sequence[Claim]
    tables: Callable[[Results], list[Table]] = _no_tables
    digits: bool = False

    def all_runs(self, size: Size, first_seed: int = 0) -> list[Run]:
        """Runs of all seeds from the first one on."""
        runs = [run for seed in range(size["seeds"]) for run in self.runs(size, seed)]
        return [replace(run, seed=first_seed + run.seed) for run in runs]

    def write(self, directory: Path, results: Results, size: Size, size_name: str) -> dict[str, Any]:
        """Write the picture, the curves, and their description; return the description."""
        summary = self.summary(results, size, size_name)
        files = images(self.draw(results), self.name)
        files["csv"] = curves(results).encode()
        files["json"] = (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode()
        for kind, content in files.items():
            write_bytes(directory / f"{self.name}.{kind}", content)
        return summary

    def summary(self, results: Results, size: Size, size_name: str) -> dict[str, Any]:
        runs = [result for by_label in results.values() for result in by_label.values()]
        return {
            "name": self.name,
            "title": self.title,
            "about": self.about,
            "size": size_name,
            "claims": [claim.judge(results) for claim in self.claims if claim.is_measured(results)],
            "tables": [{"caption": t.caption, "columns": t.columns, "rows": t.rows} for t in self.tables(results)],
            "settings": dict(size),
            "runs": [
                {"label": r.label, "seed": r.seed, "settings": dict(r.settings), "seconds": round(r.seconds, 2)}
                for r in runs
            ],
            "seeds": list(results),
            "versions": together([r.environment for r in runs], VERSIONS),
            "machine": together([r.environment for r in runs], MACHINE),
            "seconds": round(sum(r.seconds for r in runs), 1),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


def curves(results: Results) -> str:
    """All rows of all runs as comma-separated values."""
    runs = [result for by_label in results.values() for result in by_label.values()]
    columns = list(dict.fromkeys(name for result in runs for row in result.rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["run", "seed", *columns], lineterminator="\n")
    writer.writeheader()
    for result in runs:
        writer.writerows({"run": result.label, "seed": result.seed, **row} for row in result.rows)
    return text.getvalue()


def read(directory: Path, name: str) -> Results:
    """Results from the files that ``write`` wrote."""
    summary = json.loads((directory / f"{name}.json").read_bytes())
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    with open(directory / f"{name}.csv", newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            key = int(line.pop("seed")), line.pop("run")
            rows.setdefault(key, []).append({column: float(text) for column, text in line.items() if text != ""})
    results: dict[int, dict[str, Result]] = {seed: {} for seed in summary["seeds"]}
    for run in summary["runs"]:
        seed, label = run["seed"], run["label"]
        environment = summary["versions"] | summary["machine"]
        curve = rows.get((seed, label), [])
        results[seed][label] = Result(label, seed, run["settings"], curve, run["seconds"], environment)
    return results
