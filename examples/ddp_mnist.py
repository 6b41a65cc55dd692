"""Handwritten digits on several ranks, each of which keeps the preconditioners of some layers only.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/ddp_mnist.py

It runs on CPUs and GPUs. Given again, or started again by torchrun after a crash, it goes on from its last checkpoint,
on as many ranks as there are then; on as many as before it comes to the same parameters, to the bit, as a run that was
never ended. ``--fail-at`` shows it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from elastic import checksum, fail, report, resume, save, start
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import psgd
from psgd.experiments import digits, mnist

#: images of all ranks together; many numbers of ranks divide it
BATCH = 240
PRINT_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on MNIST with DistributedDataParallel and PSGD.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/ddp_mnist"), metavar="DIR")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="end one rank there, once")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where MNIST is; else $PSGD_DATA, or a download")
    arguments = parser.parse_args()

    device = start()
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = data(arguments.data, device)
    model = DistributedDataParallel(digits.network([100], torch.Generator().manual_seed(0)).to(device))
    optimizer = psgd.newton(model, shard=dist.group.WORLD)

    # After its first gradient DistributedDataParallel puts gradients in another order, and three ranks or more round
    # their sums in another way then. That is to happen here, and not after the first step of each resumed run.
    model(images[:1]).sum().backward()

    first = resume(arguments.checkpoints, model, optimizer)
    for step in range(first, arguments.steps):
        fail(now=step == arguments.fail_at)
        # The mini-batch is a function of the step, so there is nothing about the data to save.
        picked = torch.randint(len(images), (BATCH,), generator=torch.Generator().manual_seed(step))
        mine = picked.tensor_split(size)[rank].to(device)
        x, y = images[mine], labels[mine]

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure).detach()
        if (step + 1) % PRINT_EVERY == 0 or step + 1 == arguments.steps:
            dist.all_reduce(loss)
            report(f"step {step + 1}: loss {loss.item() / size:.4f}")
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            save(arguments.checkpoints, step + 1, model, optimizer)

    _, error = digits.judge(model.module, cross_entropy, test_images, test_labels)
    report(f"test error {error:.4f}")
    report(f"checksum {checksum(model)}")
    dist.destroy_process_group()


def data(folder: Path | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """On each machine one rank comes first, which may have to fetch them."""
    first = os.environ["LOCAL_RANK"] == "0"
    if not first:
        dist.barrier()
    try:
        found = digits.tensors(folder, str(device))
    except mnist.DataError as error:
        sys.exit(f"ddp_mnist: {error}")
    if first:
        dist.barrier()
    return found


if __name__ == "__main__":
    main()
