"""Momentum correction where a Keras optimizer's velocity holds learning rates of past steps."""

from __future__ import annotations

from typing import Any

from hvdkit.keras.backend import keras
from hvdkit.scaling import VELOCITY, buffer_kind

ops = keras.ops


def velocities_of(optimizer: Any) -> list[Any]:
    """The variables in which past steps are summed with their learning rates; often none."""
    kinds = [base.__name__ for base in type(optimizer).__mro__]
    if not any(buffer_kind("keras", name) == VELOCITY for name in kinds):
        return []
    if not getattr(optimizer, "momentum", 0):
        return []
    # SGD calls them momentums; RMSprop has squared gradients and momentums.
    return list(getattr(optimizer, "_momentums", None) or optimizer.momentums)


def correct_velocity(optimizer: Any) -> None:
    """Brings velocities from the last step's learning rate factor to this step's.

    Only the factor of scaling and warmup is made up for. A schedule of the user's own acts on the
    velocity as it does in one process.

    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 3, equation 10.
    """
    factor = optimizer._hvdkit.lr_factor
    if factor is None or not factor.warmup_steps:
        return
    velocities = velocities_of(optimizer)
    if not velocities:
        return
    step = ops.cast(optimizer.iterations, "int32")
    ratio = factor.of(step) / factor.of(ops.maximum(step - 1, 0))
    for velocity in velocities:
        velocity.assign(velocity * ops.cast(ratio, velocity.dtype))
