"""The README's examples run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_examples_run_in_order(capsys):
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        exec(example, names)
    assert "PSGD(Kronecker" in capsys.readouterr().out
    assert names["loss"].item() < 1.0


def test_it_starts_with_the_two_commands():
    first = re.search(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line.split("#")[0].strip() for line in first.group(1).splitlines()] == ["make demo", "make test"]
