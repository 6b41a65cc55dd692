"""Loading a state dict: all of it is checked and copied before torch installs any of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..ranks.base import Ranks
from . import checkpoint, choices
from .store import Store


@contextmanager
def loading(optimizer: Optimizer, store: Store, ranks: Ranks) -> Iterator[None]:
    """Context for torch's own ``load_state_dict``, in which loaded tensors keep the dtypes of this optimizer's state.

    Torch alone would cast them to the dtypes of their parameters, and so round a float32 ``Q`` of a bfloat16 model.
    """
    loaded: list[dict[str, Tensor]] = []
    groups: list[dict[str, Any]] = []
    checked = False

    def check_and_copy(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        nonlocal checked
        with ranks.catch() as caught:
            store.attach(optimizer.state, optimizer.param_groups)
            store.notice_changes()
            store.follow_model()
            groups.extend(checkpoint.checked_groups(saved, optimizer.param_groups, optimizer.defaults))
            part = ranks.own_part(saved)
            loaded.extend(checkpoint.checked_state(part, *store.expected(), store.may_be_missing()))
        checked = True
        # Before any rank installs anything, so that an error on one rank is an error on all ranks.
        ranks.together(caught.error, "load_state_dict")
        return {"state": {}, "param_groups": groups}

    def install(_: Optimizer) -> None:
        for group, before in zip(optimizer.param_groups, store.groups, strict=True):
            group.update(choices.only(before))
        optimizer.state.update(zip(store.params, loaded, strict=True))
        store.attach(optimizer.state, optimizer.param_groups)
        store.rebuild()

    # The first hook runs after the user's own hooks before loading, the second before the user's own hooks after it.
    handles = [
        optimizer.register_load_state_dict_pre_hook(check_and_copy),
        optimizer.register_load_state_dict_post_hook(install, prepend=True),
    ]
    try:
        yield
    except Exception as error:
        if not checked:  # a user's own hook failed, and the other ranks are waiting
            ranks.together(error, "load_state_dict")
        raise
    finally:
        for handle in handles:
            handle.remove()
