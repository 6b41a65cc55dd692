"""Where a pair ``(δθ, δg)`` comes from.

A probe evaluates loss and gradients once for the step of the parameters and, where a preconditioner is to be updated,
measures how the gradients change.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.distributed import average_, is_divided, several_ranks
from ..tangent import largest
from .closures import Closure
from .restore import Gradients

#: standard normal numbers of the shape and dtype of ``real(parameter)``, for the parameter at a position
Noise = Callable[[int], Tensor]


@dataclass
class Evaluation:
    """Loss and gradients at the parameters and, by position, the pairs that were measured around them."""

    loss: Any
    grads: list[Tensor | None]
    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Probe(ABC):
    """Evaluates gradients and measures pairs.

    Args:
        damping: the curvature, relative to the largest seen in a block, below which it counts as noise. Where the
            gradient does not depend on a direction at all, it bounds ``P`` by the inverse of this curvature. The
            default, ``eps ** 0.75`` of the preconditioner's dtype, lies between what rounding hides from an exact
            product (``eps``) and from a finite difference (``eps ** 0.5``).
    """

    def __init__(self, damping: float | None = None) -> None:
        if damping is not None and not (isinstance(damping, (int, float)) and 0 <= damping < 1):
            raise ValueError(f"damping={damping!r}: {type(self).__name__} wants a number in [0, 1), or None")
        self.damping = damping

    #: ranks that gradients are averaged over, where the probe finds them by itself
    group: Any = None
    _warned = False
    #: whether ``step`` must be given a closure
    needs_closure: bool = True
    #: what PSGD takes where it is not told otherwise
    momentum: float = 0.0
    max_rms: float = math.inf

    @abstractmethod
    def __call__(
        self, closure: Closure | None, params: Sequence[Tensor], moved: Iterable[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        """Evaluate the closure.

        Args:
            closure: the user's closure
            params: all parameters
            moved: positions of those whose preconditioner is to be updated
            noise: random numbers for them
            start: the gradients as they were before the step
        """

    def average_(self, evaluation: Evaluation) -> None:
        """Take the means of gradients and of their changes over the ranks of a group.

        For probes that find gradients by themselves: nobody else, such as ``DistributedDataParallel``, sees those.
        """
        if self.group is None:
            if several_ranks() and not self._warned:
                self._warned = True
                name = type(self).__name__
                warnings.warn(
                    f"{name} finds gradients by itself, so those of several ranks are not averaged; "
                    f"{name}(…, group=torch.distributed.group.WORLD) averages them",
                    stacklevel=2,
                )
            return
        average_([g for g in evaluation.grads if g is not None], self.group)
        average_([dgrad for _, dgrad in evaluation.pairs.values()], self.group)

    def damp(self, dtheta: Tensor, dgrad: Tensor) -> tuple[Tensor, Tensor]:
        """``δg + damping · ‖δg‖ / ‖δθ‖ · δθ``, block by block of a stack: as if ``H`` were a little larger.

        Also says which pairs are worth fitting: those whose curvature ``‖δg‖ / ‖δθ‖`` lies between ``eps²`` and
        ``eps⁻²``. What is outside is no curvature that a number format could work with but a gradient that vanished or
        exploded; following it, ``P`` would be of no use when ordinary gradients are back.
        """
        eps = torch.finfo(dgrad.dtype).eps
        damping = self.relative_damping(dgrad.dtype)
        curvature = largest(dgrad) / largest(dtheta)
        informative = (curvature > eps**2) & (curvature < eps**-2)
        ratio = torch.where(informative, damping * curvature, 0.0)
        return torch.addcmul(dgrad, dtheta, ratio.view(-1, *[1] * (dgrad.ndim - 1))), informative

    def relative_damping(self, dtype: torch.dtype) -> float:
        """The damping that was asked for, or the default for a preconditioner of this dtype."""
        return float(torch.finfo(dtype).eps) ** 0.75 if self.damping is None else self.damping

    def __repr__(self) -> str:
        options = ", ".join(
            f"{k}={v if not isinstance(v, nn.Module) else type(v).__name__}"
            for k, v in vars(self).items()
            if v is not None and not (k == "batched" and v is False) and k not in ("group", "_warned")
        )
        return f"{type(self).__name__}({options})"


def check_whole(params: Iterable[Tensor], who: str) -> None:
    if any(is_divided(p) for p in params):
        raise ValueError(
            f"params: ranks hold only parts of them; {who} wants whole ones (FiniteDifference(), whose closure calls "
            "backward, and Whitening() take both)"
        )
