"""PSGD under the ``Trainer`` of lightning, and the callback of ``psgd.lightning``."""

from __future__ import annotations

import csv
import logging
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from psgd import PSGD, FiniteDifference, HessianVector, Whitening

from ..cases import batch, small_model, train
from .packages import needs

pl = needs("lightning.pytorch")

#: what lightning itself warns of: its use of torch, and settings that are meant here
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]
STEPS = 8


class Batches(Dataset):
    """The mini-batches of the other tests, so that steps can be compared with those of an ordinary loop."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return batch(step)


class Model(pl.LightningModule):
    def __init__(self, make, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.net = small_model()
        self.make, self.skipped, self.calls = make, skipped, 0

    def training_step(self, pair, number: int):
        self.calls += 1
        x, y = pair
        loss = ((self.net(x) - y) ** 2).mean()
        self.log("loss", loss)
        return None if number in self.skipped else loss

    def configure_optimizers(self):
        return self.make(self)


class Manual(Model):
    automatic_optimization = False

    def training_step(self, pair, number: int) -> None:
        optimizer = self.optimizers()
        x, y = pair

        def closure() -> Tensor:
            self.calls += 1
            return ((self.net(x) - y) ** 2).mean()

        optimizer.step(closure)


def whitening(model: Model) -> PSGD:
    return PSGD(model.parameters(), lr=0.01, probe=Whitening())


def finite_difference(model: Model) -> PSGD:
    return PSGD(model.parameters(), lr=0.05, max_norm=1.0)


def hessian_vector(model: Model) -> PSGD:
    return PSGD(model.parameters(), lr=0.05, max_norm=1.0, probe=HessianVector())


def trainer(tmp_path, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"default_root_dir": tmp_path, "enable_checkpointing": False, "logger": False}
    return pl.Trainer(**{"max_epochs": 1, **quiet, **options})


def fit(model: Model, tmp_path, **options):
    made = trainer(tmp_path, **options)
    made.fit(model, DataLoader(Batches(), batch_size=None))
    return made


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("make", [whitening, finite_difference])
def test_automatic_optimization_takes_the_steps_of_an_ordinary_loop(tmp_path, make):
    """Every bit of them. Finite differences call ``training_step`` twice for each mini-batch."""
    model, plain = Model(make), small_model()
    fit(model, tmp_path)
    optimizer = make(plain)
    train(plain, optimizer, 0, STEPS)
    assert same(model.net, plain)
    assert model.calls == STEPS * (2 if make is finite_difference else 1)


def test_manual_optimization_takes_the_closure_of_hessian_vector(tmp_path):
    model, plain = Manual(hessian_vector), small_model()
    fit(model, tmp_path, callbacks=[monitor()])
    train(plain, hessian_vector(plain), 0, STEPS)
    assert same(model.net, plain)


def test_automatic_optimization_and_hessian_vector_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match=r"closure: it called backward\(\); HessianVector wants"):
        fit(Model(hessian_vector), tmp_path)
    with pytest.raises(Exception, match="automatic_optimization = False") as raised:
        fit(Model(hessian_vector), tmp_path, callbacks=[monitor()])
    assert type(raised.value).__name__ == "MisconfigurationException"


@pytest.mark.parametrize("make", [whitening, finite_difference])
def test_a_mini_batch_without_a_loss_is_left_out(tmp_path, make):
    model, plain = Model(make, skipped=(2, 5)), small_model()
    fit(model, tmp_path)
    optimizer = make(plain)
    for step in range(STEPS):
        if step in (2, 5):
            optimizer.zero_grad()
            optimizer.step(lambda: None)
        else:
            train(plain, optimizer, step, step + 1)
    assert same(model.net, plain)


def test_accumulation_and_clipping_are_those_of_an_ordinary_loop(tmp_path):
    model, plain = Model(whitening), small_model()
    fit(model, tmp_path, accumulate_grad_batches=4, gradient_clip_val=0.5)
    optimizer = whitening(plain)
    for step in range(STEPS):
        x, y = batch(step)
        if step % 4 == 0:
            optimizer.zero_grad()
        (((plain(x) - y) ** 2).mean() / 4).backward()
        if step % 4 == 3:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
    assert same(model.net, plain)


@pytest.mark.parametrize("make", [whitening, finite_difference])
def test_mixed_precision_trains(tmp_path, make):
    model = Model(make)
    before = ((model.net(batch(99)[0]) - batch(99)[1]) ** 2).mean().item()
    fit(model, tmp_path, precision="bf16-mixed", max_epochs=10)
    after = ((model.net(batch(99)[0]) - batch(99)[1]) ** 2).mean().item()
    assert after < 0.7 * before


def scaled() -> dict[str, object]:
    precision = pl.plugins.precision.MixedPrecision
    return {"plugins": [precision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))]}


def test_scaled_gradients_are_for_whitening(tmp_path):
    """The ``Trainer`` steps without a closure then. A scale that is too large costs a step, as ever."""

    model = Model(whitening)
    made = fit(model, tmp_path, **scaled())
    assert int(made.optimizers[0].state[model.net[0].weight]["step"]) == STEPS
    assert not same(model.net, small_model())
    with pytest.raises(ValueError, match=r"closure=None: FiniteDifference wants step\(closure\); Whitening works"):
        fit(Model(finite_difference), tmp_path, **scaled())


@pytest.mark.parametrize("make", [whitening, finite_difference])
def test_a_run_resumed_from_a_checkpoint_is_the_same_run(tmp_path, make):
    def scheduled(model: Model):
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    straight, first, second = (Model(scheduled) for _ in range(3))
    fit(straight, tmp_path, max_epochs=3)
    fit(first, tmp_path).save_checkpoint(tmp_path / "half.ckpt")
    trainer(tmp_path, max_epochs=3).fit(
        second, DataLoader(Batches(), batch_size=None), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert same(second, straight)
    assert not same(second, first)


# -- the callback -----------------------------------------------------------------------------------------------------


def monitor(every: int | None = None):
    from psgd.lightning import PreconditionerMonitor

    return PreconditionerMonitor(every)


def rows(tmp_path) -> list[dict[str, str]]:
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        return [row for row in csv.DictReader(file) if row["psgd/condition"]]


def test_it_logs_what_it_says(tmp_path):
    callback = monitor(every=3)
    model = Model(whitening)
    logger = pl.loggers.CSVLogger(tmp_path)
    made = fit(model, tmp_path, logger=logger, log_every_n_steps=1, callbacks=[callback])
    seen = rows(tmp_path)
    assert [int(row["step"]) for row in seen] == [0, 3, 6]

    plain = small_model()
    optimizer = whitening(plain)
    for step in range(7):
        before = [p.detach().clone() for p in plain.parameters()]
        train(plain, optimizer, step, step + 1)
    moved = [
        (p.detach() - old).square().mean().sqrt().item() for p, old in zip(plain.parameters(), before, strict=True)
    ]
    factors = [optimizer.state[p][k] for p in plain.parameters() for k in optimizer.state[p] if k.startswith("Q")]
    conditions = [torch.linalg.cond(Q).item() for Q in factors]
    assert float(seen[-1]["psgd/update_rms_max"]) == pytest.approx(max(moved), rel=1e-4)
    assert float(seen[-1]["psgd/condition_max"]) == pytest.approx(max(conditions), rel=1e-3)
    assert max(conditions) > float(seen[-1]["psgd/condition"]) >= 1
    assert {"psgd/condition", "psgd/update_rms", "psgd/skipped"} <= made.callback_metrics.keys()
    assert same(model.net, train_plain())  # looking changes nothing


def train_plain() -> nn.Module:
    plain = small_model()
    train(plain, whitening(plain), 0, STEPS)
    return plain


def test_it_counts_skipped_steps_and_follows_the_trainer(tmp_path):
    class Spoiled(Model):
        def training_step(self, pair, number: int):
            loss = super().training_step(pair, number)
            return loss * math.inf if number == 4 else loss

    logger = pl.loggers.CSVLogger(tmp_path)
    fit(Spoiled(whitening), tmp_path, logger=logger, log_every_n_steps=2, callbacks=[monitor()])
    assert [(row["step"], float(row["psgd/skipped"])) for row in rows(tmp_path)] == [
        ("0", 0),
        ("2", 0),
        ("4", 1),
        ("6", 1),
    ]


@pytest.mark.parametrize("model", [Model, Manual])
def test_steps_without_a_closure_are_logged_when_they_are_taken(tmp_path, model):
    """The ``Trainer`` takes such steps for scaled gradients, and tells the loss; a module's own may have none."""

    class Silent(Manual):
        def training_step(self, pair, number: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(((self.net(pair[0]) - pair[1]) ** 2).mean())
            optimizer.step()

    logger = pl.loggers.CSVLogger(tmp_path)
    options = scaled() if model is Model else {}
    chosen = Model if model is Model else Silent
    fit(chosen(whitening), tmp_path, logger=logger, log_every_n_steps=1, callbacks=[monitor(every=3)], **options)
    seen = rows(tmp_path)
    assert [int(row["step"]) for row in seen] == [0, 3, 6]
    assert all(("psgd/loss" in row) == (model is Model) for row in seen)


def test_the_loss_is_that_of_a_mini_batch(tmp_path):
    """The closure of the ``Trainer`` returns it divided by the number of those that are accumulated."""
    logger = pl.loggers.CSVLogger(tmp_path)
    options = {"accumulate_grad_batches": 4, "log_every_n_steps": 1, "callbacks": [monitor(every=1)]}
    fit(Model(whitening), tmp_path, logger=logger, **options)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        seen = list(csv.DictReader(file))
    told = {row["step"]: float(row["loss"]) for row in seen if row["loss"]}
    logged = {row["step"]: float(row["psgd/loss"]) for row in seen if row["psgd/loss"]}
    assert len(logged) == 2
    assert logged == pytest.approx({step: told[step] for step in logged})


def test_it_lets_go_of_the_optimizer(tmp_path):
    callback = monitor(every=1)
    model = Model(whitening)
    made = fit(model, tmp_path, callbacks=[callback])
    optimizer = made.optimizers[0]
    assert not optimizer.observers
    assert not optimizer._optimizer_step_post_hooks

    class Failing(Model):
        def training_step(self, pair, number: int):
            raise KeyError("data")

    broken = trainer(tmp_path, callbacks=[callback])
    with pytest.raises(KeyError, match="data"):
        broken.fit(Failing(whitening), DataLoader(Batches(), batch_size=None))
    assert not broken.optimizers[0].observers
    fit(Model(whitening), tmp_path, callbacks=[callback])  # a second run with the same callback


def test_it_says_what_does_not_fit_together(tmp_path):
    with pytest.raises(ValueError, match=r"every=0: PreconditionerMonitor wants a whole number"):
        monitor(every=0)
    adam = Model(lambda model: torch.optim.Adam(model.parameters()))
    with pytest.raises(Exception, match="it returned Adam; PreconditionerMonitor wants at least one PSGD"):
        fit(adam, tmp_path, callbacks=[monitor()])
    for options, message in [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0: .* max_norm"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: .* 2 times too large"),
    ]:
        with pytest.warns(UserWarning, match=message):
            fit(Model(finite_difference), tmp_path, callbacks=[monitor()], **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=message)
            fit(Model(whitening), tmp_path, callbacks=[monitor()], **options)


