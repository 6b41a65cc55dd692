"""Common parts of Figures 7, 8 and 9: MNIST, eight settings, training loss and test error side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Picture
from matplotlib.ticker import NullFormatter

from ..claim import Verdict
from ..digits import train
from ..drawing import plot
from ..figure import Size
from ..run import Result, Results, Run, of_first_seed
from ..training import label

EIGHT = {label(method, lr): (method, lr) for method in ("SGD", "c1", "c2", "c3") for lr in (0.01, 0.1)}
TICKS = (0.02, 0.03, 0.05, 0.08, 0.1, 0.2, 0.3, 0.5)
SMALL_SGD, SGD, SMALL_C1, C1, SMALL_C2, C2, SMALL_C3, C3 = EIGHT
#: settings that preconditioner 3 is compared with; it is at its best on the networks with the larger learning rate
RIVALS = (SMALL_SGD, SGD, SMALL_C1, C1, SMALL_C2, C2)


def runs_of(
    figure: str,
    seconds: float,
    followed: Sequence[str],
    extra: dict[str, dict[str, Any]] | None = None,
    max_norm: float | None = None,
    **model: Any,
) -> Callable[[Size, int], list[Run]]:
    """Runs of the eight settings, and of extra ones, for a model.

    Settings that no claim follows to the end are trained for ``short_epochs`` only, and for the first
    ``baseline_seeds`` seeds.

    Args:
        figure: name of the figure
        seconds: approximate time of a step with an update
        followed: labels of the settings that are trained for all epochs
        extra: settings by label, for instance regularised ones
        max_norm: largest length of preconditioned gradients, if one is needed
        model: layers and loss
    """

    def runs(size: Size, seed: int) -> list[Run]:
        settings: dict[str, dict[str, Any]] = {
            name: {
                "method": method,
                "lr": lr,
                "epochs": size["epochs" if name in followed else "short_epochs"],
                "update_every": size["update_every"],
            }
            for name, (method, lr) in EIGHT.items()
            if seed < size["baseline_seeds"] or name in followed
        }
        if max_norm is not None:
            for options in settings.values():
                if options["method"] != "SGD":
                    options["max_norm"] = max_norm
        for name, options in (extra or {}).items():
            settings[name] = {
                **options,
                "epochs": size["regularized_epochs"],
                "update_every": size["regularized_update_every"],
            }
        return [
            Run(
                figure,
                name,
                seed,
                train,
                {**options, **model},
                round(options["epochs"] * 10),
                options["epochs"] * 600 * _seconds(options, seconds),
            )
            for name, options in settings.items()
        ]

    return runs


def _seconds(options: dict[str, Any], update: float) -> float:
    """Approximate time of an iteration."""
    return 0.002 if options["method"] == "SGD" else 0.01 + update / float(options["update_every"])


def draw_of(loss: str, losses: tuple[float, float], errors: tuple[float, float]) -> Callable[[Results], Picture]:
    """Function that draws training loss and test error, with the given limits of their logarithmic axes."""

    def draw(results: Results) -> Picture:
        picture = Picture(figsize=(10, 5), layout="constrained")
        left, right = picture.subplots(1, 2)
        plot(left, of_first_seed(results), "epoch", "loss", legend=False)
        plot(right, of_first_seed(results), "epoch", "error", legend=False)
        picture.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
        for panel, limits in ((left, losses), (right, errors)):
            panel.set_yscale("log")
            panel.set_ylim(*limits)
            panel.set_xlabel("epochs")
        # A logarithmic axis of less than a decade gets no plain numbers by itself.
        right.set_yticks([tick for tick in TICKS if errors[0] <= tick <= errors[1]], minor=False)
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter(NullFormatter())
        left.set_title("(a)", fontsize="medium")
        right.set_title("(b)", fontsize="medium")
        left.set_ylabel(f"training loss ({loss})")
        right.set_ylabel("test error rate")
        return picture

    return draw


def best_error(result: Result) -> float:
    """Lowest test error along the curve."""
    return min(result.column("error"), default=1.0)


def settled_error(result: Result) -> float:
    return result.last("error", 3)


def errors(results: Sequence[Result], measure: Callable[[Result], float]) -> str:
    return ", ".join(f"{result.label}: {measure(result):.4f}" for result in results)


def perform_poorly(*results: Result) -> Verdict:
    """Whether all but the last have more than 1.5 times the test error of the last, as far as all were trained."""
    # A run that ends early has diverged; it does not shorten the others.
    epoch = min(max(result.column("epoch")) for result in results if isfinite(result.rows[-1]["loss"]))
    *poor, good = (cut(result, epoch) for result in results)
    holds = min(map(settled_error, poor)) > 1.5 * settled_error(good)
    return Verdict(holds, f"test error after {epoch:g} epochs: {errors((*poor, good), settled_error)}")


def cut(result: Result, epoch: float) -> Result:
    """Curve up to an epoch."""
    return replace(result, rows=[row for row in result.rows if row["epoch"] <= epoch])


def lowest_training_loss(c3: Result, *others: Result) -> Verdict:
    ends = {result.label: result.last("loss", 3) for result in (c3, *others)}
    text = ", ".join(f"{name}: {value:.3g}" for name, value in ends.items())
    return Verdict(ends[c3.label] < min(value for name, value in ends.items() if name != c3.label), text)


def lowest_error(c3: Result, *others: Result) -> Verdict:
    holds = best_error(c3) < min(map(best_error, others))
    return Verdict(holds, f"best test error {errors((c3, *others), best_error)}")


def error_under(level: float, measure: Callable[[Result], float] = best_error) -> Callable[[Result], Verdict]:
    def check(result: Result) -> Verdict:
        return Verdict(measure(result) < level, f"test error {measure(result):.4f}")

    return check


def best_settled(result: Result, column: str = "error") -> tuple[float, float]:
    """Lowest mean of three successive test errors, or test losses, and the epoch of the last of the three."""
    values, epochs = result.column(column), result.column("epoch")
    means = [(fmean(values[max(k - 2, 0) : k + 1]), epochs[k]) for k in range(min(2, len(values) - 1), len(values))]
    return min(means)


def overfits(result: Result) -> Verdict:
    """Whether the test error ends worse than its best, by a tenth or more, and the test loss is twice as large."""
    best, epoch = best_settled(result)
    end, loss, test_loss = settled_error(result), result.last("loss", 3), result.last("test loss", 3)
    text = (
        f"test error {best:.4f} after {epoch:g} epochs, {end:.4f} at the end; there the loss is {loss:.3g} in training"
    )
    return Verdict(end > 1.1 * best and test_loss > 2 * loss, f"{text}, {test_loss:.3g} in the test")


def no_overfitting(c3: Result, sgd: Result) -> Verdict:
    """Whether the test error stays within a tenth of its best, though the training loss is lower than that of SGD."""
    best, epoch = best_settled(c3)
    end = settled_error(c3)
    fitted = c3.last("loss", 3) < sgd.last("loss", 3)
    text = f"test error {best:.4f} after {epoch:g} epochs, {end:.4f} at the end"
    return Verdict(end <= 1.1 * best and fitted, text)
