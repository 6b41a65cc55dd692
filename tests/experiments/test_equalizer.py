from __future__ import annotations

from itertools import islice

import pytest
import torch

from psgd.experiments import equalizer


def test_the_channel_is_the_papers():
    """H(z)(1 + 0.8 z⁻²) = −0.8 + z⁻², up to scale; before scaling its energy was 8.11."""
    h = equalizer.channel()
    assert h.square().sum().item() == pytest.approx(1)
    undone = h.clone()
    undone[2:] += 0.8 * h[:-2]
    undone /= undone[2].clone()
    torch.testing.assert_close(undone[:4], torch.tensor([-0.8, 0, 1, 0], dtype=torch.float64))
    assert undone[4:].abs().max() < 1e-12
    assert ((0.8 / h[0]) ** 2).item() == pytest.approx(8.11, abs=0.01)
    assert h[-2:].abs().max() < 1e-11


def test_windows_are_what_the_channel_sends():
    """Next to each other they overlap in all but one sample, and their power is that of the source, 1/3."""
    data = equalizer.batches(torch.Generator().manual_seed(0), chunk=7)
    windows = torch.cat([w for (w,) in islice(data, 3000)])
    assert windows.shape == (30000, 21)
    torch.testing.assert_close(windows[1:, 1:], windows[:-1, :-1])
    assert windows.square().mean().item() == pytest.approx(1 / 3, rel=0.03)
    # white up to the channel's own colour: lag 2 of its autocorrelation
    h = equalizer.channel()
    expected = (h[2:] * h[:-2]).sum().item() / 3
    assert (windows[:, 0] * windows[:, 2]).mean().item() == pytest.approx(expected, abs=0.01)


def test_the_hessian_is_that_of_the_loss():
    ((windows,),) = islice(equalizer.batches(torch.Generator().manual_seed(1)), 1)
    w = torch.randn(21, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    exact = torch.autograd.functional.hessian(lambda v: equalizer.loss(v, windows), w)
    torch.testing.assert_close(equalizer.hessian(w, windows), exact)


def test_interference():
    """None where a delay is left alone, and the same for any scale."""
    w = equalizer.start()
    h = equalizer.channel()
    assert equalizer.isi(w) == pytest.approx((h.square().sum() / h.square().max()).item() - 1)
    assert equalizer.isi(-3 * w) == pytest.approx(equalizer.isi(w))


def test_the_floor_of_the_paper():
    assert equalizer.floor(12) == pytest.approx(0.0256, abs=1e-4)
    assert equalizer.isi(equalizer.start()) > 1
