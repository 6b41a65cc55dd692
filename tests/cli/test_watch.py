"""Pictures on a terminal and in the report of what a monitor wrote."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from psgd.cli import main as cli
from psgd.cli import watch
from psgd.experiments import report
from psgd.monitor import History, read
from psgd.monitor.record import FIRST, METRICS, SPECTRUM

BLOCKS = ("0.weight", "0.bias")
COLUMNS = [*FIRST, "lr", *SPECTRUM, *(f"{metric}/{block}" for metric in METRICS for block in BLOCKS)]


def line(step: int, loss: float | str = 0.5, **changes: float) -> str:
    row = {"step": step, "time": 1e9 + step, "model": "abc", "loss": loss, "skipped": 3, "lr": 0.01}
    for metric in METRICS:
        row |= {f"{metric}/0.weight": 2.0 ** (-step / 50), f"{metric}/0.bias": 4.0}
    row |= changes
    return ",".join(str(row.get(name, "")) for name in COLUMNS) + "\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(",".join(COLUMNS) + "\n" + "".join(line(50 * k, 1 / (k + 1)) for k in range(20)))
    return path


def shown(capsys, *arguments: str) -> str:
    assert cli.main(["watch", *arguments]) == 0
    return capsys.readouterr().out


def one_line(capsys) -> str:
    (text,) = capsys.readouterr().err.splitlines()
    assert text.startswith("psgd: ")
    return text


# ---------------------------------------------------------------- plots


def dots(plot: watch.Plot, width: int = 40, height: int = 8) -> list[str]:
    return [text.plain for text in plot.lines(width, height)]


def test_a_falling_line_falls():
    lines = dots(watch.Plot("loss", [0, 10], [[4.0, 1.0]], "1", unicode=False))
    assert lines[0].startswith("loss  1")
    columns = [row.index("*") for row in lines[1:-1]]
    assert columns == sorted(columns)
    assert columns[0] == watch.MARGIN + 1
    assert lines[1].split()[0] == "4"
    assert lines[-2].split()[0] == "1"
    assert re.fullmatch(r" +\+0 +10", lines[-1])
    assert {len(text) for text in lines} == {40}


def test_the_axis_is_logarithmic_where_values_differ_much():
    assert not watch.Plot("", [0, 1], [[1.0, 9.0]], "").log
    plot = watch.Plot("", [0, 1, 2], [[1e-4, 1e-2, 1.0]], "", unicode=False)
    assert plot.log
    lines = dots(plot, 20, 7)
    middle = watch.MARGIN + 1 + 5
    assert "*" in lines[3][middle - 1 : middle + 1]  # a straight line
    assert not watch.Plot("", [0, 1, 2], [[0.0, 1.0, 100.0]], "").log


@pytest.mark.parametrize(
    "values", [[], [1.0], [0.0, 0.0], [math.nan, math.inf], [1.0, math.nan, -math.inf, 2.0]], ids=str
)
@pytest.mark.parametrize("size", [(3, 1), (20, 4), (200, 60)])
def test_odd_values_and_sizes(values, size):
    lines = dots(watch.Plot("x", list(range(len(values))), [values], ""), *size)
    assert len(lines) >= 3


def test_a_jump_within_a_column_is_drawn_whole():
    plot = watch.Plot("", list(range(1000)), [[float(k % 2) for k in range(1000)]], "", unicode=False)
    assert all(text.count("*") == 30 for text in dots(plot, 40, 8)[1:-1])


def test_braille_has_eight_dots_to_a_character():
    assert "\u28ff" in "".join(dots(watch.Plot("", list(range(1000)), [[float(k % 2) for k in range(1000)]], "")))


# ---------------------------------------------------------------- the command


def test_one_picture(path, capsys):
    text = shown(capsys, str(path), "--once")
    assert text.startswith("step 950, 2 blocks, lr 0.01, 3 skipped, 20 records in 0:15:50, ")
    for title in ("loss  0.05", *METRICS.values()):
        assert title in text
    assert "most 4 0.bias" in text
    assert "PH" not in text
    assert max(map(len, text.splitlines())) <= watch.WIDEST
    assert shown(capsys, str(path)) == text  # there is no terminal


def test_some_blocks_and_the_spectrum(path, capsys):
    with open(path, "a") as file:
        file.write(line(1000, ph_q50=1.5, ph_max=30.0))
    text = shown(capsys, str(path), "--block", "weight")
    assert "1 block," in text
    assert "0.bias" not in text
    assert "|eigenvalues| of PH  1.5, most 30" in text


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        ("a,b\n", "not a file of psgd.Monitor"),
        (",".join(COLUMNS) + "\n1,2,3\n", "line 2: 3 values"),
        ("\x00\xff\n", "not a file of psgd.Monitor"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, content, named):
    if content is not None:
        (tmp_path / "x.csv").write_text(content, encoding="latin-1")
    assert cli.main(["watch", str(tmp_path / "x.csv")]) == 2
    assert named in one_line(capsys)


@pytest.mark.parametrize("arguments", [[], ["--interval", "0"], ["--block"]], ids=str)
def test_wrong_arguments_are_one_line(path, capsys, arguments):
    assert cli.main(["watch", *([str(path)] if arguments else []), *arguments]) == 2
    one_line(capsys)


def test_a_file_without_records_waits_for_them(tmp_path, capsys):
    (tmp_path / "run.csv").write_text(",".join(COLUMNS) + "\n")
    assert "no record yet" in shown(capsys, str(tmp_path / "run.csv"))


def test_a_growing_file_is_followed_until_interrupted(path, monkeypatch):
    """A line counts once it is whole; Ctrl-C leaves the last picture on the screen."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, legacy_windows=False)
    parts = [line(1000)[:20], line(1000)[20:], line(1050)]
    seen = []

    def sleep(seconds):
        assert seconds == 1.5
        seen.append(re.findall(r"step (\d+),", console.file.getvalue())[-1])
        if not parts:
            raise KeyboardInterrupt
        with open(path, "a") as file:
            file.write(parts.pop(0))

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.watch(console, str(path), interval=1.5, once=False)
    assert seen == ["950", "950", "1000", "1050"]
    text = console.file.getvalue()
    assert "step 1050" in text.rpartition("\x1b[?1049l")[2]  # on the ordinary screen


