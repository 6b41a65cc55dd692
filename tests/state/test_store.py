"""Saving, loading and copying: nothing is lost, nothing is shared by accident, nothing is loaded by halves."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from psgd import PSGD, Affine, Dense, Diagonal, FiniteDifference, Joint, Kronecker, LimitedMemory, LowRank, Whitening
from psgd.engine.stack import LENGTHS

from ..cases import PROBES, STRUCTURES, batch, probes, small_model, structures, train

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def make(structure=None, probe=None, dtype=torch.float32, dropout=0.0, **options):
    model = small_model(dtype, dropout)
    options = {"lr": 0.05, "momentum": 0.5, "update_every": 2, "max_norm": 1.0, **options}
    optimizer = PSGD(
        model.parameters(), preconditioner=structure or Kronecker(), probe=probe or FiniteDifference(), **options
    )
    return model, optimizer


def bits(model: nn.Module, optimizer: PSGD) -> bytes:
    """Every bit of parameters and state."""
    stream = io.BytesIO()
    tensors = [p.detach() for p in model.parameters()]
    tensors += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    for t in tensors:
        stream.write(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return stream.getvalue()


@pytest.mark.slow
@structures
@probes
def test_resume_is_exact_to_the_bit(structure, probe):
    """6 steps, save, load into a new model and optimizer, 6 more: as 12 in one go. Dropout is on.

    The dtypes take turns; the test below has another one for each structure and probe.
    """
    dtype = DTYPES[(STRUCTURES.index(structure) + PROBES.index(probe)) % len(DTYPES)]
    straight = make(structure, probe, dtype, dropout=0.1)
    torch.manual_seed(5)
    train(*straight, 0, 12)

    first = make(structure, probe, dtype, dropout=0.1)
    torch.manual_seed(5)
    train(*first, 0, 6)
    file = io.BytesIO()
    torch.save(
        {"model": first[0].state_dict(), "optimizer": first[1].state_dict(), "random": torch.get_rng_state()}, file
    )
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = make(structure, probe, dtype, dropout=0.1)
    second[0].load_state_dict(saved["model"])
    second[1].load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    train(*second, 6, 12)
    assert bits(*second) == bits(*straight)
    assert bits(*second) != bits(*first)


def continued(folder: Path) -> None:
    """Go on with what was saved and pickled there, and write the bits of what becomes of it."""
    torch.set_num_threads(1)
    results = []
    for saved in torch.load(folder / "saved.pt", weights_only=True):
        pair = make(STRUCTURES[saved["structure"]], PROBES[saved["probe"]], DTYPES[saved["dtype"]])
        pair[0].load_state_dict(saved["model"])
        pair[1].load_state_dict(saved["optimizer"])
        train(*pair, 5, 10)
        results.append(bits(*pair))
    for copied in pickle.loads((folder / "pickled").read_bytes()):
        train(*copied, 5, 10)
        results.append(bits(*copied))
    (folder / "results").write_bytes(pickle.dumps(results))


@pytest.mark.slow
def test_resume_in_a_new_process(tmp_path: Path, forks: BaseContext):
    """The same by state dict and by pickle, where nothing is left in memory; the dtypes take turns."""
    saved, pickled, expected = [], [], []
    for i, structure in enumerate(STRUCTURES):
        for j, probe in enumerate(PROBES):
            k = (i + j + 1) % len(DTYPES)
            pair = make(structure, probe, DTYPES[k])
            train(*pair, 0, 5)
            state = copy.deepcopy({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()})
            saved.append({"structure": i, "probe": j, "dtype": k, **state})
            pickled.append(copy.deepcopy(pair))
            train(*pair, 5, 10)
            expected.append(bits(*pair))
    torch.save(saved, tmp_path / "saved.pt")
    (tmp_path / "pickled").write_bytes(pickle.dumps(pickled))
    expected += expected
    process = forks.Process(target=continued, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert pickle.loads((tmp_path / "results").read_bytes()) == expected


@structures
@probes
def test_deepcopy_continues_alike_and_apart(structure, probe):
    pair = make(structure, probe)
    train(*pair, 0, 4)
    copied = copy.deepcopy(pair)
    assert bits(*copied) == bits(*pair)
    train(*copied, 4, 8)
    before = bits(*pair)
    train(*pair, 4, 8)
    assert before != bits(*pair)
    assert bits(*copied) == bits(*pair)


def test_pickle_does_not_carry_whole_stacks():
    """Twenty equal layers share one stack; each of their views must not bring all of it along."""
    model = nn.Sequential(*[nn.Linear(30, 30, bias=False) for _ in range(20)])
    optimizer = PSGD(model.parameters(), probe=Whitening())
    assert len(optimizer.stacks) == 1
    assert len(pickle.dumps(optimizer)) < 2 * (20 * 3 * 30 * 30 * 4)


def test_state_is_made_of_tensors_for_parameters_only():
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    assert set(optimizer.state) == set(model.parameters())
    for state in optimizer.state.values():
        assert all(isinstance(value, torch.Tensor) for value in state.values())
        assert int(state["step"]) == 3
    for group in optimizer.state_dict()["param_groups"]:
        assert all(value is None or isinstance(value, (int, float, list)) for value in group.values())


@dtypes
def test_every_buffer_keeps_its_dtype(dtype):
    """Torch would cast them to the dtype of the parameter."""
    _, optimizer = make(dtype=dtype)
    other = make(dtype=dtype)[1]
    other.load_state_dict(optimizer.state_dict())
    right = torch.float64 if dtype == torch.float64 else torch.float32
    for state in other.state.values():
        for name, value in state.items():
            assert value.dtype == (torch.int64 if name in ("step", "skipped") else right)


def test_loading_neither_changes_nor_aliases_its_argument():
    pair = make()
    train(*pair, 0, 5)
    saved = copy.deepcopy(pair[1].state_dict())
    kept = copy.deepcopy(saved)
    other = make()
    other[1].load_state_dict(saved)
    train(*other, 5, 10)
    other[1].param_groups[0]["lr"] = 7.0
    assert str(saved) == str(kept)
    for i, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(value, kept["state"][i][name])


def spoil_shape(saved):
    saved["state"][0]["Q0_root"] = torch.eye(3)
    return "'Q0_root'"


def spoil_dtype(saved):
    saved["state"][0]["Q1_root"] = saved["state"][0]["Q1_root"].to(torch.complex64)
    return "'Q1_root'"


def spoil_counter(saved):
    saved["state"][0]["step"] = saved["state"][0]["step"].double()
    return "'step'"


def spoil_count(saved):
    saved["state"][0]["skipped"].fill_(-1)
    return r"\['state'\]\[0\]\['skipped'\]: -1; PSGD wants a count of at least 0"


def spoil_weight(saved):
    saved["state"][2]["momentum_weight"].fill_(1.5)
    return r"\['state'\]\[2\]\['momentum_weight'\]: 1.5; PSGD wants a sum of weights"


def spoil_missing(saved):
    del saved["state"][2]["Q0_root"]
    return "'Q0_root'"


def spoil_extra(saved):
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    return "'exp_avg'"


def spoil_type(saved):
    saved["state"][1]["step"] = "many"
    return "'step'"


def spoil_parameter(saved):
    del saved["state"][4]
    return r"\[4\]"


def spoil_unknown(saved):
    saved["state"][99] = {}
    return r"\[99\]"


def spoil_number(saved):
    saved["param_groups"][0]["precond_lr"] = 3.0
    return "precond_lr=3.0"


def spoil_groups(saved):
    saved["param_groups"].append({"params": []})
    return "param_groups"


def spoil_whole(saved):
    del saved["state"]
    return "'state'"


def spoil_state_kind(saved):
    saved["state"] = None
    return r"\['state'\]: NoneType where a dict should be"


def spoil_entry_kind(saved):
    saved["state"][1] = None
    return r"\['state'\]\[1\]: NoneType where a dict should be"


def spoil_groups_kind(saved):
    saved["param_groups"] = {}
    return r"\['param_groups'\]: dict where a list should be"


def spoil_params(saved):
    del saved["param_groups"][0]["params"]
    return r"\['param_groups'\]\[0\]\['params'\]: NoneType where a list should be"


SPOILERS = [
    spoil_shape,
    spoil_dtype,
    spoil_counter,
    spoil_count,
    spoil_weight,
    spoil_missing,
    spoil_extra,
    spoil_type,
    spoil_parameter,
    spoil_unknown,
    spoil_number,
    spoil_groups,
    spoil_whole,
    spoil_state_kind,
    spoil_entry_kind,
    spoil_groups_kind,
    spoil_params,
]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
def test_a_bad_state_dict_is_named_and_changes_nothing(spoil):
    pair = make()
    train(*pair, 0, 5)
    saved = copy.deepcopy(pair[1].state_dict())
    train(*pair, 5, 7)
    before, groups = bits(*pair), copy.deepcopy(pair[1].state_dict()["param_groups"])
    with pytest.raises(ValueError, match=spoil(saved)):
        pair[1].load_state_dict(saved)
    assert bits(*pair) == before
    assert pair[1].state_dict()["param_groups"] == groups
    straight = make()
    train(*straight, 0, 10)
    train(*pair, 7, 10)
    assert bits(*pair) == bits(*straight)


@structures
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 0.0])
def test_a_checkpoint_that_no_step_can_go_on_from_is_refused(structure, bad):
    """Loaded, one element that is not finite would have every later step of all parameters skipped."""
    pair = make(structure)
    train(*pair, 0, 5)
    before = bits(*pair)
    for i, entries in pair[1].state_dict()["state"].items():
        for name, value in entries.items():
            may_be_zero = bad == 0 and name.startswith(("momentum", *LENGTHS, "Q0_U", "Q0_V", "Q0_Q12"))
            if not value.is_floating_point() or value.numel() == 0 or may_be_zero:
                continue
            saved = copy.deepcopy(pair[1].state_dict())
            spoilt = saved["state"][i][name]
            spoilt[0 if spoilt.ndim else ()] = bad
            with pytest.raises(ValueError, match=rf"state_dict\['state'\]\[{i}\]\['{name}'\]: .*PSGD cannot go on"):
                pair[1].load_state_dict(saved)
            assert bits(*pair) == before


@pytest.mark.parametrize(
    ("structure", "name", "spoil", "message"),
    [
        (Dense(), "Q0_full", lambda Q: Q.diagonal()[1:2].zero_(), "'Q0_full'.: its diagonal is not positive"),
        (Dense(), "Q0_full", lambda Q: Q[-1].fill_(2.0), "'Q0_full'.: it has elements below its diagonal"),
        (LimitedMemory(3), "Q0_Q11", lambda Q: Q.neg_(), "'Q0_Q11'.: its diagonal is not positive"),
        (LimitedMemory(3), "Q0_Q11", lambda Q: Q[-1].fill_(2.0), "'Q0_Q11'.: it has elements below its diagonal"),
        (LimitedMemory(3), "Q0_Q22", lambda Q: Q[-1:].neg_(), "'Q0_Q22'.: it is not positive"),
        (LowRank(2), "Q0_diag", lambda Q: Q[-1:].neg_(), "'Q0_diag'.: it is not positive"),
        (LowRank(2), "Q0_U", lambda Q: Q.fill_(-1e4), "'Q0_U', 'Q0_V'.: the determinant"),
        (Diagonal(), "Q0_diag", lambda Q: Q[-1:].neg_(), "'Q0_diag'.: it is not positive"),
        (Kronecker(), "Q1_root", lambda Q: Q[:, 1].zero_(), "'Q1_root'.: it has a row or column of zeros"),
        (Kronecker(max_dense=0), "Q1_diag", lambda Q: Q[-1:].zero_(), "'Q1_diag'.: it is not positive"),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_a_singular_q_is_refused(structure, name, spoil, message):
    pair = make(structure)
    train(*pair, 0, 5)
    saved = copy.deepcopy(pair[1].state_dict())
    if name == "Q0_U":
        saved["state"][2]["Q0_V"].abs_()
    spoil(saved["state"][2][name])
    with pytest.raises(ValueError, match=rf"\['state'\]\[2\].{message}"):
        pair[1].load_state_dict(saved)


FORMATS = [*DTYPES, torch.float16]
#: every structure from every and into every dtype; all pairs of them occur, with some structure
CONVERSIONS = [
    (structure, theirs, FORMATS[(i + k) % len(FORMATS)])
    for k, structure in enumerate(STRUCTURES)
    for i, theirs in enumerate(FORMATS)
]


@pytest.mark.parametrize(("structure", "theirs", "mine"), CONVERSIONS, ids=str)
def test_a_state_of_another_precision_is_converted(structure, theirs, mine):
    """As torch's optimizers do; each tensor gets the dtype that it would have had here."""
    pair, other = make(structure, Whitening(), theirs), make(structure, Whitening(), mine)
    train(*pair, 0, 3)
    other[0].load_state_dict(pair[0].state_dict())
    fresh = {i: {k: v.dtype for k, v in s.items()} for i, s in other[1].state_dict()["state"].items()}
    other[1].load_state_dict(pair[1].state_dict())
    state = other[1].state_dict()["state"]
    assert {i: {k: v.dtype for k, v in s.items()} for i, s in state.items()} == fresh
    for i, entries in pair[1].state_dict()["state"].items():
        for name, value in entries.items():
            assert torch.equal(state[i][name], value.to(state[i][name].dtype))
    train(*other, 3, 6)
    assert int(other[1].state[other[0][0].weight]["step"]) == 6
    assert int(other[1].state[other[0][0].weight]["skipped"]) == 0


