from __future__ import annotations

import errno
import json
import stat

import pytest

from psgd.experiments import store as module
from psgd.experiments.store import Store, write_bytes
from tests.experiments.runs import result, run


def test_what_is_saved_comes_back(tmp_path):
    store = Store(tmp_path)
    found = result(iteration=[1, 2], loss=[0.1, float("inf")])
    store.save(run(), found)
    back = store.load(run())
    assert back is not None
    assert (back.rows, back.seconds, back.environment) == (found.rows, found.seconds, found.environment)
    assert store.load(run(seed=1)) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"run": {}}', "null", "\xff"])
def test_a_damaged_file_counts_as_none(tmp_path, damage):
    store = Store(tmp_path)
    store.save(run(), result(iteration=[1]))
    (path,) = store.directory.iterdir()
    path.write_text(damage, encoding="latin-1")
    assert store.load(run()) is None


@pytest.mark.parametrize("rows", [None, [], [None], [{"loss": None}], {}, "x", 1])
def test_so_does_one_that_is_well_formed(tmp_path, rows):
    store = Store(tmp_path)
    store.save(run(), result(iteration=[1]))
    (path,) = store.directory.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": rows}))
    assert store.load(run()) is None
    path.unlink()
    path.mkdir()
    assert store.load(run()) is None


def test_no_file_is_ever_half_written(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "chmod", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_as_readable_as_others(tmp_path):
    write_bytes(tmp_path / "ours", b"")
    (tmp_path / "others").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "others")}
    assert len(modes) == 1
