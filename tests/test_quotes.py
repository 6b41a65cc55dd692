"""Numbers in the text of pages are those of the result files that they quote.

A quote is a piece of a page in which ``#`` stands for a number, and the values that these numbers must have. A number
may be rounded: it must agree with its value in all digits that it has. If a measurement is repeated, the tests that
fail here name the sentences to change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"


@cache
def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def first_number(text: str) -> float:
    return float(re.search(NUMBER, text)[1].replace(",", ""))


def cell(name: str, row: str, column: str) -> float:
    """Number in a table of a benchmark."""
    table = result(f"bench/{name}")["table"]
    (found,) = [cells for cells in table["rows"] if cells[0].strip() == row]
    return first_number(found[table["columns"].index(column)])


def runs(problem: str, name: str, role: str = "tuned", file: str = "") -> list[dict[str, Any]]:
    """Runs of an optimizer that reached the target of a problem."""
    measured = result(f"bench/problems/{file or problem}")["measurements"]
    (one,) = [one for one in measured if one["label"] == f"{problem}, {name}"]
    return [row for row in one["rows"] if row["role"] == role and row["reached"]]


def seconds(problem: str, name: str, role: str = "tuned", file: str = "", of: Callable[..., float] = median) -> float:
    return of(row["seconds"] for row in runs(problem, name, role, file))


def steps(problem: str, name: str, role: str = "tuned", file: str = "") -> float:
    return median(row["iteration"] for row in runs(problem, name, role, file))


def ratio(problem: str, name: str, other: str) -> float:
    return seconds(problem, name, file="hard") / seconds(problem, other, file="hard")


def measured(figure: str, claim: str) -> list[float]:
    """Numbers in the measurement of a claim."""
    (found,) = [c["measured"] for c in result(figure)["claims"] if c["text"].startswith(claim)]
    return [float(number.replace(",", "")) for number in re.findall(NUMBER, found)]


def cost(model: str, every: str, column: int) -> float:
    """Number in the table of what an iteration costs."""
    rows = result("complexity")["tables"][0]["rows"]
    return first_number(next(row[column] for row in rows if row[:2] == [model, every]))


def solved(problem: str) -> list[float]:
    """Smallest and largest number of mini-batches after which PSGD solved one of the eight problems."""
    (found,) = [row[-1] for row in result("rnn-suite")["tables"][0]["rows"] if row[0] == problem]
    count, seeds, *times = [float(number.replace(",", "").rstrip(",")) for number in re.findall(NUMBER, found)]
    assert count == seeds == 5
    return times


def held() -> list[int]:
    claims = [c for path in RESULTS.glob("*.json") for c in result(path.stem)["claims"] if c["source"] == "paper"]
    return [sum(claim["holds"] for claim in claims), len(claims)]


def step(name: str) -> float:
    return cell("step", name, "mean ms")


def final(setting: str, seed: int = 100) -> float:
    """Last validation loss of the last run of a language model with a setting."""
    runs = [run for run in result("bench/lm-52m")["runs"] if (run["setting"], run["seed"]) == (setting, seed)]
    return float(runs[-1]["rows"][-1]["loss"])


def at_target(name: str) -> list[float]:
    """Runs of an optimizer over the grid of the panel that reached their target, and all of them."""
    table = result("bench/defaults")["table"]
    (row,) = [row for row in table["rows"] if row[0] == "runs of the grid at the target"]
    return [float(number) for number in row[table["columns"].index(name)].split(" of ")]


def by_protocol(*optimizers: str) -> list[float]:
    """Last validation losses of language models by the protocol: for each optimizer those of all seeds."""
    runs = [run for run in result("bench/lm-52m-protocol")["runs"] if run["steps"] == 1200]
    return [run["rows"][-1]["loss"] for name in optimizers for run in runs if run["optimizer"] == name]


def of_size(size: str, optimizer: str, *steps: int) -> list[float]:
    """Validation losses of the language model of a size with one optimizer, after some numbers of steps."""
    (run,) = [run for run in result(f"bench/lm-{size}")["runs"] if run["optimizer"] == optimizer]
    losses = {row["step"]: row["loss"] for row in run["rows"]}
    return [losses[step] for step in steps]


SOAP, WHITENING, DENSE = "pytorch_optimizer.SOAP", "PSGD, whitening", "PSGD, dense"
PAPERS, OURS = "Preconditioner 3 with the paper's settings solves", "Preconditioner 3 with our recommended settings"

#: page, text, and the values of the numbers in the text
QUOTES: list[tuple[str, str, Sequence[float]]] = [
    ("docs/results.md", "# of the paper's # claims hold", held()),
    ("README.md", "Of its # claims # hold", held()[::-1]),
    (
        "docs/results.md",
        "run time: # % instead of 0.5 % for the recurrent network, and # % instead of 15 % for MNIST. On MNIST an "
        "iteration takes # times as long as an SGD iteration (# times with `update_every=10`), where its arithmetic "
        "alone would take # times as long",
        [
            cost("recurrent network", "1", 6),
            cost("MNIST network", "1", 6),
            cost("MNIST network", "1", 3),
            cost("MNIST network", "10", 3),
            cost("MNIST network", "1", 4),
        ],
    ),
    (
        "docs/choose.md",
        "# times an SGD step [for a recurrent network](results.md#the-papers-figures), # times with `update_every=10`",
        [cost("recurrent network", "1", 3), cost("recurrent network", "10", 3)],
    ),
    (
        "docs/results.md",
        "With the paper's settings, # of # seeds are solved, after # to # mini-batches.",
        measured("fig6", PAPERS)[:4],
    ),
    (
        "docs/results.md",
        "all # seeds are solved, after # to # mini-batches.",
        [measured("fig6", OURS)[k] for k in (1, 2, 3)],
    ),
    (
        "docs/results.md",
        "each on 5 of 5 seeds: addition after # to # mini-batches, multiplication after # to #, XOR after # to #, the "
        "memorisation of 20 bits after # to #, and the other four after # or fewer.",
        [
            *(n for name in ("addition", "multiplication", "XOR", "20-bit memorisation") for n in solved(name)),
            max(solved("temporal order, 3 symbols") + solved("random permutation") + solved("5-bit memorisation")),
        ],
    ),
    (
        "docs/results.md",
        "their error falls to #e-6 in float32, while the error of the paper's triangular factors stays at #.",
        [
            1e6 * float(result("bench/fit")["table"]["rows"][1][1]),
            cell("fit", "E Q, triangular, float32", "static"),
        ],
    ),
    (
        "docs/results.md",
        "their error is #, against #.",
        [cell("fit", "E Q, triangular, float32", "noisy"), cell("fit", "Q½ E Q1½ (ours), float32", "noisy")],
    ),
    (
        "docs/results.md",
        "takes # ms at n = 4096, and the matrix product that it replaces takes # ms. At n = 16384 the update takes "
        "# ms and the product # ms. There the whole update, which also has a product with `Q`, a triangular solve and "
        "a normalisation, takes # ms.",
        [
            *(cell("cuda/dense", "n = 4096", column) for column in ("rank two", "product")),
            *(cell("cuda/dense", "n = 16384", column) for column in ("rank two", "product", "whole update")),
        ],
    ),
    (
        "docs/results.md",
        "the update takes # ms at n = 2001, and the product that it replaces takes # ms.",
        [cell("dense", "n = 2001", column) for column in ("rank two", "product")],
    ),
    (
        "docs/method.md",
        "at n = 2001, the update takes [# ms instead of # ms](results.md#a-dense-q)",
        [cell("dense", "n = 2001", column) for column in ("rank two", "product")],
    ),
    ("docs/choose.md", "# ms [for the update at N = 2001]", [cell("dense", "n = 2001", "rank two")]),
    (
        "docs/choose.md",
        "# ms [at the shapes of GPT-2](results.md#one-step), where AdamW takes # ms; # to 2.5 ms for a step that "
        "does not",
        [step("PSGD"), step("AdamW"), step("PSGD, no update")],
    ),
    ("docs/choose.md", "# ms in bfloat16 at the same shapes", [step("PSGD, bf16 Q")]),
    (
        "docs/choose.md",
        "(# to 53 ms, depending on the CPU, compared with # ms for [a step",
        [step("PSGD, triangular"), step("PSGD")],
    ),
    (
        "docs/results.md",
        "a step of Muon took 30 ms instead of #, and a step with triangular factors 53 ms instead of #.",
        [step("Muon"), step("PSGD, triangular")],
    ),
    *(
        (
            page,
            "# of # runs of PSGD reach the target, and # of AdamW",
            [*at_target("PSGD, one line"), at_target("AdamW")[0]],
        )
        for page in ("README.md", "docs/results.md")
    ),
    (
        "README.md",
        "validation losses of #, # and # on three seeds, where Muon reaches #, # and #, and AdamW #, # and #.",
        by_protocol("PSGD", "Muon", "AdamW"),
    ),
    (
        "docs/results.md",
        "validation losses of #, # and # (seeds 7, 8 and 9), Muon at #, # and #, and AdamW at #, # and #.",
        by_protocol("PSGD", "Muon", "AdamW"),
    ),
    ("docs/transformers.md", "| 0.001, its default | 1 | #, #, # |", by_protocol("PSGD")),
    ("docs/transformers.md", "| 0.01 | 0.1 | #, #, # |", by_protocol("Muon")),
    ("docs/transformers.md", "| AdamW | 0.001 | 1 | #, #, # |", by_protocol("AdamW")),
    ("docs/transformers.md", "| 0.003 | 1 | #, #, # |", by_protocol(SOAP)),
    ("README.md", "SOAP reaches #, # and #.", by_protocol(SOAP)),
    ("docs/transformers.md", "| 0.001, its default | 1 | # | # | # |", of_size("124m", "PSGD", 500, 1000, 1530)),
    ("docs/transformers.md", "| 0.01 | 0.1 | # | # | # |", of_size("124m", "Muon", 500, 1000, 1530)),
    ("docs/transformers.md", "| AdamW | 0.001 | 0.1 | # | # | # |", of_size("124m", "AdamW", 500, 1000, 1530)),
    ("docs/transformers.md", "where 0.1 gave # and #.", [final("psgd:0.001:0.1", 7), final("psgd:0.001:0.1", 8)]),
    ("docs/transformers.md", "with 0.1 it ended at # in an earlier run", [final("adamw:0.001:0.1", 7)]),
    (
        "docs/transformers.md",
        "| 0.001, weight decay 1 | # | the same, `precond_lr=0.2` | # |",
        [final("psgd:0.001:1"), final("psgd:0.0005:1:precond_lr=0.2")],
    ),
    (
        "docs/transformers.md",
        "| 0.002, weight decay 0.1 | # | the same, `update_every=2` | # |",
        [final("psgd:0.002:0.1"), final("psgd:0.0005:1:update_every=2")],
    ),
    (
        "README.md",
        "# ms in tf32 and # ms with a `bfloat16` `Q`. In the same run fused AdamW takes # ms, Muon # ms, SOAP # ms "
        "(# ms without the steps that find eigenvectors) and kron_torch # ms.",
        [
            *map(step, ("PSGD", "PSGD, bf16 Q", "AdamW", "Muon", SOAP)),
            cell("step", SOAP, "median ms"),
            step("kron_torch.Kron"),
        ],
    ),
    (
        "docs/results.md",
        "`psgd.whiten` at its default learning rate is the fastest, with # s (# to #) and # steps. With tuned learning "
        "rates, SOAP needs # s (# to #) and # steps, momentum # s and # steps, and Adam # s and # steps. Curvature "
        "with a tuned learning rate of # needs # s.",
        [
            *(seconds("mnist", WHITENING, "default", of=of) for of in (median, min, max)),
            steps("mnist", WHITENING, "default"),
            *(seconds("mnist", SOAP, of=of) for of in (median, min, max)),
            steps("mnist", SOAP),
            *(value("mnist", name) for name in ("momentum", "Adam") for value in (seconds, steps)),
            runs("mnist", "PSGD")[0]["lr"],
            seconds("mnist", "PSGD"),
        ],
    ),
    (
        "docs/results.md",
        "PSGD with curvature needs # s, but it reaches the target on only two of three seeds. `psgd.whiten` needs # s, "
        "PSGD with one dense `Q` for all taps # s, and Adam # s.",
        [*(seconds("equalizer", name) for name in ("PSGD", WHITENING, DENSE, "Adam"))],
    ),
    (
        "docs/results.md",
        "With default learning rates only `psgd.whiten` reaches it, in # s.",
        [seconds("equalizer", WHITENING, "default")],
    ),
    (
        "docs/results.md",
        "Adam at a tuned learning rate of # is the fastest, with # s. PSGD with one dense `Q` follows with # s at its "
        "default learning rate",
        [runs("zebra", "Adam")[0]["lr"], seconds("zebra", "Adam"), seconds("zebra", DENSE, "default")],
    ),
    (
        "docs/results.md",
        "PSGD needs # steps and Adam #. At tuned learning rates momentum needs # s and `psgd.whiten` # s.",
        [
            steps("zebra", DENSE),
            steps("zebra", "Adam"),
            seconds("zebra", "momentum"),
            seconds("zebra", WHITENING),
        ],
    ),
    (
        "README.md",
        "a dense `P` needs # steps and Adam #, but # s where a tuned Adam needs #.",
        [
            steps("zebra", DENSE, "default"),
            steps("zebra", "Adam"),
            seconds("zebra", DENSE, "default"),
            seconds("zebra", "Adam"),
        ],
    ),
    (
        "docs/results.md",
        "Adam (# s) and momentum (# s), at tuned learning rates, are a little faster than L-BFGS (# s)",
        [*(seconds("rosenbrock100", name, file="hard") for name in ("Adam", "momentum", "LBFGS"))],
    ),
    (
        "docs/results.md",
        "needs # steps in two dimensions (momentum #, Adam #), and # in a hundred dimensions (momentum #, Adam #).",
        [steps(f"rosenbrock{n}", name, file="hard") for n in (2, 100) for name in ("PSGD", "momentum", "Adam")],
    ),
    (
        "docs/coming-from.md",
        "takes # times as long as L-BFGS on logistic regression, and # times as long on a tensor factorisation. On "
        "Rosenbrock's function it takes # times as long in two dimensions and # times as long in a hundred dimensions. "
        "With one dense `Q`, PSGD takes # times as long on logistic regression and # times as long on Rosenbrock's",
        [
            *(ratio(name, "PSGD", "LBFGS") for name in ("logistic", "tensor", "rosenbrock2", "rosenbrock100")),
            *(ratio(name, DENSE, "LBFGS") for name in ("logistic", "rosenbrock2")),
        ],
    ),
    (
        "docs/distributed.md",
        "the optimizer takes # ms with `shard=` and # ms with `fully_shard`, and each process keeps half of the state. "
        "If each process does all of the work, it takes # ms.",
        [*(cell("dist", f"{kind}, 2 processes", "optimizer, ms") for kind in ("DDP, shared", "FSDP2", "DDP"))],
    ),
    (
        "docs/distributed.md",
        "these times are #, # and # ms",
        [*(cell("dist", f"{kind}, 4 processes", "optimizer, ms") for kind in ("DDP, shared", "FSDP2", "DDP"))],
    ),
]


def agrees(text: str, value: float) -> bool:
    """Whether a number that is written with so many digits is a value, rounded.

    A whole number may be rounded to its last digit that is not zero.
    """
    plain = text.replace(",", "")
    if "." in plain:
        unit = 10.0 ** -len(plain.partition(".")[2])
    else:
        unit = 10.0 ** (len(plain) - len(plain.rstrip("0"))) if float(plain) else 1.0
    return abs(float(plain) - value) <= unit / 2 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [("5.1", 5.14, True), ("5.1", 5.16, False), ("1,300", 1340, True), ("1,300", 1360, False), ("352", 352.4, True)],
)
def test_numbers_may_be_rounded(text, value, right):
    assert agrees(text, value) is right


@pytest.mark.parametrize(
    ("page", "text", "values"), QUOTES, ids=lambda part: part[:60] if isinstance(part, str) else ""
)
def test_numbers_of_the_text_are_those_of_the_files(page, text, values):
    pattern = re.escape(text).replace(r"\#", NUMBER)
    # the anchor of a link has the sign too
    pattern = pattern.replace(rf"results\.md{NUMBER}", "results\\.md#").replace("\\ ", r"\s+")
    found = re.search(pattern, (ROOT / page).read_text("utf-8"))
    assert found is not None, f"{page} no longer has this sentence; change it here too"
    assert len(found.groups()) == len(values)
    wrong = {number: value for number, value in zip(found.groups(), values, strict=True) if not agrees(number, value)}
    assert wrong == {}, f"{page}: {found[0]!r}"


def test_the_table_of_minimize_is_that_of_the_file():
    """Cells are the number of gradients and the seconds of a method, or say that it did not reach the target."""
    page = (ROOT / "docs" / "minimize.md").read_text("utf-8")
    methods = ("psgd.minimize", "BFGS", "L-BFGS-B", "Newton-CG")
    checked, function = 0, ""
    for label, gradients, _, time, value in result("bench/minimize")["table"]["rows"]:
        if label.strip() not in methods:
            function = label
            continue
        row = re.search(rf"^\| {re.escape(function)} \|(.*)\|$", page, re.MULTILINE)[1].split("|")
        shown = re.fullmatch(rf"\s*{NUMBER}, {NUMBER} s\s*", row[methods.index(label.strip())])
        reached = gradients != "–" and float(value) <= 1.05e-8
        assert (shown is not None) == reached, (function, label)
        if shown is not None:
            assert first_number(gradients) == first_number(shown[1])
            assert agrees(shown[2], float(time.replace(",", "")))
            checked += 1
    assert checked >= 25
