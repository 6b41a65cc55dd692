from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from psgd.experiments import demo, zebra


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def finish(iterations: int, seed: int = 0) -> list[demo.Run]:
    *_, found = demo.race(seed, iterations)
    return found


@pytest.fixture(autouse=True)
def _no_colours_by_force(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def finished() -> list[demo.Run]:
    return finish(250)


def test_curves_depend_on_the_seed_alone():
    """But for how far the others get in the time that PSGD takes."""
    curves = [[run.losses[0] for run in finish(20, seed)] for seed in (3, 3, 4)]
    assert curves[0] == curves[1]
    assert all(mine != other for mine, other in zip(curves[0], curves[2], strict=True))


def test_all_start_from_the_same_weights_and_see_the_same_batches():
    found = demo.runs(0, paper=True)
    assert [run.name for run in found] == ["PSGD", "SGD", "Adam", "paper"]
    for run in found:
        run.advance(1, 1)
    before, data = zebra.start(0)
    first = zebra.loss(before, *next(data)).item()
    assert [run.loss for run in found] == [pytest.approx(first, rel=1e-12)] * 4
    for run in found:
        run.advance(1, 1)
    assert len({run.loss for run in found}) == 4


def test_the_last_point_of_a_curve_is_never_short(finished):
    psgd, *others = finished
    assert psgd.iterations == [50, 150, 250]
    for run in others:
        sizes = [after - before for before, after in zip([0, *run.iterations], run.iterations, strict=False)]
        assert set(sizes) <= {50, 100}
        assert sizes[-1] == 100


def test_all_have_the_same_time_and_at_least_as_many_mini_batches(finished):
    psgd, *others = finished
    for run in others:
        assert run.seconds >= psgd.seconds
        assert run.iterations[-1] >= psgd.iterations[-1]
        assert len(run.iterations) == len(run.losses) == len(run.times)
        assert run.times == sorted(run.times)


def test_progress_is_shown_more_often_than_points_are_drawn():
    done = [found[0].done for found in demo.race(0, 110)]
    assert done == [10, 30, 50, 70, 90, 110]


def test_a_loss_after_some_mini_batches_is_a_point_of_the_curve(finished):
    for run in finished:
        place = next(k for k, done in enumerate(run.iterations) if done >= 250)
        assert run.loss_after(250) == run.losses[place]


def test_all_learn(finished):
    assert finished[0].loss < 0.693  # log 2, the loss of a guess
    assert all(run.loss < 0.75 for run in finished)


def test_each_point_is_a_mean():
    together, one_by_one = demo.runs(0)[0], demo.runs(0)[0]
    together.advance(3, 4)
    assert together.iterations == []
    together.advance(3, 4)
    for _ in range(4):
        one_by_one.advance(1, 1)
    assert together.losses == [pytest.approx(sum(one_by_one.losses) / 4, rel=1e-12)]
    assert together.iterations == [4]


def test_the_number_of_threads_is_put_back():
    torch.set_num_threads(2)
    try:
        race = demo.race(0, 1)
        next(race)
        assert torch.get_num_threads() == 1
        assert next(race, None) is None
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_table_says_loss_errors_and_seconds(finished):
    console = Console(file=io.StringIO(), width=100)
    console.print(demo.table(finished))
    text = printed(console)
    for run in finished:
        (row,) = [line for line in text.splitlines() if f" {run.name} " in line]
        for cell in (f"{run.loss:.3f}", f"{run.loss_after(250):.3f}", f"{run.seconds:.1f}", f"{run.lr:g}"):
            assert f" {cell} " in row
        assert f" {zebra.error_rate(run.model):.1%} " in row
    assert "last 100 mini-batches" in text


def test_plain_lines_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=100)
    _, sgd, _ = demo.demo(console, iterations=7)
    lines = printed(console).splitlines()
    (progress,) = [line for line in lines if " of 7 mini-batches" in line]
    assert f"SGD {sgd.loss:.3f}" in progress
    assert "\x1b" not in printed(console)


def test_four_plain_lines_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(demo, "AVERAGED", 1)
    console = Console(file=io.StringIO(), width=100)
    demo.demo(console, iterations=10)
    counts = [line.split()[0] for line in printed(console).splitlines() if " of 10 mini-batches" in line]
    assert counts == ["3", "5", "8", "10"]


def test_bars_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=Terminal(), width=100)
    _, sgd, _ = demo.demo(console, iterations=7)
    text = printed(console)
    assert "7/7" in text
    assert f"SGD {sgd.loss:.3f}" in text
    assert " of 7 mini-batches" not in text


def test_figure_shows_the_curves_and_the_patterns(finished, tmp_path):
    figure = demo.draw(finished, points=50)
    panels: list[Any] = figure.axes
    curves, times, true, *learned = panels
    for line, by_time, run in zip(curves.lines, times.lines, finished, strict=True):
        assert line.get_xdata().tolist() == [done for done in run.iterations if done <= 250]
        assert by_time.get_xdata().tolist() == run.times
        assert by_time.get_ydata().tolist() == run.losses
        assert line.get_label().startswith(run.name)
    assert (true.images[0].get_array() == zebra.label(zebra.grid(50)).numpy()).all()
    for panel, run in zip(learned, finished, strict=True):
        assert run.name in panel.get_title()
        assert (panel.images[0].get_array() == zebra.probability(run.model, 50).numpy()).all()

    figure.savefig(tmp_path / "zebra.png")
    pixels = imread(tmp_path / "zebra.png")
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 500
    assert pixels.std() > 0.1


def test_figure_of_a_single_point_shows_it():
    figure = demo.draw(finish(3), points=10)
    assert figure.axes[0].lines[0].get_marker() == "o"
