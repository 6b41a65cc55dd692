"""A plan says what the optimizer would take, before there is one; that is checked against optimizers that are there."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psgd import (
    PSGD,
    Affine,
    Dense,
    Diagonal,
    Joint,
    Kronecker,
    LimitedMemory,
    LowRank,
    PerTensor,
    Plan,
    Whitening,
    plan,
)
from psgd.planning.result import COLUMNS, KINDS
from psgd.ranks.assign import assign

from ..cases import small_model, structures

DOCS = Path(__file__).parent.parent.parent / "docs"
SHAPES = {"embedding": (500, 16), "layers.*.w": (6, (16, 24)), "layers.*.b": (6, (16,)), "scale": ()}


def really(optimizer: PSGD) -> list[tuple[tuple[int, ...], str, int, int]]:
    """Of each block its shape, structure, and the bytes of its Q and of its average."""
    found = {}
    for stack in optimizer.stacks:
        for row, block in enumerate(stack.blocks):
            of_Q = sum(buffer[row].nbytes for buffer in stack.group.buffers().values())
            average = sum(buffer[row].nbytes for buffer in stack.average.values())
            found[block.params] = (block.shape, stack.group.describe(), of_Q, average)
    return [found[params] for params in sorted(found)]


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("blocks", [PerTensor(), Joint(), Affine()], ids=str)
@structures
def test_it_is_what_the_optimizer_allocates(structure, blocks, dtype, momentum):
    model = nn.Sequential(nn.Linear(4, 6, dtype=dtype), nn.Tanh(), nn.Linear(6, 3, dtype=dtype))
    planned = plan(model, preconditioner=structure, blocks=blocks, momentum=momentum)
    params = Affine.groups(model) if isinstance(blocks, Affine) else model.parameters()
    optimizer = PSGD(params, preconditioner=structure, blocks=blocks, momentum=0.9 * momentum)
    assert [(b.shape, b.structure, b.precond_bytes, b.average_bytes) for b in planned.blocks] == really(optimizer)
    # But for one number for each block, the length of its gradients.
    kept = [{**stack.group.buffers(), **stack.average} for stack in optimizer.stacks]
    assert planned.bytes == planned.bytes_per_rank == sum(buffer.nbytes for each in kept for buffer in each.values())


def test_the_precision_of_Q():
    model = small_model()
    planned = plan(model, precond_dtype=torch.bfloat16)
    optimizer = PSGD(model.parameters(), precond_dtype=torch.bfloat16, momentum=0.9)
    assert [(b.shape, b.structure, b.precond_bytes, b.average_bytes) for b in planned.blocks] == really(optimizer)


@structures
def test_work_is_that_of_the_groups_of_the_optimizer(structure):
    """Which is checked in groups/test_flops.py. A triangular Q goes over other blocks of rows on a CPU."""
    for every in (1, 5):
        planned = plan(SHAPES, preconditioner=structure, update_every=every)
        for block in planned.blocks:
            group = structure.init(block.shape, dtype=torch.float32, device="meta")
            assert block.flops == sum(group.flops(every)) > 0
    rare, often = plan(SHAPES, preconditioner=structure, update_every=5), plan(SHAPES, preconditioner=structure)
    assert rare.flops < often.flops


def test_whatever_tells_the_shapes():
    model = small_model()
    with torch.device("meta"):
        empty = small_model()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    expected = plan(model)
    assert expected == plan(empty) == plan(model.named_parameters()) == plan(model.state_dict())
    assert expected == plan(shapes) == plan(list(shapes.items())) == plan([[n, list(s)] for n, s in shapes.items()])
    assert expected == plan([{"params": model.named_parameters()}])
    unnamed = plan(model.parameters())
    assert unnamed == plan(list(shapes.values())) == plan(p.shape for p in model.parameters())
    assert [block.names for block in unnamed.blocks] == [(f"parameter {i}",) for i in range(6)]
    assert [block.names for block in expected.blocks] == [(name,) for name, _ in model.named_parameters()]


def test_param_groups_with_structures_and_blocks_of_their_own():
    """They are what the optimizer allocates, and a budget leaves them as they are."""
    model = small_model()
    groups = [
        {"params": list(model[0].parameters()), "preconditioner": Diagonal()},
        {"params": list(model[3].parameters())},
        {"params": list(model[5].parameters()), "blocks": Affine()},
    ]
    planned = plan(groups)
    names = ["diagonal 24", "diagonal 6", "symmetric 6 ⊗ symmetric 6", "symmetric 6", "symmetric 7"]
    assert [block.structure for block in planned.blocks] == names
    optimizer = PSGD(groups, probe=Whitening())
    assert planned.bytes == sum(
        stack.group.nbytes() + sum(a.nbytes for a in stack.average.values()) for stack in optimizer.stacks
    )
    small = plan(groups, budget=planned.bytes - 1)
    assert [block.structure for block in small.blocks][:2] == names[:2]
    assert small.preconditioner.max_dense < 7


def test_layers_alike():
    planned = plan({"layers.*.w": (3, (4, 5)), "b": (2, (4,)), "scale": ()})
    names = [block.names[0] for block in planned.blocks]
    assert names == ["layers.0.w", "layers.1.w", "layers.2.w", "b", "b", "scale"]
    assert [block.shape for block in planned.blocks] == [(4, 5)] * 3 + [(4,)] * 2 + [(1,)]
    assert plan([(3, (4, 5)), (0, 7), (2,)]).blocks[-1].names == ("parameter 4",)


def test_parameters_that_share_a_Q_share_a_line():
    layers = [{"params": {"w": (3, 4), "b": (3,)}}, {"params": {"v": (2, 3)}}]
    assert [block.names for block in plan(layers, blocks=Affine()).blocks] == [("w", "b"), ("v",)]
    assert [block.shape for block in plan(layers, blocks=Joint()).blocks] == [(15,), (6,)]
    model = nn.Linear(4, 3)
    assert [block.shape for block in plan(model, blocks=Affine()).blocks] == [(3, 5)]


def test_shared_parameters_are_planned_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert len(plan(model).blocks) == 1
    for twice in ([model[0].weight] * 2, [torch.empty(2, device="meta")] * 2):
        with pytest.raises(ValueError, match="appears twice"):
            plan(twice)


@pytest.mark.parametrize("world_size", [1, 3, 8, 40])
def test_ranks_are_the_sums_of_their_blocks(world_size):
    planned = plan(SHAPES, world_size=world_size)
    assert [block.owner for block in planned.blocks] == assign([block.cost for block in planned.blocks], world_size)
    mine = defaultdict(list)
    for block in planned.blocks:
        mine[block.owner].append(block)
    assert len(planned.ranks) == world_size
    for i, rank in enumerate(planned.ranks):
        assert rank.blocks == len(mine[i])
        assert rank.bytes == sum(block.bytes for block in mine[i])
        assert rank.flops == sum(block.flops for block in mine[i])
        assert rank.cost == pytest.approx(sum(block.cost for block in mine[i]))
    costs = [rank.cost for rank in planned.ranks]
    assert planned.balance == pytest.approx(max(costs) / (sum(costs) / world_size))
    assert planned.bytes_per_rank == max(rank.bytes for rank in planned.ranks)
    assert planned.flops_per_rank == max(rank.flops for rank in planned.ranks)


def test_it_neither_runs_out_of_room_nor_idles():
    """By products alone, some ranks would do all of them and the others keep all the averages."""
    planned = plan(
        {"k": (64, (64, 512)), "w": (64, (512, 2048))}, preconditioner=Kronecker(max_dense=64), world_size=16
    )
    assert planned.balance < 1.02
    assert planned.bytes_per_rank < 1.1 * planned.bytes / 16


BUDGETED = {"wide": (3, (96, 200)), "square": (4, (64, 64)), "narrow": (5, (200, 16))}


@pytest.mark.parametrize("inverse_free", [True, False])
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_budget_is_kept_and_used(world_size, inverse_free):
    """One more length of dense axes would be too much."""
    wanted = Kronecker(max_dense=300, inverse_free=inverse_free)
    room = None
    for n in (300, 96, 64, 16, 0):
        expected = plan(BUDGETED, preconditioner=replace(wanted, max_dense=n), world_size=world_size)
        least = expected.bytes_per_rank
        for budget in (least, room or 2 * least):
            found = plan(BUDGETED, preconditioner=wanted, world_size=world_size, budget=budget)
            assert found == expected
        room = least - 1
    with pytest.raises(
        ValueError, match=rf"budget={room}: even Kronecker\(max_dense=0, .* takes {least} bytes .* on one"
    ):
        plan(BUDGETED, preconditioner=wanted, world_size=world_size, budget=room)


def test_the_planned_preconditioner_is_one_for_the_optimizer():
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    whole = plan(model)
    planned = plan(model, budget=whole.bytes - 1)
    assert planned.preconditioner == Kronecker(max_dense=32)
    optimizer = PSGD(model.parameters(), preconditioner=planned.preconditioner, probe=Whitening())
    assert [(b.shape, b.structure, b.precond_bytes, b.average_bytes) for b in planned.blocks] == really(optimizer)
    assert plan(model, budget=whole.bytes) == whole


@pytest.mark.parametrize("structure", [Dense(), LowRank(2), LimitedMemory(2), Diagonal()], ids=str)
def test_other_structures_fit_or_do_not(structure):
    whole = plan(SHAPES, preconditioner=structure)
    assert plan(SHAPES, preconditioner=structure, budget=whole.bytes) == whole
    with pytest.raises(ValueError, match=rf"even {re.escape(str(structure))} takes {whole.bytes} bytes"):
        plan(SHAPES, preconditioner=structure, budget=whole.bytes - 1)


def test_budgets_in_words():
    """A budget that is a little too small for dense factors, in three ways; ``parse`` has all others."""
    least = plan([(64, 64)] * 40).bytes
    found = [plan([(64, 64)] * 40, budget=budget) for budget in (least - 1, f"{least - 1} B", "1 MiB")]
    assert found[0] == found[1] == found[2]
    assert found[0].bytes < least
    assert plan([(64, 64)] * 40, budget="4GB").bytes == least


WRONG = [
    ({"world_size": 0}, ValueError, "world_size=0: plan wants a whole number of at least 1"),
    ({"world_size": 1.5}, ValueError, "world_size=1.5: plan wants a whole number"),
    ({"world_size": True}, ValueError, "world_size=True: plan wants a whole number"),
    ({"budget": 0}, ValueError, "budget=0: plan wants a number of bytes, a text such as '8 GiB', or None"),
    ({"budget": "8 GX"}, ValueError, "budget='8 GX': plan wants a number of bytes"),
    ({"budget": "much"}, ValueError, "budget='much': plan wants a number of bytes"),
    ({"budget": True}, ValueError, "budget=True: plan wants a number of bytes"),
    ({"budget": 1.5}, ValueError, "budget=1.5: plan wants a number of bytes"),
    ({"momentum": 0.9}, TypeError, "momentum=0.9: plan wants True or False"),
    ({"update_every": 0}, ValueError, "update_every=0: PSGD wants a whole number"),
    ({"preconditioner": "kron"}, TypeError, "preconditioner='kron': PSGD wants one of"),
    ({"blocks": PerTensor}, TypeError, "blocks=.*: PSGD wants one of .*an object of the class"),
    ({"precond_dtype": torch.float16}, ValueError, "precond_dtype=torch.float16: PSGD wants"),
    ({"model_or_shapes": []}, ValueError, r"model_or_shapes=\[\]: plan wants at least one parameter"),
    ({"model_or_shapes": 3}, TypeError, "model_or_shapes=3: plan wants a module, parameters, or shapes"),
    ({"model_or_shapes": "w"}, TypeError, "model_or_shapes='w': plan wants a module"),
    ({"model_or_shapes": torch.ones(3)}, TypeError, "plan wants a module, parameters, or shapes"),
    ({"model_or_shapes": [3]}, TypeError, "model_or_shapes: item 0 is 3; plan wants a module"),
    ({"model_or_shapes": [(4, 4), (4, -1)]}, TypeError, r"model_or_shapes: item 1 is \(4, -1\); plan wants"),
    ({"model_or_shapes": [(4, 2.0)]}, TypeError, r"item 0 is \(4, 2.0\); plan wants"),
    ({"model_or_shapes": [(0, (4, 4))]}, TypeError, r"item 0 is \(0, \(4, 4\)\); plan wants"),
    ({"model_or_shapes": {"w": "x"}}, TypeError, r"item 0 is \('w', 'x'\); plan wants"),
    ({"model_or_shapes": [(2, torch.ones(3))]}, TypeError, "item 0 is .*; plan wants"),
    ({"model_or_shapes": [torch.ones(3, dtype=torch.int64)]}, ValueError, "of dtype torch.int64; PSGD wants"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_wrong_arguments(wrong, kind, message):
    with pytest.raises(kind, match=message) as caught:
        plan(**{"model_or_shapes": SHAPES, **wrong})
    assert "\n" not in str(caught.value)


def test_empty_parameters_take_nothing():
    planned = plan([(0, 4), (0,)], world_size=2)
    assert (planned.blocks, planned.bytes, planned.flops, planned.balance) == ((), 0, 0, 1.0)
    assert "all 0" in str(planned)


def test_the_table():
    text = str(plan(SHAPES, preconditioner=Kronecker(max_dense=20), world_size=2))
    lines = text.splitlines()
    assert lines[0] == "Kronecker(max_dense=20, max_skew=256, inverse_free=True)"
    assert lines[1].split() == ["blocks", "shape", "structure", "Q", "average", "FLOP", "ranks"]
    assert lines[2].split("  ")[0] == "embedding"
    assert lines[3].startswith("6 × layers.*.w  16×24   symmetric 16 ⊗ diagonal 24")
    assert "1.1 KiB" in lines[3]
    assert lines[-2].startswith("all 14, of 10,401 elements: Q ")
    end = r"2 ranks: at most 34\.\d KiB and .* kFLOP, mean 28\.\d KiB and .* kFLOP, balance 1\.\d{3} \(one block\)"
    assert re.fullmatch(end, lines[-1])
    assert not str(plan([(4, (8, 8))], world_size=2)).endswith("(one block)")
    assert "1 rank: " in str(plan(SHAPES))
    assert " –  " in str(plan(SHAPES, momentum=False))


def test_a_table_of_many_kinds_stays_small():
    shapes = {f"a.rather.long.name.of.module.{i}.weight": (3 + i, 5, 7, 11, 2 + i) for i in range(40)}
    planned = plan(shapes, world_size=7)
    lines = str(planned).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= COLUMNS
    assert f"… and {40 - KINDS} more, of {40 - KINDS} kinds: Q " in lines[-3]


def test_it_can_be_kept_as_json():
    planned = plan(SHAPES, world_size=3)
    kept = json.loads(json.dumps(planned.to_dict()))
    assert kept == planned.to_dict()
    assert kept["bytes"] == planned.bytes
    assert [rank["bytes"] for rank in kept["ranks"]] == [rank.bytes for rank in planned.ranks]
    assert kept["blocks"][1]["names"] == ["layers.0.w"]
    assert kept["blocks"][1]["shape"] == [16, 24]
    assert kept["blocks"][1]["owner"] == planned.blocks[1].owner
    with pytest.raises(FrozenInstanceError):
        planned.blocks = ()
    assert isinstance(planned, Plan)


LARGE = """
import resource, runpy, sys, time
import psgd
docs = runpy.run_path(sys.argv[1])
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
planned = docs["planned"]("70 B", 512, budget="5 GiB")
print(time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_a_model_of_70_billion_parameters_takes_little_to_plan():
    result = subprocess.run(
        [sys.executable, "-c", LARGE, str(DOCS / "plan.py")], capture_output=True, text=True, check=True
    )
    seconds, mebibytes = map(float, result.stdout.split())
    assert seconds < 5
    assert mebibytes < 200


def test_the_page_shows_what_the_code_gives(capsys):
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    for section in runpy.run_path(str(DOCS / "plan.py"))["sections"]():
        assert section in page
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) >= 2
    names: dict[str, object] = {}
    for code, output in examples:
        exec(code, names)
        assert capsys.readouterr().out == output
