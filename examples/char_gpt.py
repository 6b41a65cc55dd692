"""A small GPT learns a text letter by letter: whitened gradients beside AdamW, in the loop that everybody has.

    python examples/char_gpt.py --text FILE

Without ``--text`` it reads Python's own language reference, the one that ``help()`` shows, which comes with Python. The
model has two layers and about 117,000 parameters, so that it learns something in a minute on one core. PSGD has its
default step size, 0.001; for a large model start from 0.0005.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import psgd

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 64, 2, 2
#: steps over which step sizes grow, and between two looks at the validation loss
WARMUP, EVERY = 50, 50
#: AdamW at the best step size of 0.001, 0.003 and 0.01
OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1),
    "PSGD": lambda model: psgd.whiten(model, weight_decay=0.5),
}


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        stream = self.tokens(x) + self.places.weight[:size]
        for layer in self.layers:
            stream = layer(stream, self.mask[:size, :size], is_causal=True)
        return self.head(self.norm(stream))

    def loss(self, windows: Tensor) -> Tensor:
        """Of windows of one letter more than the model sees."""
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(name: str, letters: Tensor, rest: Tensor, vocabulary: int, steps: int, seed: int) -> tuple[GPT, list[tuple]]:
    """The model, and steps, seconds of training and validation loss again and again."""
    torch.manual_seed(seed)
    model = GPT(vocabulary)
    optimizer = OPTIMIZERS[name](model)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1 - 0.9 * step / steps))
    windows, kept = letters.unfold(0, CONTEXT + 1, 1), rest.unfold(0, CONTEXT + 1, CONTEXT)[:200]
    rows, seconds = [], 0.0
    begin = time.process_time()
    for step in range(steps + 1):
        if step % EVERY == 0 or step == steps:
            seconds += time.process_time() - begin
            with torch.no_grad():
                rows.append((step, seconds, model.loss(kept).item()))
            begin = time.process_time()
        loss = model.loss(windows[torch.randint(len(windows), (BATCH,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model, rows


@torch.no_grad()
def write(model: GPT, start: Tensor, length: int) -> Tensor:
    """Go on from a text."""
    for _ in range(length):
        odds = model(start[None, -CONTEXT:])[0, -1].softmax(-1)
        start = torch.cat([start, torch.multinomial(odds, 1)])
    return start


def read(path: Path | None) -> str:
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            sys.exit(f"char_gpt: cannot read {path}: {error.strerror}: name another text by --text")
    else:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            sys.exit("char_gpt: this Python comes without its language reference: name a text by --text")
        text = "\n\n".join(topics[name] for name in sorted(topics))
    if len(text) < 20 * CONTEXT:
        sys.exit(f"char_gpt: {len(text)} letters are too few: name a text of at least {20 * CONTEXT} by --text")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character-level GPT by AdamW and PSGD.")
    parser.add_argument("--steps", type=int, default=1000, help="mini-batches for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gallery/char_gpt.png"), metavar="FIGURE")
    parser.add_argument("--text", type=Path, metavar="FILE", help="else Python's language reference")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    text = read(arguments.text)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    alphabet = sorted(set(text))
    number = {letter: i for i, letter in enumerate(alphabet)}
    letters, rest = torch.tensor([number[letter] for letter in text]).split([len(text) * 9 // 10, -(-len(text) // 10)])
    print(f"{len(text):,} letters, {len(alphabet)} different ones")
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for name, color in zip(OPTIMIZERS, ("tab:orange", "tab:blue"), strict=True):
        model, rows = train(name, letters, rest, len(alphabet), arguments.steps, arguments.seed)
        steps, seconds, losses = zip(*rows, strict=True)
        print(f"{name:>5}: validation loss {losses[0]:.3f} -> {losses[-1]:.3f}, {seconds[-1]:.1f} s", flush=True)
        panels[0].plot(steps, losses, color=color, label=name)
        panels[1].plot(seconds, losses, color=color)
    written = write(model, rest[:CONTEXT], 200)[CONTEXT:]
    print("what the model of PSGD writes:", "".join(alphabet[i] for i in written), sep="\n")
    panels[0].set(xlabel="mini-batches", ylabel="validation loss (nats per letter)")
    panels[1].set_xlabel("seconds of training")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
