"""The examples for several ranks run; after a crash they go on as if nothing had been, on any number of ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from psgd import FiniteDifference, Whitening

from . import resuming

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "ddp_mnist": ["-m", "tests.ranks.on_small_digits", "examples/ddp_mnist.py"],
    "fsdp_gpt": ["examples/fsdp_gpt.py", "--text", "examples/elastic.py"],
}
STEPS, SAVED, MORE = 4, 2, 6


class Run:
    """One that has been started; several may go on side by side."""

    def __init__(self, example: list[str], ranks: int, folder: Path, *options: str, restarts: int = 0) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port for each
        command = [*torchrun, "--max-restarts", str(restarts), *example, "--checkpoints", str(folder), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)

    def output(self) -> str:
        try:
            output, errors = self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, errors
        return output


def loss(output: str, step: int) -> float:
    return float(re.search(rf"^step {step}: loss (.*)$", output, re.MULTILINE)[1])


def checksum(output: str) -> str:
    return re.search(r"^checksum (\w+)$", output, re.MULTILINE)[1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, tmp_path):
    example = EXAMPLES[name]
    until = ["--steps", str(STEPS), "--save-every", str(SAVED)]
    crashing = Run(example, 2, tmp_path / "crashing", *until, "--fail-at", str(SAVED + 1), restarts=1)
    whole = Run(example, 2, tmp_path / "whole", *until).output()
    second = Run(example, 1, tmp_path / "whole", "--steps", str(MORE))
    crashed, later = crashing.output(), second.output()
    assert "resumed" not in whole
    assert f"step-{SAVED:08d} on 2 ranks" in crashed
    assert loss(crashed, STEPS) == loss(whole, STEPS)
    assert checksum(crashed) == checksum(whole)
    assert f"step-{STEPS:08d} on 1 ranks" in later
    assert loss(later, MORE) > 0


@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference(std=1e-3)], ids=["whitening", "difference"])
@pytest.mark.parametrize("kind", ["ddp, shared", "fsdp"])
def test_resumption_by_any_number_of_ranks(ranks, kind, probe, tmp_path):
    options = {"probe": probe, "lr": 0.02, "precond_lr": 0.1, "momentum": 0.9}
    whole = ranks.run(2, resuming.train, kind, tmp_path / "whole", STEPS, MORE, **options)
    for size in (1, 2, 3, 4):
        shutil.copytree(tmp_path / "whole", tmp_path / str(size))
        (tmp_path / str(size) / f"step-{MORE:08d}.part").mkdir()  # as an interrupted save leaves it
        for result in ranks.run(size, resuming.train, kind, tmp_path / str(size), MORE, MORE, **options):
            for p, right in zip(result, whole[0], strict=True):
                assert torch.linalg.vector_norm(p - right) <= (0 if size == 2 else 1e-10) * right.norm()
        saved = sorted(path.name for path in (tmp_path / str(size)).iterdir())
        assert saved == [f"step-{STEPS:08d}", f"step-{MORE:08d}"]
