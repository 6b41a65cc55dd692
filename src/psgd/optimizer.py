"""The optimizer: options, the step of the paper's algorithm, and what torch wants of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .blocks import Blocks, PerTensor
from .criteria import Criterion, c3
from .engine import Direction, Motion, Recorder, Stack, Work, flags, without_autocast
from .groups import Kronecker, Structure
from .normalize import Normalization
from .ops.agreement import Fact, compare
from .ops.compiling import not_compiled
from .probes import ClosureChecks, Evaluation, FiniteDifference, Probe
from .ranks import Alone, Ranks, ranks_of
from .sample import measure, work_of
from .state import (
    Given,
    SkipCheck,
    Store,
    adding,
    arithmetic,
    checkpoint,
    checks,
    facts,
    loading,
    options,
    spelling,
    summary,
)

#: what a closure returns
T = TypeVar("T")


class PSGD(Optimizer):
    r"""Preconditioned stochastic gradient descent.

    The optimizer learns a preconditioner ``P = QᵀQ`` for each block of parameters from pairs of a change ``δθ`` of the
    parameters and the change ``δg`` of the gradient that it causes, or from the gradients themselves. A step is
    ``θ ← θ − lr · P m``, in which ``m`` is the average of the gradients. ``psgd.whiten(model)`` and
    ``psgd.newton(model)`` create it with the choices that suit a model. By default a step needs a closure:
    ``optimizer.step(closure)``. With ``probe=Whitening()`` it needs none: ``loss.backward(); optimizer.step()``.

    .. math::
        \begin{aligned}
        &\textbf{repeat, from } Q = c I \\
        &\quad g \leftarrow \nabla f(\theta), \text{ and every update\_every steps:} \\
        &\qquad (\delta\theta, \delta g) \leftarrow \text{probe}(f, \theta) \\
        &\qquad x, y \leftarrow \text{criterion}(Q, \delta\theta, \delta g) \\
        &\qquad \nabla\mathcal{E} \leftarrow 2\, \text{project}(x y^T + y x^T) \\
        &\qquad Q \leftarrow Q - \text{precond\_lr} / \text{normalize}(\nabla\mathcal{E})
            \cdot \nabla\mathcal{E}\, Q \\
        &\quad m \leftarrow \text{average of } g \text{ with decay momentum} \\
        &\quad d \leftarrow Q^T Q\, m, \text{ shortened to max\_rms and max\_norm} \\
        &\quad \theta \leftarrow \theta - \text{lr}\, (d + \text{weight\_decay}\; \theta)
        \end{aligned}

    The dense factors of ``Kronecker()`` are updated in other coordinates, which need no inverse. For a block with
    several axes, they match ``P δg`` to ``δθ`` along each axis, summed over the other axes. The result is not exactly
    the minimum of ``c3``.

    A step whose loss or gradients are not finite is skipped: it changes nothing, except for the number of skipped
    steps in ``state[p]["skipped"]``.

    Args:
        params: parameters, named parameters, or param groups
        lr: learning rate, a number or a tensor. The default is 0.5, or 0.001 with ``Whitening``, whose steps do not
            shrink with the gradient.
        preconditioner: structure of ``P = QᵀQ``: ``Kronecker``, ``Dense``, ``LowRank``, ``LimitedMemory`` or
            ``Diagonal``
        criterion: criterion that ``P`` is fitted to: ``c3``, ``c1`` or ``c2``
        probe: source of the pairs that ``P`` is fitted to: ``FiniteDifference``, ``HessianVector`` or ``Whitening``
        blocks: rule for which parameters share a ``Q``: ``PerTensor``, ``Joint`` or ``Affine``
        precond_lr: normalised step size of ``Q``, between 0 and 1. The default is 0.1 for inverse-free factors. For
            other factors it is 0.05, or 0.01 with ``Whitening``.
        precond_boost: factor that multiplies ``precond_lr`` during the first 150 updates of ``Q``. After them, the
            factor falls to 1 in inverse proportion to the number of updates. If ``precond_lr`` is given, the default is
            1. Otherwise it is 3. For curvature it is 6 with inverse-free factors, and 2 with ``Dense``.
        precond_dtype: dtype of ``Q`` and of the products with it, such as ``torch.bfloat16``; by default the dtype of
            the parameters, but at least float32
        normalize: normalisation of the step of ``Q``: ``MaxAbs`` (the default), ``MaxDiag`` or ``Spectral``;
            inverse-free factors have a normalisation of their own
        momentum: decay rate of the average of gradients that is preconditioned; 0 turns the average off. The default is
            0.9.
        weight_decay: decoupled weight decay
        update_every: number of steps from one update of ``Q`` to the next; the steps between two updates need no second
            gradient. The default is 1, except for inverse-free factors on a CPU. There it is 10 if axes are long, and
            with ``Whitening`` it is always between 10 and 50. Updates of long axes then cost about as much as gradients
            of 128 samples.
        update_anneal: number of steps over which updates become rarer, from one in every step to one in every
            ``update_every`` steps. The default is 0, or 100 if the optimizer chooses an ``update_every`` other than 1.
        max_rms: largest root mean square of the preconditioned gradient of a block. The default is 1.1 with
            ``Whitening``, whose preconditioned gradients have a root mean square of about 1; otherwise it is infinite.
            For blocks with a diagonal factor it also limits the spectral norm, to about twice the spectral norm of
            noise of this size.
        max_norm: largest length of the preconditioned gradient of all parameters together
        clip_outliers: largest ratio of the length of a block's gradient to the length of the longest one of about the
            last hundred steps. Longer gradients are shortened to this ratio, so that an outlier costs a few steps and
            not the run, unless it is the very first gradient. ``math.inf`` leaves gradients as they are.
        clip_steps: largest ratio of the length of a block's step to the average length of the block's earlier steps, so
            that a bad ``P`` costs a few steps and not the run. The default is 2, or infinite with ``Whitening``, whose
            steps are limited by ``max_rms``.
        adapt_lr: largest relative change of the learning rate of a block in a step. A factor of at least 1 multiplies
            ``lr``. It grows while the gradient after a step still descends along the step, and falls while steps go too
            far. So ``lr`` is the smallest learning rate, and a schedule that lowers it has little effect. The default
            is 0, for a factor of 1; ``psgd.newton`` has 0.1. It needs momentum.
        init: initial ``Q``: ``"scaled"`` is the multiple of the identity that fits the first pair or gradient of a
            block; ``"identity"`` is the start of the paper
        seed: seed of the probe's random numbers, which depend on seed, step and parameter alone
        maximize: maximise the loss instead of minimising it
        cuda_graph: capture the steps of inverse-free factors on a GPU as CUDA graphs and replay them, which needs far
            less time on the host. The temporary memory of a step then stays reserved. With ``Whitening`` it is at most
            1.5 times the memory of the state, otherwise about five times the memory of the parameters plus twice that
            of ``Q``. Steps are therefore not captured if state, gradients and pairs use more than a sixteenth of the
            device's memory. If ranks share the blocks, the part of a step that a rank does alone is captured.
        error_if_nonfinite: raise ``FloatingPointError`` if a step would be skipped; the host then waits for the device
            at every step
        shard: process group or device mesh whose ranks share the blocks. Each rank keeps ``Q`` and averages of its own
            blocks only, and sends the steps of these blocks to the other ranks. All ranks must see the same gradients,
            as with ``DistributedDataParallel``. Parameters that are ``DTensor``s, as ``fully_shard`` makes them, are
            always shared by the ranks of their mesh.

    All numbers may differ between param groups and change between steps. The numbers of one group never change the
    steps of another, except for ``max_norm``, which limits all parameters together. A param group may also have a
    ``preconditioner`` and ``blocks`` of its own, which are fixed once the group is added. Its ``precond_lr`` and
    ``precond_boost`` are then the defaults for its own structure, unless they are given.

    >>> import torch
    >>> from psgd import PSGD
    >>> theta = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    >>> optimizer = PSGD([theta], lr=0.5, precond_lr=0.1, max_norm=1.0)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (1 - theta[0]) ** 2 + 100 * (theta[1] - theta[0] ** 2) ** 2
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(1000):
    ...     loss = optimizer.step(closure)
    >>> loss.item() < 1e-12
    True
    """

    preconditioner: Structure
    criterion: Criterion
    probe: Probe
    blocks: Blocks
    precond_dtype: torch.dtype | None
    normalize: Normalization | None
    init: str
    cuda_graph: bool
    error_if_nonfinite: bool
    #: functions that are called at every step, before anything changes, with the number of the step, the probe's
    #: evaluation and whole gradients
    observers: tuple[Callable[[int, Evaluation, Mapping[int, Tensor]], None], ...] = ()
    #: whether the optimizer warns when many steps in a row were skipped; false for tools that report it in another way
    tells_skipped: bool = True

    @spelling.suggests
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        *,
        preconditioner: Structure = Kronecker(),
        criterion: Criterion = c3,
        probe: Probe = FiniteDifference(),
        blocks: Blocks = PerTensor(),
        precond_lr: float | None = None,
        precond_boost: float | None = None,
        precond_dtype: torch.dtype | None = None,
        normalize: Normalization | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        update_every: int | None = None,
        update_anneal: int | None = None,
        max_rms: float | None = None,
        max_norm: float | None = None,
        clip_outliers: float = 3.0,
        clip_steps: float | None = None,
        adapt_lr: float = 0.0,
        init: str = "scaled",
        seed: int = 0,
        maximize: bool = False,
        cuda_graph: bool = True,
        error_if_nonfinite: bool = False,
        shard: Any = None,
    ) -> None:
        choices = {
            "preconditioner": checks.choice("preconditioner", preconditioner, Structure),
            "probe": checks.choice("probe", probe, Probe),
            "criterion": checks.criterion(criterion, probe),
            "blocks": checks.choice("blocks", blocks, Blocks),
            "precond_dtype": checks.precision(precond_dtype),
            "normalize": checks.normalization(normalize),
            "init": checks.one_of("init", init, ("scaled", "identity")),
            "cuda_graph": bool(cuda_graph),
            "error_if_nonfinite": bool(error_if_nonfinite),
        }
        self._given = Given(precond_lr, precond_boost, update_every, update_anneal)
        numbers = {
            "lr": probe.lr if lr is None else lr,
            **self._given.resolve(preconditioner, probe.whitens),
            "momentum": probe.momentum if momentum is None else momentum,
            "weight_decay": weight_decay,
            "max_rms": probe.max_rms if max_rms is None else max_rms,
            "max_norm": max_norm,
            "clip_outliers": clip_outliers,
            "clip_steps": probe.clip_steps if clip_steps is None else clip_steps,
            "adapt_lr": adapt_lr,
            "seed": seed,
            "maximize": maximize,
        }
        params = checks.param_groups(params)
        options.check(numbers)
        arithmetic.warn_if_emulated(precond_dtype, checks.all_tensors(params))
        self._choice_names = tuple(choices)
        self.__dict__.update(choices)
        self._assemble(ranks_of(shard, checks.all_tensors(params)))
        with self._ranks.catch() as caught:
            super().__init__(params, numbers)
        self._ranks.same("PSGD", self._facts, "build the same model and optimizer on every rank", caught.error)

    def _assemble(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._store = Store(self.preconditioner, self.blocks, self.precond_dtype, self.normalize, ranks)
        fixed = [name for name in options.NAMES if name not in ("lr", "seed")]
        self._closure_checks, self._skip_check = ClosureChecks(), SkipCheck()
        self._recorder = Recorder(self.cuda_graph, ranks.sends, fixed)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...
    @not_compiled("a step calls closures and reseeds generators; its products are batched already")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step and return the closure's loss.

        Args:
            closure: function that evaluates the model and returns the loss. ``FiniteDifference`` needs an ordinary
                closure, which calls ``backward``. ``HessianVector`` needs a closure that does not call ``backward``.
                ``Whitening`` needs no closure.
        """
        store, ranks = self._store, self._ranks
        store.attach(self.state, self.param_groups)
        sample = measure(closure, self.probe, store, ranks, self.error_if_nonfinite, self._closure_checks)
        with without_autocast(store.skipped):
            work = work_of(sample, self.probe, store, ranks)
            for observe in self.observers:
                observe(int(store.clock), sample.evaluation, work.grads.by_position)
            self._recorder.run(work, self.probe, self.criterion, store.params, self._agree, self._advance, self._move)
        store.clock += 1
        if self.tells_skipped:
            self._skip_check(store.skipped)
        return sample.evaluation.loss

    def _advance(self, work: Work) -> list[Direction]:
        """Update averages and ``Q`` of the blocks of this rank, and find their directions: nothing is sent."""
        directions = []
        for bucket in work.buckets:
            own, ok, room = work.groups[bucket.group], work.ok[bucket.device], work.room(bucket)
            with bucket.updating(fits := bucket.group in work.due):
                limit = work.limit_(bucket, own["clip_outliers"], ok)
                m = bucket.average_(work.grads, own["momentum"], limit, ok)  # m ← β m + (1 − β) g
                d = None
                if fits:  # Q ← (I − μ ∇E / ‖∇E‖) Q
                    d = self.probe.fit_(
                        bucket.Q,
                        work.measured(bucket, m, limit, self.init == "scaled", room),
                        self.criterion,
                        own["precond_lr"],
                        ok,
                    )
                if d is None:  # d = QᵀQ m
                    d = bucket.precondition(m, own["update_every"] > 1, room)
                pace = bucket.pace_(d, m, work.grads, own, limit, ok) if own["adapt_lr"] else None
                directions.append(bucket.direction(d, own, limit, fits, ok, room, pace))
        return directions

    def _move(self, work: Work, directions: list[Direction]) -> None:
        """Move the parameters along the directions of all ranks, if all of them are finite."""
        motion = Motion(work.buckets, directions, work.groups, self._ranks.length)  # lr, less where steps are limited
        ok_everywhere = self._agree([*work.ok.values(), *motion.is_finite()])
        flags.count_skipped_(self._store.skipped, ok_everywhere)
        # θ ← θ − (rate d + decay θ)
        self._ranks.move_(motion, self._store.params, self._store.group_of, work.given, ok_everywhere)

    def _agree(self, decisions: list[Tensor]) -> dict[torch.device, Tensor]:
        """Whether all flags are true, on all devices and ranks."""
        return self._ranks.all_true(flags.agree(decisions, self._store.skipped))

    def _facts(self) -> list[Fact]:
        return facts.of_model(self._store, {name: getattr(self, name) for name in self._choice_names})

    def _notice_changes(self) -> None:
        self._store.attach(self.state, self.param_groups)
        self._store.notice_changes()

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the param groups; blocks and stacks refer to positions in this list."""
        return list(self._store.params)

    @property
    def stacks(self) -> list[Stack]:
        """Blocks with their ``Q``; blocks of one shape and param group share a stack.

        The tensors in ``state`` are views of the stacks.
        """
        self._notice_changes()
        return self._store.stacks()

    @property
    def shares_blocks(self) -> bool:
        """Whether ranks share the blocks, so that this rank keeps ``Q`` of only some of them."""
        return not self._ranks.has_all

    def check_replicas(self, group: Any = None) -> None:
        """Raise an error on all ranks unless parameters, state and param groups agree bit for bit on all of them.

        Replicas without ``shard`` do not communicate in a step. A step therefore cannot notice that replicas differ,
        for example in a number of a param group, or in a parameter that only some of them freeze. This check waits for
        the device and reads everything once; call it every few hundred steps. It leaves out parameters and state of
        which a rank has only a part.

        Args:
            group: process group of the replicas; by default all ranks
        """
        self._notice_changes()
        store = self._store
        all_facts = [*self._facts(), *facts.of_contents(store, self._ranks.has_all)]
        compare("check_replicas", all_facts, "PSGD wants replicas to be the same", None, group, store.params[0].device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group at any time; it may have a ``preconditioner`` and ``blocks`` of its own."""
        self._store.attach(self.state, self.param_groups)
        group = adding.checked(
            param_group, self._store, self._choice_names, self.defaults, self._given, self.probe.whitens
        )
        super().add_param_group(group)
        adding.adopt(self._store, self.param_groups, self.state)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """State and param groups in the format of torch's optimizers; the tensors are not copied."""
        handle = self.register_state_dict_post_hook(checkpoint.apart, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict()``, after checking all of it.

        If the model had another precision, the tensors are converted: ``Q`` to ``precond_dtype`` or its default, and
        averages to the dtype of the parameters, but at least float32.
        """
        with loading(self, self._store, self._ranks):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._ranks.check_copy()
        chosen = {name: getattr(self, name) for name in self._choice_names}
        state = {"state": checkpoint.copied(self.state), "_choice_names": self._choice_names}
        return {**super().__getstate__(), **chosen, **state, "_given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_choice_names" in state:  # unpickled or copied; otherwise torch is loading a state dict, see above
            self._assemble(Alone())
            self._store.attach(self.state, self.param_groups)
            self._store.rebuild()

    def __repr__(self) -> str:
        self._notice_changes()
        return summary.describe(type(self).__name__, self._store, self.criterion, self.probe, self.init)
