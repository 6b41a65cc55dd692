"""Plans of large transformers, for docs/plan.md: ``python docs/plan.py`` prints its tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psgd import Kronecker, Plan, plan


@dataclass(frozen=True)
class Transformer:
    """A decoder like Llama: no biases, a gated feed-forward network, fewer heads of keys and values than of queries."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 128_256
    tied: bool = False

    def shapes(self) -> dict[str, tuple[int, ...] | tuple[int, tuple[int, ...]]]:
        kv = self.width // self.heads * self.kv_heads
        of_layer = {
            "q": (self.width, self.width),
            "k": (kv, self.width),
            "v": (kv, self.width),
            "o": (self.width, self.width),
            "gate": (self.ffn, self.width),
            "up": (self.ffn, self.width),
            "down": (self.width, self.ffn),
            "norm1": (self.width,),
            "norm2": (self.width,),
        }
        ends = {"norm": (self.width,), **({} if self.tied else {"head": (self.vocabulary, self.width)})}
        layers = {f"layer.*.{name}": (self.layers, shape) for name, shape in of_layer.items()}
        return {"embedding": (self.vocabulary, self.width), **layers, **ends}


MODELS = {
    "1 B": Transformer(layers=16, width=2048, heads=32, kv_heads=8, ffn=8192, tied=True),
    "8 B": Transformer(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336),
    "70 B": Transformer(layers=80, width=8192, heads=64, kv_heads=8, ffn=28672),
}
RANKS = (8, 64, 512)


WANTED = Kronecker(max_dense=8192)


def planned(model: str, ranks: int, budget: str | None = None) -> Plan:
    shapes = MODELS[model].shapes()
    return plan(shapes, preconditioner=WANTED, precond_dtype=torch.bfloat16, world_size=ranks, budget=budget)


def overview() -> str:
    """What the fullest and the busiest rank have, and the means, for every model and number of ranks."""
    lines = [
        "| model | ranks | GiB, at most | mean | TFLOP, at most | mean | balance |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for ranks in RANKS:
            found = planned(model, ranks)
            state = f"{found.bytes_per_rank / 2**30:.2f} | {found.bytes / ranks / 2**30:.2f}"
            work = f"{found.flops_per_rank / 1e12:.1f} | {found.flops / ranks / 1e12:.1f}"
            lines.append(f"| {model} | {ranks} | {state} | {work} | {found.balance:.2f} |")
    return "\n".join(lines)


def sections() -> list[str]:
    """What the page shows, in its order."""
    return [overview(), str(planned("70 B", 64)), str(planned("70 B", 64, budget="5 GiB"))]


if __name__ == "__main__":
    print("\n\n".join(sections()))