def test_the_precision_of_q_is_that_of_precond_dtype():
    pair, other = make(probe=Whitening()), make(probe=Whitening(), precond_dtype=torch.bfloat16)
    train(*pair, 0, 3)
    other[1].load_state_dict(pair[1].state_dict())
    state = other[1].state[other[0][0].weight]
    assert state["Q0_root"].dtype == torch.bfloat16
    assert state["momentum"].dtype == torch.float32
    train(*other, 3, 6)


def test_what_another_precision_cannot_hold_is_told():
    pair, other = make(dtype=torch.float64), make()
    saved = copy.deepcopy(pair[1].state_dict())
    saved["state"][0]["Q0_root"][0, 0] = 1e100
    pair[1].load_state_dict(saved)
    with pytest.raises(ValueError, match=r"\[0\]\['Q0_root'\]: too large for torch.float32"):
        other[1].load_state_dict(saved)
    pair, other = make(Dense(), dtype=torch.float64), make(Dense())
    saved = copy.deepcopy(pair[1].state_dict())
    saved["state"][0]["Q0_full"][0, 0] = 1e-100
    pair[1].load_state_dict(saved)
    with pytest.raises(ValueError, match=r"\[0\]\['Q0_full'\]: its diagonal is not positive"):
        other[1].load_state_dict(saved)


