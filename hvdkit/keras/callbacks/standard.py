"""The right callbacks in the right order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdkit.keras.backend import keras
from hvdkit.keras.callbacks.checkpoints import BestModelCheckpoint, RootOnly
from hvdkit.keras.callbacks.synchronized import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    StopTogether,
)

WRITERS = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "RemoteMonitor", "TensorBoard")
"""Callbacks of Keras that write files or report: one rank is enough."""


def standard(
    callbacks: Iterable[Any] = (), root_rank: int = 0, stop_every: str = "epoch"
) -> list[Any]:
    """Callbacks for ``fit`` on many ranks, around the user's own.

    The order: metrics over all ranks first, so that every other callback has them; then the
    user's own, of which those that write files run on the root only; then the broadcast, after a
    callback that has restored a state; and one decision to stop, after all that may want to.

    Args:
        callbacks: The user's own. What is already one of those here stands for itself.
        root_rank: The rank that all start from and that writes.
        stop_every: See :class:`StopTogether`.

    Returns:
        A new list.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> callbacks = hvd.callbacks.standard([keras.callbacks.EarlyStopping(patience=3)])
        >>> [type(callback).__name__ for callback in callbacks][:2]
        ['MetricAverageCallback', 'EarlyStopping']
    """
    own = list(callbacks)

    def given(kind: type) -> list[Any]:
        return [callback for callback in own if isinstance(callback, kind)]

    steering = (MetricAverageCallback, BroadcastGlobalVariablesCallback, StopTogether)
    others = [callback for callback in own if not isinstance(callback, steering)]
    return [
        *(given(MetricAverageCallback) or [MetricAverageCallback()]),
        *(_on_root(callback, root_rank) for callback in others),
        *(given(BroadcastGlobalVariablesCallback) or [BroadcastGlobalVariablesCallback(root_rank)]),
        *(given(StopTogether) or [StopTogether(stop_every)]),
    ]


def _on_root(callback: Any, root_rank: int) -> Any:
    writers = tuple(getattr(keras.callbacks, name) for name in WRITERS)
    if isinstance(callback, writers) and not isinstance(callback, BestModelCheckpoint):
        return RootOnly(callback, root_rank)
    return callback
