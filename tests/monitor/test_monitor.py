"""What a monitor records is so, and watching changes nothing."""

from __future__ import annotations

import csv
import errno
import math
import os
import sys
import warnings

import pytest
import torch
from torch import nn

import psgd
from psgd import PSGD, Affine, Dense, HessianVector, Joint, Kronecker, LowRank, Monitor, Whitening, c1, c2, c3
from psgd.criteria import log_length, misfit
from psgd.groups import condition as reading
from psgd.groups.near_symmetric import NearSymmetric
from psgd.groups.triangular import Triangular
from psgd.monitor import HistoryError, TensorBoard, files, read, snapshot

from ..cases import CASES, CRITERIA, PROBES, cases, small_model, structures, train


def rows(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def whitening(model: nn.Module, **options) -> PSGD:
    return PSGD(model.named_parameters(), **{"lr": 0.01, "probe": Whitening(), **options})


# ---------------------------------------------------------------- the numbers


@cases
@pytest.mark.parametrize("exact", [256, 3])
def test_condition_is_that_of_the_matrix(case, exact, monkeypatch):
    monkeypatch.setattr(reading, "EXACT", exact)
    group = case.group(batch=2)
    for factor in group.factors:
        found = reading.condition(factor)
        true = torch.linalg.cond(factor.dense(), 2)
        assert (found <= true * (1 + 1e-6)).all()
        assert (found >= 0.8 * true).all()
        if factor.diagonal().shape[-1] <= exact:
            torch.testing.assert_close(found, true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 1e2, 1e4])
def test_condition_of_large_inverse_free_factors(dtype, spread, monkeypatch):
    """Small parts at a time, where there are many; the eigenvalues are spread evenly on a logarithmic axis."""
    monkeypatch.setattr(reading, "AT_ONCE", 100**2)
    monkeypatch.setattr(reading, "EXACT", 32)
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 100, 100, dtype=torch.float64))[0]
    values = spread ** torch.linspace(0, 1, 100, dtype=torch.float64)
    Q = (basis * values @ basis.mT).to(dtype)
    true = torch.linalg.cond(Q.double(), 2)
    found = reading.condition(NearSymmetric(Q)).double()
    assert found.shape == (3,)
    assert ((found > 0.7 * true) & (found < 1.02 * true)).all()


@cases
def test_change_is_that_of_the_matrix(case):
    old, new = case.group(batch=3, seed=0), case.group(batch=3, seed=0)
    for k, factor in enumerate(new.factors):
        generator = torch.Generator().manual_seed(k)
        for name, buffer in factor.buffers().items():
            noise = torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype) * 0.01
            buffer.add_(noise.triu() if name in ("full", "Q11") else noise)
    Q, Q_old = new.dense(), old.dense()
    true = (Q - Q_old).flatten(1).norm(dim=1) / Q_old.flatten(1).norm(dim=1)
    torch.testing.assert_close(reading.change(new, old), true, rtol=1e-6, atol=1e-8)