def saved_bytes(what: object) -> int:
    file = io.BytesIO()
    torch.save(what, file)
    return len(file.getvalue())


def test_an_entry_is_saved_without_the_stack_that_it_is_a_view_of():
    """And all entries together as before, but for the record of each tensor in the file, as with torch's optimizers."""
    model = nn.Sequential(*[nn.Linear(30, 30, bias=False) for _ in range(20)])
    optimizer = PSGD(model.parameters(), probe=Whitening())
    assert len(optimizer.stacks) == 1
    saved = optimizer.state_dict()
    entry = saved["state"][3]
    record = 512  # of a tensor, in a file of torch
    assert saved_bytes(entry) < sum(v.nbytes for v in entry.values()) + record * (len(entry) + 2)
    views = {**saved, "state": {i: optimizer.state[p] for i, p in enumerate(model.parameters())}}
    assert saved_bytes(saved) < saved_bytes(views) + 256 * 20 * len(entry)
    for i, p in enumerate(model.parameters()):  # nothing is copied
        for name, value in optimizer.state[p].items():
            assert saved["state"][i][name].data_ptr() == value.data_ptr()
            assert torch.equal(saved["state"][i][name], value)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "size": saved_bytes(state["state"][3])})
    assert optimizer.state_dict()["size"] == saved_bytes(entry)


