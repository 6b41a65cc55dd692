"""What ranks are told to do: train a small model on their part of every mini-batch."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from psgd import PSGD, Affine, Diagonal, FiniteDifference, HessianVector, Kronecker, Whitening
from psgd.ops.distributed import local
from psgd.probes import Probe

BATCH = 12


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(x[:, :3]).to(dtype)


def wrapped(model: nn.Sequential, kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model as users wrap it, and what the optimizer has to be told."""
    if kind == "alone":
        return model, {}
    size = dist.get_world_size()
    torch.manual_seed(100 + dist.get_rank())  # nobody may count on a common seed
    if kind.startswith("ddp"):
        views = kind == "ddp, views"
        shard = {"shard": dist.group.WORLD} if kind == "ddp, shared" else {}
        return DistributedDataParallel(model, gradient_as_bucket_view=views), shard
    if kind == "fsdp, tp":  # the first layer is divided twice along one dimension, the second along two, the last once
        axes = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, axes["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = axes["data"]
    elif kind == "hsdp":
        copies = 2 if size % 2 == 0 else size
        mesh = init_device_mesh("cpu", (copies, size // copies), mesh_dim_names=("copies", "parts"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "fsdp, bf16" else MixedPrecisionPolicy()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, {}


def train(
    kind: str, dtype: torch.dtype, steps: int, first: int = 0, state: Any = None, **options: Any
) -> dict[str, Any]:
    """Train, and return the whole parameters and what the optimizer keeps here."""
    model, more = wrapped(model_of(dtype), kind)
    if options["probe"] in ("exact", "batched"):
        options["probe"] = probe_by_itself(options["probe"], model)
    optimizer = PSGD(model.parameters(), **options, **more)
    go(model, optimizer, dtype, first, first + steps)
    return result(model, optimizer)


def probe_by_itself(name: str, model: nn.Module) -> Probe:
    group = dist.group.WORLD if dist.is_initialized() else None
    if name == "exact":
        return HessianVector(group=group)
    return FiniteDifference(std=1e-3, module=getattr(model, "module", model), batched=True, group=group)


def place(model: nn.Module) -> tuple[int, int]:
    """Number of this rank's part of a mini-batch, and number of parts; ranks of tensor parallelism have the same."""
    if not dist.is_initialized():
        return 0, 1
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    for mesh in meshes:
        if "tensor" in (mesh.mesh_dim_names or ()):
            return mesh["data"].get_local_rank(), mesh["data"].size()
    return dist.get_rank(), dist.get_world_size()


def go(model: nn.Module, optimizer: PSGD, dtype: torch.dtype, first: int, last: int) -> None:
    rank, size = place(model)
    by_itself = isinstance(optimizer.probe, HessianVector) or getattr(optimizer.probe, "batched", False)
    if by_itself:  # the probe finds the gradients
        model = getattr(model, "module", model)
    for step in range(first, last):
        x, y = (t.chunk(size)[rank] for t in batch(step, dtype))

        def loss_of(x: Tensor = x, y: Tensor = y) -> Tensor:
            return (model(x) - y).square().mean()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        optimizer.step(loss_of if by_itself else closure)


def result(model: nn.Module, optimizer: PSGD) -> dict[str, Any]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "params": [p.detach().clone() for p in whole],
        "Q": {
            i: {k: v.clone() for k, v in optimizer.state[p].items() if k.startswith("Q")}
            for i, p in enumerate(optimizer.parameters())
        },
        "bytes": sum(v.nbytes for entries in optimizer.state.values() for v in entries.values()),
    }


def with_loss(divided: bool, probe: Probe) -> dict[str, Any]:
    """Train with a loss that is a ``DTensor``, or an ordinary one; that of step 2 is NaN on one rank."""
    model, more = wrapped(model_of(torch.float64), "fsdp")
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    optimizer = PSGD(model.parameters(), lr=0.1, probe=probe, **more)
    rank, size = place(model)
    for step in range(4):
        x, y = (t.chunk(size)[rank] for t in batch(step, torch.float64))

        def closure(x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            loss = loss.detach() * (math.nan if step == 2 and rank == 0 else 1.0)
            return DTensor.from_local(loss, mesh, [Partial("avg")]) if divided else loss

        optimizer.step(closure)
    (skipped,) = {int(local(entries["skipped"])) for entries in optimizer.state.values()}
    return {**result(model, optimizer), "skipped": skipped}


def saved(kind: str, dtype: torch.dtype, steps: int, directory: str, **options: Any) -> dict[str, Any]:
    """Train and save a checkpoint."""
    model, more = wrapped(model_of(dtype), kind)
    optimizer = PSGD(model.parameters(), **options, **more)
    go(model, optimizer, dtype, 0, steps)
    save(model, optimizer, directory)
    return result(model, optimizer)


def resumed(kind: str, dtype: torch.dtype, first: int, last: int, directory: str, **options: Any) -> dict[str, Any]:
    """Load a checkpoint into a new model and optimizer, and train on."""
    model, more = wrapped(model_of(dtype), kind)
    optimizer = PSGD(model.parameters(), **options, **more)
    load(model, optimizer, directory)
    go(model, optimizer, dtype, first, last)
    return result(model, optimizer)


def resumed_and_saved(
    kind: str, dtype: torch.dtype, first: int, last: int, directory: str, target: str, **options: Any
) -> None:
    model, more = wrapped(model_of(dtype), kind)
    optimizer = PSGD(model.parameters(), **options, **more)
    load(model, optimizer, directory)
    go(model, optimizer, dtype, first, last)
    save(model, optimizer, target)


def save(model: nn.Module, optimizer: PSGD, directory: str) -> None:
    params, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": params, "optimizer": state}, checkpoint_id=directory)


def load(model: nn.Module, optimizer: PSGD, directory: str) -> None:
    params, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": params, "optimizer": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=params, optim_state_dict=state)


def one_without_a_gradient(kind: str) -> None:
    model, more = wrapped(model_of(torch.float64), kind)
    optimizer = PSGD(model.parameters(), probe=Whitening(), lr=0.01, **more)
    go(model, optimizer, torch.float64, 0, 1)
    if dist.get_rank() == 1:
        next(model.parameters()).grad = None
    optimizer.step()


def other_models(kind: str) -> None:
    torch.manual_seed(0)
    PSGD([torch.zeros(3, 4 + dist.get_rank(), requires_grad=True)], shard=dist.group.WORLD)


def another_mesh() -> None:
    model, _ = wrapped(model_of(torch.float64), "fsdp")
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    PSGD(model.parameters(), shard=groups[dist.get_rank() == 2])


def two_meshes() -> None:
    """Neither of two meshes has all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    params = [distribute_tensor(torch.zeros(4, 4), mesh[name], [Shard(0)]) for name in ("a", "b")]
    PSGD([p.requires_grad_() for p in params])


def checkpoint_of_another_model(kind: str) -> None:
    """Only one rank has the block that does not fit."""
    model, more = wrapped(model_of(torch.float64), kind)
    optimizer = PSGD(model.parameters(), probe=Whitening(), lr=0.01, **more)
    state = optimizer.state_dict()
    if dist.get_rank() == 0:
        name, entries = next((k, v) for k, v in state["state"].items() if any(n.startswith("Q") for n in v))
        state["state"][name] = {n: v[..., :1] if n.startswith("Q") else v for n, v in entries.items()}
    optimizer.load_state_dict(state)


def a_load_that_fails_on_one_rank(kind: str, what: str) -> int:
    """Load an older checkpoint that one rank refuses, go on, and return the number of steps taken."""
    inner = model_of(torch.float64)
    model, more = wrapped(inner, kind)
    optimizer = PSGD(inner.parameters(), lr=0.01, probe=Whitening(), **more)
    go(model, optimizer, torch.float64, 0, 2)
    state = copy.deepcopy(optimizer.state_dict())
    go(model, optimizer, torch.float64, 2, 4)
    if what == "lr" and dist.get_rank() == 0:
        state["param_groups"][0]["lr"] = -1.0
    if what == "Q":  # of one block, which one of the ranks owns
        mine = next((entries for key, entries in state["state"].items() if key == 0 and "Q0_root" in entries), None)
        if mine is not None:
            mine["Q0_root"][0, 0] = math.nan
    with pytest.raises((ValueError, RuntimeError)) as caught:
        optimizer.load_state_dict(state)
    if what == "Q":
        named = "state_dict['state'][0]['Q0_root']: not finite" if mine is not None else "it failed on another rank"
        assert named in str(caught.value)
    go(model, optimizer, torch.float64, 4, 6)
    return int(optimizer.state[optimizer.parameters()[0]]["step"])


def columns(steps: int, **options: Any) -> dict[str, Any]:
    """Parameters divided along other axes, as for tensor parallelism, and one that is not divided at all."""
    dtype = torch.float64
    model = model_of(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for k, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
        if k < 2:
            weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(1 - k)])
            layer.weight = nn.Parameter(weight)
    optimizer = PSGD(model.parameters(), **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator, dtype=dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()
    return result(model, optimizer)


def columns_alone(steps: int, **options: Any) -> dict[str, Any]:
    model = model_of(torch.float64)
    optimizer = PSGD(model.parameters(), **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return result(model, optimizer)


def killed_while_others_wait(rank: int, directory: str) -> None:
    """One rank dies in the middle of a step; the others are to notice."""
    model, more = wrapped(model_of(torch.float64), "ddp, shared")
    optimizer = PSGD(model.parameters(), probe=Whitening(), lr=0.01, **more)
    go(model, optimizer, torch.float64, 0, 2)
    save(model, optimizer, directory)
    if dist.get_rank() == rank:
        optimizer.probe.fit_ = lambda *_: os._exit(1)  # type: ignore[method-assign]
    go(model, optimizer, torch.float64, 2, 4)


def shares(kind: str, **options: Any) -> tuple[int, int]:
    """Bytes of optimizer state, and the products counted in a step, on this rank; for sixteen layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24, bias=False) for _ in range(16)]
    model, more = wrapped(nn.Sequential(*layers), kind)
    optimizer = PSGD(model.parameters(), **options, **more)
    model(torch.randn(4, 24)).square().mean().backward()
    counter = FlopCounterMode(display=False)
    with counter:
        optimizer.step()
    nbytes = sum(
        v.nbytes for entries in optimizer.state.values() for k, v in entries.items() if k not in ("step", "skipped")
    )
    return nbytes, counter.get_total_flops()


def copies() -> list[str]:
    """What copying a shared optimizer is answered with."""
    optimizer = PSGD([torch.zeros(2, 2, requires_grad=True)], probe=Whitening(), shard=dist.group.WORLD)
    return [answer_to(copied, optimizer) for copied in (copy.deepcopy, pickle.dumps)]


def answer_to(function: Callable[[PSGD], Any], optimizer: PSGD) -> str:
    try:
        function(optimizer)
    except TypeError as error:
        return str(error)
    return ""


def accumulated(kind: str, steps: int, **options: Any) -> dict[str, Any]:
    """Each rank's part of a mini-batch in two pieces; only the second backward pass is averaged over the ranks."""
    dtype = torch.float64
    model, more = wrapped(model_of(dtype), kind)
    optimizer = PSGD(model.parameters(), **options, **more)
    for step in range(steps):
        x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(step, dtype))

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            first, second = ((model, *pair) for pair in zip(x.chunk(2), y.chunk(2), strict=True))
            with model.no_sync():
                half_loss(*first).backward()
            loss = half_loss(*second)
            loss.backward()
            return loss

        optimizer.step(closure)
    return result(model, optimizer)


