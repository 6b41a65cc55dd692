from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice

import pytest
import torch
from torch import nn

from psgd.experiments import rnn2d
from psgd.experiments.rnn2d import (
    FULL,
    QUICK,
    Average,
    Gradients,
    Settings,
    epoch,
    factor,
    judge,
    parameters,
    train,
    tune,
)
from tests.emulated import Log, Recording
from tests.experiments.small_digits import small_digits  # noqa: F401

TINY = Settings(
    states=[2, 3],
    sizes=[7, 2],
    strides=[7, 2],
    lr=0.02,
    batch=50,
    epochs=2,
    images=500,
    shift=1.0,
    bend=0.0,
    averaging=0,
)


class TestGradients:
    def model(self):
        return rnn2d.network(TINY, 3)[0]

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(4, 28, 28, generator=generator), torch.randint(10, (4,), generator=generator)

    def expected(self, model, x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    def test_they_are_those_of_the_mini_batch(self):
        model = self.model()
        gradients = Gradients(model, nn.functional.cross_entropy)
        for seed in (0, 1):
            loss = gradients(*self.batch(seed))
            value, expected = self.expected(model, *self.batch(seed))
            assert torch.equal(loss, value)
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))

    def test_a_replay_reads_the_new_mini_batch_and_the_new_weights(self, monkeypatch):
        """On a device without graphs, operations are logged and done again on the same tensors."""
        captured = []

        class Graph:
            def replay(self):
                with torch._C._AutoDispatchBelowAutograd():  # a graph has kernels alone
                    captured[0].replay()

        @contextmanager
        def capture(graph):
            with Log() as log:
                yield
            captured.append(Recording(log.done))

        class Stream:
            def wait_stream(self, other):
                pass

        for name, emulated in {
            "Stream": Stream, "current_stream": Stream, "CUDAGraph": Graph, "graph": capture,
            "stream": lambda stream: nullcontext(),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, emulated)
        model = self.model()
        gradients = Gradients(model, nn.functional.cross_entropy, capture=True)
        addresses = set()
        for seed in range(4):
            loss = gradients(*self.batch(seed))
            value, expected = self.expected(model, *self.batch(seed))
            torch.testing.assert_close(loss, value)
            for p, g in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, g)
            addresses.add(tuple(p.grad.data_ptr() for p in model.parameters()))
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
        assert len(captured) == len(addresses) == 1
        assert captured[0].replays == 4

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_cuda_graph_does_the_same(self):
        model = self.model().cuda()
        plain, replayed = (Gradients(model, nn.functional.cross_entropy, capture) for capture in (False, True))
        for seed in range(3):
            batch = [tensor.cuda() for tensor in self.batch(seed)]
            expected = plain(*batch).clone(), [p.grad.clone() for p in model.parameters()]
            found = replayed(*batch), [p.grad for p in model.parameters()]
            torch.testing.assert_close(found, expected)


class TestAverage:
    def test_it_is_plain_at_first_and_exponential_then(self):
        model = nn.Linear(1, 1, bias=False)
        average = Average(model, 3)
        found = []
        for value in (1.0, 2.0, 6.0, 9.0):
            with torch.no_grad():
                model.weight.fill_(value)
            average.update_()
            found.append(average.model.weight.item())
        assert found == pytest.approx([1, 1.5, 3, 5])

    def test_the_model_in_training_stays_as_it_is(self):
        model = rnn2d.network(TINY, 3)[0]
        before = [p.detach().clone() for p in model.parameters()]
        average = Average(model, 10)
        for p in model.parameters():
            p.data.add_(1)
        for _ in range(2):
            average.update_()
        for p, old, mean in zip(model.parameters(), before, average.model.parameters(), strict=True):
            assert torch.equal(p, old + 1)
            torch.testing.assert_close(mean, old + 1)
            assert p.requires_grad
            assert not mean.requires_grad

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_the_host_does_not_wait(self):
        average = Average(rnn2d.network(TINY, 3)[0].cuda(), 10)
        torch.cuda.set_sync_debug_mode("error")
        try:
            average.update_()
        finally:
            torch.cuda.set_sync_debug_mode("default")


class TestEpoch:
    images = torch.rand(40, 28, 28)
    labels = torch.arange(40)

    def test_it_has_every_image_once_with_its_label(self):
        plain = replace(TINY, shift=0.0, degrees=0.0, scale=0.0)
        x, y = epoch(self.images, self.labels, plain, torch.Generator().manual_seed(0))
        assert sorted(y.tolist()) == list(range(40))
        assert torch.equal(x, self.images[y])
        assert not torch.equal(y, self.labels)

    def test_distortions_are_small_and_always_new(self):
        generator = torch.Generator().manual_seed(0)
        one, two = ((x[y.argsort()] - self.images).abs() for x, y in self.epochs(generator))
        assert 0 < one.mean() < 0.5
        assert not torch.equal(one, two)

    def epochs(self, generator):
        return (epoch(self.images, self.labels, TINY, generator) for _ in range(2))

    def test_bends_alone_are_a_distortion(self):
        bent = replace(TINY, shift=0.0, degrees=0.0, scale=0.0, bend=1.0)
        x, y = epoch(self.images, self.labels, bent, torch.Generator().manual_seed(0))
        assert 0 < (x[y.argsort()] - self.images).abs().mean() < 0.5