def test_a_state_dict_of_an_earlier_version_is_completed():
    """Entries and options that did not exist then get what they would have had."""
    pair = make(momentum=0.0)
    train(*pair, 0, 4)
    saved = copy.deepcopy(pair[1].state_dict())
    for state in saved["state"].values():
        del state["skipped"]
    for group in saved["param_groups"]:
        del group["max_norm"]
        del group["seed"]
    other = make(momentum=0.0)
    other[0].load_state_dict(pair[0].state_dict())
    other[1].load_state_dict(saved)
    train(*other, 4, 8)
    train(*pair, 4, 8)
    assert bits(*other) == bits(*pair)


def test_numbers_of_the_checkpoint_win_over_the_constructor():
    """Also the seed: otherwise the trajectory would not continue."""
    pair = make(seed=3)
    train(*pair, 0, 4)
    other = make(seed=4, lr=0.7)
    other[0].load_state_dict(pair[0].state_dict())
    other[1].load_state_dict(pair[1].state_dict())
    train(*other, 4, 8)
    train(*pair, 4, 8)
    assert bits(*other) == bits(*pair)


def test_hooks_see_the_state_before_and_after_loading():
    pair = make()
    train(*pair, 0, 4)
    other = make()[1]
    seen = {}

    def before(optimizer, state_dict):
        seen["before"] = int(state_dict["state"][0]["step"])
        for group in state_dict["param_groups"]:
            group["lr"] = 0.125

    def after(optimizer):
        state = next(iter(optimizer.state.values()))
        seen["after"] = (int(state["step"]), "Q0_root" in state)

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(after)
    other.load_state_dict(copy.deepcopy(pair[1].state_dict()))
    assert seen == {"before": 4, "after": (4, True)}
    assert other.param_groups[0]["lr"] == 0.125
    pair[1].register_state_dict_post_hook(lambda optimizer, state_dict: {**state_dict, "mine": 1})
    assert pair[1].state_dict()["mine"] == 1


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("blocks", [None, Affine(), Joint()], ids=str)
def test_distributed_checkpoint_round_trip(flat, probe, blocks, tmp_path):
    def new():
        model = small_model()
        params = Affine.groups(model) if isinstance(blocks, Affine) else model.parameters()
        options = {} if blocks is None else {"blocks": blocks}
        return model, PSGD(params, lr=0.05, momentum=0.5, probe=probe, max_norm=1.0, **options)

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    pair = new()
    train(*pair, 0, 5)
    saved = copy.deepcopy(get_optimizer_state_dict(pair[0], pair[1], options=options))
    other = new()
    other[0].load_state_dict(pair[0].state_dict())
    train(*other, 0, 1)  # with a state of its own
    other[0].load_state_dict(pair[0].state_dict())
    set_optimizer_state_dict(other[0], other[1], saved, options=options)
    train(*other, 5, 10)
    train(*pair, 5, 10)
    assert bits(*other) == bits(*pair)