def half_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean() / 2


def owners(kind: str, **options: Any) -> dict[int, int]:
    """Which rank has the block of which parameter, as the ranks tell each other."""
    model, more = wrapped(model_of(torch.float32), kind)
    mine = [i for stack in PSGD(model.parameters(), **options, **more).stacks for i in stack.positions]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    positions = [i for theirs in everyone for i in theirs]
    assert len(positions) == len(set(positions))
    return {i: rank for rank, theirs in enumerate(everyone) for i in theirs}


def a_bad_gradient_on_one_rank(kind: str, error_if_nonfinite: bool) -> tuple[bool, int]:
    """Whether parameters moved, and how many steps were skipped; one is bad for each parameter in turn."""
    model, more = wrapped(model_of(torch.float64), kind)
    optimizer = PSGD(model.parameters(), probe=Whitening(), lr=0.01, error_if_nonfinite=error_if_nonfinite, **more)
    go(model, optimizer, torch.float64, 0, 2)
    before = result(model, optimizer)["params"]
    params = list(model.parameters())
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
    for grad in grads:
        if dist.get_rank() == 1:
            good = grad.clone()
            grad.fill_(torch.nan)
        optimizer.step()
        if dist.get_rank() == 1:
            grad.copy_(good)
    after = result(model, optimizer)["params"]
    return not all(map(torch.equal, before, after)), int(optimizer.state[next(model.parameters())]["skipped"])


