"""What a step asks of the ranks. A process that works alone is a rank without others: every answer is the identity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..ops.distributed import is_dtensor, several_ranks
from ..ops.parameters import Flags

T = TypeVar("T")
Grads = dict[int, Tensor]
Pairs = dict[int, tuple[Tensor, Tensor]]


class Moves(Protocol):
    """Steps of the parameters of a rank's own blocks."""

    #: weight decay of one step for each param group
    decays: list[float | Tensor]

    def steps(self) -> Iterable[tuple[int, Tensor]]: ...
    def apply_(self, params: Sequence[Tensor], group_of: Sequence[int], given: Collection[int], ok: Flags) -> None: ...


class Caught(AbstractContextManager["Caught"]):
    """Context that keeps the error of its block, or lets it pass.

    Args:
        keep: whether to keep it
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.error: Exception | None = None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self.keep and isinstance(error, Exception):
            self.error = error
        return self.error is not None


class Ranks:
    """The ranks of a step, as one of them sees them; here one that shares nothing with others."""

    #: whether steps can be recorded
    recordable = True
    #: whether every block belongs to this rank
    has_all = True

    def reset(self) -> None:
        """Forget which rank has which block."""

    def check_new(self, params: Iterable[Tensor], where: str) -> None:
        """Raise if parameters cannot be added."""

    def keep(self, blocks: Sequence[T], positions: Callable[[T], Sequence[int]], cost: Callable[[T], float]) -> list[T]:
        """Decide which rank has which block, and return those of this rank.

        Args:
            blocks: new blocks, the same on all ranks
            positions: gives the positions of the parameters of a block
            cost: gives the cost of a step of a block
        """
        return list(blocks)

    def owns(self, position: int) -> bool:
        """Whether this rank has the block of a parameter."""
        return True

    def catch(self) -> Caught:
        """Context in which an error is kept, to be raised together with the others; alone it is raised at once."""
        return Caught(keep=False)

    def same(self, what: str, value: Callable[[], Any], advice: str, error: Exception | None = None) -> None:
        """Raise on all ranks unless all have the same value; a rank that has an error raises that."""
        if error is not None:
            raise error

    def together(self, error: Exception | None, what: str) -> None:
        """Raise an error on the rank that has one, and on all others another that says so."""
        if error is not None:
            raise error

    def deciding_loss(self, loss: Any) -> Any:
        """The loss, if it may decide on the step."""
        return loss

    def align(self, grads: Grads, params: Sequence[Tensor]) -> Grads:
        """Gradients that are divided as their parameters are."""
        return grads

    def gather(self, grads: Grads, pairs: Pairs, params: Sequence[Tensor]) -> tuple[Grads, Pairs, list[Tensor]]:
        """Whole gradients and pairs of the blocks of this rank, and flags that say whether all gradients are finite.

        Without flags, the gradients are still to be checked.
        """
        return grads, pairs, []

    def all_true(self, ok: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Flags that are true if they are on all ranks."""
        return ok

    def length(self, mine: Tensor) -> Tensor:
        """Length over all ranks of a vector of which this rank has a part of some length."""
        return mine

    def move_(
        self, moves: Moves, params: Sequence[Tensor], group_of: Sequence[int], given: Collection[int], ok: Flags
    ) -> None:
        """``θ ← θ − (step + decay · θ)`` for all parameters that have gradients, if ``ok``."""
        moves.apply_(params, group_of, given, ok)

    def own_part(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """State dict without what belongs to blocks of other ranks."""
        return saved

    def check_copy(self) -> None:
        """Raise if the optimizer cannot be copied or pickled."""


class Alone(Ranks):
    """A process that shares nothing with others."""

    def check_new(self, params: Iterable[Tensor], where: str) -> None:
        if any(is_dtensor(p) for p in params):
            raise ValueError(f"params{where}: ranks hold only parts of them; PSGD wants such ones from the start")

    def deciding_loss(self, loss: Any) -> Any:
        """The loss of the only process; of several that do not talk to each other, none may go its own way."""
        return None if several_ranks() else loss
