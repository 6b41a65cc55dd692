"""Misspelt options: the error names the right one; keys of others stay."""

from __future__ import annotations

import inspect

import pytest
import torch

import psgd
from psgd import PSGD
from psgd.state import options


def theta() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("precond_rl", "precond_lr"),
        ("precondlr", "precond_lr"),
        ("weightdecay", "weight_decay"),
        ("wieght_decay", "weight_decay"),
        ("wd", "weight_decay"),
        ("learning_rate", "lr"),
        ("LR", "lr"),
        ("mometum", "momentum"),
        ("beta1", "momentum"),
        ("maximise", "maximize"),
        ("max_nrom", "max_norm"),
        ("update_evry", "update_every"),
    ],
)
def test_a_misspelt_option_is_named_with_the_right_one(wrong: str, right: str):
    with pytest.raises(TypeError, match=f"^{wrong}: PSGD has no such option; did you mean {right}\\?$"):
        PSGD([theta()], **{wrong: 0.1})
    with pytest.raises(TypeError, match=f"^'{wrong}' in param group 0: PSGD has no such option; .* '{right}'\\?$"):
        PSGD([{"params": [theta()], wrong: 0.1}])
    optimizer = PSGD([theta()])
    with pytest.raises(TypeError, match="in param group 1"):
        optimizer.add_param_group({"params": [theta()], wrong: 0.1})
    assert len(optimizer.param_groups) == 1


def test_a_misspelt_choice_is_named_too():
    with pytest.raises(TypeError, match="did you mean preconditioner"):
        PSGD([theta()], precondtioner=None)
    with pytest.raises(TypeError, match="did you mean 'criterion'"):
        PSGD([{"params": [theta()], "criteron": None}])
    with pytest.raises(TypeError, match="did you mean 'preconditioner'"):
        PSGD([{"params": [theta()], "precondtioner": None}])


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("eps", 1e-8, "damping"),
        ("betas", (0.9, 0.999), "momentum"),
        ("fused", True, "automatically"),
        ("foreach", True, "automatically"),
        ("capturable", True, "automatically"),
        ("amsgrad", True, "clip_outliers"),
        ("nesterov", True, "momentum"),
        ("dampening", 0.1, "momentum"),
        ("history_size", 10, "LowRank"),
        ("line_search_fn", "strong_wolfe", "without a line search"),
        ("max_iter", 20, "without a line search"),
    ],
)
def test_options_of_other_optimizers_are_answered_in_one_line(option, value, instead):
    model = torch.nn.Linear(2, 1)
    for make in (PSGD, psgd.whiten, psgd.newton):
        with pytest.raises(TypeError, match=f"^{option}: an option of other optimizers; .*{instead}") as error:
            make(list(model.parameters()) if make is PSGD else model, **{option: value})
        assert len(str(error.value).splitlines()) == 1


def test_every_option_of_adamw_and_sgd_is_known_or_answered():
    for other in (torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS):
        for option in list(inspect.signature(other).parameters)[1:]:
            if option not in inspect.signature(PSGD).parameters:
                with pytest.raises(TypeError, match="an option of other optimizers"):
                    PSGD([theta()], **{option: None})


def test_what_is_like_no_option_is_the_error_of_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyz'"):
        PSGD([theta()], xyz=1)


#: what schedulers of torch and other tools keep in param groups, and what users do
OTHERS = ["initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "base_momentum", "max_momentum", "min_momentum"]
OTHERS += ["name", "param_names", "lr_scale", "lr_mult", "layer", "my_weight_decay", "momentum_decay", "betas_", "id"]
OTHERS += [
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "eps",
    "nesterov",
    "decoupled_weight_decay",
    "max_precond_lr",
]


@pytest.mark.parametrize("key", OTHERS)
def test_keys_of_others_stay(key: str):
    optimizer = PSGD([{"params": [theta()], key: 1}])
    assert optimizer.param_groups[0][key] == 1


def test_every_option_is_no_misspelling():
    group = dict(PSGD([theta()]).param_groups[0], params=[theta()])
    assert set(options.NAMES) <= set(group)
    PSGD([group])


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=0.1, total_steps=10, base_momentum=0.8, max_momentum=0.9
        ),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
        lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01),
    ],
)
def test_groups_that_a_scheduler_has_seen_can_be_used_again(make):
    optimizer = PSGD([theta()], momentum=0.5)
    make(optimizer)
    PSGD([{**group, "params": [theta()]} for group in optimizer.param_groups])


def test_the_signature_is_that_of_the_constructor():
    names = inspect.signature(PSGD).parameters
    assert list(names)[:3] == ["params", "lr", "preconditioner"]
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in names.values())
