from __future__ import annotations

from itertools import islice

import pytest
import torch

from psgd.experiments.hessians import SCENARIOS, hessian, pairs


def test_eight_scenarios_in_the_order_of_the_figure():
    assert [(s.definite, s.noisy, s.power) for s in SCENARIOS] == [
        (True, False, -12), (True, False, 12), (True, True, -12), (True, True, 12),
        (False, False, -12), (False, False, 12), (False, True, -12), (False, True, 12),
    ]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_hessians_are_as_described(scenario):
    H = torch.stack([hessian(scenario, torch.Generator().manual_seed(seed)) for seed in range(50)])
    torch.testing.assert_close(H, H.mT)
    eigenvalues = torch.linalg.eigvalsh(H)
    assert bool((eigenvalues > 0).all()) is scenario.definite
    # ‖H‖² is n² variances, whatever the signs of the eigenvalues
    assert (eigenvalues.square().sum(-1).mean() / 110 / scenario.variance).item() == pytest.approx(1, rel=0.2)


def test_pairs_have_the_size_and_the_noise_they_should():
    generator = torch.Generator().manual_seed(0)
    H = torch.stack([hessian(SCENARIOS[0], generator), hessian(SCENARIOS[3], generator)])
    found = list(islice(pairs(H, torch.tensor([False, True]), generator), 4000))
    dtheta, dgrad = (torch.stack(parts) for parts in zip(*found, strict=True))
    eps = torch.finfo(torch.float64).eps
    assert (dtheta.square().mean() / eps).item() == pytest.approx(1, rel=0.05)
    signal = torch.einsum("bij,kbj->kbi", H, dtheta)
    torch.testing.assert_close(dgrad[:, 0], signal[:, 0])
    noise = dgrad[:, 1] - signal[:, 1]
    ratio = signal[:, 1].square().mean() / noise.square().mean()
    assert 10 * ratio.log10().item() == pytest.approx(-20, abs=0.5)
