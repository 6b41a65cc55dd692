"""Operations of a step that involve all ranks; for a single process, each of them is the identity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..ops.agreement import Fact
from ..ops.distributed import is_dtensor, local, several_ranks
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
    """Context manager that stores the error of its block, or lets it propagate.

    Args:
        keep: whether to store the error instead of letting it propagate
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.error: Exception | None = None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self.keep and isinstance(error, Exception):
            self.error = error
        return self.error is not None


class Ranks:
    """Operations that involve all ranks of a step, as one rank calls them; in this class, for a rank without others."""

    #: whether ranks communicate in a step; communication cannot be captured in a CUDA graph, the work between it can
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
            positions: function that returns the positions of the parameters of a block
            cost: function that returns the cost of a step of a block
        """
        return list(blocks)

    def owns(self, position: int) -> bool:
        """Whether this rank owns the block of a parameter."""
        return True

    def catch(self) -> Caught:
        """Context manager that stores an error until all ranks can raise one together; a single rank raises at once."""
        return Caught(keep=False)

    def same(self, what: str, facts: Callable[[], list[Fact]], advice: str, error: Exception | None = None) -> None:
        """Raise on all ranks unless all have the same facts; a rank with an error raises that error."""
        if error is not None:
            raise error

    def together(self, error: Exception | None, what: str) -> None:
        """Raise an error on the rank where it occurred, and on all other ranks an error that names the operation."""
        if error is not None:
            raise error

    def deciding_loss(self, loss: Any) -> Any:
        """Loss that must be finite for the step to be taken, or None if the loss does not decide.

        Of a ``DTensor`` it is the part that this rank holds, as a step is taken only if all ranks want to take it.
        """
        return local(loss)

    def align(self, grads: Grads, params: Sequence[Tensor]) -> Grads:
        """Gradients, divided among the ranks in the same way as their parameters."""
        return grads

    def gather(self, grads: Grads, pairs: Pairs, params: Sequence[Tensor]) -> tuple[Grads, Pairs, list[Tensor]]:
        """Whole gradients and pairs of the blocks of this rank, and flags that tell whether all gradients are finite.

        If the list of flags is empty, the caller checks the gradients.
        """
        return grads, pairs, []

    def all_true(self, ok: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Flags that are true on every rank if they were true on all ranks, and else false on every rank."""
        return ok

    def length(self, mine: Tensor) -> Tensor:
        """Length of a vector that is divided among all ranks, from the length of this rank's part."""
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
    """Ranks of a process that shares no blocks with other processes."""

    def check_new(self, params: Iterable[Tensor], where: str) -> None:
        if any(is_dtensor(p) for p in params):
            raise ValueError(f"params{where}: ranks hold only parts of them; PSGD wants such ones from the start")

    def deciding_loss(self, loss: Any) -> Any:
        """Loss if this is the only process; else None, as the losses of replicas differ and must not decide."""
        return None if several_ranks() else super().deciding_loss(loss)
