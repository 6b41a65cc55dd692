from __future__ import annotations

import errno
import stat

import pytest

from psgd.experiments.store import Store, write_atomically, write_text
from tests.experiments.runs import result, run


def test_what_is_saved_comes_back(tmp_path):
    store = Store(tmp_path)
    found = result(iteration=[1, 2], loss=[0.1, float("inf")])
    store.save(run(), found)
    back = store.load(run())
    assert back is not None
    assert (back.rows, back.seconds, back.environment) == (found.rows, found.seconds, found.environment)
    assert store.load(run(seed=1)) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"run": {}}', "null"])
def test_a_damaged_file_counts_as_none(tmp_path, damage):
    store = Store(tmp_path)
    store.save(run(), result(iteration=[1]))
    (path,) = store.directory.iterdir()
    path.write_text(damage)
    assert store.load(run()) is None


def test_no_file_is_ever_half_written(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def full_disk(file):
        file.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(path, full_disk)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_as_readable_as_others(tmp_path):
    write_text(tmp_path / "ours", "")
    (tmp_path / "others").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "others")}
    assert len(modes) == 1
