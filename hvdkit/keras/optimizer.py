"""``DistributedOptimizer``: any Keras optimizer, with its gradients reduced over all ranks.

Keras calls ``apply`` for each batch, which accumulates gradients where the optimizer is told to,
and on every update clips them (``_clip_gradients``), decays weights and steps. The reduction has
its place right before the clipping: after accumulation, so that only updates communicate, and
before anything that is not linear in the gradients.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from hvdkit.errors import SynchronizationError, UnsupportedError
from hvdkit.keras.backend import BACKEND, adapter, collectives, keras
from hvdkit.keras.controller import ReductionController
from hvdkit.keras.loss_scale import teach_one_decision
from hvdkit.keras.settings import ReductionSettings
from hvdkit.keras.velocity import correct_velocity
from hvdkit.keras.xla import compiling_model

HOOKS = ("apply", "_backend_apply_gradients", "_clip_gradients", "_get_current_learning_rate")
"""What hvdkit overrides. A Keras without them would train without a reduction."""


class DistributedMethods:
    """What a distributed optimizer does besides what its own class does.

    Mixed into a subclass of the user's optimizer class, which it does not show: ``__class__`` is
    the user's class, so that saved models name that one.
    """

    _hvdkit: ReductionController

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Applies gradients as the optimizer's own class does, reduced over all ranks."""
        check_not_compiled_by_xla(self)
        controller = self._hvdkit
        before = controller.reductions
        super().apply(grads, trainable_variables)  # type: ignore[misc]
        if grads and controller.reductions == before and self._hvdkit_expects_reduction():
            raise SynchronizationError(
                f"{type(self).__name__}.apply() of Keras {keras.__version__} stepped without the "
                "hook that reduces gradients, and ranks would drift apart. Expected it to call "
                "_clip_gradients. Fix: use an optimizer that keeps keras.optimizers.Optimizer's "
                "apply(), or reduce with hvd.DistributedGradientTape."
            )

    def _hvdkit_expects_reduction(self) -> bool:
        """Whether the batch that was just applied ended a window, as far as that can be seen."""
        passes = self._hvdkit_passes()
        if passes == 1 or collectives.building_graph():
            return True  # a graph holds both branches
        return bool(int(self._iterations) % passes == 0)  # type: ignore[attr-defined]

    def _hvdkit_passes(self) -> int:
        return int(self.gradient_accumulation_steps or 1)  # type: ignore[attr-defined]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        controller = self._hvdkit
        with controller.apply_scope(trainable_variables):
            super()._backend_apply_gradients(  # type: ignore[misc]
                controller.weigh(grads), trainable_variables
            )

    def _clip_gradients(self, grads: Any) -> Any:
        reduced = self._hvdkit.reduce(grads, self._hvdkit_passes())
        correct_velocity(self)
        return super()._clip_gradients(reduced)  # type: ignore[misc]

    def _get_current_learning_rate(self) -> Any:
        controller = self._hvdkit
        schedule = self._learning_rate  # type: ignore[attr-defined]
        if controller.counts_updates and isinstance(
            schedule, keras.optimizers.schedules.LearningRateSchedule
        ):
            rate = schedule(self.iterations)  # type: ignore[attr-defined]
        else:
            rate = super()._get_current_learning_rate()  # type: ignore[misc]
        if controller.lr_factor is None or not controller.applying:
            return rate
        return rate * keras.ops.cast(
            controller.lr_factor.of(self.iterations),  # type: ignore[attr-defined]
            "float32",
        )

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable out: its gradient stays this rank's own.

        Args:
            var: A Keras variable, or the framework's variable in one.
        """
        self._hvdkit.register_local(var)

    def __reduce__(self) -> Any:
        config = keras.optimizers.serialize(self)
        controller = self._hvdkit
        settings = (controller.settings, controller.counts_samples, controller.label)
        return _rebuild, (config, settings)

    def __deepcopy__(self, memo: Any) -> Any:
        function, arguments = self.__reduce__()
        copied = memo[id(self)] = function(*arguments)
        return copied


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = adapter.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = adapter.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = adapter.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer reduce its gradients over all ranks before each step.

    Unlike Horovod's, it is the *same object* that comes back: state, learning rate and name stay.
    ``model.save`` writes the optimizer's own class, so that the file loads without hvdkit.

    Args:
        optimizer: Any ``keras.optimizers.Optimizer``, new or used; a ``LossScaleOptimizer``
            decides on all ranks together whether gradients are finite.
        name: First part of the reductions' names in timelines.
        device_dense: Where TensorFlow reduces dense gradients.
        device_sparse: Where TensorFlow reduces sparse gradients.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of that kind.
        sparse_as_dense: Reduces sparse gradients as dense ones.
        gradient_predivide_factor: Divides before the sum, and multiplies after it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: Batches whose gradients are accumulated before one reduction and
            step: Keras' ``gradient_accumulation_steps``, which may be used instead.
        average_aggregated_gradients: Whether these count as their mean, not as their sum. With
            ``gradient_accumulation_steps`` it is always the mean, as in Keras.
        num_groups: Horovod's former spelling of `groups`.
        groups: Reduces variables together: a number of groups, or lists of variables.
        process_set: The ranks that reduce; others step on their own gradients.
        scale_local_gradients: Whether gradients of local variables are divided by the ranks.

    Returns:
        `optimizer` itself.

    Raises:
        ValueError: An option is wrong, or the optimizer is distributed already.
        UnsupportedError: This Keras lacks a hook that the reduction needs.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        >>> type(optimizer).__name__
        'SGD'
    """
    adapter.size()  # says so where hvd.init() was forgotten
    if (device_dense or device_sparse) and BACKEND != "tensorflow":
        warnings.warn(
            "device_dense and device_sparse have no effect with PyTorch, which reduces gradients "
            "where they are.",
            stacklevel=2,
        )
    if num_groups:
        warnings.warn(
            "num_groups has become groups; pass groups=...", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    _check_passes(optimizer, backward_passes_per_step)
    settings = ReductionSettings(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
        sums_passes=backward_passes_per_step > 1 and not average_aggregated_gradients,
    )
    distribute_optimizer(optimizer, settings, label=name or "")
    set_passes(optimizer, backward_passes_per_step)
    return optimizer


def distribute_optimizer(
    optimizer: Any, settings: ReductionSettings, counts_samples: bool = False, label: str = ""
) -> list[ReductionController]:
    """Gives an optimizer, or each one inside it, the reduction, in place."""
    parts = parts_of(optimizer)
    for part in parts:
        _check_optimizer(part)
    teach_one_decision()
    for part in parts:
        part._hvdkit = ReductionController(settings, counts_samples, label)
        part.__class__ = _distributed_class(type(part))
    return controllers_of(optimizer)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"Expected a keras.optimizers.Optimizer. Received: optimizer={optimizer!r}."
        )
    if isinstance(optimizer, DistributedMethods):
        raise ValueError("This optimizer is distributed already. Fix: wrap it once.")
    missing = [hook for hook in HOOKS if not callable(getattr(optimizer, hook, None))]
    if missing:
        raise UnsupportedError(
            f"Keras {keras.__version__} would train without synchronisation: its optimizers lack "
            f"{', '.join(missing)}. Expected the optimizer methods of Keras 3.3 to 3.15. Fix: "
            "install such a Keras, or reduce with hvd.DistributedGradientTape."
        )


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that step: those in a ``LossScaleOptimizer`` or ``MultiOptimizer``, or itself.

    Raises:
        ValueError: A ``MultiOptimizer`` that makes its optimizers later, by a function.
    """
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    multiple = getattr(keras.optimizers, "MultiOptimizer", ())
    if not isinstance(optimizer, multiple):
        return [optimizer]
    if not optimizer.optimizers:
        raise ValueError(
            "Expected a MultiOptimizer whose optimizers exist. Received: one that makes them by a "
            "function. Fix: call optimizer.build(model.trainable_variables) first, or use "
            "keras.optimizers.OptimizerMap."
        )
    return list(optimizer.optimizers)


def controllers_of(optimizer: Any) -> list[ReductionController]:
    """The controllers of a distributed optimizer; none of another."""
    if optimizer is None:
        return []
    parts = parts_of(optimizer)
    return [part._hvdkit for part in parts if isinstance(part, DistributedMethods)]


@functools.cache
def _distributed_class(base: type) -> type:
    shown = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__class__": property(lambda self: base),
    }
    return type(base.__name__, (DistributedMethods, base), shown)


def _check_passes(optimizer: Any, passes: int) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(
            "Expected backward_passes_per_step to be a whole number >= 1. Received: "
            f"backward_passes_per_step={passes!r}."
        )
    for part in parts_of(optimizer):
        own = getattr(part, "gradient_accumulation_steps", None)
        if passes > 1 and own not in (None, passes):
            raise ValueError(
                "Accumulation is asked for twice. Received: gradient_accumulation_steps="
                f"{own} in the optimizer, backward_passes_per_step={passes}. Fix: pass one of "
                "them."
            )


def set_passes(optimizer: Any, passes: int) -> None:
    """Makes an optimizer accumulate over `passes` batches, as if Keras had been told so."""
    for part in parts_of(optimizer):
        if passes == 1 or part.gradient_accumulation_steps == passes:
            continue
        part.gradient_accumulation_steps = passes
        if part.built:
            part._accumulated_gradients = part.add_optimizer_variables(
                part._trainable_variables, "gradient_accumulator"
            )
            # Keras counts batches: what was counted so far were whole steps.
            part._iterations.assign(part._iterations * passes)


def check_not_compiled_by_xla(optimizer: Any) -> None:
    """Raises UnsupportedError where the step is being compiled by XLA."""
    model = compiling_model(optimizer)
    if model is not None:
        raise UnsupportedError(
            "XLA cannot compile Horovod's operations. Expected a model compiled with "
            "jit_compile=False. Received: jit_compile=True, which 'auto' becomes where there is "
            "a GPU. Fix: model.compile(..., jit_compile=False), or hvd.distribute(model), or "
            "BroadcastGlobalVariablesCallback, which both see to it."
        )


def _rebuild(config: Any, settings: Any) -> Any:
    """Makes a copied or unpickled optimizer distributed again. It builds with its next model."""
    optimizer = keras.optimizers.deserialize(config)
    reduction, counts_samples, label = settings
    distribute_optimizer(optimizer, reduction, counts_samples, label)
    return optimizer
