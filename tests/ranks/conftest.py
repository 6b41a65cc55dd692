from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of pytest-xdist for all of these tests, as each would start processes of its own."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks(forks) -> Iterator[Ranks]:
    ranks = Ranks(forks)
    yield ranks
    ranks.close()
