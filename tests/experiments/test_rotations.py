from __future__ import annotations

import math

import pytest
import torch

from psgd.experiments.long_memory import PROBLEMS
from psgd.experiments.recurrent import Network
from psgd.experiments.rotations import DRIVE, FAST, SLOW, STEPS, drive, initialise_, memory, rotations, slowest


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def angles(matrix: torch.Tensor) -> torch.Tensor:
    """Angle of each plane that an orthogonal matrix rotates, in ascending order."""
    return torch.linalg.eigvals(matrix).angle().abs().sort().values[::2]


class TestRotations:
    @pytest.mark.parametrize("states", [2, 7, 100])
    def test_they_are_orthogonal_and_not_reflections(self, states):
        matrix = rotations(states, generator())
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(states, dtype=torch.float64))
        assert torch.linalg.det(matrix).item() == pytest.approx(1)

    def test_a_share_of_the_angles_is_fast_and_the_others_are_slow(self):
        found = torch.stack([angles(rotations(100, generator(seed))) for seed in range(40)])
        count = round(50 * (1 - FAST))
        slow, fast = found[:, :count], found[:, count:]
        assert slow.max() <= SLOW + 1e-6
        # few of the fast angles are as small as that by chance, and uniform ones have these means and deviations
        assert (fast > SLOW).double().mean() > 0.97
        for part, width in ((slow, SLOW), (fast, math.pi)):
            assert part.mean().item() == pytest.approx(width / 2, rel=0.06)
            assert part.std().item() == pytest.approx(width / math.sqrt(12), rel=0.06)

    def test_share_and_limit_are_options(self):
        assert angles(rotations(40, generator(), fast=0.0, slow=0.2)).max() <= 0.2 + 1e-6
        assert (angles(rotations(40, generator(), fast=1.0, slow=0.0)) > 0).all()
        assert (angles(rotations(40, generator(), fast=0.25, slow=0.0)) < 1e-6).sum() == 15

    def test_planes_are_random(self):
        """No state is left out, and none is alone: a plane of single states would show up as zeros."""
        assert (rotations(40, generator()).abs() > 1e-6).double().mean() > 0.99


class TestInitialise:
    @pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
    def test_inputs_drive_the_states_alike_for_all_problems(self, problem):
        model = Network(problem.inputs, problem.outputs, generator(), 100)
        examples, _ = problem.sample(generator(1), 100, 300)
        initialise_(model, examples, generator(2))
        forward = model.cell.weight.detach()[:, : problem.inputs]
        drive = (examples @ forward.mT + model.cell.bias.detach()).flatten(0, 1)
        torch.testing.assert_close(drive.mean(0), torch.zeros(100, dtype=torch.float64), atol=1e-9, rtol=0)
        assert drive.std().item() == pytest.approx(DRIVE, rel=0.35)

    def test_the_feedback_matrix_rotates(self):
        model = Network(2, 1, generator(), 30)
        output = model.output.weight.detach().clone()
        initialise_(model, torch.rand(5, 6, 2), generator(2))
        feedback = model.cell.weight.detach()[:, 2:]
        torch.testing.assert_close(feedback @ feedback.mT, torch.eye(30, dtype=torch.float64))
        assert (angles(feedback) <= SLOW).sum() >= 15 - round(15 * FAST)
        assert torch.equal(model.output.weight, output)

    def test_a_longer_memory_has_slower_rotations_and_a_smaller_drive(self):
        """Over all steps, slow planes turn as far as in 100 steps; short sequences change nothing."""
        for length in (10, STEPS):
            assert (slowest(length), drive(length)) == (SLOW, DRIVE)
        assert 400 * slowest(400) == pytest.approx(STEPS * SLOW)
        assert 400 * drive(400) == pytest.approx(STEPS * DRIVE)
        short, long = (Network(2, 1, generator(), 30) for _ in range(2))
        for model, length in ((short, STEPS), (long, 4 * STEPS)):
            initialise_(model, torch.rand(5, 6, 2, generator=generator(1)), generator(2), length)
        weights = [model.cell.weight.detach().split([2, 30], 1) for model in (short, long)]
        torch.testing.assert_close(weights[1][0], weights[0][0] / 4)
        slow = 15 - round(15 * FAST)
        torch.testing.assert_close(angles(weights[1][1])[:slow], angles(weights[0][1])[:slow] / 4, rtol=1e-3, atol=1e-7)

    def test_networks_for_all_lengths_start_with_the_same_memory(self):
        problem, found = PROBLEMS["XOR"], []
        for length in (STEPS, 2 * STEPS):
            model = Network(problem.inputs, problem.outputs, generator(5), 100)
            examples, _ = problem.sample(generator(1), length, 100)
            initialise_(model, examples, generator(2), length)
            found.append(memory(model, examples[:, :50]))
        assert found[0] == pytest.approx(found[1], rel=0.3)
        assert 0.03 < found[0] < 0.3

    def test_a_constant_channel_has_finite_weights(self):
        model = Network(2, 1, generator(), 10)
        initialise_(model, torch.zeros(5, 6, 2), generator())
        assert model.cell.weight.isfinite().all()


class TestMemory:
    def test_a_rotation_of_small_states_forgets_nothing(self):
        model = Network(2, 1, generator(), 20)
        assert memory(model, torch.zeros(30, 4, 2)) == pytest.approx(1, abs=1e-3)

    def test_it_is_what_the_feedback_matrix_leaves(self):
        model = Network(2, 1, generator(), 20)
        with torch.no_grad():
            model.cell.weight[:, 2:] *= 0.5
        assert memory(model, torch.zeros(10, 4, 2)) == pytest.approx(0.5**10, rel=1e-3)

    def test_saturated_states_forget(self):
        model = Network(2, 1, generator(), 20)
        assert memory(model, 100 * torch.ones(10, 4, 2)) < 1e-3
