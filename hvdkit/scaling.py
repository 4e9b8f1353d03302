"""Learning rates of large batches: scaling rules, warmup and momentum correction.

Pure functions, so that PyTorch and Keras follow the same numbers.

Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", https://arxiv.org/abs/1706.02677,
section 2.1 (linear scaling), 2.2 (gradual warmup) and 3 (momentum correction).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

RULES = ("linear", "sqrt", "none")
VELOCITY, MEAN_GRADIENT, STEP_SIZE = "velocity", "mean_gradient", "step_size"


def scale_factor(base_global_batch: int, global_batch: int, rule: str = "linear") -> float:
    """By what a learning rate grows with the batch.

    A global batch is all samples of one optimizer step: ranks x batch x accumulated batches.

    Args:
        base_global_batch: Samples a step for which the learning rate was chosen.
        global_batch: Samples a step of this job.
        rule: ``"linear"``, the ratio of the two; ``"sqrt"``, its root (for Adam and its kin);
            ``"none"``, 1.

    Returns:
        The factor.

    Raises:
        ValueError: A batch is not a positive whole number, or the rule is unknown.

    Example:
        >>> scale_factor(32, 128), scale_factor(32, 128, "sqrt"), scale_factor(32, 128, "none")
        (4.0, 2.0, 1.0)
    """
    for name, value in (("base_global_batch", base_global_batch), ("global_batch", global_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Expected {name} to be a whole number >= 1. Received: {value!r}.")
    if rule not in RULES:
        raise ValueError(f"Expected rule to be one of {', '.join(RULES)}. Received: rule={rule!r}.")
    ratio = global_batch / base_global_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def scale_lr(
    base_lr: float, base_global_batch: int, global_batch: int, rule: str = "linear"
) -> float:
    """The learning rate for a global batch; see :func:`scale_factor`.

    Raises:
        ValueError: `base_lr` is negative or not finite, or see :func:`scale_factor`.

    Example:
        >>> scale_lr(0.1, 256, 1024)
        0.4
    """
    if not (math.isfinite(base_lr) and base_lr >= 0):
        raise ValueError(f"Expected base_lr to be finite and >= 0. Received: {base_lr=}.")
    return base_lr * scale_factor(base_global_batch, global_batch, rule)


@dataclass(frozen=True)
class ScalingRecord:
    """What scaling was applied; kept in checkpoints.

    Args:
        rule: ``"linear"``, ``"sqrt"`` or ``"none"``.
        base_global_batch: Samples a step for which the learning rate was chosen.
        global_batch: Samples a step of the job.

    Raises:
        ValueError: See :func:`scale_factor`.

    Example:
        >>> record = ScalingRecord("linear", 32, 128)
        >>> record.factor, ScalingRecord.from_dict(record.to_dict()) == record
        (4.0, True)
    """

    rule: str
    base_global_batch: int
    global_batch: int

    def __post_init__(self) -> None:
        scale_factor(self.base_global_batch, self.global_batch, self.rule)

    @property
    def factor(self) -> float:
        """What base learning rates are multiplied by."""
        return scale_factor(self.base_global_batch, self.global_batch, self.rule)

    def to_dict(self) -> dict[str, Any]:
        """As a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScalingRecord:
        """Back from :meth:`to_dict`.

        Raises:
            ValueError: A key is missing or unknown.
        """
        expected = sorted(cls.__dataclass_fields__)
        if sorted(values) != expected:
            raise ValueError(
                f"Expected a scaling record with keys {expected}. Received: keys={sorted(values)}."
            )
        return cls(**values)


def check_unscaled(record: ScalingRecord | None) -> None:
    """Refuses to scale what was scaled already.

    Args:
        record: What is known of an earlier application.

    Raises:
        ValueError: There was one.

    Example:
        >>> check_unscaled(None)
    """
    if record is not None:
        raise ValueError(
            "Expected a learning rate that is not scaled yet. Received: one scaled by "
            f"{record.factor:g} (rule={record.rule!r}, global batch {record.base_global_batch} -> "
            f"{record.global_batch}). Fix: scale it once, or pass rule='none'."
        )