def test_a_file_that_is_not_there_yet_is_waited_for(path, monkeypatch):
    later = path.with_name("later.csv")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            path.rename(later)
        if len(naps) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.watch(terminal, str(later), interval=0.5, once=False)
    assert naps == [0.5] * 4  # two until it was there, and two pictures
    output = terminal.file.getvalue()
    assert "Waiting for " in output
    assert "step 950" in output


def test_waiting_for_a_file_ends_with_an_interrupt(tmp_path, monkeypatch):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    watch.watch(terminal, str(tmp_path / "none.csv"), interval=0.5, once=False)
    assert "Waiting for " in terminal.file.getvalue()


def test_a_file_that_starts_anew_is_read_anew(path):
    history = History(path)
    assert history.poll()
    assert not history.poll()
    assert len(history) == 20
    path.write_text(",".join(COLUMNS) + "\n" + line(0))
    history.poll()
    assert len(history) == 1


def test_a_narrow_terminal_without_braille(path):
    buffer = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    watch.watch(Console(file=buffer, width=50), str(path), interval=1, once=True)
    buffer.flush()
    text = buffer.buffer.getvalue().decode("ascii")
    assert "*" in text
    assert max(map(len, text.splitlines())) <= 50


# ---------------------------------------------------------------- the report


def test_the_report_has_the_curves(path, tmp_path):
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    (tmp_path / "empty.csv").write_text(",".join(COLUMNS) + "\n")
    text = report.write(tmp_path).read_text(encoding="utf-8")
    assert report.RUNS_TITLE in text
    assert 'alt="Plots of Monitored run run"' in text
    assert "2 blocks; 3 steps skipped." in text
    assert "There is no record yet." in text
    assert "other" not in text
    (tmp_path / "run.csv").write_text("".join([",".join(COLUMNS), "\n", line(0), "1,2\n"]))
    with pytest.raises(report.ReportError, match=r"run.csv, line 3: 2 values"):
        report.write(tmp_path)


def test_the_picture_has_a_panel_for_each_number(path):
    from psgd.experiments import monitored

    with open(path, "a") as file:
        file.write(line(1000, ph_q50=1.5, ph_max=30.0))
    panels = monitored.draw(read(path)).axes
    assert [panel.get_title() for panel in panels if panel.get_visible()] == [
        "loss",
        *METRICS.values(),
        "|eigenvalues| of PH",
    ]
    assert all(len(panel.lines) in (1, 2) for panel in panels)


def test_a_longer_run_in_the_place_of_another_is_read_from_its_start(path):
    history = History(path)
    history.poll()
    path.write_text(",".join(COLUMNS) + "\n" + "".join(line(10 * k, 1.0, time=2e9 + k) for k in range(50)))
    assert history.poll()
    assert len(history) == 50
    path.write_text(path.read_text() + line(1000))
    history.poll()
    assert len(history) == 51


@pytest.mark.parametrize("damaged", [line(0, time=""), line(math.inf), line(0, time=1e300)])
def test_damaged_lines_are_told_in_one(path, capsys, damaged):
    path.write_text(",".join(COLUMNS) + "\n" + damaged)
    assert cli.main(["watch", "--once", str(path)]) != 0
    assert re.fullmatch(r"psgd: .*line 2: it has no (step|time).*\n", capsys.readouterr().err)


def test_a_block_that_is_not_there_is_told(path, capsys):
    assert cli.main(["watch", "--once", "--block", "zzz", str(path)]) == 2
    assert "no block has 'zzz' in its name; there are 0.weight, 0.bias" in capsys.readouterr().err
