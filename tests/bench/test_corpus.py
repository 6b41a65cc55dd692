"""The text is that of the files, in an order and with a division that depend on their contents alone."""

from __future__ import annotations

import pytest
import torch

from psgd.bench import corpus, tokens


@pytest.fixture
def folders(tmp_path):
    """Sources, some of which are left out."""
    contents = {f"package{k % 3}/module{k}.py": f"value = {k}\n" * 40 for k in range(60)}
    contents |= {
        "again.py": contents["package0/module0.py"],
        "tiny.py": "a = 1",
        "huge.py": "b = 2\n" * corpus.LARGEST,
        "zero.py": "c = '\0'\n" * 100,
        "notes.txt": "not source code" * 100,
        "site-packages/other.py": "d = 3\n" * 100,
    }
    for name, content in contents.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "lib" / "latin.py").write_bytes(b"e = '\xe9'\n" * 100)
    return [tmp_path / "lib"]


def test_sources_are_distinct_readable_and_neither_tiny_nor_huge(folders):
    found = corpus.divided(corpus.sources(folders), 10**6)
    assert len(found.train) + len(found.validation) == 60
    assert all(document.startswith(b"value = ") for document in (*found.train, *found.validation))
    inner = corpus.divided(corpus.sources([*folders, folders[0] / "site-packages"]), 10**6)
    assert len(inner.train) + len(inner.validation) == 61


def test_text_depends_on_contents_alone(folders, tmp_path):
    found = corpus.divided(corpus.sources(folders), 10**6)
    other = tmp_path / "moved" / "deeper"
    other.mkdir(parents=True)
    (folders[0] / "package1").rename(other / "package1")
    assert corpus.divided(corpus.sources([other, *folders]), 10**6) == found
    (other / "package1" / "module1.py").write_text("value = -1\n" * 40)
    assert corpus.divided(corpus.sources([other, *folders]), 10**6).sha256 != found.sha256


def test_size_is_bounded_and_a_share_is_held_out(folders):
    whole = corpus.divided(corpus.sources(folders), 10**6)
    assert 0.05 <= sum(map(len, whole.validation)) / whole.size <= 0.1
    assert not set(whole.train) & set(whole.validation)
    half = corpus.divided(corpus.sources(folders), whole.size // 2)
    assert 0.4 * whole.size < half.size <= whole.size // 2
    assert set(half.train) | set(half.validation) < set(whole.train) | set(whole.validation)


def test_the_installation_has_sources():
    found = corpus.read(None, 10**6)
    assert 0.5e6 < found.size <= 1e6
    assert found == corpus.read(None, 10**6)


def test_a_file_is_cut_into_pieces(tmp_path):
    content = b"".join(b"line %d\n" % k for k in range(10**4))
    pieces = list(corpus.pieces(content))
    assert b"".join(pieces) == content
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert max(map(len, pieces)) < corpus.PIECE + 20
    path = tmp_path / "text"
    path.write_bytes(content)
    assert corpus.read(path, 10**6).size == len(content) + len(pieces)


def test_without_a_tokenizer_tokens_are_bytes(folders, monkeypatch):
    monkeypatch.setattr(tokens, "PACKAGE", "no_such_tokenizer")
    text = corpus.divided(corpus.sources(folders), 10**6)
    found = tokens.tokens(text, 1024)
    assert found.vocabulary == 256
    assert bytes(found.train.tolist()) == b"".join(text.train)
    assert bytes(found.validation.tolist()) == b"".join(text.validation)
    assert found.facts()["tokenizer"] == "bytes"


def test_tokens_of_a_bpe_are_fewer_and_are_kept(folders, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokens, "cache", lambda: tmp_path / "cache")
    text = corpus.divided(corpus.sources(folders), 10**6)
    found = tokens.tokens(text, 300)
    assert found.vocabulary == 300
    assert len(found.train) < sum(map(len, text.train)) / 2
    assert int(found.train.max()) < 300
    (path,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(tokens, "_bpe", lambda *_: pytest.fail("trained again"))
    assert torch.equal(tokens.tokens(text, 300).train, found.train)
    monkeypatch.undo()
    monkeypatch.setattr(tokens, "cache", lambda: tmp_path / "cache")
    path.write_bytes(b"damaged")
    assert torch.equal(tokens.tokens(text, 300).train, found.train)


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_the_cache_is_in_a_folder_of_the_user(platform, monkeypatch, tmp_path):
    monkeypatch.setattr(tokens.sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert tokens.cache().is_relative_to(tmp_path)
    assert tokens.cache().name == "psgd"
