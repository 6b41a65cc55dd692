r"""Formulas become MathML when the site is built, which browsers show by themselves: no script, no fonts, no network.

Pages write ``$…$`` and ``$$…$$``; the extension `arithmatex` finds them, and leaves ``\(…\)`` and ``\[…\]`` in elements
of its class. A formula that cannot be converted stops the build.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, *, page: Any, config: Any, files: Any) -> str:
    return replaced(content)


def replaced(content: str) -> str:
    return _FORMULA.sub(lambda found: mathml(html.unescape(found[3]), block=found[2] == "["), content)


def mathml(latex: str, *, block: bool) -> str:
    latex = latex.strip().replace(r"\_", "_")  # the converter keeps the backslash, within texts
    try:
        found: str = convert(_aligned(latex), display="block" if block else "inline")
    except Exception as error:
        raise ValueError(f"formula {latex!r}: {type(error).__name__} {error}") from error
    # Bars are fences: without this they would stand apart, as relations do.
    found = re.sub(
        r"<mo(?: stretchy=\"false\")?>&#x(0007C|02016);</mo>",
        r'<mo stretchy="false" lspace="0" rspace="0">&#x\1;</mo>',
        found,
    )
    found = re.sub(r"<mo>([a-z]+)</mo>", r"<mi>\1</mi>", found)  # names of functions are no operators
    # A command that the converter does not know comes back as it is.
    if unknown := re.search(r"\\[a-zA-Z]+|>&<", found):
        raise ValueError(f"formula {latex!r}: {unknown[0]} is not known to latex2mathml; write it in another way")
    return f'<div class="formula">{found}</div>' if block else found


def _aligned(latex: str) -> str:
    """The converter knows arrays, and not what is made of them: pairs of a right and a left column."""
    for name in ("aligned", "align*"):
        latex = latex.replace(rf"\begin{{{name}}}", r"\begin{array}{rl}").replace(rf"\end{{{name}}}", r"\end{array}")
    return latex
