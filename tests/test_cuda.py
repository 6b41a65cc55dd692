"""What must hold on a GPU too. Skipped, visibly, where there is none."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from psgd import (
    PSGD,
    Affine,
    Dense,
    FiniteDifference,
    HessianVector,
    Joint,
    Kronecker,
    Monitor,
    PSGDWarning,
    Spectral,
    Whitening,
)
from psgd.engine.graphs import WARM_UP, Graphs
from psgd.groups.inverse_free import Chores
from psgd.groups.triangular import descend_rank_two_

from .cases import PROBES, STRUCTURES, batch
from .emulated import graphs_made

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch says so once in each process, when its synchronisation mode is first set
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

structures = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
probes = pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)


def model_on(device: str, dtype=torch.float32, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return model.to(device, dtype)


def go(model: nn.Module, optimizer: PSGD, first: int, last: int) -> None:
    parameter = next(model.parameters())
    for step in range(first, last):
        x, y = (t.to(parameter.device) for t in batch(step, parameter.dtype))

        def loss_of(x=x, y=y):
            return ((model(x) - y) ** 2).mean()

        def closure(loss_of=loss_of):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        optimizer.step(loss_of if isinstance(optimizer.probe, HessianVector) else closure)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@structures
@probes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_resume_is_exact_to_the_bit(structure, probe, dtype):
    def new():
        model = model_on("cuda", dtype, dropout=0.1)
        options = {"lr": 0.05, "momentum": 0.5, "update_every": 2, "max_norm": 1.0}
        return model, PSGD(model.parameters(), preconditioner=structure, probe=probe, **options)

    straight = new()
    torch.manual_seed(1)
    go(*straight, 0, 20)
    first = new()
    torch.manual_seed(1)
    go(*first, 0, 10)
    saved = copy.deepcopy({"model": first[0].state_dict(), "optimizer": first[1].state_dict()})
    random = torch.cuda.get_rng_state()
    second = new()
    second[0].load_state_dict(saved["model"])
    second[1].load_state_dict(saved["optimizer"])
    torch.cuda.set_rng_state(random)
    go(*second, 10, 20)
    for a, b in zip(weights(second[0]), weights(straight[0]), strict=True):
        assert torch.equal(a, b)


def test_an_entry_of_the_state_dict_is_saved_alone():
    """Its storage ends where it ends, at the memory of the stack."""
    model = nn.Sequential(*[nn.Linear(30, 30, bias=False) for _ in range(20)]).cuda()
    optimizer = PSGD(model.parameters(), probe=Whitening())
    assert len(optimizer.stacks) == 1
    state = optimizer.state_dict()["state"]
    for i, p in enumerate(model.parameters()):
        for name, value in optimizer.state[p].items():
            assert state[i][name].data_ptr() == value.data_ptr()
            assert torch.equal(state[i][name], value)
    file = io.BytesIO()
    torch.save(state[3], file)
    assert len(file.getvalue()) < 3 * 30 * 30 * 4 + 4096
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(
        torch.equal(loaded[name], value) and value.device == loaded[name].device for name, value in state[3].items()
    )
    optimizer.state.clear()  # the memory lives as long as the entries
    assert torch.equal(state[3]["Q0_root"], torch.eye(30, device="cuda"))


@structures
@probes
def test_cpu_and_gpu_agree_on_what_a_step_does(structure, probe):
    """The noise differs, as the generators do; without an update of Q there is none, nor from the identity on."""
    results = []
    options = {"preconditioner": structure, "probe": probe, "precond_lr": 1e-13, "init": "identity"}
    for device in ("cpu", "cuda"):
        model = model_on(device, torch.float64)
        optimizer = PSGD(model.parameters(), lr=0.05, **options)
        go(model, optimizer, 0, 5)
        results.append([w.cpu() for w in weights(model)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@structures
@pytest.mark.parametrize("blocks", [None, Joint(), Affine()], ids=str)
@pytest.mark.parametrize("normalize", [None, Spectral()], ids=str)
def test_a_step_never_waits_for_the_device(structure, blocks, normalize):
    if normalize is not None and structure.own_normalization:
        pytest.skip("there is nothing to choose")
    model = model_on("cuda")
    groups = Affine.groups(model) if isinstance(blocks, Affine) else [{"params": list(model.parameters())}]
    for group in groups[:1]:
        group["lr"] = 0.01
    options = {k: v for k, v in {"blocks": blocks, "normalize": normalize}.items() if v is not None}
    optimizer = PSGD(
        groups,
        lr=torch.tensor(0.05, device="cuda"),
        preconditioner=structure,
        probe=Whitening(),
        momentum=0.5,
        weight_decay=0.1,
        max_norm=1.0,
        **options,
    )
    for step in range(4):
        x, y = (t.cuda() for t in batch(step))
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_finite_difference_does_not_wait_either():
    model = model_on("cuda", dropout=0.2)
    optimizer = PSGD(model.parameters(), lr=0.05, probe=FiniteDifference())
    x, y = (t.cuda() for t in batch(0))

    def closure():
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(60):  # past the looks at closures and at skipped steps
            optimizer.step(closure)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_warnings_come_without_waiting():
    """What they are about is read when it has arrived, some steps later."""
    model, calls = model_on("cuda"), iter(range(10**6))
    optimizer = PSGD(model.parameters(), lr=0.01)
    batches = [tuple(t.cuda() for t in batch(i)) for i in range(100)]

    def closure():
        optimizer.zero_grad()
        x, y = batches[next(calls) % 100]
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    def steps(optimizer, number, closure=None):
        """Take steps that never wait; between some of them the test does, as other processes may use the device too."""
        for _ in range(0, number, 10):
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(10):
                    optimizer.step(closure)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()

    with pytest.warns(PSGDWarning, match="another mini-batch"):
        steps(optimizer, 30, closure)
    theta = torch.ones(3, device="cuda", requires_grad=True)
    theta.grad = torch.full_like(theta, torch.nan)
    with pytest.warns(PSGDWarning, match="steps in a row"):
        steps(PSGD([theta], probe=Whitening()), 100)


@pytest.mark.parametrize("first", [3, 40], ids=["before they are recorded", "recorded"])
def test_skipped_steps_and_device_step_sizes(first):
    model = model_on("cuda")
    lr = torch.tensor(0.05, device="cuda")
    optimizer = PSGD(model.parameters(), lr=lr, probe=Whitening(), momentum=0.5)
    go(model, optimizer, 0, first)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[3].weight.grad[2, 3] = torch.nan
    optimizer.step()
    lr.fill_(torch.nan)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert int(optimizer.state[model[0].weight]["skipped"]) == 2
    lr.fill_(0.05)
    optimizer.step()
    assert not torch.equal(before[0], model[0].weight)


def test_dropout_mask_is_replayed():
    model = model_on("cuda", torch.float64, dropout=0.5)
    seen = []

    class Recorder(FiniteDifference):
        def __call__(self, *args):
            evaluation = super().__call__(*args)
            seen.append(max(pair[1].abs().max().item() for pair in evaluation.pairs.values()))
            return evaluation

    go(model, PSGD(model.parameters(), lr=0.01, probe=Recorder()), 0, 3)
    assert max(seen) < 1e-5
    torch.manual_seed(4)
    go(model, PSGD(model.parameters(), lr=0.01), 0, 1)
    after = torch.cuda.get_rng_state()
    torch.manual_seed(4)
    model(torch.ones(16, 4, device="cuda", dtype=torch.float64))
    assert torch.equal(after, torch.cuda.get_rng_state())


def test_parameters_on_several_devices():
    a = torch.ones(3, 2, requires_grad=True)
    b = torch.ones(3, 2, device="cuda", requires_grad=True)
    optimizer = PSGD([a, b], lr=0.1, probe=Whitening(), max_norm=0.5, momentum=0.5)
    for _ in range(3):
        a.grad, b.grad = torch.ones(3, 2), torch.ones(3, 2, device="cuda")
        optimizer.step()
    assert not torch.equal(a, torch.ones(3, 2))
    assert not torch.equal(b.cpu(), torch.ones(3, 2))
    before = [t.detach().clone() for t in (a, b)]
    b.grad = torch.full_like(b, torch.inf)
    optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip((a, b), before, strict=True))
    assert int(optimizer.state[a]["skipped"]) == int(optimizer.state[b]["skipped"]) == 1


def test_model_moved_after_the_optimizer_was_made():
    model = model_on("cpu")
    optimizer = PSGD(model.parameters(), lr=0.05)
    model.cuda()
    go(model, optimizer, 0, 3)
    assert all(stack.device.type == "cuda" for stack in optimizer.stacks)
    cpu = model_on("cpu")
    other = PSGD(cpu.parameters(), lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    assert all(stack.device.type == "cpu" for stack in other.stacks)


def test_grad_scaler_and_half_precision():
    model = model_on("cuda")
    optimizer = PSGD(model.parameters(), lr=0.02, probe=Whitening(), max_norm=1.0)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for step in range(200):
        x, y = (t.cuda() for t in batch(step))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ((model(x) - y) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])


def test_one_optimizer_after_the_other_leaves_no_memory_behind():
    """Neither workspaces of libraries, one for each stream, nor the pools of graphs that are gone."""
    left, reserved = [], []
    for _ in range(6):
        model = nn.Linear(64, 64).cuda()
        optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            optimizer.step()
        del model, optimizer
        gc.collect()
        left.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert left[-1] - left[0] < 2**20
    # The pool of the last optimizer is still there, and no other one.
    assert reserved[-1] <= reserved[1]


@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference()], ids=lambda p: type(p).__name__)
def test_peak_memory_of_a_step(probe):
    """At most five times the parameters and twice the factors, beyond what there was, and room for products."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda()
    size = sum(p.nbytes for p in model.parameters())
    optimizer = PSGD(model.parameters(), lr=0.01, probe=probe, preconditioner=Kronecker())
    x = torch.randn(2, 1024, device="cuda")

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step(closure)
    factors = sum(stack.group.nbytes() for stack in optimizer.stacks)
    assert torch.cuda.max_memory_allocated() - before <= 5.1 * size + 2 * factors + 2**25


