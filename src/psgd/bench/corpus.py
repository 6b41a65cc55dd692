"""Text for language models: the source code of the Python installation at hand, or a file.

The same installation gives the same text in the same order, wherever it lies: documents are sorted by the SHA-256 of
their content, which also decides which of them are held out.
"""

from __future__ import annotations

import hashlib
import os
import site
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: bytes of the smallest and of the largest source file that is used; larger ones are mostly generated tables
SMALLEST, LARGEST = 256, 256 * 1024
#: bytes of a piece of a text that is given as one file, up to the end of a line
PIECE = 16 * 1024
#: share of the bytes that is held out for validation
HELD_OUT = 0.05
#: byte at the end of each document
END = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents to validate, each with ``END`` at its end.

    Args:
        train: documents to train on
        validation: documents that are held out
        sha256: hash of all of them in their order
    """

    train: Sequence[bytes]
    validation: Sequence[bytes]
    sha256: str

    @property
    def size(self) -> int:
        """Number of bytes of all documents."""
        return sum(map(len, self.train)) + sum(map(len, self.validation))


def read(text: Path | None, most: int) -> Corpus:
    """Corpus of a file, or of the Python installation, with at most so many bytes."""
    return divided(sources(roots()) if text is None else pieces(text.read_bytes()), most)


def divided(documents: Iterable[bytes], most: int) -> Corpus:
    """Corpus of distinct documents: those with the smallest hashes are held out, and those with the largest left out.

    >>> found = divided([b"a = 1", b"b = 2", b"a = 1"], most=100)
    >>> len(found.train), len(found.validation), found.size
    (1, 1, 12)
    """
    by_hash = {hashlib.sha256(document).digest(): document for document in documents}
    kept, size = [], 0
    for _, document in sorted(by_hash.items()):
        if size + len(document) + len(END) > most:
            break
        kept.append(document + END)
        size += len(kept[-1])
    held_out, seen = 0, 0
    while held_out < len(kept) - 1 and seen < HELD_OUT * size:
        seen += len(kept[held_out])
        held_out += 1
    whole = hashlib.sha256()
    for document in kept:
        whole.update(document)
    return Corpus(kept[held_out:], kept[:held_out], whole.hexdigest())


def roots() -> list[Path]:
    """Folders of the standard library and of the installed packages."""
    return [Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages())]


def sources(folders: Iterable[Path]) -> Iterator[bytes]:
    """Contents of the ``*.py`` files under some folders; those that are unreadable, very small or very large are not.

    Packages that lie within another folder, as those beside the standard library do, belong to their own folder.
    """
    for folder in folders:
        for here, inside, names in os.walk(folder):
            inside[:] = [name for name in inside if name not in ("site-packages", "dist-packages", "__pycache__")]
            for name in names:
                if name.endswith(".py"):
                    content = _content(Path(here, name))
                    if content is not None:
                        yield content


def _content(path: Path) -> bytes | None:
    try:
        if not SMALLEST <= path.stat().st_size <= LARGEST:
            return None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if END in content else content


def pieces(content: bytes) -> Iterator[bytes]:
    """Pieces of a text of about ``PIECE`` bytes, cut at the ends of lines."""
    lines, size = [], 0
    for line in content.replace(END, b"").splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            yield b"".join(lines)
            lines, size = [], 0
    if lines:
        yield b"".join(lines)