def test_accumulated_batches_make_finite_differences_of_the_last_one_over_their_number(tmp_path):
    """What the warning says: the curvature of a quadratic is seen divided by the number of batches."""
    seen = []

    class Probe(FiniteDifference):
        def __call__(self, *arguments):
            found = super().__call__(*arguments)
            seen.extend((dgrad / dtheta) for dtheta, dgrad in found.pairs.values())
            return found

    class Quadratic(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def training_step(self, pair, number: int) -> Tensor:
            return 4.0 * self.theta.square().sum() / 2

        def configure_optimizers(self) -> PSGD:
            return PSGD(self.parameters(), lr=0.01, probe=Probe())

    for k in (1, 4):
        seen.clear()
        fit(Quadratic(), tmp_path, accumulate_grad_batches=k)
        torch.testing.assert_close(seen[0], torch.full_like(seen[0], 4.0 / k), rtol=1e-4, atol=0)


def test_the_learning_rate_monitor_of_lightning_sees_momentum_and_decay(tmp_path):
    callback = pl.callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    logger = pl.loggers.CSVLogger(tmp_path)
    made = fit(Model(whitening), tmp_path, logger=logger, log_every_n_steps=1, callbacks=[callback])
    seen = {name: float(value) for name, value in made.callback_metrics.items() if name.startswith("lr-")}
    assert seen == pytest.approx({"lr-PSGD": 0.01, "lr-PSGD-momentum": 0.9, "lr-PSGD-weight_decay": 0.0})