@pytest.mark.parametrize("of_average", [False, True])
@pytest.mark.parametrize("precond_dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_does_what_a_step_does(of_average, precond_dtype):
    def new():
        model = model_on("cuda")
        lr = torch.tensor(0.01, device="cuda")
        optimizer = PSGD(
            model.parameters(), lr=lr, probe=Whitening(of_average), precond_dtype=precond_dtype, weight_decay=0.1
        )
        generator = torch.Generator("cuda").manual_seed(1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, device="cuda")
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, eager) = new(), new()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    eager.probe.chores = lambda step, lr: Chores.all()  # as a captured step does at each replay
    for _ in range(3):
        eager.step()
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"update_every": 3}, {"precond_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "probe", [Whitening(), Whitening(of_average=False), FiniteDifference(), HessianVector()], ids=repr
)
def test_recorded_steps_are_steps(options, dtype, probe):
    """Also while the step size changes, where a step is skipped, a parameter has no gradient, or memory moves."""

    def train(cuda_graph: bool) -> tuple[list[torch.Tensor], PSGD]:
        model = model_on("cuda", dtype)
        numbers = {"lr": 0.01, "weight_decay": 0.1, "max_rms": 1.1, **options}
        optimizer = PSGD(model.parameters(), probe=probe, cuda_graph=cuda_graph, **numbers)
        go(model, optimizer, 0, 30)
        for step in range(30, 60):
            optimizer.param_groups[0]["lr"] = 0.01 / step
            go(model, optimizer, step, step + 1)
        optimizer.param_groups[0]["lr"] = torch.tensor(torch.nan, device="cuda")
        go(model, optimizer, 60, 61)
        optimizer.param_groups[0]["lr"] = 0.01
        go(model, optimizer, 61, 70)
        model[0].bias.requires_grad_(False)
        model[0].bias.grad = None
        go(model, optimizer, 70, 80)
        model[0].bias.requires_grad_(True)
        for p in model.parameters():
            p.data = p.data.clone()
        go(model, optimizer, 80, 100)
        optimizer.load_state_dict(optimizer.state_dict())
        go(model, optimizer, 100, 120)
        return weights(model), optimizer

    with graphs_made() as made:
        recorded, optimizer = train(True)
    assert len(made[-1]) > 0
    with graphs_made() as made:
        plain, _ = train(False)
    assert made  # the same work, launched from the host
    assert all(len(graphs) == 0 for graphs in made)
    for mine, theirs in zip(recorded, plain, strict=True):
        assert torch.equal(mine, theirs)
    assert int(next(iter(optimizer.state.values()))["skipped"]) == 1


