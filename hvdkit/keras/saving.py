"""Loads saved models with their optimizers distributed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvdkit.keras.backend import adapter, keras
from hvdkit.keras.optimizer import DistributedOptimizer, controllers_of


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = adapter.Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model that ``model.save`` wrote, with a distributed optimizer and its state.

    The file need not come from a distributed job. Every rank that trains must load it, or get its
    state by a broadcast.

    Args:
        filepath: A ``.keras`` or ``.h5`` file.
        custom_optimizers: Optimizer classes of the user's own.
        custom_objects: Other classes and functions of the user's own, by name.
        compression: See :func:`DistributedOptimizer`.
        legacy_opts: Not possible with Keras 3, which has no legacy optimizers.

    Returns:
        The compiled model; one without an optimizer is returned as it is.

    Raises:
        ValueError: `legacy_opts` was asked for, or the file holds no model.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> model.save("model.keras")
        >>> type(hvd.load_model("model.keras").optimizer).__name__
        'SGD'
    """
    if legacy_opts:
        raise ValueError(
            "Keras 3 has no legacy optimizers. Received: legacy_opts=True. Fix: leave it out."
        )
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not controllers_of(optimizer):
        DistributedOptimizer(optimizer, compression=compression)
    return model
