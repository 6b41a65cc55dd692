"""The report: files of `psgd reproduce` and of monitors in a folder, on a page that needs nothing else."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from ..monitor import History, HistoryError
from . import monitored
from .drawing import images
from .figures import FIGURES
from .store import write_bytes

TITLE = "Preconditioned SGD: the paper's experiments"
#: title of a page that has only monitored runs
RUNS_TITLE = "Preconditioned SGD: monitored runs"
#: order of the sections; other results of the folder follow by name
ORDER = list(FIGURES)
#: pattern of cells: a column of these is aligned to the right
NUMBER = re.compile(r"[-−+]?[\d.,]+(e[-+]?\d+)?( ?%)?")

Result = dict[str, Any]

_SEED = {"seed": int, "holds": bool, "measured": str}
_CLAIM = {"name": str, "text": str, "source": str, "holds": bool, "measured": str, "note": str, "seeds": [_SEED]}
#: parts of a result that the page reads; a list has any number of its item, a dict at least the named keys
SHAPE: Result = {
    **dict.fromkeys(("title", "about", "size", "finished"), str),
    "claims": [_CLAIM],
    "tables": [{"caption": str, "columns": [str], "rows": [[str]]}],
    "runs": [{"label": str, "seed": int, "settings": {}, "seconds": (int, float)}],
    "settings": {},
    "seeds": [int],
    "versions": {},
    "machine": {"processor": str, "cores": (int, str), "device": str},
    "seconds": (int, float),
}


class ReportError(Exception):
    """Error of results that are missing or cannot be read; the message is one line for people."""


def write(directory: Path) -> Path:
    """Write `report.html` beside its figures, completely or not at all."""
    path = directory / "report.html"
    try:
        watched = monitored.histories(directory)
    except HistoryError as error:
        raise ReportError(str(error)) from None
    results = _read(directory)
    if not results and not watched:
        raise ReportError(f"no results in {directory}: run psgd reproduce first, or have a psgd.Monitor write there")
    write_bytes(path, _page(directory, results, watched).encode(errors="replace"))
    return path


# ---------------------------------------------------------------- what is there


def _read(directory: Path) -> dict[str, Result]:
    """Results by name, in the order of the sections."""
    results: dict[str, Result] = {}
    places = {name: place for place, name in enumerate(ORDER)}
    for path in sorted(directory.glob("[!.]*.json"), key=lambda path: (places.get(path.stem, len(ORDER)), path.stem)):
        try:
            result = json.loads(path.read_bytes())
            problem = _misfit(result, SHAPE)
        except ValueError as error:
            problem = f"it is not JSON: {error}"
        if not problem:
            results[path.stem] = result
        elif path.stem in places:  # other files may be in the folder for other reasons
            raise ReportError(f"{path} is not a result of psgd reproduce: {problem}")
    return results


def _misfit(value: Any, shape: Any, at: str = "") -> str:
    """First place where a value differs from its shape, in words; empty if it fits."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{at or 'it'} is not an object"
        if missing := [key for key in shape if key not in value]:
            return f"{at or 'it'} has no {missing[0]!r}"
        parts = [(value[key], shape[key], f"{at}.{key}".lstrip(".")) for key in shape]
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{at} is not a list"
        parts = [(entry, shape[0], f"{at}[{index}]") for index, entry in enumerate(value)]
    else:
        # In Python a truth value is a number.
        fits = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
        return "" if fits else f"{at} cannot be {json.dumps(value)[:40]}"
    return next(filter(None, (_misfit(*part) for part in parts)), "")


# ---------------------------------------------------------------- the page; all that is returned from here on is markup