@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference()], ids=repr)
def test_parameters_of_all_kinds_are_recorded(probe):
    """Numbers, two dtypes, odd sizes, and blocks of one shape of which some are maximised."""

    def train(cuda_graph: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        kinds = [((8, 8), torch.bfloat16), ((5,), torch.float32), ((), torch.float32), ((8, 8), torch.float32)] * 2
        params = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s, dtype in kinds]
        groups = [{"params": params[:5]}, {"params": params[5:], "maximize": True, "weight_decay": 0.1}]
        optimizer = PSGD(groups, lr=0.01, probe=probe, max_rms=1.1, momentum=0.5, cuda_graph=cuda_graph)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(p.float().square().sum() * (1 if k < 5 else -1) for k, p in enumerate(params))
            loss.backward()
            return loss.detach()

        for _ in range(30):
            optimizer.step(closure)
        return [p.detach() for p in params]

    with graphs_made() as made:
        recorded = train(True)
    assert len(made[-1]) > 0
    plain = train(False)
    assert all(map(torch.equal, recorded, plain))
    assert all(torch.isfinite(p).all() for p in recorded)


def test_parameters_that_never_have_gradients_do_not_keep_others_from_being_recorded():
    def train(cuda_graph: bool) -> list[torch.Tensor]:
        model = model_on("cuda")
        model[3].requires_grad_(False)
        optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening(), cuda_graph=cuda_graph)
        go(model, optimizer, 0, 30)
        return weights(model)

    with graphs_made() as made:
        recorded = train(True)
    assert len(made[-1]) > 0
    assert all(map(torch.equal, recorded, train(False)))


