from __future__ import annotations

import json

import pytest
from matplotlib.image import imread

from psgd.experiments.claim import Claim
from psgd.experiments.figure import read
from psgd.experiments.reproduce import Order, Written, reproduce
from tests.experiments.runs import toy


@pytest.fixture
def written(tmp_path):
    (event,) = [
        event
        for event in reproduce([Order.of(toy(), False)], tmp_path, jobs=1, device="cpu")
        if isinstance(event, Written)
    ]
    return event


def test_files(written, tmp_path):
    assert {path.name for path in tmp_path.iterdir()} == {"toy.png", "toy.svg", "toy.csv", "toy.json", "runs"}
    assert imread(tmp_path / "toy.png").shape[:2] == (300, 300)
    assert "<svg" in (tmp_path / "toy.svg").read_text()
    assert json.loads((tmp_path / "toy.json").read_text()) == json.loads(json.dumps(written.summary))


def test_summary_says_what_was_done_and_found(written):
    summary = written.summary
    assert summary["settings"] == {"count": 3, "seeds": 2}
    assert summary["seeds"] == [0, 1]
    assert [(run["label"], run["seed"]) for run in summary["runs"]] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [claim["holds"] for claim in summary["claims"]] == [True, False]
    assert summary["claims"][1]["note"] == "It is not."
    assert set(summary["versions"]) == {"psgd", "torch", "python"}
    assert set(summary["machine"]) == {"processor", "cores", "device"}
    assert summary["tables"] == [{"caption": "A table", "columns": ("x",), "rows": [["1"]]}]


def test_the_files_hold_the_results_to_the_last_bit(written, tmp_path):
    results = read(tmp_path, "toy")
    again = [Claim.judge(claim, results) for claim in toy().claims]
    assert again == written.summary["claims"]
    assert [row["loss"] for row in results[1]["b"].rows] != [row["loss"] for row in results[0]["b"].rows]
    csv = (tmp_path / "toy.csv").read_text().splitlines()
    assert csv[0] == "run,seed,iteration,loss,threads"
    assert len(csv) == 1 + 2 * 2 * 3


def test_the_same_results_make_the_same_pictures(written, tmp_path):
    first = {path.name: path.read_bytes() for path in tmp_path.glob("toy.[ps]*")}
    written.figure.write(tmp_path, read(tmp_path, "toy"), {"seeds": 2}, "quick")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("toy.[ps]*")} == first
