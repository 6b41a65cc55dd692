"""Every figure, shrunk to seconds; and every claim, on the results that are in the documentation."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from psgd.experiments import costs, digits, long_memory, recurrent
from psgd.experiments.figure import Figure, read
from psgd.experiments.figures import FIGURES, fig3, fig5, fig6, rnn_long, rnn_suite
from psgd.experiments.reproduce import Order, Written, reproduce
from psgd.experiments.rnn2d import Settings
from tests.experiments.small_digits import small_digits  # noqa: F401

RESULTS = Path(__file__).parents[3] / "docs" / "results"
#: for each module that yields a row after so many mini-batches, the fewer that are enough to see that it does
EVERY = {digits: 6, recurrent: 5, long_memory: 5, fig3: 10, fig5: 10, fig6: 5, rnn_suite: 5, rnn_long: 5}
MNIST = {"epochs": 0.2, "short_epochs": 0.1, "update_every": 4, "seeds": 1, "baseline_seeds": 1}
TINY: dict[str, dict[str, Any]] = {
    "fig1": {"seeds": 1},
    "fig2": {"pairs": 20, "seeds": 1},
    "fig3": {"iterations": 20, "seeds": 1},
    "fig4": {"seeds": 1},
    "fig5": {"iterations": 20, "seeds": 1},
    "fig6": {
        "length": 6,
        "iterations": 20,
        "paper_iterations": 30,
        "stop": True,
        "seeds": 3,
        "paper_seeds": 2,
        "baseline_seeds": 1,
    },
    "fig7": MNIST,
    "fig8": MNIST | {"regularized_epochs": 0.1, "regularized_update_every": 4},
    "fig9": MNIST,
    "complexity": {"rounds": 1, "length": 4, "seeds": 1},
    "rnn-suite": {"length": 10, "iterations": 5, "others": [*rnn_suite.SECONDS], "seeds": 2, "baseline_seeds": 1},
    "rnn-long": {"length": 12, "iterations": 5, "seeds": 2},
    "rnn2d": asdict(Settings(states=[2, 2], sizes=[7, 2], strides=[7, 2], epochs=2, images=200)) | {"seeds": 2},
}
#: figures whose full results are not in the documentation yet
UNMEASURED: set[str] = set()
EACH = pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.usefixtures("small_digits")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@EACH
def test_every_figure_runs_is_drawn_and_judged(figure: Figure, device: str, tmp_path: Path, monkeypatch):
    for module, every in EVERY.items():
        monkeypatch.setattr(module, "EVERY", every)
    monkeypatch.setattr(costs, "TURN", 2)
    first_seed = 100  # no figure may ask for seed 0
    order = Order(figure, TINY[figure.name], "quick", first_seed)
    *_, event = reproduce([order], tmp_path, jobs=1, device=device)
    assert isinstance(event, Written)
    assert event.summary["seeds"] == [first_seed + k for k in range(TINY[figure.name]["seeds"])]
    assert len(event.summary["claims"]) == len(figure.claims)
    for claim in event.summary["claims"]:
        assert isinstance(claim["holds"], bool)
        assert claim["measured"] != "not measured"
    pixels = imread(tmp_path / f"{figure.name}.png")
    assert pixels[..., :3].std() > 0.02  # something is drawn
    # every label that a claim speaks of is the label of a run
    labels = {run["label"] for run in event.summary["runs"]}
    assert {label for claim in figure.claims for label in claim.labels} <= labels


@EACH
def test_another_first_seed_changes_the_seeds_alone(figure: Figure):
    for size in (figure.quick, figure.full):
        plain, later = figure.all_runs(size), figure.all_runs(size, 100)
        assert [replace(run, seed=run.seed + 100) for run in plain] == later


@EACH
def test_sizes(figure: Figure):
    """The full size is at least as large; each run of a figure has a label of its own, and foretells its rows."""
    for size in (figure.quick, figure.full):
        assert set(size) == set(TINY[figure.name])
        runs = figure.all_runs(size)
        assert len({run.key for run in runs}) == len(runs)
        assert all(run.figure == figure.name and run.rows >= 1 and run.seconds > 0 for run in runs)
        assert {run.seed for run in runs} == set(range(size["seeds"]))
    costs = [sum(run.seconds for run in figure.all_runs(size)) for size in (figure.quick, figure.full)]
    assert costs[0] <= costs[1]


def test_claims_have_names_of_their_own():
    for figure in FIGURES.values():
        names = [claim.name for claim in figure.claims]
        assert len(set(names)) == len(names)
        assert all(claim.source in ("paper", "ours") for claim in figure.claims)


CLAIMS = [
    pytest.param(figure, claim, id=f"{figure.name}-{claim.name}")
    for figure in FIGURES.values()
    if figure.name not in UNMEASURED
    for claim in figure.claims
]


def test_results_are_there_for_all_other_figures():
    assert {name for name in FIGURES if not (RESULTS / f"{name}.json").exists()} == UNMEASURED


@pytest.mark.parametrize(("figure", "claim"), CLAIMS)
def test_the_report_says_what_the_claims_say(figure, claim):
    """The verdicts in the documentation are those of this code on those curves."""
    written = json.loads((RESULTS / f"{figure.name}.json").read_text())
    (there,) = [entry for entry in written["claims"] if entry["name"] == claim.name]
    assert claim.judge(read(RESULTS, figure.name)) == there


#: what SGD, or what the paper compares with, did in the place of what a claim praises
IN_PLACE = {"fig1": ("after preconditioning", "before"), "fig2": ("preconditioner 3", "preconditioner 1")}


#: where no run of the figure does worse: a definite Hessian, a square of one class, an unsolved problem, updates that
#: cost nothing, and steps that cost much
FREE: dict[str, float] = {"gradient": 0.1, "SGD": 0.5, "PSGD, no update": 1.0} | {
    f"PSGD, update every {every}": 1.0 for every in (1, 2, 5, 10)
}
DEAR = FREE | {"PSGD, update every 1": 9.0, "PSGD": 9.0, "arithmetic of P g": 1.0, "arithmetic of an update": 1.0}
MADE_UP: dict[str, list[dict[str, float]]] = {
    "signs_are_kept": [{"direction": 0, "eigenvalue": -1.0}, {"direction": 1, "eigenvalue": -1.0}],
    "interleaved": [{"x2": 0.5, "class 1": 0.0, "changes": 0.0}],
    "reads_digits": [{"epoch": 1, "iteration": 100, "error": 0.0061}],
    "psgd_solves_all": [{"iteration": 100, "wrong": 0.01}],
    "solves_twice_as_long": [{"iteration": 100, "wrong": 0.01}],
    "rare_updates_rnn": [FREE],
    "rare_updates_mnist": [FREE],
    **{name: [DEAR] for name in ("rnn_doubles", "rnn_gradients", "rnn_floor", "mnist_floor", "defaults_cost")},
}


def others(figure: str, label: str, labels: list[str]) -> list[str]:
    """Labels whose results may stand in for those of a label: SGD for preconditioner 3, everything for the rest."""
    if figure in IN_PLACE and label == IN_PLACE[figure][0]:
        return [IN_PLACE[figure][1]]
    if label.endswith(": PSGD"):
        return [label.replace("PSGD", "SGD, 0.03")]
    if label.startswith("preconditioner 3") and any(other.startswith("SGD") for other in labels):
        return [other for other in labels if other.startswith("SGD")]
    return [other for other in labels if other != label]


@pytest.mark.parametrize(("figure", "claim"), CLAIMS)
def test_every_claim_can_fail(figure, claim):
    """A claim that holds fails when the results of something worse stand in the place of what it is about."""
    results = read(RESULTS, figure.name)
    if not claim.judge(results)["holds"]:
        return  # it has failed
    labels = list(results[0])
    if claim.name in MADE_UP:
        first = claim.labels[0]
        changed = {0: results[0] | {first: replace(results[0][first], rows=MADE_UP[claim.name])}}
        assert not claim.judge(changed)["holds"]
        return
    subjects = [label for label in claim.labels if label.endswith(": PSGD")] or list(claim.labels[:1])
    fallen = []
    for choice in range(max(len(others(figure.name, subject, labels)) for subject in subjects)):
        changed = {seed: dict(by_label) for seed, by_label in results.items()}
        for subject in subjects:
            choices = others(figure.name, subject, labels)
            substitute = choices[min(choice, len(choices) - 1)]
            for by_label in changed.values():
                if subject in by_label:
                    source = by_label if substitute in by_label else results[0]
                    by_label[subject] = replace(source[substitute], label=subject)
        fallen.append(not claim.judge(changed)["holds"])
    about_c3 = subjects[0].startswith("preconditioner 3") or subjects[0].endswith(": PSGD")
    assert all(fallen) if about_c3 else any(fallen)
