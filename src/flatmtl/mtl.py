"""What users hold: an aggregator and a perturbation, with one verb."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter

from flatmtl._options import check_known, warn
from flatmtl.aggregators.base import AnyAggregator, LossWeighting
from flatmtl.branches import Branch, Branches
from flatmtl.closures import Closure, listed
from flatmtl.gradients import Rows
from flatmtl.parameters import TaskParameters
from flatmtl.passes import Passes
from flatmtl.perturbations import SAM
from flatmtl.ranks import Ranks, checked_group
from flatmtl.replay import Replay
from flatmtl.stats import StepResult
from flatmtl.step import Combine, FlatScale, OnNonfinite, Options, Step
from flatmtl.task import Learned
from flatmtl.weighted import SummedPasses, SummedStep, TaskByTask, WeightedStep

_COPIES: Mapping[str, tuple[Branch, ...]] = {
    "individual": ("flat",),
    "direct": (),
    "second": ("flat", "pair"),
    "each": ("pair",),
}
"""For each way to combine, the branches that aggregate beside the loss branch."""


class FlatMTL:
    r"""Any gradient aggregator or loss weighting, made sharpness-aware.

    For task gradients :math:`g_i` and SAM gradients :math:`g_i^{SAM}` taken at each task's own worst case within
    a radius, the flat gradient of a task is :math:`f_i = g_i^{SAM} - g_i`, and the shared parameters get

    .. math::
        d = A(g_1, \dots, g_m) + A(f_1, \dots, f_m).

    Each head gets its own gradient at the worst case, never scaled by the aggregator. Without a perturbation
    the direction is :math:`A(g_1, \dots, g_m)` and the heads get their plain gradients.

    A :class:`~flatmtl.aggregators.LossWeighting` trains the weighted sum of the losses instead, with SAM on that sum
    if there is a perturbation, and scales the heads too.

    Cost: one forward pass and ``m`` backward passes, and with a perturbation ``m`` more of both (of the trunk
    and one head each). Memory beyond plain training: ``(m + 2) n`` numbers for ``n`` shared parameters. For a loss
    weighting one pass of each kind, or two with a perturbation, and ``2 n`` numbers; with micro-batches, whose weights
    are known only in the end, ``m`` backward passes and ``m`` rows. A model under ``fully_shard`` spreads this memory
    over its ranks, but an aggregator that is neither of a Gramian nor a loss weighting takes ``m n`` on each.

    Args:
        aggregator: an :class:`~flatmtl.aggregators.Aggregator`, or any function from ``(m, n)`` to ``(n,)``.
        perturbation: :class:`SAM` or :class:`ASAM`; ``None``, or a radius of zero, for the plain method.
        combine: ``"individual"`` is the paper's, above. ``"direct"`` aggregates the SAM gradients. ``"second"``
            aggregates the two aggregated vectors once more. ``"each"`` aggregates each task's loss and flat
            gradient and then these over the tasks. As ``rho`` goes to 0 the first two tend to the plain method;
            with a min-norm aggregator the last two vanish with the flat part.
        flat_scale: ``"linear"`` lets the flat part of ``"individual"`` vanish in proportion to the flat
            gradients whatever the aggregator's ``degree``: it is multiplied by :math:`r^{1 - degree}`, with
            :math:`r` the geometric mean of :math:`|f_i| / |g_i|` over tasks where neither is zero. ``"raw"`` is
            the algorithm as printed. They are the same for degree 1. For a loss weighting, whose parts are one sum,
            neither this nor ``combine`` matters.
        schedule: cheaper variants of the step; there is none yet, so only ``None``.
        on_nonfinite: what to do about a loss or gradient that is not finite: ``"raise"`` an error that names the
            task, ``"drop_task"`` from this step, or ``"skip_step"``. A task to be dropped that is finite in the
            clean pass is dropped from the flat part alone, and its head gets the plain gradient.
        process_group: the processes whose batches are one, each with its part: task gradients are averaged over the
            closures of all of them. ``None``: those of the ``DistributedDataParallel`` that the model of the parameters
            is or holds, or over which ``fully_shard`` cut its parameters, else this process alone.

    Raises:
        TypeError: if ``aggregator`` is not callable or ``perturbation`` not a perturbation.
        ValueError: for an unknown option.

    References:
        - Phan et al. (2025), *Beyond losses reweighting: empowering multi-task learning via the generalization
          perspective*, ICCV.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flatmtl import SAM, FlatMTL, split_parameters
        >>> from flatmtl.aggregators import MGDA
        >>> _ = torch.manual_seed(0)
        >>> model = nn.ModuleDict({"trunk": nn.Linear(3, 2), "left": nn.Linear(2, 1), "right": nn.Linear(2, 1)})
        >>> x = torch.randn(8, 3)
        >>> def closure(tasks):
        ...     z = model["trunk"](x)
        ...     return {t: model[t](z).square().mean() for t in tasks}
        >>> parameters = split_parameters(model, closure, ["left", "right"])
        >>> mtl = FlatMTL(MGDA(), SAM(rho=0.05))
        >>> result = mtl.backward(closure, parameters)
        >>> bool((result.sharpness > 0).all()), model["trunk"].weight.grad.shape
        (True, torch.Size([2, 3]))
    """

    def __init__(
        self,
        aggregator: AnyAggregator,
        perturbation: SAM | None = None,
        *,
        combine: Combine = "individual",
        flat_scale: FlatScale = "linear",
        schedule: None = None,
        on_nonfinite: OnNonfinite = "raise",
        process_group: Any = None,
    ) -> None:
        _check_kinds(aggregator, perturbation)
        check_known("combine", combine, tuple(_COPIES))
        check_known("flat_scale", flat_scale, ("linear", "raw"))
        check_known("schedule", schedule, (None,))
        check_known("on_nonfinite", on_nonfinite, ("raise", "drop_task", "skip_step"))
        self.aggregator = aggregator
        self.process_group = None if process_group is None else checked_group(process_group)
        if isinstance(aggregator, LossWeighting):
            combine = "direct"  # all are the same for a sum
        self.options = Options(perturbation, combine, flat_scale, on_nonfinite)
        self._branches = Branches(aggregator, _COPIES[combine])
        self._learned = Learned()
        self._busy = False
        self._said = False
        self._rows: Rows | None = None
        self._last: Replay | None = None

    def backward(
        self,
        closure: Closure | Sequence[Closure],
        parameters: TaskParameters,
        *,
        scaler: GradScaler | None = None,
    ) -> StepResult:
        """Add the step's direction into ``.grad`` of every parameter; never step.

        The weights are the same bit for bit afterwards, also when the closure raises; then ``.grad``, buffers
        and aggregator are as before the call too. Otherwise buffers and random streams stand where one clean
        pass leaves them. A parameter that no present task reaches keeps its ``.grad``, ``None`` included, so
        that weight decay and momentum leave it alone.

        Args:
            closure: returns losses for at least the tasks asked for, ``None`` for a task without labels in this
                batch; called for all tasks first, then for one at a time. Losses of other tasks are ignored. A
                list is for gradient accumulation: each closure returns means over its micro-batch, and a task's
                gradient is the mean over the closures in which it is present.
            parameters: who owns which parameter.
            scaler: a gradient scaler, whose scale the losses of the closure do not hold. What is added to
                ``.grad`` is scaled. A gradient that overflows, or a loss for which ``on_nonfinite`` skips the step,
                leaves ``.grad`` infinite and everything else as before, so that the scaler skips the step.

        Returns:
            By-products of the step, such as the losses, the sharpness and the share of conflicts.

        Raises:
            TypeError: as :func:`flatmtl.closures.evaluate`, or for an argument of another kind.
            KeyError: as there.
            ValueError: as there; also for a task whose gradient reaches no shared parameter, for a parameter frozen
                since the split, and in several processes without a group, or in a wrapper that is not understood.
            Disagreement: on all ranks, if the closure of one failed or they do not train the same parameters or, where
                they must, tasks. A closure that fails on one rank of a model under ``fully_shard`` raises its own error
                there, while the others wait for its part of the pass, as in any training of such a model.
            FloatingPointError: naming a task whose loss or gradient is not finite, if ``on_nonfinite="raise"``.
            RuntimeError: within :func:`torch.inference_mode`, or from a closure of the same object.
        """
        closures = listed(closure)
        _check_parameters(parameters)
        if self._busy:
            raise RuntimeError(
                "backward was called by a closure of the same FlatMTL; give the closure's own step another."
            )
        self._last = None
        ranks = parameters.layout.ranks(self.process_group, parameters.model)
        self._check_scope(ranks)
        ranks.device = parameters.shared[0].device
        self._branches.ranks, self._branches.layout = ranks, parameters.layout
        self._learned.kind = f"{type(self.aggregator).__name__} {self.options}"
        self._say_if_untrained(parameters)
        restore = self._branches.snapshot()
        step = self._step(closures, parameters, _enabled(scaler), ranks)
        try:
            self._busy = True
            with ranks.unwrapped():
                parameters.find_modules(closures)
                try:
                    result = step.run()
                except TaskByTask:
                    step.passes.start_over()
                    restore()
                    step = self._step(closures, parameters, _enabled(scaler), ranks, at_once=False)
                    result = step.run()
        except BaseException:
            step.passes.roll_back()
            restore()
            raise
        finally:
            self._busy = False
            parameters.layout.drop_copies()
        if result.skipped:
            restore()
        elif getattr(self.aggregator, "learns_from_step", False):
            self._last = step.passes.replay()
        return result

    def after_step(self, closure: Closure | Sequence[Closure]) -> None:
        """Show an aggregator that learns from it (FAMO) what the optimizer's step did to the losses.

        To be called after ``optimizer.step()`` with the closure of the same batch, which is evaluated once more, from
        the same random streams and buffers as in :meth:`backward`; these stand afterwards where they stood. For every
        other aggregator, and after a skipped step, nothing is done, so that a training loop can always call it.

        Raises:
            ValueError: if the number of closures is not that of :meth:`backward`.
        """
        if self._last is not None:
            context = self._last.losses(listed(closure))
            self._last = None
            self._branches.after_step(context)

    def _step(
        self,
        closures: Sequence[Closure],
        parameters: TaskParameters,
        scaler: GradScaler | None,
        ranks: Ranks,
        *,
        at_once: bool = True,
    ) -> Step:
        """Return the step to run; a loss weighting's is on the sum of the losses, ``at_once`` if that can be."""
        perturbation = self.options.active
        weighted = isinstance(self.aggregator, LossWeighting)
        common = perturbation is None or perturbation.local_of(weighted=True) == 0.0
        if weighted and at_once and common and ranks.most(len(closures), parameters.shared[0].device) == 1:
            passes = SummedPasses(closures, parameters, self._buffer(parameters, 1), scaler, self._learned, ranks)
            return SummedStep(passes, self._branches, self.options)
        rows = self._buffer(parameters, len(parameters.tasks))
        passes = Passes(closures, parameters, rows, scaler, self._learned, ranks)
        return (WeightedStep if weighted else Step)(passes, self._branches, self.options)

    def _check_scope(self, ranks: Ranks) -> None:
        if self.options.ascends_by_rank and ranks.sharded and not ranks.alone:
            raise ValueError(
                'scope="rank" perturbs along the gradients of each rank, which a model under fully_shard never has: '
                'its backward pass averages them. Use scope="global", or wrap the model in DistributedDataParallel.'
            )

    def _say_if_untrained(self, parameters: TaskParameters) -> None:
        """Warn once if nobody seems to train the parameters of the aggregator."""
        left = any(p.grad is not None for p in self.parameters())
        if left and not self._said and all(p.grad is None for p in parameters.everything):
            self._said = True
            warn(
                f"the parameters of {type(self.aggregator).__name__} still hold the gradient of an earlier step, while "
                "those of the model were cleared: they are in no optimizer, or not cleared with it. Give the optimizer "
                "[*model.parameters(), *mtl.parameters()], and call its zero_grad()."
            )

    def _buffer(self, parameters: TaskParameters, count: int) -> Rows:
        """Return a buffer of so many rows, that of the last step if it fits."""
        if self._rows is None or not self._rows.fits(parameters, count):
            self._rows = Rows(parameters, count)
        return self._rows

    def parameters(self) -> Iterable[Parameter]:
        """Return the trainable parameters of the aggregator, for the optimizer."""
        return self._branches.parameters()

    def start_epoch(self, epoch: int, total: int | None = None) -> None:
        """Tell whatever counts epochs that epoch ``epoch`` of ``total`` begins."""
        self._branches.start_epoch(epoch, total)

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to resume exactly."""
        return {"branches": self._branches.state_dict(), "asks_all": self._learned.asks_all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: if the state is that of something else.
        """
        if set(state) != {"branches", "asks_all"}:
            raise ValueError(f"the state has {sorted(state)}; expected what FlatMTL.state_dict() returns.")
        self._branches.load_state_dict(state["branches"])
        self._learned.asks_all = bool(state["asks_all"])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of copies what is of one step or process only, and the buffer that every step can make anew."""
        return {**vars(self), "_last": None, "_rows": None, "_busy": False, "process_group": None}

    def __repr__(self) -> str:
        how = "" if isinstance(self.aggregator, LossWeighting) else f", combine={self.options.combine!r}"
        return f"FlatMTL({self.aggregator!r}, {self.options.perturbation!r}{how})"


def _enabled(scaler: GradScaler | None) -> GradScaler | None:
    """Return the scaler, ``None`` if it is switched off."""
    if scaler is not None and not hasattr(scaler, "scale"):
        raise TypeError(f"scaler is {scaler!r}; expected a torch.amp.GradScaler, or None for none.")
    return scaler if scaler is not None and scaler.is_enabled() else None


def _check_parameters(parameters: TaskParameters) -> None:
    if not isinstance(parameters, TaskParameters):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; expected TaskParameters. Make them once by "
            "split_parameters(model, closure, tasks)."
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("within torch.inference_mode() nothing has a gradient; call backward outside of it.")
    parameters.check_trainable()


def _check_kinds(aggregator: object, perturbation: object) -> None:
    if isinstance(aggregator, type) or not callable(aggregator):
        name = aggregator.__name__ if isinstance(aggregator, type) else repr(aggregator)
        raise TypeError(
            f"aggregator is {name}; expected an instance such as CAGrad(), or a function from (m, n) to (n,). "
            "For a name use flatmtl.aggregators.build(name)."
        )
    if perturbation is not None and not isinstance(perturbation, SAM):
        raise TypeError(
            f"perturbation is {perturbation!r}; expected SAM(rho), ASAM(rho), or None for the plain method."
        )
