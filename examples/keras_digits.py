"""Trains a small CNN on scikit-learn's 1,797 handwritten digits with Keras, on any number of ranks.

    python examples/keras_digits.py                            # one rank, also without Horovod
    ./horovodrun.sh -np 4 python examples/keras_digits.py      # four
    KERAS_BACKEND=torch ./horovodrun.sh -np 4 python examples/keras_digits.py

Only what is marked with "hvd" makes it a distributed script.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd

SPLIT_SEED = 0
"""The test part is the same whatever the number of ranks and --seed."""
WARMUP_PART = 0.2
"""Part of all steps in which the learning rate rises to its scaled value."""

Part = tuple[np.ndarray, np.ndarray]


def load_parts() -> tuple[Part, Part]:
    """Training and test part: images of shape (n, 8, 8, 1) from 0 to 1, and labels."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype("float32")
    train, test = train_test_split(
        np.arange(len(images)), test_size=0.2, random_state=SPLIT_SEED, stratify=digits.target
    )
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def build_model() -> Any:
    """Two convolutions and two dense layers, 72,000 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=25, help="passes over the training part")
    parser.add_argument("--batch-size", type=int, default=16, help="samples a rank and step")
    parser.add_argument(
        "--lr",
        type=float,
        default=0.04,
        help="learning rate for one rank's batch; scaled with the ranks",
    )
    parser.add_argument(
        "--compression",
        choices=("none", "fp16", "bf16"),
        default="none",
        help="format in which gradients travel",
    )
    parser.add_argument("--seed", type=int, default=0, help="weights and order")
    arguments = parser.parse_args()
    for name, legal in (
        ("epochs", arguments.epochs >= 1),
        ("batch_size", arguments.batch_size >= 1),
        ("lr", 0 < arguments.lr < math.inf),
        ("seed", arguments.seed >= 0),
    ):
        if not legal:
            parser.error(f"--{name.replace('_', '-')} is out of range: {getattr(arguments, name)}.")
    return arguments


def main() -> int:
    """Trains and reports; 1 where the training diverged."""
    arguments = parse_arguments()
    hvd.init()  # hvd
    keras.utils.set_random_seed(arguments.seed + hvd.rank())  # each rank drops other features
    train, test = load_parts()
    batches = hvd.shard(train, arguments.batch_size, seed=arguments.seed)  # hvd
    steps = arguments.epochs * len(batches)

    model = build_model()
    schedule = keras.optimizers.schedules.CosineDecay(arguments.lr, steps)
    model = hvd.distribute(  # hvd
        model,
        warmup_steps=int(WARMUP_PART * steps),
        compression=arguments.compression,
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    start = time.perf_counter()
    history = model.fit(
        batches,
        epochs=arguments.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
    seconds = time.perf_counter() - start
    if not math.isfinite(history.history["loss"][-1]):
        if hvd.rank() == 0:
            print(
                "error: the training diverged: expected a finite loss. Received: loss="
                f"{history.history['loss'][-1]}. Fix: lower --lr={arguments.lr}.",
                file=sys.stderr,
                flush=True,
            )
        return 1
    part = hvd.shard(test, 64, train=False)
    accuracy = hvd.evaluate(model, part, verbose=0, return_dict=True)["accuracy"]  # hvd
    count = len(test[1])
    if hvd.rank() == 0:
        speed = arguments.epochs * len(train[1]) / seconds
        print(
            f"ranks {hvd.size()}, {speed:.0f} samples/s, test accuracy {100 * accuracy:.2f} % "
            f"({round(accuracy * count)} of {count})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
