"""Wraps optimizers: of TensorFlow 1 by Horovod's own class, of Keras by hvdkit.keras."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow.backend import HOROVOD_INSTALLED, mpi_ops
from hvdkit.tensorflow.compression import Compression

_global = mpi_ops.global_process_set


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = _global,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that applies the gradients of all ranks.

    Keras optimizers get all of the options; Horovod hands them neither `op` nor `groups`.
    Optimizers of ``tf.compat.v1`` are Horovod's own, with Horovod's behaviour.

    Args:
        optimizer: A Keras optimizer, or one of ``tf.compat.v1.train``.
        name: Name of the new optimizer.
        use_locking: For ``tf.compat.v1`` optimizers only.
        device_dense: Where dense gradients are reduced.
        device_sparse: Where sparse gradients are reduced.
        compression: How the numbers travel.
        sparse_as_dense: Reduces ``tf.IndexedSlices`` as dense tensors.
        backward_passes_per_step: Backward passes whose gradients are added up before a step.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies it.
        average_aggregated_gradients: Divides what was added up by the number of passes.
        num_groups: Deprecated; use `groups`.
        groups: How many groups of gradients are reduced together, or lists of variables.
        process_set: The ranks that take part.
        scale_local_gradients: Divides gradients of local variables by the number of ranks.

    Raises:
        ValueError: `optimizer` is none, or options do not go together.

    Example:
        >>> import keras, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    """
    if gradient_predivide_factor != 1.0 and op != mpi_ops.Average:
        raise ValueError(
            "gradient_predivide_factor needs op=Average. Received: "
            f"gradient_predivide_factor={gradient_predivide_factor}, op={op}."
        )
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced with `groups`.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    options = {
        "name": name,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _legacy_optimizer(optimizer, use_locking=use_locking, **options)
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        return _keras_optimizer(optimizer, **options)
    raise ValueError(
        "Expected a Keras optimizer, or one of tf.compat.v1.train. Received: "
        f"optimizer={type(optimizer).__name__}."
    )


def _legacy_optimizer(optimizer: Any, **options: Any) -> Any:
    if HOROVOD_INSTALLED:
        horovod = importlib.import_module("horovod.tensorflow")
        return horovod.DistributedOptimizer(optimizer, **options)
    if options["backward_passes_per_step"] != 1:
        raise ValueError(
            "backward_passes_per_step needs Horovod's optimizer, and Horovod is not installed. "
            f"Received: backward_passes_per_step={options['backward_passes_per_step']}. "
            "Fix: run `hvdkit build`."
        )
    return optimizer


def _keras_optimizer(optimizer: Any, **options: Any) -> Any:
    """Hands a Keras optimizer and all options to the Keras adapter."""
    # Imported here, since the Keras adapter is built on this one.
    adapter = importlib.import_module("hvdkit.keras.optimizer")
    return adapter.DistributedOptimizer(optimizer, **options)
