"""Tables of measurements, made from the files that the commands left: a page cannot disagree with them.

``<!-- table: results/bench/step.json -->`` becomes the table of a benchmark, with its command, machine and versions;
``<!-- claims: results -->`` becomes the verdicts on the claims of the paper, figure by figure. Paths are those from the
folder of the documentation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: a table of more rows is folded away
LONG = 24
_MARK = re.compile(r"^<!-- (table|claims): (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    docs = Path(config["docs_dir"])
    return _MARK.sub(lambda mark: {"table": benchmark, "claims": claims}[mark[1]](docs / mark[2]), markdown)


def benchmark(path: Path) -> str:
    """What a benchmark measured, as `psgd bench` wrote it."""
    found = _read(path)
    table = found["table"]
    where = ", ".join([*_machine(found["machine"]), *(f"{name} {v}" for name, v in found["versions"].items())])
    shown = markdown_table(table["columns"], table["rows"])
    if len(table["rows"]) > LONG:
        shown = [f'??? note "All {len(table["rows"])} rows"', "", *(f"    {line}" for line in shown)]
    lines = [f"*{found['title']}: {table['caption'].rstrip('.')}.*", "", *shown, "", f"`{found['command']}`; {where}."]
    failed = [f"{m['label']}: {m['failure']}" for m in found["measurements"] if m["failure"] is not None]
    if failed:
        lines += ["", "Not measured:", "", *(f"* {escaped(line)}" for line in failed)]
    return "\n".join(lines)


def claims(folder: Path) -> str:
    """For each figure how many claims of the paper hold, and which do not; in the order of their names."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        found = _read(path)
        ours = [c for c in found["claims"] if c["source"] == "paper"]
        broken = [c["text"] for c in ours if not c["holds"]]
        links = f"[picture]({folder.name}/{path.stem}.svg), [curves]({folder.name}/{path.stem}.csv)"
        rows.append([found["title"], f"{len(ours) - len(broken)} of {len(ours)}", " ".join(broken), links])
    if not rows:
        raise ValueError(f"{folder}: no results there")
    return "\n".join(markdown_table(["figure", "claims that hold", "those that do not", ""], rows))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, numbers to the right; a leading space in it becomes an indent."""
    numbers = [all(re.fullmatch(r"[\d.,e+≤<>%–\s-]*", row[k]) for row in rows) for k in range(len(columns))]
    rule = ["---:" if k and numbers[k] else "---" for k in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(escaped(cell) for cell in cells) + " |"

    return [line(columns), "|" + "|".join(rule) + "|", *(line(row) for row in rows)]


def escaped(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return "&emsp;" * (indent // 2) + text.strip().replace("|", "\\|").replace("<", "&lt;")


def _machine(machine: dict[str, Any]) -> list[str]:
    device = machine.get("device")
    processor = f"{machine['processor']}, {machine['cores']} cores"
    return [processor] if device in (None, "cpu") else [str(device), processor]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: a page wants its table, but there is no such file") from None
    return found