def a_group_added_later(kind: str, steps: int, **options: Any) -> dict[str, Any]:
    """Only the first layers are trained at first."""
    dtype = torch.float64
    model, more = wrapped(model_of(dtype), kind)
    params = list(model.parameters())
    optimizer = PSGD(params[:4], **options, **more)
    go(model, optimizer, dtype, 0, steps)
    optimizer.add_param_group({"params": params[4:], "lr": 0.01})
    go(model, optimizer, dtype, steps, 2 * steps)
    return result(model, optimizer)


def structures_of_their_own(kind: str, steps: int, **options: Any) -> dict[str, Any]:
    """Every layer has another structure; half-way another optimizer goes on."""
    dtype = torch.float64
    model, more = wrapped(model_of(dtype), kind)
    params = list(model.parameters())
    own = [{"preconditioner": Kronecker(max_dense=0)}, {"blocks": Affine()}, {"preconditioner": Diagonal()}]

    def new() -> PSGD:
        groups = [{"params": params[2 * k : 2 * k + 2], **choices} for k, choices in enumerate(own)]
        return PSGD(groups, **options, **more)

    first, second = new(), new()
    go(model, first, dtype, 0, steps)
    second.load_state_dict(first.state_dict())
    go(model, second, dtype, steps, 2 * steps)
    return result(model, second)


