"""A small character-level GPT, divided over several ranks by ``fully_shard``; so is what the optimizer keeps for it.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/fsdp_gpt.py --text FILE

It runs on CPUs and GPUs. Given again, or started again by torchrun after a crash, it goes on from its last checkpoint,
on as many ranks as there are then; on as many as before it comes to the same parameters, to the bit, as a run that was
never ended. ``--fail-at`` shows it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from elastic import checksum, fail, report, resume, save, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import psgd
from psgd.bench.gpt import GPT, Shape, Text

#: where a text is looked for if none is given; the last is always there
TEXTS = (Path("tinyshakespeare.txt"), Path("../shared/data/text/tinyshakespeare.txt"), Path(__file__))
#: windows of text of all ranks together: many numbers of ranks divide it
SMALL = Shape(layers=2, heads=2, width=64, context=64, batch=24, dropout=0.0)
LARGE = Shape(layers=6, heads=6, width=384, context=256, batch=96, dropout=0.0)
WARMUP = 50
PRINT_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT with fully_shard and PSGD.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/fsdp_gpt"), metavar="DIR")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="end one rank there, once")
    parser.add_argument("--text", type=Path, metavar="FILE", help="else tinyshakespeare.txt, else this program")
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()

    device = start()
    rank, size = dist.get_rank(), dist.get_world_size()
    text = Text(arguments.text or next(path for path in TEXTS if path.is_file()), str(device))
    shape = LARGE if device.type == "cuda" else SMALL
    torch.manual_seed(0)  # each rank makes the whole model, and keeps its parts
    model = GPT(text.vocabulary, shape).to(device)
    mesh = init_device_mesh(device.type, (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = psgd.whiten(model, arguments.lr, weight_decay=0.1)

    first = resume(arguments.checkpoints, model, optimizer)
    for step in range(first, arguments.steps):
        fail(now=step == arguments.fail_at)
        # Mini-batch and step size are functions of the step, so there is nothing about them to save.
        x, y = (t.tensor_split(size)[rank] for t in next(text.batches(step, shape)))
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())  # not model.loss, which fully_shard does not know of
        loss.backward()
        optimizer.step()
        if (step + 1) % PRINT_EVERY == 0 or step + 1 == arguments.steps:
            dist.all_reduce(loss.detach_())
            report(f"step {step + 1}: loss {loss.item() / size:.4f}")
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            save(arguments.checkpoints, step + 1, model, optimizer)

    report(f"checksum {checksum(model)}")  # all ranks take part in it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
