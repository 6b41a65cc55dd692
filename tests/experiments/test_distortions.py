from __future__ import annotations

import pytest
import torch

from psgd.experiments import distortions
from psgd.experiments.distortions import POINTS, bends, distort, transforms


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


def test_points_are_shifted_by_pixels():
    """If all points of an image are shifted alike, it is shifted as a whole."""
    shifts = torch.zeros(1, 2, POINTS, POINTS)
    shifts[0, 0] = 2 * 3 / 28
    moved = distort(images(1), transforms(1, generator()), shifts)
    torch.testing.assert_close(moved[:, :, :-3], images(1)[:, :, 3:], rtol=0, atol=1e-4)


def test_bends_have_a_limit_and_differ_from_place_to_place():
    shifts = bends(500, generator(), 1.5) * 14
    assert shifts.shape == (500, 2, POINTS, POINTS)
    assert 1.49 < shifts.abs().max() <= 1.5
    assert shifts.std((2, 3)).min() > 0.3
    maps = transforms(2, generator())
    bent = distort(images(2), maps, bends(2, generator(), 1.5))
    assert 0.05 < (bent - distort(images(2), maps)).abs().mean() < 0.4


def test_chunks_do_not_show(monkeypatch):
    maps = transforms(7, generator(), shift=2.0, degrees=10.0, scale=0.1)
    shifts = bends(7, generator(), 1.0)
    whole, bent = distort(images(7), maps), distort(images(7), maps, shifts)
    monkeypatch.setattr(distortions, "CHUNK", 3)
    assert torch.equal(distort(images(7), maps), whole)
    assert torch.equal(distort(images(7), maps, shifts), bent)
