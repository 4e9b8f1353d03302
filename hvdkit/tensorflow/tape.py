"""Gradient tapes whose gradients are those of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.gradients import GradientReduction
from hvdkit.tensorflow.values import raw_variable

_global = mpi_ops.global_process_set


class _DistributedTape(tf.GradientTape):
    """Records with another tape, and reduces what its ``gradient`` returns.

    ``jacobian`` and ``batch_jacobian`` stay this rank's own.
    """

    def __init__(
        self, tape: tf.GradientTape, reduction: GradientReduction, scale_local_gradients: bool
    ) -> None:
        super().__init__(persistent=getattr(tape, "_persistent", False))
        self._inner = tape
        self._reduction = reduction
        self.process_set = reduction.process_set
        self.scale_local_gradients = scale_local_gradients
        self._local_sources: set[Any] = set()

    def __enter__(self) -> _DistributedTape:
        self._inner.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)

    def watch(self, tensor: Any) -> None:
        self._inner.watch(tf.nest.map_structure(raw_variable, tensor))

    def stop_recording(self) -> Any:
        return self._inner.stop_recording()

    def reset(self) -> None:
        self._inner.reset()

    def watched_variables(self) -> Any:
        return self._inner.watched_variables()

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.batch_jacobian(*args, **kwargs)

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of a tensor or variable this rank's own."""
        self._local_sources.add(raw_variable(source).ref())

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of all ranks, in the structure of `sources`.

        Args:
            target: What to differentiate.
            sources: Tensors, variables or Keras 3 variables: one, or nested lists and
                dictionaries, the same on all ranks.
            output_gradients: Gradients of the elements of `target`.
            use_generic_names: Names operations by numbers only, and without name scopes.
            unconnected_gradients: What sources get that `target` does not depend on; None is
                None on all ranks.
        """
        # The fourth argument of TensorFlow's own tapes.
        if isinstance(use_generic_names, (tf.UnconnectedGradients, str)):
            unconnected_gradients, use_generic_names = use_generic_names, False
        flat = tf.nest.flatten(sources)
        grads = self._inner.gradient(
            target,
            [raw_variable(source) for source in flat],
            output_gradients,
            unconnected_gradients,
        )
        shared = [index for index, source in enumerate(flat) if not self._is_local(source)]
        reduced = self._reduction(
            [grads[index] for index in shared],
            [flat[index] for index in shared],
            use_generic_names,
        )
        shared_grads = dict(zip(shared, reduced, strict=True))
        results = [
            shared_grads[index] if index in shared_grads else self._scaled_local(grad)
            for index, grad in enumerate(grads)
        ]
        return tf.nest.pack_sequence_as(sources, results)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of source and gradient: those of local sources, and the others."""
        flat = tf.nest.flatten(sources)
        grads = self.gradient(target, flat, output_gradients, use_generic_names)
        pairs = list(zip(flat, grads, strict=True))
        local = [pair for pair in pairs if self._is_local(pair[0])]
        return local, [pair for pair in pairs if not self._is_local(pair[0])]

    def _is_local(self, source: Any) -> bool:
        return bool(self._local_sources) and raw_variable(source).ref() in self._local_sources

    def _scaled_local(self, grad: Any) -> Any:
        """Averages weigh each rank by 1/size, and so must what is not averaged."""
        if grad is None or not self.scale_local_gradients:
            return grad
        ranks = self.process_set.size()
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(grad.values / ranks, grad.indices, grad.dense_shape)
        return grad / tf.cast(ranks, grad.dtype)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = _global,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose ``gradient`` returns the average of the gradients of all ranks.

    Works eagerly and within ``tf.function``, with persistent tapes, with any structure of sources
    and with Keras 3 variables. A source that is unconnected on all ranks gives None; where only
    some ranks have a gradient, all ranks raise an error that names it.

    Args:
        gradtape: A ``tf.GradientTape``, before or after its recording.
        device_dense: Where dense gradients are reduced.
        device_sparse: Where sparse gradients are reduced.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of one's own.
        sparse_as_dense: Reduces ``tf.IndexedSlices`` as dense tensors.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies it; for
            averages only.
        num_groups: Deprecated; use `groups`.
        groups: How many groups of gradients are reduced together, or lists of variables.
        process_set: The ranks that take part; on other ranks the tape is an ordinary one.
        scale_local_gradients: Divides gradients of local sources by the number of ranks.

    Raises:
        ValueError: Options that do not go together.
        SynchronizationError: From ``gradient``, where ranks have different gradients; on all
            ranks. Within ``tf.function`` it is ``tf.errors.InvalidArgumentError``.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> weight = tf.Variable(3.0)
        >>> with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = weight**2
        >>> float(tape.gradient(loss, weight))
        6.0
    """
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced with `groups`.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    reduction = GradientReduction(
        "DistributedGradientTape",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
    )
    return _DistributedTape(gradtape, reduction, scale_local_gradients)


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = _global,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Like :func:`DistributedGradientTape`, but some layers stay each rank's own.

    Args:
        gradtape: As there, and so are the others.
        device_dense: As there.
        device_sparse: As there.
        compression: As there.
        sparse_as_dense: As there.
        op: As there.
        gradient_predivide_factor: As there.
        num_groups: As there.
        groups: As there.
        process_set: As there.
        local_layers: A Keras layer, built, or several, whose gradients are not reduced.
        scale_local_gradients: As there.

    Raises:
        ValueError: `local_layers` holds something else than layers.

    Example:
        >>> import keras, tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> layer = keras.layers.Dense(1)
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(layer(tf.ones([1, 2])))
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
        >>> len(tape.gradient(loss, layer.trainable_variables))
        2
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in _trainable(local_layers):
        tape.register_local_source(variable)
    return tape


def _trainable(layers: Any) -> Iterable[Any]:
    if layers is None:
        return []
    listed = layers if isinstance(layers, (list, tuple, set)) else [layers]
    for layer in listed:
        if not isinstance(layer, tf.keras.layers.Layer):
            raise ValueError(
                "Expected Keras layers in local_layers. Received: "
                f"local_layers={[type(layer).__name__ for layer in listed]}. "
                "Fix: for variables call tape.register_local_source(variable)."
            )
    return [variable for layer in listed for variable in layer.trainable_weights]
