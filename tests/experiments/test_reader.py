from __future__ import annotations

import pytest
import torch

from psgd.experiments.reader import FEEDBACK, Layer, Reader, windows


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class TestWindows:
    def test_windows_that_do_not_overlap_are_the_blocks_of_an_image(self):
        maps = torch.arange(16.0).view(4, 4, 1, 1)
        found = windows(maps, 2, 2)
        assert found.shape == (2, 2, 1, 4)
        assert found[0, 1, 0].tolist() == [2, 3, 6, 7]

    @pytest.mark.parametrize(
        ("length", "size", "stride", "count"), [(28, 4, 2, 14), (7, 2, 2, 4), (7, 3, 2, 4), (5, 3, 1, 5)]
    )
    def test_every_stride_has_a_window(self, length, size, stride, count):
        found = windows(torch.ones(length, length, 2, 3), size, stride)
        assert found.shape == (count, count, 2, 3 * size * size)

    def test_outside_of_the_image_there_are_zeros(self):
        found = windows(torch.ones(4, 4, 1, 1), 4, 2)[..., 0, :].view(2, 2, 4, 4)
        assert not found[0, :, 0].any()
        assert not found[1, :, -1].any()
        assert not found[:, 0, :, 0].any()
        assert found[0, 0, 1:, 1:].all()

    def test_channels_and_pixels_come_in_the_order_of_a_convolution(self):
        maps, weight = torch.randn(6, 4, 3, 2), torch.randn(5, 2, 2, 2)
        expected = torch.nn.functional.conv2d(maps.permute(2, 3, 0, 1), weight, stride=2)
        ours = windows(maps, 2, 2) @ weight.flatten(1).T
        torch.testing.assert_close(ours.permute(2, 3, 0, 1), expected)


class TestLayer:
    def test_the_first_pixel_of_a_direction_has_no_feedback(self):
        layer = Layer(1, 3, 1, 1, generator())
        maps = torch.randn(3, 4, 2, 1)
        out = layer(maps).view(3, 4, 2, 4, 3)
        for direction, corner in enumerate(((0, 0), (0, 3), (2, 0), (2, 3))):
            expected = (maps[corner] @ layer.weights[direction][:, :1].T).tanh()
            torch.testing.assert_close(out[corner][:, direction], expected)

    def test_the_second_pixel_has_the_bias_and_the_feedback_of_its_matrix(self):
        layer = Layer(1, 3, 1, 1, generator())
        with torch.no_grad():
            layer.weights[0][:, -1] = 0.3
        maps = torch.randn(2, 2, 1, 1)
        W, U, V, b = layer.weights[0].split([1, 3, 3, 1], 1)
        first = (maps[0, 0] @ W.T + b[:, 0]).tanh()
        h = layer(maps)[..., :3]
        torch.testing.assert_close(h[1, 0], (maps[1, 0] @ W.T + first @ U.T + b[:, 0]).tanh())
        torch.testing.assert_close(h[0, 1], (maps[0, 1] @ W.T + first @ V.T + b[:, 0]).tanh())

    def test_feedback_starts_as_a_multiple_of_rotations(self):
        layer = Layer(2, 5, 2, 2, generator())
        for weight in layer.weights:
            assert weight.shape == (5, 2 * 4 + 2 * 5 + 1)
            for matrix in weight.detach()[:, 8:18].split(5, 1):
                torch.testing.assert_close(matrix @ matrix.T, FEEDBACK**2 * torch.eye(5))


class TestReader:
    def test_the_number_of_parameters(self):
        model = Reader([6, 12], [4, 2], [2, 2], generator())
        first, second = 4 * 6 * (16 + 12 + 1), 4 * 12 * (24 * 4 + 24 + 1)
        assert sum(p.numel() for p in model.parameters()) == first + second + 48 * 10 + 10

    def test_images_of_a_mini_batch_do_not_see_each_other(self):
        model = Reader([3, 4], [4, 2], [2, 2], generator())
        images = torch.rand(5, 28, 28, generator=generator(1))
        together = model(images)
        assert together.shape == (5, 10)
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)

    def test_every_parameter_gets_a_gradient(self):
        model = Reader([3, 4, 5], [4, 3, 2], [2, 2, 2], generator())
        model(torch.rand(2, 28, 28)).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())

    def test_the_same_seed_gives_the_same_reader(self):
        one, same, other = (Reader([3], [4], [4], generator(seed)).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert not torch.equal(one["layers.0.weights.0"], other["layers.0.weights.0"])
