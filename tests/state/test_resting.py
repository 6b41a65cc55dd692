"""Blocks without gradients are stacked apart once that seems to last."""

from __future__ import annotations

from psgd.blocks import Block
from psgd.state.resting import PATIENCE, Resting

NONE: frozenset[Block] = frozenset()
ONE, OTHER = (frozenset([Block((i,), ((3,),), ((3,),))]) for i in range(2))


def changes(resting: Resting, blocks: frozenset[Block], times: int) -> list[bool]:
    return [resting.changes(blocks) for _ in range(times)]


def test_blocks_that_rest_for_a_while_are_apart():
    resting = Resting()
    assert changes(resting, ONE, PATIENCE) == [False] * (PATIENCE - 1) + [True]
    assert resting.apart == ONE
    assert not any(changes(resting, ONE, 10))


def test_blocks_that_rest_now_and_then_are_not():
    resting = Resting()
    for blocks in (ONE, NONE, OTHER) * 10:
        assert not any(changes(resting, blocks, PATIENCE - 1))
    assert resting.apart == NONE


def test_the_number_of_changes_grows_slowly():
    resting = Resting()
    found = [resting.changes((ONE, OTHER)[step // 50 % 2]) for step in range(5000)]
    assert 3 <= sum(found) <= 6


def test_nothing_changes_after_a_stop():
    resting = Resting()
    resting.stop()
    assert not any(changes(resting, ONE, 100))
