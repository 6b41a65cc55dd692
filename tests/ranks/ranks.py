"""Processes that stay, for tests that need several ranks: starting one takes seconds, a job often less."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

MOST = 4
#: that no one waits for ever
SECONDS = 120


class FailedOnRanksError(Exception):
    """What went wrong, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{error}" for rank, error in sorted(errors.items())))
        self.errors = errors


class Ranks:
    """A few processes that do what they are told, together."""

    def __init__(self, context: BaseContext, count: int = MOST) -> None:
        self.pipes, self.processes = [], []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.place = tempfile.TemporaryDirectory()

    def run(self, size: int, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """The job's results on ``size`` ranks of one process group."""
        self.meet()
        for rank in range(size):
            self.send(rank, size, job, *args, **options)
        answers = {rank: self.receive(rank) for rank in range(size)}
        errors = {rank: value for rank, (good, value) in answers.items() if not good}
        if errors:
            raise FailedOnRanksError(errors)
        return [answers[rank][1] for rank in range(size)]

    def meet(self) -> None:
        """Where the ranks of the next job find each other."""
        self.place.cleanup()
        self.place = tempfile.TemporaryDirectory()

    def send(self, rank: int, size: int, job: Callable[..., Any], *args: Any, timeout: float = 20, **options: Any):
        self.pipes[rank].send((rank, size, str(Path(self.place.name) / "store"), timeout, job, args, options))

    def receive(self, rank: int) -> tuple[bool, Any]:
        """Whether all went well, and the result, or else the error."""
        if not self.pipes[rank].poll(SECONDS):
            self.close()
            raise TimeoutError(f"rank {rank} has not answered for {SECONDS} s")
        answer: tuple[bool, Any] = self.pipes[rank].recv()
        return answer

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.place.cleanup()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        rank, size, store, timeout, job, args, options = pipe.recv()
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
            torch.manual_seed(rank)  # nobody may count on a common one
            answer = (True, job(*args, **options))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
