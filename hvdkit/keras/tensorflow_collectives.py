"""What the Keras adapter needs of TensorFlow; :mod:`~hvdkit.keras.torch_collectives` mirrors it.

``fit`` traces a graph, so counts of samples are tensors here, and what lasts from one step to the
next is a ``tf.Variable``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.gradients import GradientReduction
from hvdkit.tensorflow.state import broadcast_variables as broadcast_tensorflow_variables
from hvdkit.tensorflow.values import live, numbered, settled

Gradient = Any


def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    label: str,
    settings: Any,
    samples: Any = None,
    passes: int = 1,
) -> tuple[list[Gradient], Any]:
    """Reduces gradients over the ranks of a process set.

    Args:
        gradients: Dense tensors or ``tf.IndexedSlices``.
        variables: The Keras or TensorFlow variables that they belong to.
        label: First part of the reductions' names.
        settings: A :class:`~hvdkit.keras.settings.ReductionSettings`.
        samples: Samples of this rank, None where they are not counted.
        passes: Batches of a step, which has to be the same on all ranks.

    Returns:
        The reduced gradients, and the samples of all ranks.

    Raises:
        SynchronizationError: Ranks have different gradients; on all ranks. Within a graph it is
            ``tf.errors.InvalidArgumentError``.
    """
    label = numbered(label)
    reduction = GradientReduction(
        label,
        device_dense=settings.device_dense,
        device_sparse=settings.device_sparse,
        compression=settings.compression,
        sparse_as_dense=settings.sparse_as_dense,
        op=settings.op,
        gradient_predivide_factor=settings.gradient_predivide_factor,
        groups=settings.groups,
        process_set=settings.process_set,
        ignore_name_scope=True,
        passes=passes,
    )
    total = None if samples is None else _sum(samples, f"{label}.samples", settings.process_set)
    return reduction(gradients, variables), total


def building_graph() -> bool:
    """Whether what runs now only builds a graph."""
    return not tf.executing_eagerly()


def build_before_training(model: Any) -> None:
    """Makes ``fit`` and ``train_on_batch`` build an unbuilt model before they make their graph.

    Keras does so only for models of a strategy of ``tf.distribute``; the default strategy, which
    changes nothing else, is one. Otherwise the first step would train before a broadcast.
    """
    if model._distribute_strategy is None:
        model._distribute_strategy = tf.distribute.get_strategy()


def true_on_all(flag: Any, name: str, process_set: Any) -> tf.Tensor:
    """Whether a boolean is true on every rank of the set."""
    wire = tf.cast(flag, tf.float32)
    return _sum(1.0 - wire, numbered(name), process_set) < 0.5


def scale(gradients: Sequence[Gradient], factor: Any) -> list[Gradient]:
    """Gradients times a number or a scalar tensor; 0 times anything is 0.

    A factor of 1, the usual one, costs no pass over memory.
    """
    if isinstance(factor, float):
        return list(gradients) if factor == 1.0 else [_scaled(g, factor) for g in gradients]
    scaled = tf.cond(
        tf.equal(factor, 1.0),
        lambda: [_identity(gradient) for gradient in gradients],
        lambda: [_scaled(gradient, factor) for gradient in gradients],
    )
    return list(scaled)


def _identity(gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values, gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


def _scaled(gradient: Gradient, factor: Any) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = _scaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def length_of(tensor: Any) -> Any:
    """Samples of a batch."""
    return tf.shape(tensor, out_type=tf.int64)[0]


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Gives Keras variables the root's values, in place. Their order tells them apart.

    Raises:
        SynchronizationError: The ranks' variables differ in number, shape or dtype.
    """
    broadcast_tensorflow_variables(list(variables), root_rank)


class WindowCounter:
    """Samples of the micro-batches between two optimizer steps, on this rank.

    Gradients are accumulated as ``sum(g_m * n_m / reference)``, which needs no scaling while all
    batches have the same size.

    Args:
        process_set: The ranks whose batches make up a step.
        label: First part of the reductions' names.
    """

    def __init__(self, process_set: Any, label: str) -> None:
        self._process_set = process_set
        self._label = label
        self._factor: Any = None
        with tf.init_scope():  # also where the first step is being traced
            self._reference = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._total = tf.Variable(0, dtype=tf.int64, trainable=False)

    def begin(self, samples: Any) -> None:
        """A micro-batch of so many samples is about to be applied."""
        samples = tf.cast(samples, tf.int64)
        self._total.assign_add(samples)
        reference = tf.cond(
            self._reference > 0, self._reference.read_value, lambda: self._agree(samples)
        )
        self._factor = tf.cast(samples, tf.float64) / tf.cast(reference, tf.float64)

    def _agree(self, samples: tf.Tensor) -> tf.Tensor:
        agreed = samples
        if self._process_set.included() and self._process_set.size() > 1:
            agreed = _reduce(samples, f"{self._label}.reference", mpi_ops.Max, self._process_set)
        self._reference.assign(tf.maximum(agreed, 1))
        return self._reference.read_value()

    def weigh(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The current micro-batch's gradients, as they are accumulated."""
        return scale(gradients, self._factor)

    def take(self) -> tf.Tensor:
        """Ends the window; the samples of this rank in it."""
        total = tf.identity(self._total.read_value())
        with tf.control_dependencies([total]):
            self._total.assign(0)
        return total

    def correction(self, passes: int, ranks: int, total: Any) -> tf.Tensor:
        """What a mean over ranks and micro-batches is multiplied by to be one over samples.

        Args:
            passes: Micro-batches of a window.
            ranks: Ranks that the mean was taken over.
            total: Their samples.
        """
        full = tf.cast(passes * ranks * self._reference.read_value(), tf.float64)
        # Without a sample on any rank the gradients are zeros, whatever the factor.
        return full / tf.cast(tf.maximum(total, 1), tf.float64)


def _sum(tensor: tf.Tensor, name: str, process_set: Any) -> tf.Tensor:
    return _reduce(tensor, name, mpi_ops.Sum, process_set)


def _reduce(tensor: tf.Tensor, name: str, op: int, process_set: Any) -> tf.Tensor:
    # A batch's size may be a constant of the graph, which must be sent in each step all the same.
    # The surrounding name scopes have the numbers of Keras' optimizers, which ranks may differ in.
    reduced = mpi_ops._allreduce(
        live(tensor), name=name, op=op, process_set=process_set, ignore_name_scope=True
    )
    return settled(reduced)
