"""Scaled and warmed-up learning rates under any scheduler, and one plateau decision for all.

The factor (scaling x warmup) is put on each group's ``lr`` only while ``optimizer.step`` runs and
taken off after it. Outside the step, groups and schedulers keep the rates of the user's own script:

- Every scheduler gives its own curve times the factor, whether it was built before or after,
  reads ``group["lr"]`` recursively or not, and whatever absolute rates it was given (``max_lr`` of
  OneCycleLR, ``eta_min`` of CosineAnnealingLR, ``min_lr`` of ReduceLROnPlateau).
- Groups that are added later, with rates written for one rank, are scaled like the others.
- A checkpoint holds unscaled rates, so nothing is scaled twice, and a job with another number of
  ranks resumes with its own factor.

:func:`effective_lrs` gives the rates that count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hvdkit.scaling import (
    STEP_SIZE,
    ScalingRecord,
    buffer_kind,
    check_unscaled,
    check_warmup,
    warmup_multiplier,
    warmup_start,
)
from hvdkit.torch.subclass import named_like

logger = logging.getLogger(__name__)

RECORD_KEY = "hvdkit_lr"
"""Key of the record in the first parameter group; so it travels in the optimizer's state."""


class LrControl:
    """Multiplies an optimizer's learning rates by scaling and warmup, during each step.

    Made by :func:`control_lr`. Counts the optimizer's steps, not the scheduler's.

    Args:
        optimizer: Any optimizer of torch, or one of its kind.
        scaling: What to scale by; None for 1.
        warmup_steps: Optimizer steps until the full rate.
        start_multiplier: Multiplier that the warmup begins at.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaling: ScalingRecord | None,
        warmup_steps: int,
        start_multiplier: float,
    ) -> None:
        self.optimizer = optimizer
        self.scaling = scaling
        self.warmup_steps = warmup_steps
        self.start_multiplier = start_multiplier
        self._replaced: list[tuple[dict[str, Any], Any, Any]] = []
        self._record(self.steps_done)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    @property
    def steps_done(self) -> int:
        """Optimizer steps done, those before a resume included."""
        record = self.optimizer.param_groups[0].get(RECORD_KEY)
        return 0 if record is None else int(record["steps_done"])

    @property
    def scale(self) -> float:
        """Factor of the scaling alone."""
        return 1.0 if self.scaling is None else self.scaling.factor

    @property
    def factor(self) -> float:
        """Scaling x warmup of the next step."""
        return self.scale * warmup_multiplier(
            self.steps_done, self.warmup_steps, self.start_multiplier
        )

    def state_dict(self) -> dict[str, Any]:
        """Settings and progress, as JSON can hold them. The optimizer's own state has them too."""
        return dict(self.optimizer.param_groups[0][RECORD_KEY])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up the progress of :meth:`state_dict`; the settings stay those of this job.

        Raises:
            ValueError: `state` is no such record.
        """
        if "steps_done" not in state:
            raise ValueError(
                f"Expected a record with the key 'steps_done'. Received: keys={sorted(state)}."
            )
        self.optimizer.param_groups[0][RECORD_KEY] = dict(state)
        self._after_load(self.optimizer)

    def restore(self) -> None:
        """Takes the factor off again, where a step ended by an exception; else does nothing."""
        for group, own, replaced in self._replaced:
            if isinstance(own, torch.Tensor):
                replaced.copy_(own)
            elif group["lr"] is replaced:
                group["lr"] = own
        self._replaced = []

    def remove(self) -> None:
        """Lets go of the optimizer, whose next steps use the unscaled rates."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self.optimizer.param_groups[0].pop(RECORD_KEY, None)
        del self.optimizer._hvdkit_lr_control  # type: ignore[attr-defined]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        factor = self.factor
        multiplied: set[int] = set()
        for group in optimizer.param_groups:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                # In place, as capturable optimizers and schedulers keep the tensor itself. Groups
                # may share one.
                if id(lr) in multiplied:
                    continue
                multiplied.add(id(lr))
                own = lr.clone()
                self._replaced.append((group, own, lr))
                lr.mul_(factor)
            else:
                replaced = float(lr) * factor
                self._replaced.append((group, lr, replaced))
                group["lr"] = replaced

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        self._record(self.steps_done + 1)

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self.restore()

    def _after_load(self, optimizer: Optimizer) -> None:
        self._replaced = []  # of groups that loading has put away
        loaded = optimizer.param_groups[0].get(RECORD_KEY)
        self._record(self.steps_done)
        now = optimizer.param_groups[0][RECORD_KEY]
        if loaded is not None and loaded != now:
            logger.warning(
                "The checkpoint was written with other learning rate settings; those of this job "
                "count. Checkpoint: %s. Now: %s.",
                loaded,
                now,
            )

    def _record(self, steps_done: int) -> None:
        # A new dict each time: a state_dict() in memory must not go on counting.
        self.optimizer.param_groups[0][RECORD_KEY] = {
            "scaling": None if self.scaling is None else self.scaling.to_dict(),
            "warmup_steps": self.warmup_steps,
            "start_multiplier": self.start_multiplier,
            "steps_done": steps_done,
        }


