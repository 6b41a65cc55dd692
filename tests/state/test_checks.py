"""Bad input: an error that names the argument, the value and what would be right, before anything is changed."""

from __future__ import annotations

import copy
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from psgd import (
    PSGD,
    Affine,
    Dense,
    FiniteDifference,
    HessianVector,
    Joint,
    Kronecker,
    LimitedMemory,
    LowRank,
    MaxAbs,
    Whitening,
    c1,
    c2,
)
from tests.state.test_store import bits

from ..cases import small_model, train

NUMBERS = [
    ("lr", -0.1),
    ("lr", math.nan),
    ("lr", math.inf),
    ("lr", "0.1"),
    ("lr", torch.tensor(-1.0)),
    ("lr", torch.tensor(math.nan)),
    ("lr", torch.ones(2)),
    ("precond_lr", 0.0),
    ("precond_lr", 1.0),
    ("precond_lr", -0.5),
    ("precond_lr", 2),
    ("precond_lr", math.nan),
    ("momentum", 1.0),
    ("momentum", -0.1),
    ("weight_decay", -1e-3),
    ("weight_decay", math.inf),
    ("update_every", 0),
    ("update_every", 1.5),
    ("update_every", True),
    ("max_norm", 0.0),
    ("max_norm", -1.0),
    ("adapt_lr", -0.1),
    ("adapt_lr", 1.0),
    ("adapt_lr", math.nan),
    ("seed", 0.5),
    ("maximize", 1),
    *((name, 10**400) for name in ("lr", "precond_lr", "momentum", "weight_decay", "update_every", "update_anneal")),
    *((name, 10**400) for name in ("max_rms", "max_norm", "seed")),
    ("lr", 10**5000),
    ("lr", Fraction(1, 2)),
    ("seed", -(2**63) - 1),
    ("update_anneal", 2**63),
]