OPTIONS = [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}, {"cpu_offload": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_distributed_checkpoint_into_a_fresh_optimizer(options, frozen):
    """With momentum, and with the weight of a layer frozen: its bias holds what belongs to both."""

    def new():
        model = small_model()
        model[0].weight.requires_grad_(not frozen)
        return model, PSGD(Affine.groups(model), lr=0.05, momentum=0.5, blocks=Affine(), max_norm=1.0)

    chosen = StateDictOptions(**options)
    pair, other = new(), new()
    train(*pair, 0, 5)
    saved = copy.deepcopy(get_optimizer_state_dict(pair[0], pair[1], options=chosen))
    other[0].load_state_dict(pair[0].state_dict())
    set_optimizer_state_dict(other[0], other[1], saved, options=chosen)
    train(*other, 5, 10)
    train(*pair, 5, 10)
    assert bits(*other) == bits(*pair)
    home = pair[0][0].bias if frozen else pair[0][0].weight
    assert not torch.equal(pair[1].state[home]["Q0_root"], torch.eye(6))


def test_a_state_that_a_tool_has_dropped_is_missed():
    """Frozen in mid-run: the state of the weight, which belongs to the whole layer, must not get lost unseen."""
    model = small_model()
    optimizer = PSGD(Affine.groups(model), lr=0.05, blocks=Affine())
    train(model, optimizer, 0, 3)
    model[0].weight.requires_grad_(False)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]
    with pytest.raises(ValueError, match=r"\['state'\]\[0\]: missing"):
        optimizer.load_state_dict(saved)


