"""Each rank's share of the data, for Keras with either backend.

The data sets are TensorFlow's, which ``fit`` takes with PyTorch too; :mod:`hvdkit.tfdata`
has the rules.
"""

from __future__ import annotations

import sys
from typing import Any

from hvdkit.keras.backend import adapter, keras
from hvdkit.optional import require

_MODULE = "hvdkit.tfdata"


def shard(data: Any, batch_size: int | None, **options: Any) -> Any:
    """This rank's batches of a data set that every rank can read in full.

    Args:
        data: See :func:`hvdkit.tfdata.shard`.
        batch_size: Samples a rank and step.
        options: The options of that function.

    Returns:
        A ``tf.data.Dataset`` of batches.

    Raises:
        ValueError: Arguments do not fit each other or the data.

    Example:
        >>> import numpy as np, hvdkit.keras as hvd
        >>> hvd.init()
        >>> len(hvd.shard(np.zeros((10, 3)), 4))
        3
    """
    if "rank" not in options and "size" not in options:
        options |= {"rank": adapter.rank(), "size": adapter.size()}
    return _functions().shard(data, batch_size, **options)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Says which epoch the next pass over a data set of :func:`shard` is.

    ``fit`` of a model of :func:`hvdkit.keras.distribute` does so by itself.

    Args:
        dataset: What :func:`shard` returned.
        epoch: Number of the epoch, from 0.

    Raises:
        ValueError: The data set is another one, or the epoch is negative.

    Example:
        >>> import numpy as np, hvdkit.keras as hvd
        >>> hvd.init()
        >>> hvd.set_epoch(hvd.shard(np.zeros((10, 3)), 4), 2)
    """
    _functions().set_epoch(dataset, epoch)


def is_sharded(data: Any) -> bool:
    """Whether this is what :func:`shard` returned."""
    module = sys.modules.get(_MODULE)
    return module is not None and bool(module.is_sharded(data))


class SetEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells a data set of :func:`shard` which epoch begins, also after a resume.

    Args:
        dataset: What :func:`shard` returned.

    Example:
        >>> import numpy as np, hvdkit.keras as hvd
        >>> hvd.init()
        >>> batches = hvd.shard(np.zeros((10, 3)), 4)
        >>> callbacks = [hvd.callbacks.SetEpoch(batches)]
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tells the number."""
        set_epoch(self.dataset, epoch)


def _functions() -> Any:
    return require(_MODULE, feature="hvd.shard", extra="tensorflow")