def without_addresses(value: object) -> str:
    """Name of a case that is the same in all processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=lambda v: str(v) if not isinstance(v, int) else hex(v)[:20])
def test_numbers(name, value):
    """In the constructor, in a param group, in a group added later, and set between steps."""
    message = rf"{name}=.*: PSGD wants "
    params = [torch.ones(2, requires_grad=True)]
    with pytest.raises(ValueError, match=message):
        PSGD(params, **{name: value})
    with pytest.raises(ValueError, match=message):
        PSGD([{"params": params, name: value}])
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05)
    train(model, optimizer, 0, 2)
    before, groups = bits(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params, name: value})
    assert optimizer.state_dict()["param_groups"] == groups
    assert params[0] not in optimizer.state
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, 2, 3)
    optimizer.param_groups[0][name] = groups[0][name]
    assert bits(model, optimizer) == before
    train(model, optimizer, 2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preconditioner": "dense"}, r"preconditioner='dense': PSGD wants one of .*Dense\(\)"),
        ({"preconditioner": Dense}, r"preconditioner=.*Dense.*object of the class: Dense\(\)"),
        ({"criterion": "c3"}, r"criterion='c3': PSGD wants c1, c2, c3"),
        ({"probe": None}, r"probe=None: PSGD wants one of .*Whitening\(\)"),
        ({"blocks": 3}, r"blocks=3: PSGD wants one of .*Joint\(\)"),
        ({"normalize": MaxAbs}, r"normalize=.*MaxAbs.*: PSGD wants MaxAbs\(\)"),
    ],
    ids=str,
)
def test_choices(options, message):
    with pytest.raises(TypeError, match=message):
        PSGD([torch.ones(2, requires_grad=True)], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precond_dtype": torch.float16}, r"precond_dtype=torch.float16: PSGD wants torch.bfloat16"),
        (
            {"precond_dtype": torch.bfloat16, "preconditioner": Dense()},
            r"precond_dtype=torch.bfloat16: Dense\(\) is inverted .* PSGD wants torch.float32",
        ),
        ({"normalize": MaxAbs()}, r"normalize=MaxAbs\(\): Kronecker\(.* PSGD wants None here"),
        ({"criterion": c1, "probe": Whitening()}, r"criterion=c1: .* Whitening measures no such pairs; PSGD wants c3"),
        ({"criterion": c2, "probe": Whitening()}, r"criterion=c2: .* Whitening measures no such pairs; PSGD wants c3"),
    ],
    ids=without_addresses,
)
def test_choices_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        PSGD([torch.ones(2, requires_grad=True)], **options)


def test_a_criterion_of_ones_own_may_whiten():
    theta = torch.ones(2, requires_grad=True)
    optimizer = PSGD([theta], lr=0.1, probe=Whitening(), criterion=lambda Q, v, g: c2(Q, v, g))
    theta.grad = torch.ones(2)
    optimizer.step()
    assert not torch.equal(theta, torch.ones(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kronecker(max_dense=-1), "max_dense=-1: Kronecker wants"),
        (lambda: Kronecker(max_dense=1.5), "max_dense=1.5: Kronecker wants"),
        (lambda: LimitedMemory(0), "size=0: LimitedMemory wants"),
        (lambda: LowRank(0), "rank=0: LowRank wants"),
        (lambda: LowRank(2.0), "rank=2.0: LowRank wants"),
        (lambda: LowRank(True), "rank=True: LowRank wants"),
        (lambda: FiniteDifference(std=0.0), "std=0.0: FiniteDifference wants"),
        (lambda: FiniteDifference(damping=-1.0), r"damping=-1.0: FiniteDifference wants"),
        (lambda: Whitening(damping=1.0), "damping=1.0: Whitening wants"),
        (lambda: HessianVector(damping=math.nan), "damping=nan: HessianVector wants"),
        (lambda: HessianVector(damping="a"), "damping='a': HessianVector wants"),
        (lambda: FiniteDifference(std=True), "std=True: FiniteDifference wants"),
        (lambda: FiniteDifference(std=10**400), "std=10{400}: FiniteDifference wants"),
        (lambda: FiniteDifference(std="a"), "std='a': FiniteDifference wants"),
    ],
)
def test_arguments_of_choices(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="module=3: FiniteDifference wants"):
        FiniteDifference(module=3)


def test_parameters():
    p = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"params=\[\]: PSGD wants at least one parameter"):
        PSGD([])
    with pytest.raises(TypeError, match="params=None: PSGD wants an iterable"):
        PSGD(None)
    with pytest.raises(ValueError, match=r"params=\[\] in param group 1: PSGD wants at least one"):
        PSGD([{"params": [p]}, {"params": []}])
    with pytest.raises(ValueError, match=r"parameter 1 in param group 0, of shape \(2,\), appears twice"):
        PSGD([p, p])
    with pytest.raises(ValueError, match=r"parameter 0 in param group 1.*appears twice"):
        PSGD([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match=r"parameter 0 in param group 0 is of dtype torch.int64; PSGD wants floating"):
        PSGD([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"dtype torch.float8_e4m3fn; PSGD wants .* at least 16 bits"):
        PSGD([torch.ones(2).to(torch.float8_e4m3fn)])
    with pytest.raises(ValueError, match=r"torch.sparse_coo; PSGD wants dense ones"):
        PSGD([torch.eye(2).to_sparse().requires_grad_()])
    with pytest.raises(ValueError, match=r"PSGD wants p.resolve_conj\(\)"):
        PSGD([torch.ones(2, dtype=torch.complex64).conj().requires_grad_()])
    with pytest.raises(TypeError, match="item 1 in param group 0 is 3; PSGD wants tensors"):
        PSGD([p, 3])
    with pytest.raises(TypeError, match="iterable"):
        PSGD(p)
    with pytest.raises(ValueError, match="non-leaf"):
        PSGD([p * 2])
    with pytest.raises(ValueError, match="the key 'params' too"):
        PSGD([{"lr": 0.1}])
    optimizer = PSGD([p])
    with pytest.raises(TypeError, match="PSGD wants a dict"):
        optimizer.add_param_group([torch.ones(2)])
    with pytest.raises(ValueError, match="appears twice"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("criterion", c2), ("probe", Whitening()), ("precond_dtype", torch.float64)],
    ids=without_addresses,
)
def test_choices_that_are_not_for_param_groups(name, value):
    p = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=rf"{name}=.* in param group 0: PSGD takes it for all"):
        PSGD([{"params": [p], name: value}])


@pytest.mark.parametrize(
    ("choice", "options", "message"),
    [
        ({"preconditioner": "dense"}, {}, r"preconditioner='dense' in param group 1: PSGD wants one of .*Dense\(\)"),
        ({"preconditioner": Dense}, {}, r"preconditioner=.* in param group 1: .*object of the class: Dense\(\)"),
        ({"preconditioner": None}, {}, r"preconditioner=None in param group 1: PSGD wants one of"),
        ({"blocks": 3}, {}, r"blocks=3 in param group 1: PSGD wants one of .*Joint\(\)"),
        (
            {"preconditioner": Dense()},
            {"precond_dtype": torch.bfloat16},
            r"precond_dtype=torch.bfloat16 in param group 1: Dense\(\) is inverted .* PSGD wants torch.float32",
        ),
        (
            {"preconditioner": Kronecker()},
            {"preconditioner": Dense(), "normalize": MaxAbs()},
            r"normalize=MaxAbs\(\) in param group 1: Kronecker\(.* PSGD wants None here",
        ),
    ],
    ids=str,
)
def test_choices_of_a_param_group(choice, options, message):
    """In the constructor, and in a group added later, which then is not there."""
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises((TypeError, ValueError), match=message):
        PSGD([{"params": [first]}, {"params": [second], **choice}], **options)
    optimizer = PSGD([first], **options)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.add_param_group({"params": [second], **choice})
    assert len(optimizer.param_groups) == 1
    assert second not in optimizer.state


def test_choices_go_with_the_structures_that_are_used():
    """The default, which no group has, may be one that they do not go with."""
    p = torch.ones(2, requires_grad=True)
    assert PSGD([{"params": [p], "preconditioner": Dense()}], normalize=MaxAbs()).param_groups
    group = {"params": [p], "preconditioner": Kronecker()}
    assert PSGD([group], preconditioner=Dense(), precond_dtype=torch.bfloat16).param_groups


def test_numbers_of_numpy_are_numbers():
    p = torch.ones(2, requires_grad=True)
    PSGD([p], lr=np.float32(0.1), update_every=np.int64(2), precond_lr=np.float64(0.1))


def test_sparse_gradients():
    embedding = nn.Embedding(4, 2, sparse=True)
    for probe in (Whitening(), FiniteDifference()):
        optimizer = PSGD(embedding.parameters(), probe=probe)

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = embedding(torch.tensor([1, 2])).sum()
            loss.backward()
            return loss

        before = embedding.weight.detach().clone()
        with pytest.raises(ValueError, match="parameter 0 has a sparse gradient; PSGD wants dense ones"):
            optimizer.step(closure)
        assert torch.equal(before, embedding.weight)
        assert int(optimizer.state[embedding.weight]["step"]) == 0


def test_closures():
    model = small_model()
    x = torch.ones(2, 4)
    other = torch.ones(2, requires_grad=True)

    def forward_only():
        return model(x).mean()

    def backward():
        loss = model(x).mean()
        loss.backward()
        return loss

    for probe, closure, message in [
        (FiniteDifference(), None, r"closure=None: FiniteDifference wants step\(closure\)"),
        (HessianVector(), None, r"closure=None: HessianVector wants step\(closure\)"),
        (FiniteDifference(), forward_only, "closure: it left no gradient on any parameter; FiniteDifference wants"),
        (FiniteDifference(), lambda: {"loss": backward()}, "closure: it returned a dict with the keys 'loss'; Finite"),
        (
            FiniteDifference(),
            lambda: (backward(), x),
            "it returned a tuple of 2 items; FiniteDifference wants the loss",
        ),
        (
            Whitening(),
            lambda: {"loss": backward()},
            "closure: it returned a dict with the keys 'loss'; Whitening wants",
        ),
        (
            Whitening(),
            lambda: [backward(), x],
            "closure: it returned a list of 2 items; Whitening wants the loss alone",
        ),
        (HessianVector(), lambda: {"loss": forward_only()}, "it returned a dict with the keys 'loss'; HessianVector"),
        (HessianVector(), lambda: (forward_only(), x), "it returned a tuple of 2 items; HessianVector wants the loss"),
        (
            FiniteDifference(module=model, batched=True),
            lambda: {"loss": forward_only()},
            r"it returned a dict with the keys 'loss'; FiniteDifference\(batched=True\) wants the loss",
        ),
        (HessianVector(), backward, r"closure: it called backward\(\); HessianVector wants a closure that only"),
        (HessianVector(), lambda: 3.0, "closure: it returned 3.0; HessianVector wants the loss as a tensor"),
        (HessianVector(), lambda: model(x), r"closure: it returned a tensor of shape \(2, 1\).*HessianVector wants"),
        (HessianVector(), lambda: model(x).mean().detach(), "requires_grad=False; HessianVector wants"),
        (HessianVector(), lambda: other.sum(), "closure: the loss it returned does not depend on any"),
    ]:
        optimizer = PSGD(model.parameters(), lr=0.1, probe=probe)
        for p in model.parameters():
            p.grad = torch.full_like(p, 2.0)
        before = bits(model, optimizer)
        with pytest.raises(ValueError, match=message):
            optimizer.step(closure)
        assert bits(model, optimizer) == before
        assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in model.parameters())
    with pytest.raises(TypeError, match="closure=3: step wants a function"):
        optimizer.step(3)


def test_parameters_that_changed():
    model = small_model()
    optimizer = PSGD(model.named_parameters(), lr=0.1, probe=Whitening())
    train(model, optimizer, 0, 2)
    model.double()
    with pytest.raises(
        ValueError, match=r"parameter 0 \(0.weight\) was torch.float32 of shape .* and is now torch.float64"
    ):
        train(model, optimizer, 2, 3)
    model.float()
    train(model, optimizer, 2, 3)
    model[0].weight.data = torch.ones(3, 4)
    model[0].weight.grad = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"shape \(6, 4\) on cpu and is now torch.float32 of shape \(3, 4\)"):
        optimizer.step()


def test_gradients_unlike_their_parameter():
    theta = torch.ones(2, requires_grad=True)
    optimizer = PSGD([theta], probe=_OtherGradient())
    theta.grad = torch.ones(2)
    with pytest.raises(
        ValueError, match=r"parameter 0 is torch.float32 of shape \(2,\) on cpu and its gradient torch.float64"
    ):
        optimizer.step()
    assert torch.equal(theta, torch.ones(2))


class _OtherGradient(Whitening):
    """Torch itself lets nobody put such a gradient on a parameter."""

    def __call__(self, *args):
        evaluation = super().__call__(*args)
        evaluation.grads = [torch.ones(2, dtype=torch.float64)]
        evaluation.pairs = {}
        return evaluation


def test_dense_too_large_for_memory():
    theta = torch.zeros(2_000_000, requires_grad=True)
    message = r"preconditioner=Dense\(\): Q would take 14.6 TiB on cpu, where .* free;.*\(2000000,\).*Use Kronecker\(\)"
    with pytest.raises(ValueError, match=message):
        PSGD([theta], preconditioner=Dense())
    with pytest.raises(ValueError, match=r"preconditioner=Dense\(\) in param group 0: Q would take 14.6 TiB"):
        PSGD([{"params": [theta], "preconditioner": Dense()}])
    with pytest.raises(ValueError, match="Q would take"):
        PSGD([torch.zeros(1_000_000, requires_grad=True) for _ in range(2)], preconditioner=Dense(), blocks=Joint())
    optimizer = PSGD([torch.ones(2, requires_grad=True)], preconditioner=Dense())
    with pytest.raises(ValueError, match="Q would take"):
        optimizer.add_param_group({"params": [theta]})
    assert len(optimizer.param_groups) == 1
    assert theta not in optimizer.state


def test_affine_wants_layers():
    with pytest.raises(ValueError, match=r"shapes \(6, 4\), \(6,\), .* is not one layer; Affine wants one param group"):
        PSGD(small_model().parameters(), blocks=Affine())


def test_a_group_that_fails_half_way_leaves_no_trace(monkeypatch):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05)
    train(model, optimizer, 0, 2)
    before = bits(model, optimizer)

    extra = torch.ones(3, requires_grad=True)
    original = Kronecker.init

    def fail(self, *args, device, **kwargs):
        if device != "meta":
            raise MemoryError
        return original(self, *args, device=device, **kwargs)

    monkeypatch.setattr(Kronecker, "init", fail)
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": [extra]})
    monkeypatch.undo()
    assert bits(model, optimizer) == before
    assert extra not in optimizer.state
    train(model, optimizer, 2, 4)
    other = small_model()
    other_optimizer = PSGD(other.parameters(), lr=0.05)
    train(other, other_optimizer, 0, 4)
    assert bits(model, optimizer) == bits(other, other_optimizer)
