"""Sizes as people write them."""

from __future__ import annotations

import pytest

from psgd.state.memory import parse, readable


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1 GiB", 2**30),
        ("1.5KiB", 1536),
        (" 200 MiB ", 200 * 2**20),
        ("9000 B", 9000),
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        ("4g", 2**32),
        ("4 G", 2**32),
        ("2T", 2**41),
        ("1e9", None),
        ("4", None),
        ("4 GX", None),
        ("-4 GiB", None),
        ("much", None),
    ],
)
def test_sizes(text, size):
    assert parse(text) == size


def test_what_is_readable_can_be_read():
    for size in (1, 1023, 1536, 3 * 2**29):
        assert parse(readable(size)) == size