def test_distributed_checkpoint_files(tmp_path):
    pair, other = make(), make()
    train(*pair, 0, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that there is no process group
        torch.distributed.checkpoint.save(
            {"optimizer": get_optimizer_state_dict(*pair)}, checkpoint_id=tmp_path / "checkpoint"
        )
        target = {"optimizer": get_optimizer_state_dict(*other)}
        torch.distributed.checkpoint.load(target, checkpoint_id=tmp_path / "checkpoint")
    other[0].load_state_dict(pair[0].state_dict())
    set_optimizer_state_dict(*other, target["optimizer"])
    train(*other, 5, 10)
    train(*pair, 5, 10)
    assert bits(*other) == bits(*pair)


def test_model_cast_before_loading():
    pair = make(dtype=torch.float64)
    train(*pair, 0, 5)
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05, momentum=0.5, update_every=2, max_norm=1.0)
    model.double()
    model.load_state_dict(pair[0].state_dict())
    optimizer.load_state_dict(pair[1].state_dict())
    train(model, optimizer, 5, 10)
    train(*pair, 5, 10)
    assert bits(model, optimizer) == bits(*pair)


def test_distributed_checkpoint_of_a_fresh_optimizer_is_harmless():
    model, optimizer = make()
    before = [p.detach().clone() for p in model.parameters()]
    get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    fresh = make()
    train(model, optimizer, 0, 5)
    train(*fresh, 0, 5)
    assert bits(model, optimizer) == bits(*fresh)


def test_frozen_parameters_may_lack_a_saved_state():
    """Torch's distributed checkpoint drops it."""
    pair = make()
    next(pair[0].parameters()).requires_grad_(False)
    train(*pair, 0, 3)
    saved = copy.deepcopy(pair[1].state_dict())
    del saved["state"][0]
    pair[1].load_state_dict(saved)
    train(*pair, 3, 5)


