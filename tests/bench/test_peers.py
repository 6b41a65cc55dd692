from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from psgd.bench import peers
from psgd.bench.isolate import MissingPackageError, SkippedError

HAS_MUON = hasattr(torch.optim, "Muon")  # from torch 2.9 on
TORCHS = [peer for peer in peers.PEERS.values() if peer.package is None and (HAS_MUON or peer.name != "Muon")]
OTHERS = [peer for peer in peers.PEERS.values() if peer.package is not None]


def quadratic(peer, steps=150, lr=None):
    """The loss before and after: a matrix and a vector, with condition 10."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((6, 4), (4,))]
    scales = [torch.linspace(0.1, 1, p.numel()).reshape(p.shape) for p in params]
    optimizer = peer.optimizer(params, lr)

    def closure():
        optimizer.zero_grad()
        loss = sum((scale * p.square()).sum() for p, scale in zip(params, scales, strict=True))
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(steps)]
    return losses[0], losses[-1], optimizer


@pytest.mark.parametrize("peer", [*TORCHS, peers.PSGD_FLOAT32, peers.PSGD_TRIANGULAR], ids=lambda peer: peer.name)
def test_it_minimises_a_quadratic(peer):
    first, last, _ = quadratic(pickle.loads(pickle.dumps(peer)), lr=peer.lr if peer.closure else 0.05)
    assert last < 0.1 * first


@pytest.mark.parametrize("peer", OTHERS, ids=lambda peer: peer.name)
def test_one_of_another_package_works_or_says_what_to_install(peer):
    if peer.installed:
        assert peer.version
    else:
        assert peer.version is None
        with pytest.raises(MissingPackageError, match=rf"{peer.package} is not installed: pip install 'psgd\[bench\]'"):
            quadratic(peer)


def test_the_step_size_is_handed_on_and_has_a_default():
    for peer in (*TORCHS, *peers.OURS):
        for lr in (None, 0.0123):
            optimizer = peer.optimizer([torch.zeros(3, 2, requires_grad=True)], lr)
            assert {group["lr"] for group in optimizer.param_groups} == {peer.lr if lr is None else lr}


def test_variants_of_ours_differ():
    p = torch.zeros(3, 2, requires_grad=True)
    assert len({repr(peer.optimizer([p])) + repr(peer.make) for peer in peers.OURS}) == len(peers.OURS)
    assert len({peer.name for peer in (*peers.OURS, *peers.PEERS.values())}) == len(peers.OURS) + len(peers.PEERS)


@pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
def test_muon_is_for_hidden_matrices_and_adamw_for_the_rest():
    embedding, hidden, bias = (torch.randn(*shape).requires_grad_() for shape in ((9, 4), (4, 4), (4,)))
    optimizer = peers.PEERS["Muon"].optimizer([embedding, hidden, bias], hidden=[hidden])
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    assert muon.param_groups[0]["params"] == [hidden]
    assert [p.shape for p in adamw.param_groups[0]["params"]] == [embedding.shape, bias.shape]
    for p in (embedding, hidden, bias):
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in (embedding, hidden, bias)]
    optimizer.step()
    assert all((p != old).any() for p, old in zip((embedding, hidden, bias), before, strict=True))
    assert len(optimizer.state) == 3
    optimizer.zero_grad()
    assert hidden.grad is None
    assert len(peers.PEERS["Muon"].optimizer([bias]).param_groups) == 1


def test_an_old_torch_has_no_muon(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(SkippedError, match=r"needs torch 2\.9"):
        peers.PEERS["Muon"].optimizer([torch.zeros(3, 2, requires_grad=True)])


def test_choosing():
    assert peers.chosen("none") == []
    assert peers.chosen("all") == list(peers.PEERS.values())
    assert [peer.name for peer in peers.chosen("adamw, sgd,SGD")] == ["SGD", "AdamW"]
    assert [peer.name for peer in peers.chosen("kron_torch,none")] == ["kron_torch.Kron"]
    assert {peer.package for peer in peers.chosen("heavyball")} == {"heavyball"}
    for wrong in ("adamx", "", "sgd,help"):
        with pytest.raises(
            peers.UnknownPeerError, match=r"is none of SGD, .*LBFGS, .*; a package \(heavyball, .*all; none"
        ):
            peers.chosen(wrong)


def test_a_package_without_metadata_is_still_installed():
    assert replace(peers.SGD, package="tests").version == "unknown"
