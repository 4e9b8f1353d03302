"""Twenty distributed steps: ``python -m tests.keras.curve torch|keras FILE``.

Writes the learning rates that the steps used and the weights after them. The model, its weights
and the data are the same for each framework.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

STEPS, EACH, RATE, WARMUP = 20, 4, 0.05, 8


def initial() -> list[np.ndarray]:
    """Weights in Keras' layout: kernels of shape (inputs, outputs)."""
    generator = np.random.default_rng(7)
    shapes = ((6, 16), (16,), (16, 3), (3,))
    return [generator.normal(0, 0.4, shape).astype("float32") for shape in shapes]


def batches(rank: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """This rank's part of each global batch."""
    generator = np.random.default_rng(8)
    found = []
    for _ in range(STEPS):
        inputs = generator.normal(size=(EACH * size, 6)).astype("float32")
        targets = generator.integers(0, 3, EACH * size)
        mine = slice(EACH * rank, EACH * (rank + 1))
        found.append((inputs[mine], targets[mine]))
    return found


def with_torch() -> tuple[int, list[float], list[np.ndarray]]:
    """The steps of hvdkit.torch."""
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), initial(), strict=True):
            parameter.copy_(torch.from_numpy(value.T.copy()))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model, optimizer = hvd.distribute(model, optimizer, warmup_steps=WARMUP, summary=False)
    rates = []
    for inputs, targets in batches(hvd.rank(), hvd.size()):
        rates.append(hvd.effective_lrs(optimizer)[0])
        optimizer.zero_grad()
        outputs = model(torch.from_numpy(inputs))
        torch.nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
        optimizer.step()
    return hvd.rank(), rates, [p.detach().numpy().T for p in model.parameters()]


def with_keras() -> tuple[int, list[float], list[np.ndarray]]:
    """The steps of hvdkit.keras, with the backend that KERAS_BACKEND names."""
    import keras

    import hvdkit.keras as hvd

    hvd.init()
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )
    model.set_weights(initial())
    model = hvd.distribute(
        model,
        warmup_steps=WARMUP,
        summary=False,
        optimizer=keras.optimizers.SGD(RATE, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rates = []
    for inputs, targets in batches(hvd.rank(), hvd.size()):
        rates.append(hvd.effective_lr(model.optimizer))
        model.train_on_batch(inputs, targets)
    weights: list[Any] = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    return hvd.rank(), rates, weights


if __name__ == "__main__":
    rank, rates, weights = {"torch": with_torch, "keras": with_keras}[sys.argv[1]]()
    if rank == 0:
        np.savez(sys.argv[2], rates=rates, weights=np.concatenate([w.ravel() for w in weights]))