def test_a_first_step_of_zero_gradients_at_zero_lr_changes_nothing():
    model, optimizer = make(probe=Whitening(), lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {k: v.clone() for k, v in optimizer.state[next(model.parameters())].items()}
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    after = optimizer.state[next(model.parameters())]
    assert torch.equal(after["Q0_root"], before["Q0_root"])


def test_a_state_replaced_from_outside_is_used():
    """As offloading does: tensors leave and come back as other tensors."""
    pair, other = make(), make()
    train(*pair, 0, 5)
    train(*other, 0, 5)
    for state in other[1].state.values():
        for name in list(state):
            state[name] = state[name].clone()
    train(*pair, 5, 10)
    train(*other, 5, 10)
    assert bits(*pair) == bits(*other)


def test_a_state_that_was_cleared_is_made_anew():
    """As some recipes restart an optimizer: it goes on as a new one would."""
    pair = make()
    train(*pair, 0, 5)
    pair[1].state.clear()
    other = make()
    other[0].load_state_dict(pair[0].state_dict())
    train(*pair, 0, 5)
    train(*other, 0, 5)
    assert bits(*pair) == bits(*other)


def test_a_group_taken_out_is_left_alone():
    model = small_model()
    optimizer = PSGD([{"params": model[0].parameters()}, {"params": model[3:].parameters()}], lr=0.05, momentum=0.5)
    train(model, optimizer, 0, 3)
    Q = optimizer.state[model[3].weight]["Q0_root"].clone()
    optimizer.param_groups.pop(0)
    before = model[0].weight.detach().clone()
    optimizer.param_groups[0]["update_every"] = 100
    train(model, optimizer, 3, 5)
    assert torch.equal(model[0].weight, before)
    assert torch.equal(optimizer.state[model[3].weight]["Q0_root"], Q)
    assert int(optimizer.state[model[3].weight]["step"]) == 5


def test_only_groups_with_momentum_keep_an_average():
    """Also if blocks of one shape are in both, and if momentum is switched on later."""
    a, b = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    optimizer = PSGD([{"params": [a], "momentum": 0.9}, {"params": [b]}], lr=0.01, probe=Whitening(), momentum=0.0)

    def step() -> None:
        for p in (a, b):
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    assert "momentum" in optimizer.state[a]
    assert "momentum" not in optimizer.state[b]
    optimizer.param_groups[1]["momentum"] = 0.5
    step()
    assert float(optimizer.state[a]["momentum_weight"]) == pytest.approx(1 - 0.9**2)
    assert float(optimizer.state[b]["momentum_weight"]) == pytest.approx(0.5)


def test_stacks_have_blocks_of_one_param_group():
    params = [nn.Parameter(torch.ones(3, 4)) for _ in range(5)]
    optimizer = PSGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.01)
    assert [stack.positions for stack in optimizer.stacks] == [[0, 1], [2, 3, 4]]


def test_looking_at_it_in_inference_mode_does_no_harm():
    pair, other = make(), make()
    with torch.inference_mode():
        assert "PSGD" in repr(pair[1])
    train(*pair, 0, 3)
    train(*other, 0, 3)
    assert bits(*pair) == bits(*other)


def test_group_added_later_is_part_of_the_checkpoint():
    def extended():
        model, optimizer = make(Diagonal())
        extra = nn.Linear(6, 6, bias=False)
        nn.init.eye_(extra.weight)
        return model, optimizer, extra

    model, optimizer, extra = extended()
    train(model, optimizer, 0, 5)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.01})
    whole = nn.Sequential(model[:3], extra, model[3:])
    train(whole, optimizer, 5, 10)
    other, other_optimizer, other_extra = extended()
    other_optimizer.add_param_group({"params": other_extra.parameters()})
    other_whole = nn.Sequential(other[:3], other_extra, other[3:])
    other_whole.load_state_dict(whole.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    train(whole, optimizer, 10, 15)
    train(other_whole, other_optimizer, 10, 15)
    assert bits(whole, optimizer) == bits(other_whole, other_optimizer)


def test_dense_state_has_one_block_for_a_joint_group():
    model = small_model()
    optimizer = PSGD(model.parameters(), preconditioner=Dense(), blocks=Joint(), probe=Whitening())
    n = sum(p.numel() for p in model.parameters())
    first, *rest = model.parameters()
    assert optimizer.state[first]["Q0_full"].shape == (n, n)
    assert all(set(optimizer.state[p]) == {"step", "skipped"} for p in rest)
    x, _ = batch(0)
    assert model(x).shape == (16, 1)


def test_a_param_group_that_was_emptied_does_not_shift_the_numbers_of_others():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = PSGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.0}], probe=Whitening())
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["params"].clear()
        a.grad, b.grad = torch.randn(3), torch.randn(3)
        optimizer.step()
    assert torch.equal(b, torch.ones(3))
