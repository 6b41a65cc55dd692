"""The examples for several ranks run; after a crash they go on as if nothing had been, on any number of ranks."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from psgd import FiniteDifference, Whitening
from psgd.experiments import mnist

from . import resuming
from .ranks import Ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "ddp_mnist": ["-m", "tests.ranks.on_small_digits", "examples/ddp_mnist.py"],
    "fsdp_gpt": ["examples/fsdp_gpt.py", "--text", "examples/elastic.py"],
}
STEPS, SAVED, MORE = 4, 2, 6


class Run:
    """One that torchrun has been told to start; others may go on beside it."""

    def __init__(self, example: list[str], ranks: int, folder: Path, *options: str, restarts: int = 0) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port for each
        command = [*torchrun, "--max-restarts", str(restarts), *example, "--checkpoints", str(folder), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *args: object) -> None:
        with self.process:  # which closes its pipes, and waits for it
            self.process.kill()

    def output(self) -> str:
        output, errors = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, errors
        return output


def run_on_this_rank(example: list[str], port: int, *options: str) -> str:
    """Run an example as torchrun would, in a process that is there already, and return what it prints."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()  # the example has one of its own
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        for name, value in where.items():
            patch.setenv(name, value)
        patch.chdir(ROOT)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(mnist, "load", mnist.load)  # which an example replaces
        as_module = example[0] == "-m"
        patch.setattr(sys, "argv", [*(example[1:] if as_module else example), *options])
        run = runpy.run_module if as_module else runpy.run_path
        run(sys.argv[0], run_name="__main__")
    return output.getvalue()


def on_ranks(ranks: Ranks, size: int, example: list[str], folder: Path, *options: str) -> str:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    return str(ranks.run(size, run_on_this_rank, example, port, "--checkpoints", str(folder), *options)[0])


def loss(output: str, step: int) -> float:
    return float(re.search(rf"^step {step}: loss (.*)$", output, re.MULTILINE)[1])


def checksum(output: str) -> str:
    return re.search(r"^checksum (\w+)$", output, re.MULTILINE)[1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(ranks, name, tmp_path):
    """torchrun starts one that crashes again; it does what one does that never crashed, on ranks that are there."""
    example = EXAMPLES[name]
    until = ["--steps", str(STEPS), "--save-every", str(SAVED)]
    with Run(example, 2, tmp_path / "crashing", *until, "--fail-at", str(SAVED + 1), restarts=1) as crashing:
        whole = on_ranks(ranks, 2, example, tmp_path / "whole", *until)
        later = on_ranks(ranks, 1, example, tmp_path / "whole", "--steps", str(MORE))
        crashed = crashing.output()
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
