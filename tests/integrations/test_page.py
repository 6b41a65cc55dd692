"""``docs/integrations.md``: its code runs as it is written, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")


def test_code_runs_in_order():
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 7
    for block in blocks:
        exec(block, names)


def test_each_example_is_named_and_each_name_is_an_example():
    named = set(re.findall(r"examples/integrations/(\w+)\.py", PAGE))
    assert named == {path.stem for path in (ROOT / "examples" / "integrations").glob("*.py")}