def test_moving_scale_between_factors_is_no_change():
    case = next(c for c in CASES if c.shape == (2, 3, 4))
    old, new = case.group(), case.group()
    for factor, scale in zip(new.factors, (8.0, 0.5, 0.25), strict=True):
        for buffer in factor.buffers().values():
            buffer.mul_(scale)
    assert reading.change(new, old).item() < 1e-7


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_lengths_do_not_overflow(scale):
    v = torch.tensor([[3.0, 4.0]]) * scale
    assert log_length(v).item() == pytest.approx(math.log(5 * scale), rel=1e-6)


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_misfit_of_what_fits_is_zero_and_scale_free(criterion, scale):
    """For P = |H|⁻¹ there is none; c3 does not mind negative curvature, which the secant equations cannot fit."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    signs = torch.tensor([1.0, 1, 1, 1, 1, -1 if criterion is c3 else 1], dtype=torch.float64)
    values = torch.logspace(-1, 1, 6, dtype=torch.float64) * scale
    H = basis * (values * signs) @ basis.mT
    P = basis / values @ basis.mT
    Q = Dense().init((6,), dtype=torch.float64, device="cpu")
    dtheta = torch.randn(1, 6, dtype=torch.float64)
    dgrad = (H @ dtheta[0])[None]
    assert isinstance(Q.factors[0], Triangular)
    Q.factors[0].full.copy_(torch.linalg.cholesky(P, upper=True)[None])
    assert misfit(criterion, Q, dtheta, dgrad).item() < 1e-9
    Q.factors[0].full.mul_(2**0.5)  # P is twice as large
    twice = {c1: 0.5, c2: 1.0, c3: math.log(4)}[criterion]
    assert misfit(criterion, Q, dtheta, dgrad).item() == pytest.approx(twice)


@pytest.mark.parametrize(
    ("structure", "criterion", "probe"),
    [
        (Dense(), c3, HessianVector()),
        (Dense(), c2, HessianVector()),
        (Kronecker(), c3, HessianVector()),
        (Kronecker(inverse_free=False), c3, Whitening()),
        (Kronecker(), c3, Whitening()),
        (LowRank(3), c3, HessianVector()),
    ],
    ids=lambda choice: getattr(choice, "__name__", str(choice)),
)
def test_the_residual_falls_while_Q_is_fitted(structure, criterion, probe):
    """On a fixed problem, with the parameters held still."""
    torch.manual_seed(0)
    theta = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    left, right = (torch.diag(torch.logspace(0, 2, n, dtype=torch.float64)) for n in (4, 6))
    optimizer = PSGD([theta], lr=0.0, preconditioner=structure, criterion=criterion, probe=probe, precond_lr=0.1)
    residuals = []

    def closure():
        loss = 10 * (theta * (left @ theta @ right)).sum()
        if isinstance(probe, Whitening):
            optimizer.zero_grad()
            theta.grad = left @ torch.randn_like(theta) @ right
        return loss.detach() if isinstance(probe, Whitening) else loss

    with Monitor(optimizer, lambda record: residuals.append(record.blocks[0].residual), every=5):
        for _ in range(300):
            if isinstance(probe, Whitening):
                closure()
                optimizer.step()
            else:
                optimizer.step(closure)
    first, last = sum(residuals[:3]) / 3, sum(residuals[-20:]) / 20
    assert len(residuals) == 60
    assert last < 0.2 * first


def test_numbers_are_those_of_the_step():
    model = small_model(torch.float64)
    optimizer = PSGD(model.named_parameters(), lr=0.05, probe=HessianVector(), preconditioner=Dense(), init="identity")
    before = [p.detach().clone() for p in model.parameters()]
    Q = [optimizer.state[p]["Q0_full"].clone() for p in model.parameters()]
    with Monitor(optimizer, every=1) as monitor:
        losses = train(model, optimizer, 0, 1)
    record = monitor.last
    assert record.loss == pytest.approx(losses[0], rel=1e-12)
    assert (record.step, record.skipped, record.lr) == (0, 0, (0.05,))
    for block, p, theta, old in zip(record.blocks, model.parameters(), before, Q, strict=True):
        new = optimizer.state[p]["Q0_full"]
        assert block.update_rms == pytest.approx((p - theta).square().mean().sqrt().item(), rel=1e-9)
        assert block.q_step == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-6)
        assert block.condition[0] == pytest.approx(torch.linalg.cond(new, 2).item(), rel=0.2)
    assert [block.name for block in record.blocks] == [name for name, _ in model.named_parameters()]


# ---------------------------------------------------------------- watching


@structures
@pytest.mark.parametrize(
    ("probe", "criterion"),
    [(probe, criterion) for probe in PROBES for criterion in CRITERIA if criterion is c3 or not probe.whitens],
    ids=lambda choice: getattr(choice, "__name__", type(choice).__name__),
)
def test_watching_changes_nothing(structure, probe, criterion):
    """And every number is there, whatever the choices."""
    results = []
    for watched in (False, True):
        model = small_model()
        optimizer = PSGD(
            model.parameters(), lr=0.01, preconditioner=structure, probe=probe, criterion=criterion, max_norm=1.0
        )
        if watched:
            with Monitor(optimizer, every=2, model=model) as monitor:
                train(model, optimizer, 0, 4)
            for block in monitor.last.blocks:
                numbers = (block.q_step, block.residual, block.update_rms, *block.condition)
                assert all(v is not None and math.isfinite(v) and v >= 0 for v in numbers)
                assert min(block.condition) >= 1 - 1e-6
        else:
            train(model, optimizer, 0, 4)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("blocks", [Joint(), Affine()], ids=str)
def test_blocks_that_share_a_Q_and_several_groups(blocks, tmp_path):
    model = small_model()
    groups = Affine.groups(model) if isinstance(blocks, Affine) else model.named_parameters()
    optimizer = PSGD(groups, lr=0.01, probe=Whitening(), blocks=blocks, preconditioner=LowRank(2))
    with Monitor(optimizer, tmp_path / "run.csv", every=1) as monitor:
        train(model, optimizer, 0, 3)
    names = [block.name for block in monitor.last.blocks]
    if isinstance(blocks, Affine):
        assert names == ["0.weight+0.bias", "3.weight+3.bias", "5.weight+5.bias"]
        assert {"lr/0", "lr/1", "lr/2"} <= rows(tmp_path / "run.csv")[0].keys()
    else:
        assert names == ["0.weight+..+5.bias"]


def test_bfloat16_Q_maximize_and_a_step_size_on_the_device():
    model = small_model(torch.bfloat16)
    optimizer = whitening(model, precond_dtype=torch.bfloat16, lr=torch.tensor(0.01), maximize=True)
    with Monitor(optimizer, every=1) as monitor:
        train(model, optimizer, 0, 3)
    assert monitor.last.lr == pytest.approx((0.01,))
    assert all(block.residual is not None and block.update_rms > 0 for block in monitor.last.blocks)


@pytest.mark.parametrize("update", [{"update_every": 3}, {"update_every": 7, "update_anneal": 20}], ids=str)
@pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)
def test_between_updates_the_last_one_is_told(update, probe):
    """Records are never without a step of Q, however updates and records fall."""
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=probe, max_norm=1.0, **update)
    found = []
    with Monitor(optimizer, found.append, every=10):
        train(model, optimizer, 0, 41)
    assert [record.step for record in found] == [0, 10, 20, 30, 40]
    assert all(block.q_step > 0 and block.residual is not None for record in found for block in record.blocks)


def test_without_an_update_since_the_last_record_its_numbers_stand_again():
    model = small_model()
    optimizer = whitening(model, update_every=5)
    seen = []
    with Monitor(optimizer, lambda record: seen.append(record.blocks[0].q_step), every=3):
        train(model, optimizer, 0, 10)
    assert None not in seen
    assert seen[1] == seen[0]  # there was no update between steps 0 and 3
    assert seen[2] != seen[1]


def test_skipped_steps_and_losses_that_are_not_finite(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = whitening(model)
    with Monitor(optimizer, tmp_path / "run.csv", every=1) as monitor:
        for factor in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum() * factor
            loss.backward()
            optimizer.step()
            monitor.loss(loss)
    assert [row["skipped"] for row in rows(tmp_path / "run.csv")] == ["0", "1", "1"]
    assert [row["loss"] == "nan" for row in rows(tmp_path / "run.csv")] == [False, True, False]
    assert [row["update_rms/bias"] == "0" for row in rows(tmp_path / "run.csv")] == [False, True, False]


def test_nothing_is_looked_at_between_records(monkeypatch):
    model = small_model()
    optimizer = whitening(model)
    with Monitor(optimizer, every=50) as monitor:
        train(model, optimizer, 0, 1)
        monitor.loss(1.0)
        record = monitor.last
        assert record.step == 0

        def fail(*_):
            raise AssertionError("looked at")

        for name in ("Fit", "Move", "fetch", "conditions"):
            monkeypatch.setattr(psgd.monitor.measure, name, fail)
        train(model, optimizer, 1, 50)
        monitor.loss(torch.tensor(1.0))
        assert monitor.last is record
        assert monitor.due
        with pytest.raises(AssertionError, match="looked at"):
            train(model, optimizer, 50, 51)


def test_blocks_without_gradients_have_no_residual_and_do_not_move():
    model = small_model()
    optimizer = whitening(model)
    model[0].weight.requires_grad_(False)
    with Monitor(optimizer, every=1) as monitor:
        train(model, optimizer, 0, 2)
    frozen = monitor.last.blocks[0]
    assert (frozen.q_step, frozen.residual, frozen.update_rms) == (0, None, 0)


def test_the_loss_is_told_after_the_step():
    model = nn.Linear(2, 1)
    optimizer = whitening(model)
    with Monitor(optimizer, every=2) as monitor:
        monitor.loss(1.0)  # no step was taken, as GradScaler leaves some out
        assert monitor.last is None
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(TypeError, match="number"):
            monitor.loss("low")
        assert monitor.last is None  # it waits for its loss
        monitor.loss(3.5)
        assert monitor.last.loss == 3.5
        optimizer.step()
        monitor.loss(7.0)
        optimizer.step()  # not told before the next step: written without
        optimizer.step()
        assert (monitor.last.step, monitor.last.loss) == (2, None)
        optimizer.step()
        assert monitor.waiting
        monitor.flush()  # nor to be told at all
        assert not monitor.waiting
        assert (monitor.last.step, monitor.last.loss) == (4, None)
    monitor.close()
    with pytest.raises(ValueError, match="closed"):
        monitor.loss(1.0)
    assert optimizer.observers == ()
    optimizer.step()


def test_the_step_size_is_that_of_the_step():
    """A scheduler changes a step size that is a tensor in place, before the loss is told."""
    model = nn.Linear(2, 1)
    optimizer = whitening(model, lr=torch.tensor(0.01))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    with Monitor(optimizer, every=1) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
        monitor.loss(1.0)
    assert monitor.last.lr == pytest.approx((0.01,))


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 1)
    optimizer = whitening(model)
    with Monitor(optimizer, every=numpy.int64(1)) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        monitor.loss(numpy.float32(2.0))
    assert monitor.last.loss == 2.0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_file_without_an_end_is_no_file_of_ours(monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1000)
    with pytest.raises(ValueError, match=r"not a file of psgd.Monitor"):
        Monitor(whitening(nn.Linear(2, 1)), "/dev/full")


def test_two_monitors_and_copies_of_the_optimizer():
    import copy

    model = small_model()
    optimizer = whitening(model)
    with Monitor(optimizer, every=1) as first, Monitor(optimizer, every=2) as second:
        twin = copy.deepcopy(optimizer)
        assert twin.observers == ()
        train(model, optimizer, 0, 2)
    assert (first.last.step, second.last.step) == (1, 0)


def test_a_failed_step_is_not_recorded():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01)
    with Monitor(optimizer, every=1) as monitor:

        def closure():
            raise OSError("no data")

        with pytest.raises(OSError, match="no data"):
            optimizer.step(closure)
        assert monitor.last is None
        train(model, optimizer, 0, 1)
        assert monitor.last.step == 0


def test_snapshot_needs_no_steps():
    model = small_model()
    optimizer = whitening(model)
    fresh = snapshot(optimizer)
    assert {block.condition for block in fresh.blocks if len(block.condition) == 1} == {(1.0,)}
    assert all(block.residual is None for block in fresh.blocks)
    train(model, optimizer, 0, 5)
    later = snapshot(optimizer, model)
    assert later.step == 5
    assert all(block.residual is not None and block.q_step is None for block in later.blocks)
    assert later.summary()["condition_max"] > 1
    assert "condition/0.weight/1" in later.to_dict()


def test_blocks_of_one_shape_have_numbers_of_their_own():
    params = [torch.ones(4, 3, requires_grad=True) for _ in range(3)]
    optimizer = PSGD(params, probe=Whitening())
    for k, p in enumerate(params):
        for axis in range(2):
            optimizer.state[p][f"Q{axis}_root"][0, 0] = 2.0 + 3 * k + axis
    found = snapshot(optimizer).blocks
    assert [block.condition for block in found] == [pytest.approx((2.0 + 3 * k, 3.0 + 3 * k)) for k in range(3)]


def test_the_spectrum_on_request(tmp_path):
    """Of a fitted P, all eigenvalues of PH are one."""
    theta = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = PSGD([theta], lr=0.0, probe=HessianVector(), preconditioner=Dense(), precond_lr=0.1)
    H = torch.tensor([100.0, 1.0, -0.01], dtype=torch.float64)

    def closure():
        return 0.5 * (H * theta.square()).sum()

    with Monitor(optimizer, tmp_path / "run.csv", every=3) as monitor:
        found = monitor.spectrum(closure, probes=3, iterations=3)
        assert (found.quantile(1), found.quantile(0.5)) == pytest.approx((100, 1))
        assert found.negative == pytest.approx(1 / 3)
        for _ in range(3):
            optimizer.step(closure)
        optimizer.state[theta]["Q0_full"].copy_(torch.diag(H.abs() ** -0.5))
        assert monitor.due
        monitor.spectrum(closure, probes=3, iterations=3)
        optimizer.step(closure)
    first, last = rows(tmp_path / "run.csv")
    assert [float(first[f"ph_{q}"]) for q in ("q10", "q50", "q90", "max")] == pytest.approx([0.01, 1, 100, 100])
    assert [float(last[f"ph_{q}"]) for q in ("q10", "q50", "q90", "max")] == pytest.approx([1] * 4)


# ---------------------------------------------------------------- files


def test_a_resumed_run_adds_to_its_file(tmp_path):
    """Also where it was killed after its checkpoint, in the middle of a line."""
    path = tmp_path / "new folder" / "run.csv"
    model = small_model()
    optimizer = whitening(model)
    with Monitor(optimizer, path, every=2):
        train(model, optimizer, 0, 5)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved = torch.load(_saved(saved, tmp_path), weights_only=True)
        train(model, optimizer, 5, 9)
    straight = read(path)
    with open(path, "a") as file:
        file.write("10,half a li")
    model = small_model()
    optimizer = whitening(model)
    with Monitor(optimizer, path, every=2):  # made before the checkpoint is loaded, as is usual
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 5, 11)
    assert [row["step"] for row in rows(path)] == ["0", "2", "4", "6", "8", "6", "8", "10"]
    again = read(path)
    assert list(again.columns["step"]) == [0, 2, 4, 6, 8, 10]
    for name in straight.columns:
        if name != "time":
            assert again.columns[name][:5] == pytest.approx(straight.columns[name], nan_ok=True)
    assert Monitor(optimizer, path, overwrite=True).last is None
    assert path.read_text() == ""


def _saved(what, folder):
    torch.save(what, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "run.csv"
    model = nn.Linear(2, 1)
    optimizer = whitening(model)
    with Monitor(optimizer, path, every=1):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    content = path.read_bytes()
    others = [
        (nn.Sequential(nn.Linear(2, 1)), {}, "another model.*'residual/weight'"),
        (nn.Linear(3, 1), {}, "other shapes"),
        (nn.Linear(2, 1), {"preconditioner": Dense()}, "other shapes or structures"),
    ]
    for other, options, complaint in others:
        with pytest.raises(ValueError, match=complaint):
            Monitor(whitening(other, **options), path)
    assert path.read_bytes() == content
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a file of"):
        Monitor(optimizer, path)
    with pytest.raises(OSError, match="directory"):
        Monitor(optimizer, tmp_path)
    assert optimizer.observers == ()  # who was refused does not watch


def test_training_goes_on_when_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "run.csv"
    model = small_model()
    optimizer = whitening(model)
    with Monitor(optimizer, path, every=1):
        train(model, optimizer, 0, 3)
        content = path.read_bytes()

        class Full:
            """Takes some of a line, and no more."""

            def __init__(self, *args, **kwargs):
                self.file = real_open(*args, **kwargs)
                self.written = 0

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

            def tell(self):
                return self.file.tell()

            def write(self, data):
                if self.written:
                    raise OSError(errno.ENOSPC, "No space left on device")
                self.written = self.file.write(data[:10])
                return self.written

        real_open = open
        monkeypatch.setattr(files, "open", Full, raising=False)
        with pytest.warns(RuntimeWarning, match=r"run.csv cannot be written: No space left on device"):
            train(model, optimizer, 3, 4)
        train(model, optimizer, 4, 6)  # without another warning
    assert path.read_bytes() == content


def test_blocks_that_change_end_the_recording(tmp_path):
    model = small_model()
    optimizer = whitening(model)
    with Monitor(optimizer, tmp_path / "run.csv", every=1):
        train(model, optimizer, 0, 2)
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))]})
        with pytest.warns(RuntimeWarning, match="other blocks now"):
            train(model, optimizer, 2, 5)
    assert len(rows(tmp_path / "run.csv")) == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", None),
        ("step,ti", None),
        ("step,time,model,loss,skipped,lr\n", None),
        ("step,time,model,loss,skipped,lr\n0,1,ab,2,0,0.1\n50,2,ab,1", None),
        ("hello", "not a file"),
        ("x,y\n1,2\n", "begins with 'x,y'"),
        ("step,time,model,loss,skipped,lr\n0,1,ab,2\n", "line 2: 4 values where there should be 6"),
        ("step,time,model,loss,skipped,lr\n0,1,ab,low,0,0.1\n", "line 2: .*'low'"),
        ("step,time,model,loss,skipped,lr\n,1,ab,2,0,0.1\n", "line 2: it has no step"),
    ],
)
def test_reading_files_as_they_come(tmp_path, content, complaint):
    path = tmp_path / "run.csv"
    path.write_text(content)
    if complaint is None:
        assert len(read(path)) == ("ab" in content)
        return
    with pytest.raises(HistoryError, match=complaint) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_tensorboard_gets_what_a_csv_gets(tmp_path):
    class Writer:
        def __init__(self):
            self.scalars = {}
            self.flushed = 0

        def add_scalar(self, tag, value, step, walltime):
            self.scalars[tag, step] = value

        def flush(self):
            self.flushed += 1

    model = small_model()
    optimizer = whitening(model)
    writer = Writer()
    with Monitor(optimizer, TensorBoard(writer), every=2), Monitor(optimizer, tmp_path / "run.csv", every=2):
        train(model, optimizer, 0, 4)
    assert writer.flushed == 2
    for row in rows(tmp_path / "run.csv"):
        for name, cell in row.items():
            if cell and name not in ("step", "time", "model"):
                assert writer.scalars[name, int(row["step"])] == pytest.approx(float(cell), rel=1e-8)


def test_tensorboard_itself(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = small_model()
    optimizer = whitening(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Monitor(optimizer, TensorBoard(tmp_path / "runs"), every=2):
            train(model, optimizer, 0, 4)
        events = EventAccumulator(str(tmp_path / "runs"))
        events.Reload()
    assert [event.step for event in events.Scalars("q_step/0.weight")] == [0, 2]


def test_without_tensorboard_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'psgd\[monitor\]'"):
        TensorBoard("runs")


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 2.5}, ValueError, r"every=2\.5"),
        ({"every": True}, ValueError, "every=True"),
        ({"to": 3}, TypeError, "to=3"),
        ({"to": TensorBoard}, TypeError, r"TensorBoard\("),
        ({"model": "mine"}, TypeError, "model='mine'"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, TypeError, "wants a PSGD"),
    ],
)
def test_wrong_arguments(arguments, error, complaint):
    with pytest.raises(error, match=complaint):
        Monitor(**{"optimizer": whitening(nn.Linear(2, 1)), **arguments})


def test_other_wrong_arguments():
    with pytest.raises(TypeError, match="SummaryWriter"):
        TensorBoard(3)
    with pytest.raises(TypeError, match="snapshot wants a PSGD"):
        snapshot(None)
    optimizer = whitening(nn.Linear(2, 1))
    for argument in ("probes", "iterations"):
        with pytest.raises(ValueError, match=f"{argument}=0"):
            Monitor(optimizer).spectrum(lambda: torch.ones(()), **{argument: 0})
