"""Marks of examples that are for the tests, not for readers: ``python notest`` is Python that is not run."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return without_marks(markdown)


def on_page_content(content: str, *, page: Any, config: Any, files: Any) -> None:
    if "<p>```" in content:
        raise ValueError(
            f"{page.file.src_uri}: a block of code begins with something that is not the name of a language"
        )


def without_marks(markdown: str) -> str:
    """
    >>> print(without_marks("~~~python notest\\nx = 1\\n~~~".replace("~", "`")).replace("`", "~"))
    ~~~python
    x = 1
    ~~~
    """
    return re.sub(r"^( *```python) notest$", r"\1", markdown, flags=re.MULTILINE)
