"""A GPT: the model that ``psgd bench lm`` trains; and a text of characters for a small one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from ..ops.streams import sent


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its mini-batches; ``tied``: the embedding of tokens is also the last layer."""

    layers: int = 6
    heads: int = 6
    width: int = 384
    context: int = 256
    batch: int = 64
    dropout: float = 0.2
    tied: bool = True


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = fn.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).reshape(batch, time, width)))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(fn.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Transformer with embeddings of tokens and of positions."""

    def __init__(self, vocabulary: int, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        if not shape.tied:
            self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.reset()

    def reset(self) -> None:
        """Give the parameters new random values in place, so that a compiled model can be trained again."""
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Layers that add to the residual stream start smaller, the more of them there are.
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * self.shape.layers) if adds else 1))
            else:
                nn.init.constant_(p, 1.0 if name.endswith("weight") else 0.0)

    def hidden(self) -> list[nn.Parameter]:
        """Matrices of hidden layers, which Muon is for."""
        return [p for p in self.layers.parameters() if p.ndim == 2]

    def forward(self, x: Tensor) -> Tensor:
        stream = self.drop(self.tokens(x) + self.places.weight[: x.shape[1]])
        for layer in self.layers:
            stream = layer(stream)
        last = self.tokens if self.shape.tied else self.head
        return fn.linear(self.norm(stream), last.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return fn.cross_entropy(self(x).flatten(0, 1).float(), y.flatten())


class Text:
    """Text as numbers: nine tenths to train on, the rest to validate."""

    def __init__(self, path: Path, device: str) -> None:
        characters = path.read_text(encoding="utf-8", errors="replace")
        known = sorted(set(characters))
        number = {c: i for i, c in enumerate(known)}
        data = torch.tensor([number[c] for c in characters], dtype=torch.int64)
        cut = len(data) * 9 // 10
        self.vocabulary = len(known)
        self.train, self.rest = data[:cut].to(device), data[cut:].to(device)

    def batches(self, seed: int, shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
        """Random windows of the training text; each optimizer sees the same ones."""
        generator = torch.Generator().manual_seed(seed)
        offsets = torch.arange(shape.context + 1, device=self.train.device)
        while True:
            starts = torch.randint(len(self.train) - shape.context - 1, (shape.batch, 1), generator=generator)
            windows = self.train[sent(starts, self.train.device) + offsets]  # the host does not wait
            yield windows[:, :-1], windows[:, 1:]

    def validation(self, shape: Shape, most: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """All of the validation text, window by window."""
        count = (len(self.rest) - 1) // shape.context
        windows = [self.rest[i * shape.context : (i + 1) * shape.context + 1] for i in range(count)]
        stacked = torch.stack(windows)[:most]
        return [(part[:, :-1], part[:, 1:]) for part in stacked.split(shape.batch)]
