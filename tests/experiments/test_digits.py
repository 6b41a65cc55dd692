from __future__ import annotations

import pytest
import torch

from psgd.experiments import digits
from tests.experiments.small_digits import small_digits  # noqa: F401


@pytest.mark.parametrize(("hidden", "parameters"), [([], 7850), ([300], 238510), ([300, 100], 266610)])
def test_networks_have_the_papers_sizes(hidden, parameters):
    model = digits.network(hidden, torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model) == 2 * len(hidden) + 1


def test_hinge_is_the_papers():
    output = torch.randn(50, 10, dtype=torch.float64)
    target = torch.randint(10, (50,))
    expected = []
    for o, i in zip(output.tolist(), target.tolist(), strict=True):
        margin = max(max(value for j, value in enumerate(o) if j != i) + 1 - o[i], 0)
        expected.append((margin**2 + 0.01) ** 0.5 - 0.1)
    assert digits.hinge(output, target).item() == pytest.approx(sum(expected) / 50, rel=1e-12)
    assert torch.autograd.gradcheck(digits.hinge, (output.requires_grad_(), target))


def test_an_epoch_sees_every_image_once():
    images, labels = torch.arange(300.0)[:, None], torch.arange(300)
    data = digits.batches(images, labels, torch.Generator().manual_seed(0))
    epochs = [torch.cat([next(data)[1] for _ in range(3)]) for _ in range(2)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(300))
    assert not torch.equal(*epochs)
    x, y = next(data)
    assert torch.equal(x[:, 0].long(), y)


def test_judge_counts_what_is_wrong():
    images = torch.eye(10)
    labels = torch.arange(10)
    labels[0] = 3
    loss, error = digits.judge(torch.nn.Identity(), digits.LOSSES["cross entropy"], images, labels)
    assert error == 0.1
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(images, labels).item())


def settings(**changes):
    return {
        "seed": 0, "device": "cpu", "data": None, "method": "SGD", "lr": 0.1, "hidden": [], "loss": "cross entropy",
        "epochs": 0.2, **changes,
    }  # fmt: skip


@pytest.mark.usefixtures("small_digits")
class TestTrain:
    def test_rows_are_tenths_of_an_epoch(self):
        rows = list(digits.train(**settings()))
        assert [row["epoch"] for row in rows] == [0.1, 0.2]
        assert rows[1]["loss"] < rows[0]["loss"]
        assert 0 <= rows[1]["error"] < 0.5

    @pytest.mark.parametrize("loss", digits.LOSSES)
    @pytest.mark.parametrize("method", ["SGD", "c3"])
    def test_all_losses_can_be_learned(self, loss, method):
        rows = list(digits.train(**settings(loss=loss, method=method, hidden=[20], update_every=20)))
        assert rows[-1]["error"] < 0.5

    @pytest.mark.parametrize("change", [{"regularization": 0.01}, {"hidden": [5]}, {"seed": 1}, {"lr": 0.2}])
    def test_every_setting_counts(self, change):
        plain, changed = (next(digits.train(**settings(**options))) for options in ({}, change))
        assert plain["loss"] != changed["loss"]

    def test_the_norm_can_be_limited(self):
        free, limited = (next(digits.train(**settings(method="c3", update_every=60, max_norm=m))) for m in (None, 0.1))
        assert free["loss"] < limited["loss"]

    def test_updates_can_be_rare(self):
        often, rarely = (next(digits.train(**settings(method="c3", update_every=k))) for k in (10, 30))
        assert often["loss"] != rarely["loss"]
