"""Keras callbacks for training on many ranks; :func:`standard` puts them in the right order."""

from __future__ import annotations

from hvdkit.keras.callbacks.checkpoints import BestModelCheckpoint, RootOnly
from hvdkit.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvdkit.keras.callbacks.standard import standard
from hvdkit.keras.callbacks.synchronized import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    StopTogether,
)
from hvdkit.keras.data import SetEpoch

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "RootOnly",
    "SetEpoch",
    "StopTogether",
    "standard",
]