def control_lr(
    optimizer: Optimizer,
    scaling: ScalingRecord | None = None,
    warmup_steps: int = 0,
    start_multiplier: float | None = None,
) -> LrControl:
    """Scales and warms up the learning rates of an optimizer, whatever schedules them.

    The loop stays as it is: ``optimizer.step(); scheduler.step()``. An optimizer whose state was
    loaded from a checkpoint of such a job goes on in the middle of its warmup.

    Args:
        optimizer: Any optimizer of torch, or one of its kind; distributed or not.
        scaling: What to scale by; None for 1.
        warmup_steps: Optimizer steps until the full rate; 0 for no warmup.
        start_multiplier: Multiplier that the warmup begins at. None is 1/factor, the base rate, as
            in Goyal et al. 2017, section 2.2; 0.0 begins at zero.

    Returns:
        The control, which is also found by :func:`lr_control_of`.

    Raises:
        ValueError: The optimizer is scaled already, or an option is out of its range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> control = control_lr(optimizer, ScalingRecord("linear", 32, 128), warmup_steps=3)
        >>> [round(lr, 3) for lr in effective_lrs(optimizer)]
        [0.2]
    """
    control = lr_control_of(optimizer)
    if control is not None:
        check_unscaled(control.scaling)
        raise ValueError(
            "Expected an optimizer without warmup. Received: one with warmup_steps="
            f"{control.warmup_steps}. Fix: attach it once, or call remove() on the first."
        )
    if start_multiplier is None:
        start_multiplier = warmup_start(1.0 if scaling is None else scaling.factor)
    check_warmup(warmup_steps, start_multiplier)
    if warmup_steps and _kind(optimizer) == STEP_SIZE:
        logger.warning(
            "%s keeps a step size of its own, made from an earlier learning rate: Rprop uses the "
            "rate of its first step only, ASGD that of the step before. The warmup acts "
            "accordingly. Fix: warmup_steps=0 for Rprop.",
            type(optimizer).__name__,
        )
    control = LrControl(optimizer, scaling, warmup_steps, start_multiplier)
    optimizer._hvdkit_lr_control = control  # type: ignore[attr-defined]
    return control


def _kind(optimizer: Optimizer) -> str:
    kinds = {buffer_kind("torch", base.__name__) for base in type(optimizer).__mro__}
    return STEP_SIZE if STEP_SIZE in kinds else kinds.pop()


def lr_control_of(optimizer: Optimizer) -> LrControl | None:
    """The control of an optimizer, None if it has none.

    Example:
        >>> import torch
        >>> lr_control_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)) is None
        True
    """
    control: LrControl | None = optimizer.__dict__.get("_hvdkit_lr_control")
    return control


def reattach(optimizer: Optimizer) -> LrControl | None:
    """Gives a copied or unpickled optimizer, which has lost its hooks, its control again.

    Args:
        optimizer: One whose first group may hold the record of a control.

    Returns:
        The control, None where there is no record.

    Example:
        >>> import copy, torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> _ = control_lr(optimizer, ScalingRecord("linear", 32, 128))
        >>> reattach(copy.deepcopy(optimizer)).factor
        4.0
    """
    record = optimizer.param_groups[0].get(RECORD_KEY)
    if record is None or lr_control_of(optimizer) is not None:
        return lr_control_of(optimizer)
    scaling = None if record["scaling"] is None else ScalingRecord.from_dict(record["scaling"])
    return control_lr(optimizer, scaling, record["warmup_steps"], record["start_multiplier"])


def effective_lrs(optimizer: Optimizer) -> list[float]:
    """The learning rates that the next step really uses, one a parameter group.

    What to print or log, since ``param_groups[i]["lr"]`` and ``scheduler.get_last_lr()`` are the
    rates before scaling and warmup.

    Example:
        >>> import torch
        >>> effective_lrs(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5))
        [0.5]
    """
    control = lr_control_of(optimizer)
    factor = 1.0
    if control is not None:
        control.restore()
        factor = control.factor
    return [float(group["lr"]) * factor for group in optimizer.param_groups]


def synchronized_plateau(
    scheduler: ReduceLROnPlateau, average: Callable[[float, float], float]
) -> ReduceLROnPlateau:
    """Makes all ranks take one decision, from the weighted mean of their metrics.

    Each rank's own metric would lower the rate at different times on different ranks, and the
    models would drift apart. The scheduler stays the same object; its ``step`` gets a keyword
    ``weight``, the number of samples behind this rank's metric (1 if left out).

    Args:
        scheduler: The scheduler to change, in place.
        average: Takes this rank's metric and weight, gives the weighted mean over all ranks. It
            communicates, so all ranks must step the scheduler equally often.

    Returns:
        `scheduler` itself.

    Raises:
        ValueError: It is no ReduceLROnPlateau, or synchronized already.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        >>> plateau = synchronized_plateau(plateau, lambda metric, weight: metric)
        >>> plateau.step(1.5, weight=100)
        >>> plateau.best
        1.5
    """
    if not isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"Expected a ReduceLROnPlateau. Received: scheduler={type(scheduler).__name__}."
        )
    base: Any = type(scheduler)
    if hasattr(base, "_hvdkit_average"):
        raise ValueError("This scheduler is synchronized already. Fix: do it once.")

    def step(self: Any, metrics: Any, epoch: Any = None, *, weight: float = 1.0) -> None:
        mean = average(float(metrics), float(weight))
        base.step(self, mean) if epoch is None else base.step(self, mean, epoch)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        return _rebuild_plateau, (base, average), self.__dict__

    scheduler.__class__ = named_like(
        base, _hvdkit_average=staticmethod(average), step=step, __reduce_ex__=reduce_ex
    )
    return scheduler


def _rebuild_plateau(base: Any, average: Callable[[float, float], float]) -> Any:
    return synchronized_plateau(base.__new__(base), average)
