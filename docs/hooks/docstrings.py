"""What mkdocstrings does not find in our docstrings by itself.

* ``.. math::``, as torch writes formulas, becomes ``$$…$$``.
* Examples, from ``>>>`` to the next empty line, become code.
* A comment ``#: …`` above a field is the field's docstring.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

_MATH = re.compile(r"^( *)\.\. math::[ ]*\n((?:\1[ ]+.*\n|[ ]*\n)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = examples(formulas(obj.docstring.value))

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        if text := comment_above(attr.filepath.read_text(encoding="utf-8").splitlines(), attr.lineno):
            attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)


def formulas(text: str) -> str:
    r"""
    >>> print(formulas(".. math::\n    a = b\n\nThat."))
    $$
    a = b
    $$
    <BLANKLINE>
    That.
    """
    return _MATH.sub(lambda found: f"$$\n{textwrap.dedent(found[2]).strip()}\n$$\n\n", text)


def examples(text: str) -> str:
    """Fence them: without, Markdown takes the signs for quotations."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"```pycon\n{p}\n```" if p.lstrip().startswith(">>> ") else p for p in paragraphs)


def comment_above(lines: list[str], lineno: int) -> str:
    """
    >>> comment_above(["x = 1", "#: how many", "#: there are", "y = 2"], 4)
    'How many there are'
    """
    first = lineno - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#:"):
        first -= 1
    text = " ".join(line.lstrip()[2:].strip() for line in lines[first : lineno - 1])
    return text[:1].upper() + text[1:]
