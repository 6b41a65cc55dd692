"""``psgd plan``: memory and work of PSGD for a model, given by its name, by a function that makes it, or by shapes."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Annotated, Any

import torch
import typer

from ... import Kronecker, __version__
from ...planning import plan as make_plan
from ..output import USAGE_ERROR, Json, Output

Shapes = dict[str, tuple[int, Any]]


def gpt2(layers: int, width: int) -> Shapes:
    """Shapes of the tensors of a GPT-2 by name; the embedding of tokens is the head too."""
    of_layer: dict[str, tuple[int, ...]] = {
        "qkv.weight": (3 * width, width),
        "qkv.bias": (3 * width,),
        "out.weight": (width, width),
        "out.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
        **{f"norm{k}.{part}": (width,) for k in (1, 2) for part in ("weight", "bias")},
    }
    all_layers: Shapes = {f"layers.*.{name}": (layers, shape) for name, shape in of_layer.items()}
    ends: Shapes = {"norm.weight": (1, (width,)), "norm.bias": (1, (width,))}
    return {"tokens": (50257, width), "places": (1024, width), **all_layers, **ends}


#: models that are known by name
MODELS = {
    "gpt2": gpt2(12, 768),
    "gpt2-medium": gpt2(24, 1024),
    "gpt2-large": gpt2(36, 1280),
    "gpt2-xl": gpt2(48, 1600),
}
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
SHAPE = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<lengths>\d+(?:x\d+)*)(?::(?P<count>\d+))?")


def plan(
    wanted: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help=f"Model to plan for: {', '.join(MODELS)}; a function MODULE:NAME that returns a model; "
            "or shapes of parameters, [NAME=]ROWSxCOLUMNS[:HOW_MANY].",
        ),
    ],
    ranks: Annotated[int, typer.Option(metavar="N", min=1, help="Number of processes that share the work.")] = 1,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Largest memory of the state on each rank: a number of bytes, or 4GB, 4GiB or 4g.",
            show_default="any",
        ),
    ] = None,
    max_dense: Annotated[
        int, typer.Option(metavar="N", min=0, help="Length of the longest axis with a dense factor.")
    ] = Kronecker().max_dense,
    precond_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype of Q, such as bfloat16.", show_default="float32 or wider")
    ] = None,
    update_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of steps from one update of Q to the next.")
    ] = 1,
    momentum: Annotated[bool, typer.Option(help="Whether an average of gradients is kept.")] = True,
    as_json: Json = False,
) -> None:
    """Compute the cost of PSGD for a model: the bytes and FLOPs of each block, and the rank that owns it.

    Nothing is allocated, so the model may be larger than the memory of the machine. With a budget, the longest axes get
    diagonal factors until the state fits. The function psgd.plan does the same in Python.

    \b
    Examples:
      psgd plan gpt2 --ranks 8 --precond-dtype bfloat16
      psgd plan embedding=50304x768 mlp=3072x768:24 --budget '1 GiB'
      psgd plan torchvision.models:resnet50 --json
    """
    printer = Output(as_json=as_json)
    try:
        found = make_plan(
            model_or_shapes(wanted),
            preconditioner=Kronecker(max_dense=max_dense),
            world_size=ranks,
            budget=int(budget) if budget is not None and budget.isdecimal() else budget,
            precond_dtype=None if precond_dtype is None else dtype(precond_dtype),
            momentum=momentum,
            update_every=update_every,
        )
    except (ValueError, TypeError) as error:
        raise USAGE_ERROR(str(error)) from None
    printer.results.say(found)
    printer.document({**found.to_dict(), "version": __version__})


def model_or_shapes(words: Sequence[str]) -> Any:
    """Argument for ``psgd.plan`` from words of the command line.

    >>> model_or_shapes(["head=10x64", "layers.*=64x64:3", "64"])
    [('head', (1, (10, 64))), ('layers.*', (3, (64, 64))), (1, (64,))]
    """
    for word in words:
        if word in MODELS or FUNCTION.fullmatch(word):
            if len(words) > 1:
                raise _unknown(f"{word!r} is a whole model, which leaves no place for others")
            return MODELS[word] if word in MODELS else _made(word)
    return [_shape(word) for word in words]


def dtype(word: str) -> torch.dtype:
    """Dtype from its name.

    >>> dtype("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, word, None)
    if not isinstance(found, torch.dtype):
        raise typer.BadParameter(f"{word!r} is no dtype of torch, such as bfloat16", param_hint="'--precond-dtype'")
    return found


def _shape(word: str) -> Any:
    found = SHAPE.fullmatch(word)
    if found is None:
        raise _unknown(
            f"{word!r} is none of {', '.join(MODELS)}, no function such as package.module:make, "
            "and no shape such as 64x32, name=64x32 or name=64x32:12 for 12 of them"
        )
    shape = (int(found["count"] or 1), tuple(map(int, found["lengths"].split("x"))))
    return (found["name"], shape) if found["name"] else shape


def _made(word: str) -> torch.nn.Module:
    """Model that a function returns, made without using memory."""
    module, _, name = word.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # as ``python -m`` does
    try:
        with torch.device("meta"), redirect_stdout(sys.stderr):  # stdout is for the plan
            make: Any = importlib.import_module(module)
            for part in name.split("."):
                make = getattr(make, part)
            made = make()
    except (Exception, SystemExit) as error:  # the user's code may do anything
        raise _unknown(f"{word}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(here)
    if not isinstance(made, torch.nn.Module):
        raise _unknown(f"{word} returns {type(made).__name__}, and not a torch.nn.Module")
    return made


def _unknown(message: str) -> Exception:
    return typer.BadParameter(message, param_hint="'MODEL'")
