from __future__ import annotations

import pytest
import torch

from psgd import PSGD, Affine
from psgd.experiments import recurrent
from psgd.experiments.recurrent import ADDITION, TOLERANCE, Network, Problem, addition, train


class TestNetwork:
    def test_it_has_the_papers_parameters_and_blocks(self):
        model, _ = ADDITION.start(0)
        assert sum(p.numel() for p in model.parameters()) == 2701
        optimizer = PSGD(Affine.groups(model), blocks=Affine())
        assert "(50, 53): symmetric 50 ⊗ symmetric 53" in repr(optimizer)
        assert "(1, 51): symmetric 51" in repr(optimizer)

    def test_it_starts_as_the_paper_says(self):
        model, _ = ADDITION.start(3)
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


class TestProblem:
    def test_both_marks_of_addition_are_in_the_first_half_and_make_the_answer(self):
        x, y = ADDITION.sample(torch.Generator().manual_seed(0), 20, 500)
        values, marks = x.unbind(-1)
        assert (marks.sum(0) == 2).all()
        assert not marks[10:].any()
        assert marks[:10].any(1).all()
        torch.testing.assert_close(y[0], (values * marks).sum(0))

    def test_other_numbers_have_answers_of_the_same_variance(self):
        x, y = addition(width=1.0).sample(torch.Generator().manual_seed(0), 20, 5000)
        values, marks = x.unbind(-1)
        assert 0.99 < values.max() <= 1
        assert -1 <= values.min() < -0.99
        torch.testing.assert_close(y[0], (values * marks).sum(0) / 2)
        assert y.var().item() == pytest.approx(recurrent.SUM, rel=0.05)
        assert torch.equal(values, 2 * ADDITION.sample(torch.Generator().manual_seed(0), 20, 5000)[0][..., 0])

    def test_the_first_mark_can_be_early(self):
        x, y = addition(early=True).sample(torch.Generator().manual_seed(0), 40, 500)
        values, marks = x.unbind(-1)
        assert (marks[:4].sum(0) == 1).all()
        assert not marks[20:].any()
        torch.testing.assert_close(y[0], (values * marks).sum(0))

    def test_lengths_vary_only_where_the_problem_says_so(self):
        seen = {True: set(), False: set()}
        for varying, lengths in seen.items():
            problem = Problem("addition", 2, 1, ADDITION.sample, variance=1.0, varying=varying)
            batches = problem.batches(torch.Generator().manual_seed(0), 40, batch=1)
            lengths.update(len(next(batches)[0]) for _ in range(100))
        assert seen == {True: {40, 41, 42, 43, 44}, False: {40}}

    def test_a_number_is_wrong_beyond_the_tolerance_and_a_sequence_if_any_class_is(self):
        def answer(x, answers):
            return x[-answers:]

        numbers = Problem("numbers", 1, 1, ADDITION.sample, variance=1.0)
        y = torch.zeros(1, 4)
        x = torch.tensor([0.9 * TOLERANCE, -0.9 * TOLERANCE, 1.1 * TOLERANCE, -1.1 * TOLERANCE]).view(1, 4, 1)
        assert numbers.wrong(answer, x, y) == 2
        classes = Problem("classes", 2, 2, ADDITION.sample, answers=2)
        x = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
        assert classes.wrong(answer, torch.nn.functional.one_hot(x, 2), torch.zeros(2, 4)) == 3


class TestTrain:
    settings = {"seed": 0, "device": "cpu", "length": 4, "iterations": 600}  # noqa: RUF012

    def test_a_short_memory_is_soon_learned_and_then_it_stops(self):
        rows = list(train(method="Adam", lr=0.01, stop=True, **self.settings))
        assert rows[-1]["loss"] < 0.01
        assert len(rows) < 6
        assert len(list(train(method="Adam", lr=0.01, stop=False, **self.settings))) == 6

    def test_the_unexplained_variance_is_told(self):
        row = next(train(method="SGD", lr=0.01, stop=True, **self.settings))
        assert row["unexplained"] == pytest.approx(row["loss"] * 6)

    def test_the_warm_up_is_used(self):
        settings = {**self.settings, "stop": False, "method": "SGD", "lr": 0.01}
        cold, warm = next(train(**settings)), next(train(**settings, warmup=1000))
        assert warm["loss"] > cold["loss"]

    def test_numbers_and_places_are_settings(self):
        settings = {**self.settings, "length": 20, "stop": False, "method": "SGD", "lr": 0.01}
        losses = [next(train(**settings, **more))["loss"] for more in ({}, {"width": 1.0}, {"early": True})]
        assert len(set(losses)) == 3

    def test_recommended_settings_are_options_of_psgd(self):
        settings = {**self.settings, "iterations": 100}
        (row,) = train(method="c3", stop=False, **settings, **recurrent.RECOMMENDED)
        assert row["loss"] < 1