def _page(directory: Path, results: dict[str, Result], watched: dict[str, History]) -> str:
    files = resources.files(__package__)
    every = list(results.values())
    claims = [claim for result in every for claim in result["claims"]]
    ours = [claim for claim in claims if claim["source"] == "ours"]
    papers = [claim for claim in claims if claim["source"] != "ours"]
    shares = f": {_share(papers)} of the paper's, {_share(ours)} of our own" if ours else ""
    # Results of different runs may be in one folder, though mostly they are not.
    sizes = " and ".join(dict.fromkeys(escape(result["size"]) for result in every))
    origins = " and ".join(dict.fromkeys(_origin(result) for result in every))
    total = _duration(sum(result["seconds"] for result in every))
    sections = [_section(directory, name, result) for name, result in results.items()]
    sections += [_watched_section(name, history) for name, history in watched.items()]
    return Template(files.joinpath("report.html").read_text("utf-8")).substitute(
        title=TITLE if results else RUNS_TITLE,
        style=files.joinpath("report.css").read_text("utf-8"),
        verdict=f"{_share(claims)} claims hold{shares}." if results else f"Runs: {len(watched)}.",
        circumstances=f"Size: {sizes}. Run on {origins}. Computing time: {total} in all." if results else "",
        overview=(_overview(results) if results else "") + (_watched_overview(watched) if watched else ""),
        sections="\n".join(sections),
    )


def _overview(results: dict[str, Result]) -> str:
    rows = []
    for name, result in results.items():
        claims = result["claims"]
        hold = _mark(all(claim["holds"] for claim in claims), _share(claims)) if claims else "no claims"
        link = f'<a href="#{quote(name)}">{_heading(name, result)}</a>'
        rows.append((link, hold, f"{escape(result['size'])}, {_duration(result['seconds'])}"))
    return _table("", ("Experiment", "Claims that hold", "Run"), rows)


def _section(directory: Path, name: str, result: Result) -> str:
    finished = escape(result["finished"])
    when = re.sub(r"Z|\+00:00", " UTC", finished.replace("T", " "))
    claims = "\n".join(map(_claim, result["claims"]))
    tables = "\n".join(_escaped_table(table["caption"], table["columns"], table["rows"]) for table in result["tables"])
    return f"""\
<section id="{escape(name)}">
<h2>{_heading(name, result)}</h2>
<p class="meta">Size: {escape(result["size"])}. Seeds: {", ".join(map(str, result["seeds"]))}.
Computing time: {_duration(result["seconds"])}; written
<time datetime="{finished}">{when}</time>.</p>
<p id="{escape(name)}-about">{escape(result["about"])}</p>
{_picture(directory / f"{name}.png", name, _heading(name, result))}
{f'<h3>Claims and measurements</h3><ul class="claims">{claims}</ul>' if claims else ""}
{f"<h3>Tables</h3>{tables}" if tables else ""}
{_settings(result)}
<p class="back"><a href="#overview">Back to the overview</a></p>
</section>"""


def _watched_overview(watched: dict[str, History]) -> str:
    rows = []
    for name, history in watched.items():
        steps, losses = history.curve("step")[1], history.curve("loss")[1]
        last = f"{losses[-1]:.4g}" if losses else "–"
        link = f'<a href="#run-{quote(name)}">{escape(name)}</a>'
        rows.append((link, f"{steps[-1]:.0f}" if steps else "–", f"{len(steps)}", last))
    return _table("", ("Monitored run", "Last step", "Records", "Loss"), rows)


def _watched_section(name: str, history: History) -> str:
    key, heading = f"run-{name}", f"Monitored run {name}"
    skipped = history.curve("skipped")[1]
    about = f"{len(history.blocks())} blocks; {skipped[-1] if skipped else 0:.0f} steps skipped."
    png = images(monitored.draw(history), name)["png"] if len(history) else b""
    picture = _shown(png, key, escape(heading)) if png else '<p class="missing">There is no record yet.</p>'
    return f"""\
<section id="{escape(key)}">
<h2>{escape(heading)}</h2>
<p id="{escape(key)}-about">{escape(about)} Of a number that every block has, the median and the largest are drawn.
All of them are in <code>{escape(name)}.csv</code>.</p>
{picture}
<p class="back"><a href="#overview">Back to the overview</a></p>
</section>"""


def _picture(path: Path, name: str, heading: str) -> str:
    picture = path.read_bytes() if path.exists() else b""
    if not picture:
        return f'<p class="missing">The picture is missing: {escape(path.name)} is not in the folder, or is empty.</p>'
    return _shown(picture, name, heading)


