"""Tokens of a corpus, by a byte-level BPE that is trained on it, or its bytes; kept in the user's cache folder."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ..experiments.store import write_bytes
from .corpus import Corpus

#: number of different bytes, which is the vocabulary without a tokenizer
BYTES = 256
#: bytes of the documents that the tokenizer is trained on
SAMPLE = 32_000_000
#: number of documents that are encoded together, by all cores
TOGETHER = 512
#: package of the tokenizer
PACKAGE = "tokenizers"


@dataclass(frozen=True)
class Tokens:
    """A corpus as numbers.

    Args:
        train: tokens to train on
        validation: tokens that are held out
        vocabulary: number of different tokens
        kind: "bytes", or the name and version of the tokenizer
        sha256: hash of the text
        size: number of bytes of the text
        held_out: number of bytes of the held-out part
    """

    train: Tensor
    validation: Tensor
    vocabulary: int
    kind: str
    sha256: str
    size: int
    held_out: int

    def facts(self) -> dict[str, Any]:
        """Numbers that describe the data, for results."""
        return {
            "text": self.sha256,
            "text_bytes": self.size,
            "tokenizer": self.kind,
            "vocabulary": self.vocabulary,
            "train_tokens": len(self.train),
            "validation_tokens": len(self.validation),
            "validation_bytes": self.held_out,
        }


def tokens(corpus: Corpus, vocabulary: int) -> Tokens:
    """Tokens of a corpus with a vocabulary of at most this size, from the cache if they are there.

    Without the package ``tokenizers``, or for a vocabulary of 256, tokens are bytes.
    """
    if vocabulary <= BYTES or importlib.util.find_spec(PACKAGE) is None:
        kind, path = "bytes", None
    else:
        kind = f"{PACKAGE} {metadata.version(PACKAGE)}"
        path = cache() / f"tokens-{corpus.sha256[:32]}-{vocabulary}-{kind.replace(' ', '-')}.pt"
    found = None if path is None else _load(path)
    if found is None:
        encode = _bytes if path is None else _bpe(corpus, vocabulary)
        found = _joined(encode(corpus.train)), _joined(encode(corpus.validation))
        if path is not None:
            content = BytesIO()
            torch.save(found, content)
            write_bytes(path, content.getvalue())
    train, validation = found
    held_out = sum(map(len, corpus.validation))
    return Tokens(train, validation, BYTES if path is None else vocabulary, kind, corpus.sha256, corpus.size, held_out)


def _joined(parts: Iterator[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int32), *parts])


def cache() -> Path:
    """Folder of the user for what can be computed again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "psgd"


def _load(path: Path) -> tuple[Tensor, Tensor] | None:
    """Tokens of an earlier run; None if there are none, or if the file is damaged."""
    try:
        train, validation = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError):
        return None
    return train, validation


def _bytes(documents: Sequence[bytes]) -> Iterator[Tensor]:
    for document in documents:
        yield torch.frombuffer(bytearray(document), dtype=torch.uint8).int()


def _bpe(corpus: Corpus, vocabulary: int) -> Any:
    """Function that encodes documents, after training on the first ``SAMPLE`` bytes; documents have no order anyway."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_sample(corpus.train), trainer)

    def encode(documents: Sequence[bytes]) -> Iterator[Tensor]:
        for first in range(0, len(documents), TOGETHER):
            texts = [document.decode(errors="replace") for document in documents[first : first + TOGETHER]]
            for encoding in tokenizer.encode_batch_fast(texts):
                yield torch.tensor(encoding.ids, dtype=torch.int32)

    return encode


def _sample(documents: Sequence[bytes]) -> Iterator[str]:
    size = 0
    for document in documents:
        size += len(document)
        if size > SAMPLE:
            return
        yield document.decode(errors="replace")