def another_structure() -> dict[str, str]:
    """Answers where the last rank has another structure in a param group, from the start or later."""
    params = [torch.zeros(4, 4, requires_grad=True), torch.zeros(4, 4, requires_grad=True)]
    structure = Kronecker(max_skew=256 if dist.get_rank() == 0 else 255)  # of equal costs
    group = {"params": params[1:], "preconditioner": structure}

    def later() -> None:
        optimizer = PSGD(params[:1], probe=Whitening(), shard=dist.group.WORLD)
        optimizer.add_param_group(group)
        optimizer.step()

    def replicas() -> None:
        PSGD([{"params": params[:1]}, group], probe=Whitening()).check_replicas()

    def at_once() -> None:
        PSGD([{"params": params[:1]}, group], probe=Whitening(), shard=dist.group.WORLD)

    return answers_to({"at once": at_once, "later": later, "replicas": replicas})


def with_gradients(shapes: Sequence[tuple[int, ...]], steps: int, paces: Sequence[int] = (1,), **options: Any) -> Any:
    """Parameters of some shapes, shared, with random gradients; param groups that update Q at different paces."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    groups = [{"params": params[k :: len(paces)], "update_every": pace} for k, pace in enumerate(paces)]
    shard = dist.group.WORLD if dist.is_initialized() else None
    optimizer = PSGD(groups, probe=Whitening(), shard=shard, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


def reloaded_with_other_numbers(shapes: Sequence[tuple[int, ...]]) -> Any:
    """Whether Q of all blocks is what it was, after numbers changed while training."""
    torch.manual_seed(0)
    params = [torch.randn(shape).requires_grad_() for shape in shapes]

    def new() -> PSGD:
        return PSGD(
            [{"params": params[:3]}, {"params": params[3:]}], probe=Whitening(), shard=dist.group.WORLD, lr=0.01
        )

    optimizer = new()
    optimizer.param_groups[0].update(momentum=0.0, update_every=7)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    other = new()
    other.load_state_dict(optimizer.state_dict())
    first, second = (
        {(i, k): v for i, p in enumerate(params) for k, v in o.state[p].items() if k.startswith("Q")}
        for o in (optimizer, other)
    )
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def sequence_parallel(steps: int) -> Any:
    """A layer whose gradients are sums still to be taken; alone the same without ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        layouts = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(),
        }
        parallelize_module(model, mesh, layouts)
    optimizer = PSGD(model.parameters(), lr=0.02, probe=Whitening())
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if dist.is_initialized() else x
        out = model(part)
        (out - x).square().mean().backward()
        optimizer.step()
    return result(model, optimizer)["params"]


