"""The build fails where a page would fetch something from elsewhere: scripts, styles, fonts or pictures."""

from __future__ import annotations

import re
from typing import Any

_FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    if found := fetched(output):
        raise ValueError(f"{page.file.src_uri}: it would fetch {found[0]}; the pages are to be read without a network")
    return output


def fetched(html: str) -> list[str]:
    """
    >>> fetched('<a href="https://x.org">x</a> <img src="y.png"> <script async src="//cdn.org/z.js"></script>')
    ['//cdn.org/z.js']
    """
    return _FETCHED.findall(html)
