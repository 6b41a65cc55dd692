"""Problems of the panel with networks, on data that are made by code: nothing is read or downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .smooth import Batch, Instance, drawn, whole

#: samples that networks are judged by
HELD_OUT = 512
#: seed of what is to be learned, where another truth would need another target; seeds change the data and the start
TRUTH = 1000


def built(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Network whose start depends on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def layers(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    found: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        found += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*found[:-1])


def endless(sampled: Callable[[int], Batch], size: int) -> Iterator[Batch]:
    """Mini-batches of new samples."""
    while True:
        yield sampled(size)


def judged(
    model: nn.Module, loss: Callable[[Batch], Tensor], test: Batch, batches: Iterator[Batch], best: float = 0.0
) -> Instance:
    """Problem with mini-batches, judged by the loss of held-out data, less the ``best`` that is possible."""

    @torch.no_grad()
    def value() -> float:
        model.eval()
        found = float(loss(test)) - best
        model.train()
        return found

    return Instance(model, loss, value, batches)


def mlp(seed: int, size: int = 64) -> Instance:
    """Regression of a random network of one hidden layer by another with two; judged by the squared error."""
    truth, generator = torch.Generator().manual_seed(TRUTH), torch.Generator().manual_seed(seed)
    W1, w2 = torch.randn(10, 32, generator=truth), torch.randn(32, 1, generator=truth)

    def sampled(count: int) -> Batch:
        x = torch.randn(count, 10, generator=generator)
        return x, torch.tanh(x @ W1 * 0.3) @ w2 * 0.3

    model = built(seed, lambda: layers(10, 64, 64, 1, activation=nn.ReLU))
    test = sampled(HELD_OUT)
    batches = endless(sampled, size)
    return judged(model, lambda batch: functional.mse_loss(model(batch[0]), batch[1]), test, batches)


def spirals(seed: int, size: int = 64) -> Instance:
    """Classification of points on two spirals, of which a few have the wrong label; judged by the cross entropy."""
    generator = torch.Generator().manual_seed(seed)

    def sampled(count: int, wrong: float) -> Batch:
        label = torch.randint(2, (count,), generator=generator)
        turn = torch.rand(count, generator=generator).sqrt() * 3 * math.pi
        angle = turn + math.pi * label
        x = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 5
        x = x + 0.05 * torch.randn(x.shape, generator=generator)
        flip = torch.rand(count, generator=generator) < wrong
        return x, torch.where(flip, 1 - label, label).to(x)

    model = built(seed, lambda: layers(2, 48, 48, 1))

    def loss(batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

    test = sampled(HELD_OUT, wrong=0.0)
    return judged(model, loss, test, drawn(generator, *sampled(4096, wrong=0.05), size=size))


def cnn(seed: int, size: int = 32, side: int = 12, classes: int = 8) -> Instance:
    """Small images: a pattern of its class, shifted and in noise; convolutions with batch normalisation."""
    truth, generator = torch.Generator().manual_seed(TRUTH), torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 5, 5, generator=truth)

    def sampled(count: int) -> Batch:
        label = torch.randint(classes, (count,), generator=generator)
        images = 0.9 * torch.randn(count, 1, side, side, generator=generator)
        row, column = (
            torch.randint(side - 4, (count, 2), generator=generator)[:, :, None].add(torch.arange(5)).unbind(1)
        )
        images[torch.arange(count)[:, None, None], 0, row[:, :, None], column[:, None]] += patterns[label]
        return images, label

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 12, 5, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(16, classes),
        )

    model = built(seed, make)
    test = sampled(HELD_OUT)
    batches = drawn(generator, *sampled(4096), size=size)
    return judged(model, lambda batch: functional.cross_entropy(model(batch[0]), batch[1]), test, batches)


class Transformer(nn.Module):
    """Causal transformer of two layers that predicts the next symbol."""

    def __init__(self, symbols: int, length: int, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.layers(self.symbols(text) + self.places.weight, mask=self.mask, is_causal=True)
        return cast("Tensor", self.head(self.norm(hidden)))


def transformer(seed: int, symbols: int = 8, length: int = 16, size: int = 16, width: int = 32) -> Instance:
    """Random Markov chain of second order; judged by the cross entropy over that of the true probabilities."""
    generator = torch.Generator().manual_seed(seed)
    chain = (2.5 * torch.randn(symbols, symbols, symbols, generator=generator)).log_softmax(-1)

    def sampled(count: int) -> Tensor:
        text = [torch.randint(symbols, (count,), generator=generator) for _ in range(2)]
        while len(text) <= length:
            odds = chain[text[-2], text[-1]].exp()
            text.append(torch.multinomial(odds, 1, generator=generator)[:, 0])
        return torch.stack(text, 1)

    model = built(seed, lambda: Transformer(symbols, length, width))

    def loss(batch: Batch) -> Tensor:
        (text,) = batch
        # The first two symbols say nothing about each other.
        return functional.cross_entropy(model(text[:, :-1])[:, 1:].flatten(0, 1), text[:, 2:].flatten())

    test = sampled(HELD_OUT // 4)
    best = -float(chain[test[:, :-2], test[:, 1:-1]].gather(2, test[:, 2:, None]).mean())
    return judged(model, loss, (test,), drawn(generator, sampled(8192), size=size), best)


class Recurrent(nn.Module):
    """Gated recurrent units that read a sequence and then say one number."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.units = nn.GRU(inputs, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.units(x)[0][:, -1])[:, 0])


