"""Choices of param groups: fixed once a group is added, kept while saving, loading and copying, and shown."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from psgd import PSGD, Affine, Dense, Diagonal, FiniteDifference, Joint, Kronecker, PerTensor, Whitening
from psgd.groups import Group, Structure
from psgd.probes import Probe

from ..cases import PROBES, probes, small_model, train
from .test_store import bits

#: choices of the three layers of ``small_model``
LAYERS = ({"preconditioner": Kronecker(max_dense=0)}, {}, {"preconditioner": Dense(), "blocks": Affine()})


def make(probe: Probe = FiniteDifference()) -> tuple[nn.Module, PSGD]:
    model = small_model()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    groups = [{"params": list(layer.parameters()), **own} for layer, own in zip(layers, LAYERS, strict=True)]
    return model, PSGD(groups, lr=0.05, momentum=0.5, update_every=2, probe=probe)


def saved(optimizer: PSGD) -> dict:
    """State dict, as it comes back from a file that may hold no objects of this package."""
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def test_each_group_has_its_own_structure_and_blocks():
    _, optimizer = make()
    assert [(tuple(s.blocks[0].shape), s.group.describe()) for s in optimizer.stacks] == [
        ((6, 4), "diagonal 6 ⊗ diagonal 4"),
        ((6,), "diagonal 6"),
        ((6, 6), "symmetric 6 ⊗ symmetric 6"),
        ((6,), "symmetric 6"),
        ((1, 7), "dense 7"),
    ]
    assert (optimizer.preconditioner, optimizer.blocks) == (Kronecker(), PerTensor())


def test_step_sizes_of_Q_are_those_of_the_structure_unless_given():
    def steps_of_Q(own: dict, **options) -> list[tuple[float, float]]:
        optimizer = PSGD([{"params": [torch.zeros(2)]}], probe=Whitening(), **options)
        optimizer = copy.deepcopy(optimizer)  # which remembers what was given
        optimizer.add_param_group({"params": [torch.ones(2)], **own})
        return [(group["precond_lr"], group["precond_boost"]) for group in optimizer.param_groups]

    dense, inverse_free = {"preconditioner": Dense()}, {"preconditioner": Kronecker(max_dense=0)}
    assert steps_of_Q(dense) == [(0.1, 3.0), (0.01, 3.0)]
    assert steps_of_Q(inverse_free, preconditioner=Dense()) == [(0.01, 3.0), (0.1, 3.0)]
    assert steps_of_Q(inverse_free, preconditioner=Dense(), precond_lr=0.2) == [(0.2, 1.0), (0.2, 1.0)]
    assert steps_of_Q(dense, precond_boost=2.0) == [(0.1, 2.0), (0.01, 2.0)]
    assert steps_of_Q({**inverse_free, "precond_lr": 0.3}) == [(0.1, 3.0), (0.3, 1.0)]
    assert steps_of_Q({**dense, "precond_boost": 4.0}) == [(0.1, 3.0), (0.01, 4.0)]


@probes
def test_resume_is_exact_to_the_bit(probe):
    straight, first, second = make(probe), make(probe), make(probe)
    train(*straight, 0, 20)
    train(*first, 0, 10)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(saved(first[1]))
    assert [group.get("preconditioner") for group in second[1].param_groups] == [Kronecker(max_dense=0), None, Dense()]
    train(*second, 10, 20)
    assert bits(*second) == bits(*straight)


def test_a_checkpoint_has_choices_as_text():
    groups = saved(make()[1])["param_groups"]
    assert [group.get("preconditioner") for group in groups] == [repr(Kronecker(max_dense=0)), None, "Dense()"]
    assert [group.get("blocks") for group in groups] == [None, None, "Affine()"]


def test_loading_keeps_the_choices_of_the_optimizer():
    """Also if the same were saved in other words, or by default; another structure of Q is refused."""
    plain = small_model()
    by_default = PSGD(plain.parameters(), lr=0.05, preconditioner=Kronecker(max_dense=0))
    train(plain, by_default, 0, 3)
    model = small_model()
    chosen = Kronecker(max_dense=0, max_skew=1)
    optimizer = PSGD([{"params": model.parameters(), "preconditioner": chosen}], lr=0.05)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(by_default.state_dict())
    assert optimizer.param_groups[0]["preconditioner"] is chosen
    by_default.load_state_dict(saved(optimizer))
    assert "preconditioner" not in by_default.param_groups[0]
    train(plain, by_default, 3, 6)
    train(model, optimizer, 3, 6)
    assert bits(plain, by_default) == bits(model, optimizer)
    other = PSGD([{"params": small_model().parameters(), "preconditioner": Diagonal()}], lr=0.05)
    with pytest.raises(ValueError, match="saved with another preconditioner, or other blocks"):
        other.load_state_dict(optimizer.state_dict())


class Mine(Structure):
    """Structure of a user, of which two objects are never equal."""

    def init(self, shape, *, batch=1, dtype, device) -> Group:
        return Diagonal().init(shape, batch=batch, dtype=dtype, device=device)


def test_a_structure_without_equality_survives_loading_and_copying():
    p = torch.ones(3, requires_grad=True)
    optimizer = PSGD([{"params": [p], "preconditioner": Mine()}], probe=Whitening(), lr=0.01)
    for step in range(3):
        copied = copy.deepcopy(optimizer)
        for each in (optimizer, copied):
            for q in each.parameters():
                q.grad = torch.full((3,), 1.0 + step)
            each.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(copied.parameters()[0], p)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_continue_alike(copied):
    pair = make(Whitening())
    train(*pair, 0, 4)
    other = copied(pair)
    train(*pair, 4, 8)
    train(*other, 4, 8)
    assert bits(*pair) == bits(*other)


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_round_trip(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    pair, other = make(), make()
    train(*pair, 0, 5)
    dumped = copy.deepcopy(get_optimizer_state_dict(*pair, options=options))
    other[0].load_state_dict(pair[0].state_dict())
    set_optimizer_state_dict(*other, dumped, options=options)
    train(*pair, 5, 10)
    train(*other, 5, 10)
    assert bits(*other) == bits(*pair)


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        (
            0,
            "preconditioner",
            Dense(),
            r"preconditioner=Dense\(\) in param group 0: it was Kronecker\(max_dense=0, .*stay",
        ),
        (
            1,
            "preconditioner",
            Dense(),
            r"preconditioner=Dense\(\) in param group 1: it was Kronecker\(max_dense=2048, ",
        ),
        (2, "blocks", Joint(), r"blocks=Joint\(\) in param group 2: it was Affine\(\); PSGD wants .* to stay"),
        (2, "blocks", None, r"blocks=None in param group 2: PSGD wants one of"),
    ],
)
def test_choices_stay_as_they_are(group, name, value, message):
    pair, other = make(), make()
    train(*pair, 0, 3)
    before = bits(*pair)
    usual = pair[1].param_groups[group].get(name)
    pair[1].param_groups[group][name] = value
    for attempt in (lambda: train(*pair, 3, 4), lambda: pair[1].load_state_dict(other[1].state_dict())):
        with pytest.raises((TypeError, ValueError), match=message):
            attempt()
        assert bits(*pair) == before
    pair[1].param_groups[group][name] = copy.deepcopy(usual) or Kronecker()  # equal ones are the same
    train(*pair, 3, 6)
    train(*other, 0, 6)
    assert bits(*pair) == bits(*other)


def test_a_choice_that_is_taken_out_is_missed():
    model, optimizer = make()
    del optimizer.param_groups[0]["preconditioner"]
    with pytest.raises(ValueError, match=r"preconditioner=Kronecker\(max_dense=2048, .* in param group 0: it was"):
        train(model, optimizer, 0, 1)


def test_the_dict_of_the_user_stays_as_it_was():
    group = {"params": [torch.ones(2)], "preconditioner": Dense()}
    PSGD([torch.zeros(2)]).add_param_group(group)
    assert set(group) == {"params", "preconditioner"}


def test_groups_taken_out_do_not_shift_the_choices_of_others():
    model, optimizer = make(Whitening())
    train(model, optimizer, 0, 3)
    Q = optimizer.state[model[5].weight]["Q0_full"].clone()
    optimizer.param_groups.pop(0)
    train(model, optimizer, 3, 4)
    assert [stack.group.describe() for stack in optimizer.stacks][-1] == "dense 7"
    assert torch.equal(optimizer.state[model[5].weight]["Q0_full"], Q)  # which is not due
    optimizer.param_groups[0]["params"].clear()
    train(model, optimizer, 4, 5)
    optimizer.param_groups.pop(0)  # it had no parameters, so that these are the same
    train(model, optimizer, 5, 6)
    assert int(optimizer.state[model[5].weight]["step"]) == 6
    assert int(optimizer.state[model[5].weight]["skipped"]) == 0


def test_repr_tells_them_apart():
    text = repr(make()[1])
    assert text.startswith(
        f"PSGD({Kronecker(max_dense=0)} or {Kronecker()} or Dense(), c3, FiniteDifference(), PerTensor() or Affine();"
    )
    assert "precond_lr=0.1 or 0.05, " in text
    assert "\n  group 0: (6, 4): diagonal 6 ⊗ diagonal 4, float32 on cpu" in text
    assert "\n  group 2: (1, 7): dense 7, float32 on cpu" in text
    assert "group" not in repr(PSGD([{"params": [torch.zeros(2)]}, {"params": [torch.zeros(2)]}]))


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)
def test_training_reduces_the_loss(probe):
    losses = train(*make(probe), 0, 60)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
