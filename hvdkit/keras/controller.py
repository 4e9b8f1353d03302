"""What a distributed Keras optimizer does besides its own work, and the state that it needs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hvdkit.errors import SynchronizationError
from hvdkit.keras.backend import collectives, keras
from hvdkit.keras.settings import ReductionSettings
from hvdkit.scaling import ScalingRecord, warmup_multiplier

ops = keras.ops

_numbers = itertools.count()


class LearningRateFactor:
    """Scaling x warmup, on the learning rate only while the optimizer applies gradients.

    Args:
        scaling: What to scale by.
        warmup_steps: Optimizer steps until the full rate; 0 for none.
        start_multiplier: Multiplier that the warmup begins at.
    """

    def __init__(self, scaling: ScalingRecord, warmup_steps: int, start_multiplier: float) -> None:
        self.scaling = scaling
        self.warmup_steps = warmup_steps
        self.start_multiplier = start_multiplier
        # One entry a step, so that a graph and PyTorch's adapter use the very same numbers.
        self._table = [
            scaling.factor * warmup_multiplier(step, warmup_steps, start_multiplier)
            for step in range(max(1, warmup_steps))
        ]

    def at(self, step: int) -> float:
        """The factor of a step, 0 the first."""
        return self._table[min(step, len(self._table) - 1)]

    def of(self, step: Any) -> Any:
        """As :meth:`at`, for an integer tensor or variable of Keras."""
        if len(self._table) == 1:
            return self._table[0]
        table = ops.convert_to_tensor(self._table, dtype="float32")
        return ops.take(table, ops.clip(ops.cast(step, "int32"), 0, len(self._table) - 1))


class ReductionController:
    """Reduces one optimizer's gradients; lives on the optimizer as ``_hvdkit``.

    Args:
        settings: How to reduce.
        counts_samples: Whether gradients are weighted by the samples of their batches.
        label: First part of the reductions' names.
    """

    def __init__(
        self, settings: ReductionSettings, counts_samples: bool = False, label: str = ""
    ) -> None:
        self.settings = settings
        self.counts_samples = counts_samples
        self.label = label
        self.lr_factor: LearningRateFactor | None = None
        self.counts_updates = False
        """Whether schedules count optimizer steps instead of micro-batches."""
        self.reductions = 0
        """How often the reduction was run, or built into a graph."""
        self.applications = 0
        """How often gradients came in, to be applied or accumulated; or a graph was built."""
        self.local_variables: dict[int, Any] = {}
        self._counter: Any = None
        self._batch: Any = None
        self._applying = False
        self._prefix: str | None = None
        self._variables: Sequence[Any] = ()

    @property
    def prefix(self) -> str:
        """Keeps optimizers apart; numbered at the first use, which all ranks reach together."""
        if self._prefix is None:
            number = next(_numbers)
            label = self.label or "hvdkit.keras"
            self._prefix = f"{label}.{number}" if number else label
        return self._prefix

    @property
    def applying(self) -> bool:
        """Whether the optimizer is within ``apply``."""
        return self._applying

    def register_local(self, variable: Any) -> None:
        """Leaves a variable out of reductions and broadcasts."""
        self.local_variables[identity(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether a variable is left out."""
        return identity(variable) in self.local_variables

    @contextlib.contextmanager
    def batch_scope(self, samples: Any) -> Iterator[None]:
        """Around a training step of so many samples (a number, or a tensor of the graph)."""
        self._batch = samples
        try:
            yield
        finally:
            self._batch = None

    @contextlib.contextmanager
    def apply_scope(self, variables: Sequence[Any]) -> Iterator[None]:
        """Around the optimizer's own work on gradients of `variables`."""
        self._variables = list(variables)
        self._applying = True
        self.applications += 1
        try:
            yield
        finally:
            self._applying = False

    def weigh(self, gradients: Sequence[Any]) -> list[Any]:
        """Weighs a micro-batch's gradients by its samples, before they are accumulated."""
        if not self.counts_samples:
            return list(gradients)
        if self._batch is None:
            raise SynchronizationError(
                "Cannot tell how many samples these gradients stand for: they did not come from "
                "the train_step of the model that hvd.distribute() was given. Fix: train that "
                "model with fit() or train_on_batch(), or use hvd.DistributedOptimizer in a loop "
                "of your own."
            )
        if self._counter is None:
            self._counter = collectives.WindowCounter(self.settings.process_set, self.prefix)
        self._counter.begin(self._batch)
        return list(self._counter.weigh(gradients))

    def reduce(self, gradients: Sequence[Any], passes: int) -> list[Any]:
        """The reduced gradients of one optimizer step.

        Args:
            gradients: Means over the window's backward passes, in the order of the variables of
                :meth:`apply_scope`.
            passes: Backward passes of a window.
        """
        self.reductions += 1
        own = self._counter.take() if self.counts_samples else None
        total = own
        shared, local = (
            [i for i, v in enumerate(self._variables) if self.is_local(v) == is_local]
            for is_local in (False, True)
        )
        results = [gradients[index] for index in shared]
        if self.settings.communicates and shared:
            variables = [self._variables[index] for index in shared]
            results, total = collectives.reduce_gradients(
                results, variables, self.prefix, self.settings, own, passes
            )
        factor, local_factor = self._factors(passes, own, total)
        reduced = dict(zip(shared, collectives.scale(results, factor), strict=True))
        if local:
            kept = collectives.scale([gradients[index] for index in local], local_factor)
            reduced |= zip(local, kept, strict=True)
        return [reduced[index] for index in range(len(gradients))]

    def _factors(self, passes: int, own: Any, total: Any) -> tuple[Any, Any]:
        """What reduced gradients are multiplied by, and what those of local variables are."""
        settings = self.settings
        ranks = settings.process_set.size() if settings.communicates else 1
        share = 1.0 / ranks if settings.scale_local_gradients else 1.0
        if not self.counts_samples:
            summed = float(passes) if settings.sums_passes else 1.0
            return summed, summed * share
        correction = self._counter.correction(passes, ranks, total)
        return correction, self._counter.correction(passes, 1, own) * share


def identity(variable: Any) -> int:
    """One number for a Keras variable and for the framework's variable inside it."""
    return id(variable.value if isinstance(variable, keras.Variable) else variable)
