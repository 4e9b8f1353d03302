"""A distributed optimizer that leaves some layers to each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdkit.keras.backend import adapter, keras
from hvdkit.keras.optimizer import DistributedOptimizer


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = adapter.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = adapter.Average,
    groups: Any = None,
    process_set: Any = adapter.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As :func:`DistributedOptimizer`, without a reduction for the variables of some layers.

    Args:
        optimizer: See :func:`DistributedOptimizer`, as the other arguments.
        name: First part of the reductions' names.
        device_dense: Where TensorFlow reduces dense gradients.
        device_sparse: Where TensorFlow reduces sparse gradients.
        compression: How gradients are sent.
        sparse_as_dense: Reduces sparse gradients as dense ones.
        gradient_predivide_factor: Divides before the sum, and multiplies after it.
        op: ``Average`` or ``Sum``.
        groups: Reduces variables together.
        process_set: The ranks that reduce.
        local_layers: A built layer, or several, whose gradients stay each rank's own.
        scale_local_gradients: Whether these gradients are divided by the number of ranks.

    Returns:
        `optimizer` itself.

    Raises:
        ValueError: A layer is none, or is not built yet.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> head = keras.layers.Dense(1)
        >>> head.build((None, 2))
        >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[head])
    """
    layers = _layers(local_layers)
    DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            optimizer.register_local_var(variable)
    return optimizer


def _layers(local_layers: Any) -> list[Any]:
    if local_layers is None:
        return []
    layers = list(local_layers) if isinstance(local_layers, Iterable) else [local_layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"Expected local_layers to be Keras layers. Received: {type(layer).__name__}."
            )
        if not layer.built:
            raise ValueError(
                f"Expected built layers, whose variables exist. Received: {layer.name!r}, not "
                "built. Fix: call layer.build(input_shape), or the model on a batch, before this."
            )
    return layers
