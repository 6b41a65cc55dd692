"""``python tools/release_notes.py v0.2.0``: whether this tree may bear the tag, and what the changelog says of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/psgd/__init__.py").read_text(), flags=re.MULTILINE)
    if found is None:
        raise SystemExit("release_notes: there is no __version__ in src/psgd/__init__.py")
    return found[1]


def section(changelog: str, wanted: str) -> tuple[str, str]:
    """Of one version: what stands after its number in the heading, and the text below."""
    for part in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        number, _, date = heading.partition(",")
        if number.strip() == wanted:
            return date.strip(), text.strip()
    raise SystemExit(f"release_notes: CHANGELOG.md has no heading '## {wanted}, DATE'")


def notes(tag: str, changelog: str, citation: str) -> str:
    """What is released under a tag; ends the program where the files do not agree on it."""
    wanted = version()
    if tag != f"v{wanted}":
        raise SystemExit(f"release_notes: the tag is {tag}, but __version__ says v{wanted}")
    date, text = section(changelog, wanted)
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) is None:
        raise SystemExit(f"release_notes: CHANGELOG.md has {date or 'nothing'!r} where the date of {wanted} belongs")
    for key, value in {"version": wanted, "date-released": date}.items():
        if re.search(rf'^{key}: "?{re.escape(value)}"?$', citation, flags=re.MULTILINE) is None:
            raise SystemExit(f"release_notes: CITATION.cff has no line '{key}: {value}'")
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/release_notes.py TAG")
    print(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text("utf-8"), (ROOT / "CITATION.cff").read_text("utf-8")))
