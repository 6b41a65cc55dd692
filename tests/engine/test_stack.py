"""Blocks of one shape in arrays with a leading dimension."""

from __future__ import annotations

import pytest
import torch

from psgd import Kronecker
from psgd.blocks import Joint, PerTensor
from psgd.engine.stack import Stack

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_whatever_is_packed_has_the_precision_of_the_steps(dtype: torch.dtype, count: int):
    params = [torch.randn(2, 3).to(dtype) for _ in range(count)]
    blocks = PerTensor().divide(list(enumerate(params)))
    Q = Kronecker().init((2, 3), batch=count, dtype=torch.float32, device="cpu")
    packed = Stack(blocks, Q, {}, Stack.new_lengths(count, torch.float64, CPU), torch.float64).pack(
        dict(enumerate(params))
    )
    assert packed.dtype == torch.float64
    assert torch.equal(packed, torch.stack(params).double())


def test_unpacking_undoes_packing_and_what_is_left_out_is_zero():
    params = {i: torch.randn(shape) for i, shape in enumerate([(2, 3), (4,)])}
    (block,) = Joint().divide(list(params.items()))
    Q = Kronecker().init(block.shape, dtype=torch.float32, device="cpu")
    stack = Stack([block], Q, {}, Stack.new_lengths(1, torch.float32, CPU), torch.float32)
    assert all(torch.equal(part, params[i]) for i, part in stack.unpack(stack.pack(params)))
    some = dict(stack.unpack(stack.pack({1: params[1]})))
    assert torch.equal(some[0], torch.zeros(2, 3))
    assert torch.equal(some[1], params[1])


def test_a_block_is_given_if_any_of_its_parameters_is():
    (block,) = Joint().divide([(i, torch.ones(2)) for i in range(3)])
    Q = Kronecker().init(block.shape, dtype=torch.float32, device="cpu")
    stack = Stack([block], Q, {}, Stack.new_lengths(1, torch.float32, CPU), torch.float32)
    assert stack.having({1, 7}) == [0]
    assert stack.having({7}) == []


def test_chosen_rows_are_copies():
    blocks = PerTensor().divide([(i, torch.ones(2)) for i in range(4)])
    Q = Kronecker().init((2,), batch=4, dtype=torch.float32, device="cpu")
    stack = Stack(blocks, Q, {}, {"grad_length": torch.arange(4.0)}, torch.float32)
    part = stack.select([0, 3], torch.tensor([0, 3]))
    assert part.positions == [0, 3]
    assert part.lengths["grad_length"].tolist() == [0.0, 3.0]
    for buffer in part.buffers().values():
        buffer.fill_(7.0)
    assert torch.equal(stack.group.dense(), torch.eye(2).expand(4, 2, 2))
    assert stack.lengths["grad_length"].tolist() == [0.0, 1.0, 2.0, 3.0]