def test_the_learning_rate_grows_and_falls_to_zero():
    factors = [factor(step, 2000) for step in range(2001)]
    assert factors[0] == 1 / rnn2d.WARMUP
    assert max(factors) == factors[rnn2d.WARMUP] == 1
    assert factors[rnn2d.WARMUP :] == sorted(factors[rnn2d.WARMUP :], reverse=True)
    assert factors[-1] == pytest.approx(0, abs=1e-12)
    assert factor(0, 5) == 1  # a warm-up is at most a tenth of the training


def test_judge_counts_what_is_wrong(monkeypatch):
    monkeypatch.setattr(rnn2d, "CHUNK", 3)
    labels = torch.arange(10)
    labels[0] = 3
    loss, error = judge(nn.Identity(), torch.eye(10), labels)
    assert error == 0.1
    assert loss == pytest.approx(nn.functional.cross_entropy(torch.eye(10), labels).item())


def test_the_network_is_small():
    """A few thousand to a few tens of thousands of parameters."""
    assert 1_000 < parameters(QUICK) < parameters(FULL) < 100_000


@pytest.mark.usefixtures("small_digits")
class TestTrain:
    def rows(self, **changes):
        return list(train(seed=0, device="cpu", data=None, **asdict(replace(TINY, **changes))))

    def test_images_are_between_zero_and_one(self):
        images, _, test_images, _ = rnn2d.tensors(None, "cpu")
        assert images.shape == (600, 28, 28)
        assert (images.min(), test_images.max()) == (0, pytest.approx(1, abs=0.01))

    def test_it_learns(self):
        rows = self.rows(epochs=6, shift=0.0, degrees=0.0, scale=0.0)
        assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert rows[-1]["iteration"] == 60
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
        assert rows[-1]["error"] < rows[0]["error"]

    def test_the_same_seed_gives_the_same_rows(self):
        assert self.rows() == self.rows()

    @pytest.mark.parametrize(
        "change",
        [
            {"lr": 0.01}, {"momentum": 0.0}, {"weight_decay": 0.1}, {"smoothing": 0.1}, {"batch": 100}, {"images": 400},
            {"shift": 0.0}, {"degrees": 0.0}, {"scale": 0.0}, {"states": [3, 3]}, {"sizes": [9, 2]},
            {"strides": [14, 2]}, {"bend": 1.0},
        ],
        ids=lambda change: next(iter(change)),
    )  # fmt: skip
    def test_every_setting_counts(self, change):
        plain, changed = (
            list(islice(train(seed=0, device="cpu", data=None, **asdict(replace(TINY, epochs=1, **options))), 1))
            for options in ({}, change)
        )
        assert plain[0]["loss"] != changed[0]["loss"]

    def test_an_average_is_tested_and_does_not_change_the_training(self):
        plain, averaged = self.rows(), self.rows(averaging=10)
        assert [row["loss"] for row in plain] == [row["loss"] for row in averaged]
        assert all(a["test loss"] != b["test loss"] for a, b in zip(plain, averaged, strict=True))
        assert [row.pop("error without average") for row in averaged] == [row["error"] for row in plain]
        assert [row | {"error without average": row["error"]} for row in plain] == self.rows(averaging=1)

    def test_settings_are_chosen_by_training_images_that_are_not_trained_with(self, monkeypatch):
        """The held-out images are the last ones, and the test images are not seen at all."""
        monkeypatch.setattr(rnn2d, "HELD_OUT", 100)
        images, labels, test_images, test_labels = rnn2d.tensors(None, "cpu")
        moved = images[:500], labels[:500], images[500:], labels[500:]
        tuned = list(tune(seed=0, device="cpu", data=None, **asdict(replace(TINY, images=600))))
        monkeypatch.setattr(rnn2d, "tensors", lambda data, device: moved)
        assert tuned == self.rows(images=600)
        assert tuned[-1]["iteration"] == 20
        monkeypatch.setattr(rnn2d, "tensors", lambda data, device: (images, labels, 0 * test_images, 0 * test_labels))
        assert tuned == list(tune(seed=0, device="cpu", data=None, **asdict(replace(TINY, images=600))))

    def test_a_loss_that_is_not_finite_is_the_last(self, monkeypatch):
        images, *rest = rnn2d.tensors(None, "cpu")
        monkeypatch.setattr(rnn2d, "tensors", lambda data, device: (images * float("nan"), *rest))
        assert len(self.rows()) == 1
