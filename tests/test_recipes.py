"""One line for a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import psgd
from psgd import PSGD, Affine, Dense, FiniteDifference, Kronecker, Whitening
from psgd.recipes import param_groups

BOTH = pytest.mark.parametrize("make", [psgd.whiten, psgd.newton], ids=["whiten", "newton"])


class Model(nn.Module):
    """Embedding, recurrent layer, normalisation, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.lstm(self.embed(x))[0]))


def names(optimizer: PSGD) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


@BOTH
def test_biases_and_norms_do_not_decay_and_each_level_of_a_recurrent_layer_is_one_block(make):
    optimizer = make(Model(), weight_decay=0.1)
    assert names(optimizer) == [
        ["norm.weight", "norm.bias", "head.bias"],
        ["lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0", "lstm.bias_hh_l0"],
        ["lstm.weight_ih_l1", "lstm.weight_hh_l1", "lstm.bias_ih_l1", "lstm.bias_hh_l1"],
        ["embed.weight"],
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1, 0.1, 0.1]
    assert [group.get("blocks") for group in optimizer.param_groups] == [None, Affine(), Affine(), None]
    assert optimizer.param_groups[3]["preconditioner"] == Kronecker(max_dense=6)  # a diagonal factor for the rows
    assert sum(len(stack.blocks) for stack in optimizer.stacks) == 1 + 3 + 2


@BOTH
def test_without_decay_there_is_one_group_beside_recurrent_layers(make):
    assert len(make(Model()).param_groups) == 4
    assert len(make(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))).param_groups) == 1


@BOTH
def test_frozen_parameters_are_left_out(make):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert names(make(model)) == [["1.weight", "1.bias"]]
    with pytest.raises(ValueError, match="Sequential has no parameters that require a gradient"):
        make(model.requires_grad_(False))


@BOTH
def test_probe_structure_and_numbers(make):
    optimizer = make(nn.Linear(3, 4))
    assert optimizer.preconditioner == Kronecker()
    kind, lr = (Whitening, 0.001) if make is psgd.whiten else (FiniteDifference, 0.5)
    assert isinstance(optimizer.probe, kind)
    assert optimizer.param_groups[0]["lr"] == lr
    other = make(nn.Linear(3, 4), lr=0.02, max_dense=7, momentum=0.5)
    assert other.preconditioner == Kronecker(max_dense=7)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (0.02, 0.5)
    assert make(nn.Linear(3, 4), preconditioner=Dense()).preconditioner == Dense()


@BOTH
def test_embeddings_with_more_columns_than_rows_are_ordinary(make):
    assert names(make(nn.Embedding(4, 9))) == [["weight"]]
    assert "preconditioner" not in make(nn.Embedding(4, 9)).param_groups[0]
    assert "preconditioner" not in make(nn.Embedding(9, 4), preconditioner=Dense()).param_groups[0]


@BOTH
@pytest.mark.parametrize("wrong", [torch.ones(2), [torch.ones(2)], None], ids=["tensor", "list", "None"])
def test_something_else_than_a_model(make, wrong):
    with pytest.raises(TypeError, match=r"it must be a torch.nn.Module \(PSGD\(params, …\) takes parameters\)"):
        make(wrong)


def test_misspelt_options_are_named():
    with pytest.raises(TypeError, match="precond_lr"):
        psgd.whiten(nn.Linear(2, 2), precond_rl=0.1)


def test_both_train():
    torch.manual_seed(0)
    x = torch.randint(0, 11, (4, 9))
    for make in (psgd.whiten, psgd.newton):
        model = Model()
        optimizer = make(model)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
            loss.backward()
            return loss.detach()

        first = float(closure())
        for _ in range(60):
            last = optimizer.step(closure)
        assert float(last) < 0.8 * first


def test_statistics_change_once_in_a_step():
    """``newton`` evaluates twice, and tells the probe the model."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = psgd.newton(model)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean() + model[0].weight.square().sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert int(model[1].num_batches_tracked) == 1


def test_groups_are_those_of_the_model():
    model = Model()
    params = [p for group in param_groups(model, 0.1) for _, p in group["params"]]
    assert len(params) == len(set(params)) == len(list(model.parameters()))


@BOTH
def test_parameters_are_added_without_names(make):
    optimizer, more = make(nn.Linear(2, 3)), nn.Linear(3, 2)
    optimizer.add_param_group({"params": more.parameters()})
    optimizer.add_param_group({"params": nn.Linear(2, 2).named_parameters()})
    assert names(optimizer)[1:] == [["group 1, parameter 0", "group 1, parameter 1"], ["weight", "bias"]]


@BOTH
def test_unusual_models(make):
    class Scaled(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(9, 4)
            self.scale = nn.Parameter(torch.tensor(1.0))

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.GRU(4, 4), nn.GRU(4, 4)
            self.b.weight_hh_l0 = self.a.weight_hh_l0

    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.embed = nn.Linear(4, 9, bias=False), nn.Embedding(9, 4)
            self.embed.weight = self.head.weight

    assert names(make(Scaled())) == [["scale"], ["weight"]]
    found = [name for group in names(make(Shared())) for name in group]
    assert len(found) == len(set(found)) == 7
    assert make(HeadFirst()).param_groups[0]["preconditioner"] == Kronecker(max_dense=4)


@pytest.mark.parametrize(
    "scale",
    [lambda i: 0.01 if i == 0 else 1.0, lambda i: min(1.0, 0.001 + i / 100), lambda i: 1e4 if i >= 100 else 1.0],
    ids=["small first batch", "ramp", "jump"],
)
def test_newton_survives_a_loss_whose_size_changes(scale):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=generator)
    y = x[:, :2].prod(1, keepdim=True) + x[:, 2:3].sin()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = psgd.newton(model)
    losses = []
    for i in range(200):
        rows = torch.randint(0, 512, (32,), generator=generator)

        def closure(i=i, rows=rows):
            optimizer.zero_grad()
            loss = scale(i) * (model(x[rows]) - y[rows]).square().mean()
            loss.backward()
            return loss.detach()

        losses.append(optimizer.step(closure).item() / scale(i))
    assert max(losses) < 100 * losses[0]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", [psgd.whiten, psgd.newton])
def test_a_structure_of_ones_own_and_max_dense_exclude_each_other(make):
    with pytest.raises(ValueError, match=r"max_dense=3: .*; use preconditioner=Kronecker\(max_dense=3\)"):
        make(nn.Linear(4, 4), max_dense=3, preconditioner=psgd.Diagonal())
    assert "Kronecker(max_dense=3" in repr(make(nn.Linear(4, 4), max_dense=3))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], ids=["module", "iterable"])
def test_a_model_in_place_of_parameters_is_an_error_of_one_line(model):
    with pytest.raises(TypeError, match=r"^params: a \w+; PSGD wants parameters, .* psgd.whiten\(model\)") as caught:
        psgd.PSGD(model)
    assert "\n" not in str(caught.value)


def test_newton_does_not_undo_weight_decay():
    """With a factor of the learning rate it would: the loss falls along every step where decay and gradient balance."""
    ends = {}
    for options in ({}, {"adapt_lr": 0.0}, {"weight_decay": 0.0}):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False).double()
        x, y = torch.randn(50, 4, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
        optimizer = psgd.newton(model, **{"weight_decay": 0.3, **options})

        def closure(optimizer=optimizer, model=model, x=x, y=y):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss.detach()

        for _ in range(300):
            optimizer.step(closure)
        ends[str(options)] = model.weight.detach().norm().item()
    plain, constant, free = ends.values()
    assert plain == pytest.approx(constant, rel=0.02)
    assert plain < 0.9 * free