def warmup_multiplier(step: int, warmup_steps: int, start: float = 0.0) -> float:
    """What the target learning rate is multiplied by in one step of a gradual warmup.

    It grows evenly and counts the *end* of the batch, so that the first step is not lost to a rate
    of `start` and the last step of the warmup has exactly the target. With ``start = 1/ratio`` it
    begins at the rate of the base batch, as in Goyal et al. 2017, section 2.2; Horovod's formula
    ``1/size * (1 + e*(size-1)/W)`` is the same with e epochs done and W epochs of warmup.

    Args:
        step: Optimizer steps done before this one.
        warmup_steps: Length of the warmup; 0 for none.
        start: Multiplier before the first step, 0 to 1.

    Returns:
        A multiplier up to 1, and exactly 1 from step ``warmup_steps - 1`` on.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> [warmup_multiplier(step, 4, start=0.5) for step in (0, 1, 2, 3, 99)]
        [0.625, 0.75, 0.875, 1.0, 1.0]
    """
    check_warmup(warmup_steps, start)
    if step < 0:
        raise ValueError(f"Expected step >= 0. Received: {step=}.")
    if step + 1 >= warmup_steps:
        return 1.0
    return start + (1.0 - start) * ((step + 1) / warmup_steps)


def check_warmup(warmup_steps: int, start: float) -> None:
    """Raises ``ValueError`` if the settings of a warmup are out of their ranges.

    Example:
        >>> check_warmup(100, 0.25)
    """
    whole = isinstance(warmup_steps, int) and not isinstance(warmup_steps, bool)
    if not whole or warmup_steps < 0:
        raise ValueError(
            f"Expected warmup_steps to be a whole number of steps >= 0. Received: {warmup_steps=}. "
            "Fix: epochs are round(epochs * steps_per_epoch) steps."
        )
    if not 0.0 <= start <= 1.0:
        raise ValueError(
            f"Expected start between 0 and 1. Received: {start=}. "
            "Fix: use 1/ratio to begin at the base rate, or 0."
        )


def warmup_start(factor: float) -> float:
    """The start that makes a warmup begin at the base rate: 1 over the scaling factor.

    A factor below 1, of a batch smaller than the base, needs no warmup: 1.

    Example:
        >>> warmup_start(4.0), warmup_start(0.5)
        (0.25, 1.0)
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"Expected factor to be finite and > 0. Received: {factor=}.")
    return min(1.0, 1.0 / factor)


# What the momentum buffer sums. Only a velocity contains the learning rate of past steps.
_BUFFERS = {
    "torch": {"Rprop": STEP_SIZE, "ASGD": STEP_SIZE},
    "keras": {"SGD": VELOCITY, "RMSprop": VELOCITY},
}


def buffer_kind(framework: str, optimizer: str) -> str:
    """What an optimizer's buffers hold, as far as the learning rate goes.

    Args:
        framework: ``"torch"`` or ``"keras"``.
        optimizer: Class name, for example ``"SGD"``.

    Returns:
        ``"velocity"`` (steps, each with its own rate in it), ``"step_size"`` (the rate itself), or
        ``"mean_gradient"`` (no rate; the case of every optimizer not known to differ).

    Raises:
        ValueError: The framework is unknown.

    Example:
        >>> buffer_kind("keras", "SGD"), buffer_kind("torch", "SGD")
        ('velocity', 'mean_gradient')
    """
    if framework not in _BUFFERS:
        raise ValueError(
            f"Expected framework to be one of {', '.join(_BUFFERS)}. Received: {framework=}."
        )
    return _BUFFERS[framework].get(optimizer, MEAN_GRADIENT)


def needs_momentum_correction(framework: str, optimizer: str) -> bool:
    """Whether a change of the learning rate must be made up for in the momentum.

    Example:
        >>> needs_momentum_correction("torch", "SGD")
        False
    """
    return buffer_kind(framework, optimizer) == VELOCITY


def momentum_correction(previous_lr: float, new_lr: float, momentum: float) -> float:
    """Momentum for the one step in which the rate changes, where the buffer is a velocity.

    Velocity is ``v = m*v - lr*g``: past gradients carry the old rate. Scaling ``m`` by
    ``new_lr / previous_lr`` makes it what ``u = m*u + g; w -= lr*u`` (PyTorch's form, which needs
    no correction) would give.

    Source: Goyal et al. 2017, section 3, equation 10.

    Args:
        previous_lr: The rate *applied* in the step before, not the one of the epoch before.
        new_lr: The rate of this step.
        momentum: The optimizer's own momentum.

    Returns:
        The corrected momentum; `momentum` itself where no rate was applied before.

    Raises:
        ValueError: A rate or the momentum is negative or not finite.

    Example:
        >>> momentum_correction(0.1, 0.2, 0.9)
        1.8
    """
    for name, value in (
        ("previous_lr", previous_lr),
        ("new_lr", new_lr),
        ("momentum", momentum),
    ):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"Expected {name} to be finite and >= 0. Received: {value!r}.")
    # After a rate of 0 no ratio exists; the step of that rate added nothing to the velocity.
    return momentum if previous_lr == 0 else momentum * (new_lr / previous_lr)
