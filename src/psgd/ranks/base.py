"""Operations of a step that involve all ranks; for a process that works alone, each of them is the identity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..ops.agreement import Fact
from ..ops.distributed import is_dtensor, several_ranks
from ..ops.parameters import Flags

T = TypeVar("T")
Grads = dict[int, Tensor]
Pairs = dict[int, tuple[Tensor, Tensor]]


class Moves(Protocol):
    """Steps of the parameters of this rank's own blocks."""

    #: weight decay of one step for each param group
    decays: list[float | Tensor]

    def steps(self) -> Iterable[tuple[int, Tensor]]: ...
    def apply_(self, params: Sequence[Tensor], group_of: Sequence[int], given: Collection[int], ok: Flags) -> None: ...


class Caught(AbstractContextManager["Caught"]):
    """Context manager that keeps the error of its block, or lets it pass.

    Args:
        keep: whether to keep the error
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.error: Exception | None = None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self.keep and isinstance(error, Exception):
            self.error = error
        return self.error is not None


class Ranks:
    """Ranks of a step, from the view of one of them; here of one that shares nothing with others."""

    #: whether ranks send each other anything in a step: that cannot be recorded, but what a rank does alone can
    sends = False
    #: whether every block belongs to this rank
    has_all = True

    def reset(self) -> None:
        """Forget which rank owns which block."""

    def check_new(self, params: Iterable[Tensor], where: str) -> None:
        """Raise if parameters cannot be added."""

    def keep(self, blocks: Sequence[T], positions: Callable[[T], Sequence[int]], cost: Callable[[T], float]) -> list[T]:
        """Decide which rank owns which block, and return the blocks of this rank.

        Args:
            blocks: new blocks, the same on all ranks
            positions: returns the positions of the parameters of a block
            cost: returns the cost of a step of a block
        """
        return list(blocks)

    def owns(self, position: int) -> bool:
        """Whether this rank owns the block of a parameter."""
        return True

    def catch(self) -> Caught:
        """Context manager that keeps an error until all ranks can raise one together; alone it is raised at once."""
        return Caught(keep=False)

    def same(self, what: str, facts: Callable[[], list[Fact]], advice: str, error: Exception | None = None) -> None:
        """Raise on all ranks unless all have the same facts; a rank with an error raises that error."""
        if error is not None:
            raise error

    def together(self, error: Exception | None, what: str) -> None:
        """Raise an error on the rank where it occurred, and on all others one that says so."""
        if error is not None:
            raise error

    def deciding_loss(self, loss: Any) -> Any:
        """Loss that decides whether the step is taken, or None."""
        return loss

    def align(self, grads: Grads, params: Sequence[Tensor]) -> Grads:
        """Gradients divided as their parameters are."""
        return grads

    def gather(self, grads: Grads, pairs: Pairs, params: Sequence[Tensor]) -> tuple[Grads, Pairs, list[Tensor]]:
        """Whole gradients and pairs of the blocks of this rank, and flags that say whether all gradients are finite.

        If there are no flags, the caller checks the gradients.
        """
        return grads, pairs, []

    def all_true(self, ok: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Flags that are true if they are true on all ranks."""
        return ok

    def length(self, mine: Tensor) -> Tensor:
        """Length of a vector that is divided over all ranks, from the length of this rank's part."""
        return mine

    def move_(
        self, moves: Moves, params: Sequence[Tensor], group_of: Sequence[int], given: Collection[int], ok: Flags
    ) -> None:
        """``θ ← θ − (step + decay · θ)`` for all parameters that have gradients, if ``ok``."""
        moves.apply_(params, group_of, given, ok)

    def own_part(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """State dict without the state of blocks of other ranks."""
        return saved

    def check_copy(self) -> None:
        """Raise if the optimizer cannot be copied or pickled."""


class Alone(Ranks):
    """Process that shares nothing with others."""

    def check_new(self, params: Iterable[Tensor], where: str) -> None:
        if any(is_dtensor(p) for p in params):
            raise ValueError(f"params{where}: ranks hold only parts of them; PSGD wants such ones from the start")

    def deciding_loss(self, loss: Any) -> Any:
        """Loss of the only process; None if there are others, as replicas must not decide differently."""
        return None if several_ranks() else loss
