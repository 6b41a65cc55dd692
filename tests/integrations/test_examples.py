"""The scripts of ``examples/integrations``: each trains to the margin that it states, and tells where it does not."""

from __future__ import annotations

import ast
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

from .packages import needs, needs_inductor

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
#: those that need packages, and others' warnings that come with them
PACKAGES = {
    "accelerate_loop": "accelerate",
    "lightning_closure": "lightning",
    "lightning_manual": "lightning",
    "lightning_trainer": "lightning",
    "tensorboard_tracking": "tensorboard",
    "transformers_trainer": "transformers",
    "wandb_tracking": "wandb",
}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
examples = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def prepared(name: str, tmp_path, monkeypatch):
    """Skips what cannot be run here, and runs the rest in an empty folder."""
    if name == "compiled_model":
        needs_inductor()
        torch._dynamo.reset()
    if name in PACKAGES:
        needs(PACKAGES[name])
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if name in PACKAGES or name == "compiled_model":
            warnings.simplefilter("ignore")  # theirs: about versions of torch, numbers of workers, what they import
        yield EXAMPLES / f"{name}.py"


@examples
def test_it_trains_to_its_margin(name: str, prepared: Path, capsys):
    runpy.run_path(str(prepared), run_name="__main__")
    seen = re.findall(r"loss ([\d.]+) -> ([\d.]+)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert seen
    for before, after in seen:
        assert 0 < float(after) < 0.5 * float(before)


@examples
def test_without_steps_it_fails_and_says_so(name: str, prepared: Path, capsys):
    main = runpy.run_path(str(prepared))["main"]
    with pytest.raises(SystemExit) as ended:
        main(lr=0.0)
    assert re.search(rf"^{name}: the loss was to fall below", str(ended.value.code))
    assert "->" in capsys.readouterr().out


@examples
def test_it_states_its_command_and_margin(name: str):
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    assert f"python examples/integrations/{name}.py" in text
    assert "The margin:" in " ".join(text.split())
