"""Links of the files at the root of the repository, which are also pages here: `docs/plan.md` is `plan.md`.

``CHANGELOG.md`` and ``CONTRIBUTING.md`` are written for readers of the repository. Here their links to pages lead to
the pages; those to files that are not part of the site become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
_INCLUDED = re.compile(r'^--8<-- "(\w+\.md)"$', re.MULTILINE)
#: mkdocs itself lets some of them pass
_OUTSIDE = re.compile(r"\]\((\.\./[^)\s]*)\)")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    root = Path(config["config_file_path"]).parent

    def included(found: re.Match[str]) -> str:
        return moved((root / found[1]).read_text(encoding="utf-8"), {file.src_uri for file in files})

    if outside := _OUTSIDE.search(markdown):
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page.file.src_uri}: the link to {outside[1]} leads out of the site")
    return _INCLUDED.sub(included, markdown)


def moved(markdown: str, known: set[str]) -> str:
    """
    >>> moved("[plan](docs/plan.md#a), [code](src/x.py), [log](CHANGELOG.md), [web](https://x.org)", {"plan.md"})
    '[plan](plan.md#a), code, [log](changelog.md), [web](https://x.org)'
    """

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        page = PAGES.get(target, target.removeprefix("docs/"))
        return f"[{text}]({page}{anchor})" if page in known | set(PAGES.values()) else text

    return _LINK.sub(link, markdown)
