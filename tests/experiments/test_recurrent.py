from __future__ import annotations

import pytest
import torch

from psgd import PSGD, Affine
from psgd.experiments import recurrent
from psgd.experiments.recurrent import PROBLEMS, Network, train

EACH = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def sample(name: str, length: int = 20, batch: int = 500):
    return PROBLEMS[name].sample(torch.Generator().manual_seed(0), length, batch)


class TestNetwork:
    def test_it_has_the_papers_parameters_and_blocks(self):
        model, _ = PROBLEMS["addition"].start(0)
        assert sum(p.numel() for p in model.parameters()) == 2701
        optimizer = PSGD(Affine.groups(model), blocks=Affine())
        assert "(50, 53): symmetric 50 ⊗ symmetric 53" in repr(optimizer)
        assert "(1, 51): symmetric 51" in repr(optimizer)

    def test_it_starts_as_the_paper_says(self):
        model, _ = PROBLEMS["addition"].start(3)
        forward, feedback = model.cell.weight.detach().split([2, 50], dim=1)
        torch.testing.assert_close(feedback @ feedback.mT, torch.eye(50, dtype=torch.float64))
        assert forward.square().mean().item() == pytest.approx(0.01, rel=0.5)
        assert model.output.weight.square().mean().item() == pytest.approx(0.01, rel=0.5)
        assert not model.cell.bias.any()
        assert not model.output.bias.any()

    def test_it_is_the_recurrence(self):
        model = Network(3, 2, torch.Generator().manual_seed(0), states=5)
        x = torch.randn(4, 6, 3, dtype=torch.float64)
        h = torch.zeros(6, 5, dtype=torch.float64)
        outputs = []
        for step in x:
            h = torch.tanh(model.cell(torch.cat([step, h], dim=1)))
            outputs.append(model.output(h))
        torch.testing.assert_close(model(x, 3), torch.stack(outputs[-3:]))


@EACH
class TestEveryProblem:
    def test_shapes(self, problem):
        x, y = problem.sample(torch.Generator().manual_seed(0), 20, 7)
        assert x.shape[1:] == (7, problem.inputs)
        assert y.shape == (problem.answers, 7)
        model, _ = problem.start(0)
        assert model(x, problem.answers).shape == (problem.answers, 7, problem.outputs)
        assert problem.loss(model, x, y).isfinite()

    def test_the_seed_decides(self, problem):
        (x, y), (x_again, y_again), (x_other, _) = (
            problem.sample(torch.Generator().manual_seed(seed), 20, 7) for seed in (0, 0, 1)
        )
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
        assert not torch.equal(x, x_other)

    def test_answers_are_balanced(self, problem):
        _, y = problem.sample(torch.Generator().manual_seed(0), 30, 20000)
        if problem.variance is None:
            shares = torch.bincount(y.flatten()).double() / y.numel()
            assert len(shares) == problem.outputs
            torch.testing.assert_close(shares, torch.full_like(shares, 1 / problem.outputs), rtol=0.1, atol=0)
        else:
            assert y.var().item() == pytest.approx(problem.variance, rel=0.05)

    def test_the_end_alone_does_not_tell_the_answer(self, problem):
        """What decides stands in the first 70 %, or before the pause."""
        x, y = problem.sample(torch.Generator().manual_seed(0), 20, 5000)
        tail = x[len(x) - 4 - problem.answers :].transpose(0, 1).flatten(1)
        target = (y.double() if problem.variance is not None else y[:1].double()).mT
        design = torch.cat([tail, torch.ones(5000, 1, dtype=torch.float64)], dim=1)
        residual = target - design @ torch.linalg.lstsq(design, target, driver="gelsd").solution
        assert residual.var() > 0.6 * target.var()


def test_marked_numbers_make_the_answer():
    for name, combine in (("addition", torch.add), ("multiplication", torch.mul)):
        x, y = sample(name)
        values, marks = x.unbind(-1)
        assert (marks.sum(0) == 2).all()
        assert not marks[10:].any()
        first, second = (values.mT[marks.mT.bool()].view(-1, 2)).unbind(1)
        torch.testing.assert_close(y[0], combine(first, second))
    x, y = sample("XOR")
    values, marks = x.unbind(-1)
    assert set(values.unique().tolist()) == {-0.5, 0.5}
    first, second = (values.mT[marks.mT.bool()].view(-1, 2)).unbind(1)
    assert torch.equal(y[0], (first != second).long())


@pytest.mark.parametrize(("name", "count"), [("temporal order, 2 symbols", 2), ("temporal order, 3 symbols", 3)])
def test_temporal_order(name, count):
    x, y = sample(name)
    symbols = x.argmax(-1)
    assert ((symbols < 2).sum(0) == count).all()
    for column, answer in zip(symbols.mT, y[0], strict=True):
        bits = column[column < 2].tolist()
        assert int("".join(map(str, bits)), 2) == answer


def test_random_permutation():
    x, y = sample("random permutation", length=60)
    symbols = x.argmax(-1)
    assert torch.equal(symbols[0], y[0])
    assert (symbols[1:] >= 2).all()
    for column in symbols.mT[:20]:
        assert len(set(column.tolist())) == 60
    assert sample("random permutation", length=150)[0].shape[0] == 150


@pytest.mark.parametrize(("name", "count", "alphabet"), [("5-bit memorisation", 5, 2), ("20-bit memorisation", 10, 5)])
def test_memorisation(name, count, alphabet):
    x, y = sample(name)
    symbols = x.argmax(-1)
    assert len(symbols) == 20 + 2 * count
    assert torch.equal(symbols[:count], y)
    assert (y < alphabet).all()
    assert (symbols[-count - 1] == alphabet + 1).all()
    rest = torch.cat([symbols[count : -count - 1], symbols[-count:]])
    assert (rest == alphabet).all()


class TestTrain:
    settings = {"seed": 0, "device": "cpu", "length": 4, "iterations": 600}  # noqa: RUF012

    def test_a_short_memory_is_soon_learned_and_then_it_stops(self):
        rows = list(train(problem="XOR", method="Adam", lr=0.01, stop=True, **self.settings))
        assert rows[-1]["wrong"] < 0.01
        assert len(rows) < 6
        assert len(list(train(problem="XOR", method="Adam", lr=0.01, stop=False, **self.settings))) == 6

    def test_of_numbers_the_unexplained_variance_is_told(self):
        row = next(train(problem="addition", method="SGD", lr=0.01, stop=True, **self.settings))
        assert row["wrong"] == pytest.approx(row["loss"] * 6)

    def test_the_warm_up_is_used(self):
        settings = {**self.settings, "problem": "addition", "stop": False, "method": "SGD", "lr": 0.01}
        cold, warm = next(train(**settings)), next(train(**settings, warmup=1000))
        assert warm["loss"] > cold["loss"]

    def test_recommended_settings_are_options_of_psgd(self):
        settings = {**self.settings, "iterations": 100}
        (row,) = train(problem="addition", method="c3", stop=False, **settings, **recurrent.RECOMMENDED)
        assert row["loss"] < 1
