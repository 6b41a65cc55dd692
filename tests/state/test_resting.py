"""Blocks without gradients are stacked apart once that seems to last."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch

from psgd import PSGD, Monitor, Whitening
from psgd.blocks import Block
from psgd.state import layout
from psgd.state.resting import PATIENCE, Resting
from tests.emulated import emulated_graphs, without_kernels

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


def bytes_of_state(optimizer: PSGD) -> int:
    """Bytes of the state; memory that several tensors share counts once."""
    storages = [t.untyped_storage() for state in optimizer.state.values() for t in state.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def steps(optimizer: PSGD, params: Sequence[torch.Tensor], having: Collection[int], number: int) -> None:
    """Take steps in which only some parameters have a gradient."""
    for _ in range(number):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p) if i in having else None
        optimizer.step()


@pytest.fixture
def kernels() -> Iterator[None]:
    with emulated_graphs():
        yield


@pytest.mark.usefixtures("kernels")
class TestOptimizer:
    """An optimizer whose kernels go through all parameters, emulated."""

    def test_stacks_that_were_divided_are_not_kept(self):
        params = [torch.randn(64, 32, requires_grad=True) for _ in range(20)]
        optimizer = PSGD(params, probe=Whitening())
        steps(optimizer, params, range(20), 2)
        before = bytes_of_state(optimizer)
        steps(optimizer, params, [0], 5)
        assert len(optimizer.stacks) == 2
        assert bytes_of_state(optimizer) <= 1.01 * before

    def test_a_large_state_is_not_copied(self, monkeypatch):
        monkeypatch.setattr(layout, "is_small", lambda device, nbytes: nbytes < 1000)
        params = [torch.randn(64, 32, requires_grad=True) for _ in range(3)]
        optimizer = PSGD(params, probe=Whitening())
        steps(optimizer, params, [0, 1], 10)
        assert len(optimizer.stacks) == 1

    def test_if_there_is_no_memory_for_a_copy_all_is_as_it_was(self, monkeypatch):
        params = [torch.randn(64, 32, requires_grad=True) for _ in range(3)]
        optimizer = PSGD(params, probe=Whitening())
        steps(optimizer, params, [0, 1], PATIENCE - 1)

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(layout.Layout, "_new_stacks", fail)
            with pytest.raises(torch.OutOfMemoryError):
                steps(optimizer, params, [0, 1], 1)
        state = optimizer.state[params[0]]
        state["momentum"] = replaced = torch.zeros_like(state["momentum"])  # as tools do that move the state
        steps(optimizer, params, [0, 1], 1)
        assert optimizer.state[params[0]]["momentum"] is not replaced

    def test_a_param_group_without_any_gradient_is_not_stacked_again(self):
        params = [torch.randn(4, 4, requires_grad=True) for _ in range(4)]
        optimizer = PSGD([{"params": params[:2]}, {"params": params[2:]}], probe=Whitening())
        steps(optimizer, params, range(4), 2)
        stacks = optimizer.stacks
        for having in ([0, 1], [2, 3], [], range(4)):
            steps(optimizer, params, having, 10)
            assert all(now is then for now, then in zip(optimizer.stacks, stacks, strict=True))

    def test_a_monitor_follows_blocks_to_other_stacks(self):
        """Numbers of an update of ``Q`` are recorded later than it, when blocks may be stacked in another way."""

        def recorded() -> list[tuple[str, float | None]]:
            torch.manual_seed(0)
            params = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
            optimizer = PSGD(params, probe=Whitening(), update_every=4, update_anneal=0)
            records: list[Any] = []
            monitor = Monitor(optimizer, records.append, every=5)
            steps(optimizer, params, range(3), 3)
            steps(optimizer, params, [0, 2], 3)
            monitor.close()
            return [(block.name, block.q_step) for block in records[-1].blocks]

        divided = recorded()
        with without_kernels():
            assert divided == recorded()