def answers_to(attempts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Error of each attempt, or an empty string."""

    def answer(attempt: Callable[[], Any]) -> str:
        try:
            attempt()
        except RuntimeError as error:
            return str(error)
        return ""

    return {name: answer(attempt) for name, attempt in attempts.items()}


def with_another(kind: str, options: dict[str, tuple[Any, Any]]) -> dict[str, str]:
    """Answer to a step for which the last rank was told something else than the others, for each option."""
    model, more = wrapped(model_of(torch.float64), kind)
    params = list(model.parameters())
    last = dist.get_rank() == dist.get_world_size() - 1

    def attempt(name: str, usual: Any, another: Any) -> None:
        first = 2 if name == "param group" and last else 1
        optimizer = PSGD([{"params": params[:first]}, {"params": params[first:]}], probe=Whitening(), **more)
        if hasattr(optimizer, name):
            setattr(optimizer, name, another if last else usual)
        else:
            optimizer.param_groups[1][name] = another if last else usual
        go(model, optimizer, torch.float64, 0, 1)

    return answers_to({name: partial(attempt, name, *values) for name, values in options.items()})


def frozen_on_one_rank(probe: str) -> dict[str, str]:
    """Answers of a probe that averages gradients by itself, with and without shared blocks."""
    model = model_of(torch.float64)
    list(model.parameters())[2].requires_grad_(dist.get_rank() == 0)
    optimizers = {
        name: PSGD(model.parameters(), probe=probe_by_itself(probe, model), shard=shard)
        for name, shard in {"alone": None, "shared": dist.group.WORLD}.items()
    }
    return answers_to({name: partial(go, model, o, torch.float64, 0, 1) for name, o in optimizers.items()})


def compared_replicas(lr: float) -> dict[str, str]:
    """Answers of ``check_replicas`` where all is well, and after one rank did something else."""
    model, _ = wrapped(model_of(torch.float64), "ddp")
    optimizer = PSGD(model.parameters(), probe=Whitening(), lr=lr)
    first, weight = dist.get_rank() == 0, next(model.parameters())

    def another_rate() -> None:
        optimizer.param_groups[0]["lr"] = lr if first else lr / 2
        optimizer.check_replicas()

    def frozen() -> None:
        optimizer.param_groups[0]["lr"] = lr
        weight.requires_grad_(first)
        optimizer.check_replicas()

    def without_gradient() -> None:
        weight.requires_grad_()
        weight.grad = weight.grad if first else None
        optimizer.step()
        weight.grad = None
        optimizer.check_replicas()

    go(model, optimizer, torch.float64, 0, 3)
    return answers_to(
        {"same": optimizer.check_replicas, "lr": another_rate, "frozen": frozen, "gradient": without_gradient}
    )


def about_to_do_otherwise(what: str) -> None:
    params = [torch.zeros(4, 4, requires_grad=True), torch.zeros(3, 3, requires_grad=True)]
    probe = FiniteDifference() if what == "closure" else Whitening()
    optimizer = PSGD(params, probe=probe, shard=dist.group.WORLD)
    first = dist.get_rank() == 0
    if what == "group":
        optimizer.add_param_group({"params": [torch.zeros(4, 4 + dist.get_rank(), requires_grad=True)]})
    if what == "wrong number" and first:
        optimizer.param_groups[0]["momentum"] = 2.0

    def closure() -> Tensor:
        loss = sum(p.square().sum() for group in optimizer.param_groups for p in group["params"])
        if not (first and what == "closure"):
            loss.backward()
        return loss

    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step(closure if what == "closure" else None)