def _shown(picture: bytes, name: str, heading: str) -> str:
    """Link that lets the picture fill the window: browsers open no `data:` address, and a copy is long."""
    return f"""\
<figure class="picture" id="{escape(name)}-picture">
<a href="#{quote(name)}-picture"><img src="data:image/png;base64,{b64encode(picture).decode()}"
alt="Plots of {heading}" aria-describedby="{escape(name)}-about"><span>Enlarge</span></a>
<a class="close" href="#{quote(name)}">Close</a>
</figure>"""


def _claim(claim: Result) -> str:
    source = '<span class="ours">Our own claim</span>' if claim["source"] == "ours" else "The paper's claim"
    note = f'<p class="note">{escape(claim["note"])}</p>' if claim["note"] else ""
    rows = [(str(run["seed"]), _mark(run["holds"]), escape(run["measured"])) for run in claim["seeds"]]
    seeds = f"""\
<details><summary>Holds on {_share(claim["seeds"])} {"seed" if len(rows) == 1 else "seeds"}</summary>
{_table("", ("Seed", "Verdict", "Measured"), rows)}
</details>"""
    return f"""\
<li>
<div><p class="label">{source}</p><p>{escape(claim["text"])}</p><code>{escape(claim["name"])}</code></div>
<div><p class="label">Measured</p><p>{_mark(claim["holds"])} {escape(claim["measured"])}</p>
{note}{seeds if rows else ""}</div>
</li>"""


def _settings(result: Result) -> str:
    """All that is needed to run it again, folded away."""
    runs = result["runs"]
    keys = list(dict.fromkeys(key for run in runs for key in run["settings"]))
    rows = []
    for run in runs:
        values = [_value(run["settings"].get(key, "")) for key in keys]
        rows.append([run["label"], str(run["seed"]), *values, f"{run['seconds']:.1f}"])
    common = [(key, _value(value)) for key, value in result["settings"].items()]
    return f"""\
<details><summary>Settings and {len(runs):,} {"run" if len(runs) == 1 else "runs"}</summary>
<p>Run on {_origin(result)}.</p>
{_escaped_table("Common to all runs", ("Setting", "Value"), common) if common else ""}
{_escaped_table("Runs", ("Run", "Seed", *keys, "Seconds"), rows) if rows else ""}
</details>"""


# ---------------------------------------------------------------- words and tables


def _heading(name: str, result: Result) -> str:
    number = re.fullmatch(r"fig(\d+)", name)
    return (f"Figure {number[1]}: " if number else "") + escape(result["title"])


def _origin(result: Result) -> str:
    machine = result["machine"]
    cores = f"{machine['cores']} core{'' if str(machine['cores']) == '1' else 's'}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return escape(f"{machine['processor']} ({cores}, device {machine['device']}) with {versions}")


def _share(claims: Sequence[Result]) -> str:
    return f"{sum(claim['holds'] for claim in claims)} of {len(claims)}"


def _mark(holds: bool, text: str = "") -> str:
    kind, sign, verdict = ("holds", "✓", "holds") if holds else ("fails", "✗", "does not hold")
    return f'<strong class="mark {kind}"><span aria-hidden="true">{sign}</span> {text or verdict}</strong>'


def _duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f}&nbsp;s"
    minutes, rest = divmod(round(seconds), 60)
    units = f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
    return units.replace(" ", "&nbsp;")


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _escaped_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return _table(escape(caption), [*map(escape, columns)], [[*map(escape, row)] for row in rows])


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table in a box that scrolls by itself, also with keys; the caption stays visible above the box."""
    numeric = [all(map(NUMBER.fullmatch, column)) for column in zip(*rows, strict=False)]
    kinds = ["", *(' class="number"' if right else "" for right in numeric[1:])]
    head = "".join(f'<th scope="col"{kind}>{text}</th>' for text, kind in zip_longest(columns, kinds, fillvalue=""))
    body = ""
    for first, *rest in filter(None, rows):
        cells = "".join(f"<td{kind}>{text}</td>" for text, kind in zip_longest(rest, kinds[1:], fillvalue=""))
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
    return f"""\
<figure>{f"<figcaption>{caption}</figcaption>" if caption else ""}
<div class="scroll" role="group" aria-label="{caption or "Table"}" tabindex="0"><table>
<thead><tr>{head}</tr></thead>
<tbody>{body}</tbody>
</table></div></figure>"""
