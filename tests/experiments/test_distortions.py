from __future__ import annotations

import pytest
import torch

from psgd.experiments import distortions
from psgd.experiments.distortions import distort, transforms


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count):
    return torch.rand(count, 28, 28, generator=generator(9))


def test_without_limits_nothing_changes():
    maps = transforms(3, generator())
    assert torch.equal(maps, torch.tensor([[1.0, 0, 0], [0, 1, 0]]).expand(3, 2, 3))
    torch.testing.assert_close(distort(images(3), maps), images(3), rtol=0, atol=1e-5)


def test_a_shift_is_counted_in_pixels():
    maps = transforms(1, generator())
    maps[0, 0, 2] = 2 * 3 / 28
    moved = distort(images(1), maps)
    torch.testing.assert_close(moved[:, :, :-3], images(1)[:, :, 3:], rtol=0, atol=1e-5)
    assert moved[:, :, -3:].abs().max() < 1e-4


@pytest.mark.parametrize(
    ("limit", "measure", "largest"),
    [
        ({"shift": 2.0}, lambda maps: maps[:, :, 2] * 14, 2.0),
        ({"scale": 0.1}, lambda maps: maps[:, :, :2].diagonal(dim1=1, dim2=2) - 1, 0.1),
        ({"degrees": 10.0}, lambda maps: torch.atan2(maps[:, 1, 0], maps[:, 0, 0]).rad2deg(), 10.0),
    ],
    ids=["shift", "scale", "degrees"],
)
def test_limits_are_reached_and_not_exceeded(limit, measure, largest):
    found = measure(transforms(2000, generator(), **limit))
    assert found.abs().max() <= largest * 1.0001
    assert found.max() > 0.98 * largest
    assert found.min() < -0.98 * largest


def test_a_rotation_keeps_areas_and_a_scaling_does_not():
    turned, scaled = (transforms(100, generator(), **limit)[:, :, :2] for limit in ({"degrees": 15.0}, {"scale": 0.2}))
    torch.testing.assert_close(torch.linalg.det(turned), torch.ones(100))
    assert torch.linalg.det(scaled).std() > 0.05


def test_chunks_do_not_show(monkeypatch):
    maps = transforms(7, generator(), shift=2.0, degrees=10.0, scale=0.1)
    whole = distort(images(7), maps)
    monkeypatch.setattr(distortions, "CHUNK", 3)
    assert torch.equal(distort(images(7), maps), whole)