def recurrent(seed: int, length: int = 24, size: int = 16, width: int = 16) -> Instance:
    """Addition of two marked numbers of a sequence; judged by the squared error."""
    generator = torch.Generator().manual_seed(seed)

    def sampled(count: int) -> Batch:
        numbers = torch.rand(count, length, generator=generator)
        half = length // 2
        places = torch.randint(half, (count, 2), generator=generator) + torch.tensor([0, half])
        marks = torch.zeros(count, length).scatter_(1, places, 1.0)
        return torch.stack([numbers, marks], 2), (numbers * marks).sum(1)

    model = built(seed, lambda: Recurrent(2, width))
    test = sampled(HELD_OUT)
    batches = endless(sampled, size)
    return judged(model, lambda batch: functional.mse_loss(model(batch[0]), batch[1]), test, batches)


def autoencoder(seed: int, size: int = 64, features: int = 40, hidden: int = 4) -> Instance:
    """Deep autoencoder of tanh layers, of curved data of few dimensions; judged by the squared error."""
    generator = torch.Generator().manual_seed(seed)
    W1, W2 = torch.randn(hidden, 24, generator=generator), torch.randn(24, features, generator=generator) / 24**0.5

    def sampled(count: int) -> Batch:
        return (torch.tanh(torch.randn(count, hidden, generator=generator) @ W1 * 0.6) @ W2,)

    model = built(seed, lambda: layers(features, 32, 16, hidden, 16, 32, features))
    test = sampled(HELD_OUT)
    batches = drawn(generator, *sampled(4096), size=size)
    return judged(model, lambda batch: functional.mse_loss(model(batch[0]), batch[0]), test, batches)


def physics(seed: int, points: int = 64, width: int = 20) -> Instance:
    """Network that solves ``-u'' = f`` with zeros at both ends, for two waves; judged by the loss itself.

    The residual is differentiated twice in the loss, and once more for its gradient.
    """
    x = torch.linspace(0, 1, points)[:, None].requires_grad_()
    force = (math.pi**2 * (torch.sin(math.pi * x) + 4 * torch.sin(2 * math.pi * x))).detach()
    ends = torch.tensor([[0.0], [1.0]])
    model = built(seed, lambda: layers(1, width, width, 1))

    @torch.enable_grad()
    def loss() -> Tensor:
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return (ddu + force).square().mean() / force.square().mean() + model(ends).square().mean()

    return whole(model, loss)


class SkipGram(nn.Module):
    """Two tables of vectors, whose products are the odds that two words are neighbours."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.neighbours = nn.Embedding(words, width)

    def forward(self, word: Tensor, neighbour: Tensor) -> Tensor:
        return (self.words(word) * self.neighbours(neighbour)).sum(-1)


def embedding(seed: int, words: int = 400, topics: int = 10, size: int = 128, width: int = 12) -> Instance:
    """Skip-gram with negative samples: words of a topic are neighbours, most are rare, and few rows have a gradient.

    It is judged by the loss on other pairs with other negative samples.
    """
    truth, generator = torch.Generator().manual_seed(TRUTH), torch.Generator().manual_seed(seed)
    odds = 1.0 / torch.arange(1, words + 1)
    topic = torch.randint(topics, (words,), generator=truth)
    near = (odds * (0.05 + (topic[:, None] == topic))).cumsum(1)  # row: a word; column: how often others are beside it
    all_words = odds.cumsum(0)

    def picked(sums: Tensor, *shape: int) -> Tensor:
        """Draw words with odds whose sums are given."""
        places = torch.rand(shape, generator=generator) * sums[..., -1:]
        return torch.searchsorted(sums, places).clamp_max(words - 1)

    def sampled(count: int) -> Batch:
        word = picked(all_words, count)
        return word, torch.cat([picked(near[word], count, 1), picked(all_words, count, 4)], 1)

    model = built(seed, lambda: SkipGram(words, width))
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])

    def loss(batch: Batch) -> Tensor:
        scores = model(batch[0][:, None], batch[1])
        return functional.binary_cross_entropy_with_logits(scores, labels.expand_as(scores))

    test = sampled(4 * HELD_OUT)
    return judged(model, loss, test, endless(sampled, size))
