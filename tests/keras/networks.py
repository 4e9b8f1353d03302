"""Small Keras models with weights that all ranks and both backends can make alike."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def network(dtype: str | None = None) -> Any:
    """Two layers with weights from a fixed seed."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh", dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )
    generator = np.random.default_rng(3)
    model.set_weights([generator.normal(0, 0.4, weight.shape) for weight in model.weights])
    return model


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes."""
    generator = np.random.default_rng(11)
    inputs = generator.normal(size=(count, 6)).astype("float32")
    return inputs, generator.integers(0, 3, count)


def cross_entropy() -> Any:
    """The loss that these models are trained with."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights_of(model: Any) -> list[np.ndarray]:
    """The model's weights, as arrays."""
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights]


def distance(model: Any, reference: Any) -> float:
    """The largest difference between the weights of two models."""
    pairs = zip(weights_of(model), weights_of(reference), strict=True)
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)


def train_alone(
    optimizer: Any, batches: list[tuple[np.ndarray, np.ndarray]], **compile_arguments: Any
) -> Any:
    """What one process computes with the big batches."""
    model = network()
    model.compile(optimizer, cross_entropy(), **compile_arguments)
    for inputs, targets in batches:
        model.train_on_batch(inputs, targets)
    return model


def equal_on_all_ranks(hvd: Any, arrays: list[np.ndarray]) -> bool:
    """Whether all ranks hold the same numbers, bit for bit."""
    told = hvd.allgather_object([np.asarray(array) for array in arrays])
    return all(
        np.array_equal(ours, theirs)
        for other in told
        for ours, theirs in zip(told[0], other, strict=True)
    )
