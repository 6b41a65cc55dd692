"""Train a model of ``psgd bench lm`` with some settings, in one process that compiles it once.

    python tools/lm_settings.py runs.json psgd:0.001:0.1 psgd:0.001:1 muon:0.01:0.1 --steps 500 --seeds 100

A setting is ``OPTIMIZER:LEARNING_RATE:WEIGHT_DECAY``, in which the optimizer is psgd, adamw, muon or soap. For PSGD,
further options may follow, as in ``psgd:0.001:0.1:momentum=0.95``. Runs are added to the file, each as soon as it is
finished; runs that are there already are not repeated. ``docs/results/bench/lm-52m.json`` has such runs. They are no
substitute for the protocol of ``psgd bench lm``, which tunes all optimizers in the same way: they answer what a setting
changes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

import psgd
from psgd.bench import corpus, lm
from psgd.bench.contestants import CONTESTANTS, Contestant, adamw, muon
from psgd.bench.gpt import GPT
from psgd.bench.lm_training import Trainer
from psgd.bench.protocol import Setting
from psgd.bench.tokens import tokens


class Nesterov:
    """Optimizer whose average of gradients is Nesterov's: an average of ``g + beta (g − g_before)``."""

    def __init__(self, inner: Optimizer, beta: float) -> None:
        self.inner, self.beta = inner, beta
        self.param_groups = inner.param_groups
        self.zero_grad = inner.zero_grad
        self.before: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params]
        before = [g.clone() for g in grads] if self.before is None else self.before
        for p, g in zip(params, torch._foreach_lerp(before, grads, 1 + self.beta), strict=True):
            p.grad = g
        torch._foreach_copy_(before, grads)
        self.before = before
        self.inner.step()


def whiten(model: GPT, lr: float, weight_decay: float, **options: Any) -> Any:
    """``psgd.whiten`` with further options.

    ``nesterov`` is the ``beta`` of ``Nesterov``, and ``outer`` multiplies the learning rate of embeddings.
    """
    nesterov, outer = options.pop("nesterov", 0.0), options.pop("outer", 1.0)
    optimizer = psgd.whiten(model, lr, weight_decay=weight_decay, **options)
    if outer != 1:
        hidden = {id(p) for p in model.hidden()}
        for group in optimizer.param_groups:
            if all(p.ndim == 2 and id(p) not in hidden for p in group["params"]):
                group["lr"] = lr * outer
    return Nesterov(optimizer, nesterov) if nesterov else optimizer


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "psgd": whiten,
    "adamw": adamw,
    "muon": muon,
    "soap": CONTESTANTS["pytorch_optimizer.SOAP"].make,
}


def value(text: str) -> Any:
    """Value of an option: a dtype of torch, or what Python's literals say."""
    dtype = getattr(torch, text, None)
    return dtype if isinstance(dtype, torch.dtype) else json.loads(text.lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file that runs are added to")
    parser.add_argument("settings", nargs="+", metavar="OPTIMIZER:LR:WEIGHT_DECAY[:OPTION=VALUE]")
    parser.add_argument("--size", choices=lm.SIZES, default="52m")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    size = lm.SIZES[arguments.size]
    data = tokens(corpus.read(None, size.most), size.vocabulary)
    trainer = Trainer(size.shape, size.every, size.judged, data, arguments.device)
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": []}
    for text in arguments.settings:
        name, lr, weight_decay, *options = text.split(":")
        make = partial(OPTIMIZERS[name], **{key: value(v) for key, _, v in (o.partition("=") for o in options)})
        contestant = Contestant(CONTESTANTS["PSGD"].name, make, 0.0)
        for seed in arguments.seeds:
            run = {"setting": text, "size": arguments.size, "steps": arguments.steps, "seed": seed}
            if any(all(done.get(key) == v for key, v in run.items()) for done in found["runs"]):
                continue
            trainer.seconds_per_step(contestant)
            rows = list(trainer.train(contestant, Setting(float(lr), float(weight_decay)), seed, arguments.steps))
            found["runs"].append({**run, "text": data.sha256, "tokens": len(data.train), "rows": rows})
            arguments.out.write_text(json.dumps(found, indent=1))
            print(text, f"seed {seed}:", " ".join(f"{row['loss']:.4f}" for row in rows), flush=True)


if __name__ == "__main__":
    main()
