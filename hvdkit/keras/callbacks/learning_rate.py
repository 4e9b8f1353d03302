"""Learning rates that a callback sets for each batch or epoch, as Horovod's callbacks do.

:func:`hvdkit.keras.distribute` needs none of these: it scales and warms up by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hvdkit.keras.backend import adapter, keras
from hvdkit.keras.optimizer import parts_of
from hvdkit.keras.velocity import velocities_of
from hvdkit.scaling import momentum_correction, warmup_multiplier

logger = logging.getLogger(__name__)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier``, from one epoch to another.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A number, or a function of the epoch. It gets whole epochs with `staircase`;
            without, the epoch and the part of it that is done before the batch.
        start_epoch: The first epoch that it acts in.
        end_epoch: The first epoch that it does not act in any more; None for no end.
        staircase: Whether the rate changes once an epoch, else with each batch.
        momentum_correction: Whether a velocity that holds steps at the old rate (SGD and RMSprop
            with momentum) is brought to the new one; other optimizers need no correction.
            Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 3.
        steps_per_epoch: Batches of an epoch; found out where Keras knows it.

    Raises:
        ValueError: An argument is wrong, or the optimizer's rate cannot be set.

    Example:
        >>> import hvdkit.keras as hvd
        >>> callback = hvd.callbacks.LearningRateScheduleCallback(
        ...     initial_lr=0.1, multiplier=lambda epoch: 0.5 ** epoch
        ... )
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Expected the initial_lr that is multiplied. Received: None.")
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.staircase = True
            self.multiplier = lambda epoch: multiplier

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that the rate can be set."""
        for optimizer in parts_of(self.model.optimizer):
            if not isinstance(optimizer._learning_rate, keras.Variable):
                raise ValueError(
                    "Expected an optimizer whose learning rate is a number. Received: "
                    f"{type(optimizer._learning_rate).__name__}, which sets the rate itself. Fix: "
                    "build the optimizer with a number, or leave this callback out."
                )
        if not self.staircase and self._steps() is None:
            raise ValueError(
                "Expected steps_per_epoch, the batches of an epoch: Keras cannot tell it for this "
                "data. Fix: pass steps_per_epoch to the callback."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Takes note of the epoch; a resumed training begins with a later one."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the batch."""
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            steps = self._steps()
            assert steps is not None
            self._set(self.multiplier(self.current_epoch + batch / steps))
        elif batch == 0:
            self._set(self.multiplier(self.current_epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports the rate as ``lr``."""
        if logs is not None:
            logs["lr"] = float(parts_of(self.model.optimizer)[0].learning_rate)

    def _steps(self) -> int | None:
        return self.steps_per_epoch or (self.params or {}).get("steps")

    def _set(self, multiplier: float) -> None:
        for optimizer in parts_of(self.model.optimizer):
            former, rate = float(optimizer.learning_rate), self.initial_lr * multiplier
            optimizer.learning_rate = rate
            if self.momentum_correction and former != rate and optimizer.built:
                ratio = momentum_correction(former, rate, 1.0)
                for velocity in velocities_of(optimizer):
                    velocity.assign(velocity * ratio)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate evenly from ``initial_lr / size`` to `initial_lr`.

    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 2.2. The curve is that of
    :func:`hvdkit.scaling.warmup_multiplier`: the last batch of the warmup has exactly
    `initial_lr`.

    Args:
        initial_lr: The rate to reach, scaled by the number of ranks already.
        warmup_epochs: Epochs until it is reached; may be a fraction.
        momentum_correction: See :class:`LearningRateScheduleCallback`.
        steps_per_epoch: Batches of an epoch; found out where Keras knows it.
        verbose: 1 to report the end of the warmup, on rank 0.

    Example:
        >>> import hvdkit.keras as hvd
        >>> callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=3)
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warmup,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _warmup(self, epoch: float) -> float:
        steps = self._steps()
        assert steps is not None
        warmup_steps = round(self.warmup_epochs * steps)
        return warmup_multiplier(round(epoch * steps), warmup_steps, 1.0 / adapter.size())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the batch, until the warmup is over."""
        steps = self._steps()
        assert steps is not None
        if self.current_epoch * steps + batch < round(self.warmup_epochs * steps):
            super().on_train_batch_begin(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports the rate, and the end of the warmup."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and adapter.rank() == 0 and epoch < self.warmup_epochs <= epoch + 1:
            rate = float(parts_of(self.model.optimizer)[0].learning_rate)
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.")
