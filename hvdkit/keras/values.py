"""Collectives on single values, with the signatures of ``horovod.tensorflow.keras``."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.keras.backend import adapter, keras


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = adapter.Compression.none,
) -> Any:
    """Reduces a value over all ranks.

    Args:
        value: A tensor, an array, a number or a Keras variable, of one shape on all ranks.
        name: Name of the operation.
        average: Horovod's former spelling of `op`.
        prescale_factor: Applied to the contributions.
        postscale_factor: Applied to the result.
        op: ``Average``, the default, or ``Sum``.
        compression: See :func:`DistributedOptimizer`.

    Returns:
        A tensor of Keras' backend.

    Example:
        >>> import hvdkit.keras as hvd
        >>> hvd.init()
        >>> float(hvd.allreduce(2.0))
        2.0
    """
    return adapter.allreduce(
        _tensor(value),
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Joins the values of all ranks along their first dimension, which may differ in length.

    Example:
        >>> import hvdkit.keras as hvd
        >>> hvd.init()
        >>> hvd.allgather([1.0, 2.0]).shape[0]
        2
    """
    return adapter.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value, on all ranks.

    Example:
        >>> import hvdkit.keras as hvd
        >>> hvd.init()
        >>> float(hvd.broadcast(3.0, root_rank=0))
        3.0
    """
    return adapter.broadcast(_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = adapter.Average) -> Any:
    """Reduces a value over all ranks and gives each rank its part of the first dimension.

    Example:
        >>> import hvdkit.keras as hvd
        >>> hvd.init()
        >>> hvd.reducescatter([1.0, 2.0]).shape[0]
        2
    """
    return adapter.reducescatter(_tensor(value), name=name, op=op)


def _tensor(value: Any) -> Any:
    if isinstance(value, (int, float, list, tuple, np.ndarray, np.generic)):
        value = np.asarray(value)
        if value.dtype == np.float64 and not isinstance(value, np.generic):
            value = value.astype(keras.config.floatx())
    return keras.ops.convert_to_tensor(value)
