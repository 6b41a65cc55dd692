"""Pictures that can be read on a phone and enlarged: each is a link to its file, and knows how wide it was drawn.

The width in inches is ``--inches`` in the style of the link. ``style.css`` uses it on narrow screens, where a picture
scrolls in its own box rather than shrinks until nobody can read its labels.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

_IMAGE = re.compile(r'<img alt="[^"]*" src="([^"]+)"[^>]*>')
#: inches in each unit that the width of an SVG has here; CSS has 96 pixels to an inch
_UNITS = {"pt": 1 / 72, "px": 1 / 96, "": 1 / 96}


def on_page_content(content: str, *, page: Any, config: Any, files: Any) -> str:
    return linked(content, Path(config["docs_dir"]))


def linked(content: str, folder: Path) -> str:
    def link(found: re.Match[str]) -> str:
        inches = width((folder / found[1]).read_bytes())
        return f'<a class="picture" href="{found[1]}" style="--inches: {inches:.1f}">{found[0]}</a>'

    return _IMAGE.sub(link, content)


def width(picture: bytes) -> float:
    r"""Width of a picture in inches.

    >>> width(b'<svg width="648pt" height="3pt">'), width(b'<svg viewBox="0 0 1248 99">')
    (9.0, 13.0)
    """
    if picture.startswith(b"\x89PNG"):
        pixels = struct.unpack(">I", picture[16:20])[0]
        at = picture.find(b"pHYs")
        per_metre = struct.unpack(">I", picture[at + 4 : at + 8])[0] if at > 0 else 96 / 0.0254
        return float(pixels / (per_metre * 0.0254))
    head = re.search(rb"<svg[^>]*>", picture)
    if head is None:
        raise ValueError("a picture is neither PNG nor SVG")
    if given := re.search(rb'\bwidth="([\d.]+)(\w*)"', head[0]):
        return float(given[1]) * _UNITS[given[2].decode()]
    box = re.search(rb'\bviewBox="[\d.]+ [\d.]+ ([\d.]+)', head[0])
    if box is None:
        raise ValueError("an SVG has neither a width nor a viewBox")
    return float(box[1]) / 96
