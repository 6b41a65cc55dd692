"""Which parameters share a Q, and that packing loses nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psgd import PSGD, Affine, Dense, FiniteDifference, HessianVector, Joint, PerTensor, Whitening
from psgd.blocks import Blocks
from psgd.ops.real import as_real

from .cases import train


def layer_tensors(dtype=torch.float64):
    return [torch.randn(3, 2, 2, dtype=dtype), torch.randn(3, 4, dtype=dtype), torch.randn(3, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("blocks", [PerTensor(), Joint(), Affine()], ids=str)
def test_unpack_undoes_pack(blocks: Blocks, dtype):
    tensors = layer_tensors(dtype)
    divided = blocks.divide(list(enumerate(tensors)))
    assert sorted(i for block in divided for i in block.params) == [0, 1, 2]
    for block in divided:
        packed = block.pack([tensors[i] for i in block.params])
        assert tuple(packed.shape) == block.shape
        assert packed.numel() == block.numel
        for i, part in zip(block.params, block.unpack(packed), strict=True):
            assert torch.equal(part, as_real(tensors[i]))
            assert part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_shapes_of_blocks():
    params = list(enumerate(layer_tensors()))
    assert [block.shape for block in PerTensor().divide(params)] == [(3, 2, 2), (3, 4), (3,)]
    assert [block.shape for block in Joint().divide(params)] == [(27,)]
    assert [block.shape for block in Affine().divide(params)] == [(3, 9)]
    assert [block.shape for block in PerTensor().divide([(0, torch.tensor(1.0))])] == [(1,)]


def test_affine_block_is_weight_beside_bias():
    layer = nn.Linear(2, 3)
    (block,) = Affine().divide(list(enumerate(layer.parameters())))
    expected = torch.cat([layer.weight, layer.bias[:, None]], 1)
    assert torch.equal(block.pack(list(layer.parameters())), expected)


class Cell(nn.Module):
    """A recurrent cell with one bias, as in the paper: 50×2, 50×50 and 50, in all 50×53; its output layer is 1×51."""

    def __init__(self) -> None:
        super().__init__()
        self.W_ih = nn.Parameter(torch.randn(50, 2) * 0.1)
        self.W_hh = nn.Parameter(torch.linalg.qr(torch.randn(50, 50))[0])
        self.b = nn.Parameter(torch.zeros(50))
        self.out = nn.Linear(50, 1)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 50)
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ self.W_ih.T + h @ self.W_hh.T + self.b)
        return self.out(h)


def test_the_recurrent_network_of_the_paper():
    model = Cell()
    optimizer = PSGD(Affine.groups(model), blocks=Affine())
    assert [stack.blocks[0].shape for stack in optimizer.stacks] == [(50, 53), (1, 51)]
    assert [stack.group.describe() for stack in optimizer.stacks] == ["symmetric 50 ⊗ symmetric 53", "symmetric 51"]
    assert sum(p.numel() for p in model.parameters()) == 2701


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.rnn = nn.LSTM(4, 5, num_layers=2, bidirectional=True)
        self.attention = nn.MultiheadAttention(10, 2)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(10, 7)
        self.tied = nn.Linear(10, 7)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.back = nn.ConvTranspose2d(4, 4, 3)
        self.turned = BiasFirst()


class BiasFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(torch.zeros(3, 2))


def test_groups_of_a_model():
    groups = Affine.groups(Mixed(), lr=0.5)
    named = {tuple(name for name, _ in group["params"]) for group in groups}
    gates = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    assert named == {
        ("scale",),
        ("embedding.weight",),
        *{tuple(f"rnn.{g}_l{level}{way}" for g in gates) for level in (0, 1) for way in ("", "_reverse")},
        ("attention.in_proj_weight", "attention.in_proj_bias"),
        ("attention.out_proj.weight", "attention.out_proj.bias"),
        ("conv.weight", "conv.bias"),
        ("norm.weight",),
        ("norm.bias",),
        ("head.weight", "head.bias"),
        ("tied.bias",),
        ("back.weight",),
        ("back.bias",),
        ("turned.bias", "turned.weight"),
    }
    assert all(group["lr"] == 0.5 for group in groups)
    optimizer = PSGD(groups, blocks=Affine())
    shapes = {block.shape for stack in optimizer.stacks for block in stack.blocks}
    assert {(20, 11), (20, 17), (30, 11), (8, 28), (7, 11)} <= shapes


@pytest.mark.slow
@pytest.mark.parametrize("probe", [FiniteDifference(), HessianVector(), Whitening()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("bias_frozen", [False, True])
def test_affine_layers_are_trained(probe, bias_frozen):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    if bias_frozen:
        model[0].bias.requires_grad_(False)
    start = model[0].bias.detach().clone()
    optimizer = PSGD(Affine.groups(model), lr=0.05, blocks=Affine(), probe=probe, max_norm=1.0)
    losses = train(model, optimizer, 0, 200)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert torch.equal(start, model[0].bias) == bias_frozen


def test_joint_takes_mixed_dtypes_in_the_more_precise_one():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([a, b], lr=0.1, preconditioner=Dense(), blocks=Joint(), probe=Whitening())
    a.grad, b.grad = torch.ones(2), torch.ones(2, dtype=torch.float64)
    optimizer.step()
    assert optimizer.stacks[0].like.dtype == torch.float64
    torch.testing.assert_close(a.double(), b, rtol=0.01, atol=0)
    assert not torch.equal(a, torch.ones(2))


def test_blocks_join_only_what_is_on_one_device():
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, device="meta", requires_grad=True)
    for blocks in (Joint(), Affine()):
        with pytest.raises(ValueError, match=r"a group on the devices cpu, meta.*one device"):
            PSGD([a, b], blocks=blocks)
    with pytest.raises(ValueError, match="all real or all complex"):
        PSGD([a, torch.ones(2, dtype=torch.complex64, requires_grad=True)], blocks=Affine())