@pytest.fixture(params=["nccl", "cpu:gloo,cuda:nccl"])
def group_of_one(request, tmp_path) -> Iterator[Any]:
    """Process group whose only rank is this process."""
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    torch.cuda.set_device(0)
    place = f"file://{tmp_path / 'store'}"
    dist.init_process_group(request.param, init_method=place, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["shard", "fully_shard"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_norm": 0.5, "weight_decay": 0.1}, {"momentum": 0.0}, {"update_every": 3}, {"adapt_lr": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("probe", [Whitening(), FiniteDifference()], ids=repr)
def test_ranks_record_what_they_do_alone(group_of_one, kind, options, probe):
    """Also while the step size changes, where a step is skipped, or a checkpoint is loaded."""

    def train(kind: str | None, cuda_graph: bool) -> tuple[list[torch.Tensor], PSGD, list[Any]]:
        model, more = model_on("cuda", torch.float64), {}
        if kind == "fully_shard":
            fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        elif kind == "shard":
            more = {"shard": group_of_one}
        numbers = {"lr": 0.01, "max_rms": 1.1, **options, **more}
        optimizer = PSGD(model.parameters(), probe=probe, cuda_graph=cuda_graph, **numbers)
        with graphs_made() as made:
            go(model, optimizer, 0, 40)
            optimizer.param_groups[0]["lr"] = torch.tensor(torch.nan, device="cuda")
            go(model, optimizer, 40, 41)
            for step in range(41, 50):
                optimizer.param_groups[0]["lr"] = 0.01 / step
                go(model, optimizer, step, step + 1)
            optimizer.load_state_dict(optimizer.state_dict())
            go(model, optimizer, 50, 70)
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        return [p.detach().clone() for p in whole], optimizer, made

    recorded, optimizer, made = train(kind, True)
    assert len(made) == 2
    assert all(len(graphs) >= 2 for graphs in made)  # lengths of gradients, and directions
    assert int(next(iter(optimizer.state.values()))["skipped"]) == 1
    launched, other, made = train(kind, False)
    assert all(len(graphs) == 0 for graphs in made)
    assert all(map(torch.equal, recorded, launched))
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    alone, _, _ = train(None, True)
    for mine, theirs in zip(recorded, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_recordings_of_ranks_keep_one_copy_of_directions(group_of_one):
    """However many recordings there are, as each leaves its directions behind."""
    reserved = []
    for numbers in (1, 6):
        gc.collect()
        torch.cuda.empty_cache()
        params = [torch.randn(1024, 1024, device="cuda", requires_grad=True) for _ in range(8)]
        optimizer = PSGD(params, lr=0.01, probe=Whitening(), shard=group_of_one)
        before = torch.cuda.memory_allocated()
        for step in range(60):
            optimizer.param_groups[0]["momentum"] = 0.9 - 0.1 * (step % numbers)  # each value is another recording
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
            optimizer.zero_grad()
        reserved.append(torch.cuda.memory_allocated() - before)
        del optimizer, params
    size = 8 * 4 * 1024**2
    assert reserved[1] - reserved[0] < size / 2


def test_a_step_that_cannot_be_recorded_is_taken_anyway(monkeypatch):
    model = model_on("cuda")
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
    go(model, optimizer, 0, 1)
    fit_ = optimizer.probe.fit_

    def waiting(*args):
        torch.cuda.synchronize()
        return fit_(*args)

    monkeypatch.setattr(optimizer.probe, "fit_", waiting)
    before = weights(model)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        go(model, optimizer, 1, 20)
    assert int(optimizer.state[next(model.parameters())]["step"]) == 20
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_random_numbers_go_on_after_a_capture_that_failed():
    """They are those that a process without the capture draws, also in later captures."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    torch.rand(5, device=device)
    expected = [torch.rand(5, device=device) for _ in range(3)]
    torch.manual_seed(0)
    torch.rand(5, device=device)
    graphs = Graphs(device, 0)
    for _ in range(WARM_UP):
        graphs("key", torch.cuda.synchronize)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        graphs("key", torch.cuda.synchronize)
    found = [torch.rand(5, device=device) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = torch.rand(5, device=device)
    graph.replay()
    assert all(map(torch.equal, [*found, last], expected))


def test_autograd_is_told_that_recorded_steps_change_parameters():
    model = model_on("cuda")
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
    go(model, optimizer, 0, 30)
    x, y = (t.cuda() for t in batch(0, torch.float32))
    loss = ((model(x) - y) ** 2).mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("n", [1, 63, 64, 65, 130, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocked_update_is_the_product(n, dtype):
    Q = torch.randn(2, n, n, dtype=dtype, device="cuda").triu()
    x, y = torch.randn(2, 2, n, 1, dtype=dtype, device="cuda")
    step, scale = (torch.rand(2, 1, 1, dtype=dtype, device="cuda") for _ in range(2))
    expected = scale * (Q.double() - step * (x @ y.mT + y @ x.mT).double().triu() @ Q.double())
    descend_rank_two_(Q, x, y, step, scale)
    torch.testing.assert_close(Q.double(), expected, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-10)
    assert torch.equal(Q, Q.triu())


def test_dense_too_large_for_the_device():
    with pytest.raises(ValueError, match=r"Dense\(\): Q would take .* on cuda:0"):
        PSGD([torch.zeros(1_000_000, device="cuda", requires_grad=True)], preconditioner=Dense())


def test_a_monitor_waits_for_the_device_at_records_only(tmp_path):
    """Steps are replayed as they would be without it, and end at the same bits."""
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
        optimizer = PSGD(model.named_parameters(), lr=0.01, probe=Whitening())
        monitor = Monitor(optimizer, tmp_path / "run.csv", every=20) if watched else None
        x = torch.randn(32, 64, device="cuda")
        with graphs_made() as made:
            for step in range(60):
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                quiet = step > 40 and step % 20 not in (0, 1)  # before, steps are recorded; the loss is told at the end
                torch.cuda.set_sync_debug_mode("error" if quiet else "default")
                try:
                    optimizer.step()
                    if monitor is not None:
                        monitor.loss(loss)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        results.append((weights(model), len(made[-1])))
        if monitor is not None:
            monitor.close()
            assert monitor.last is not None
            assert monitor.last.step == 40
            assert all(block.q_step and block.update_rms for block in monitor.last.blocks)
    assert results[0][1] == results[1][1] > 0
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
