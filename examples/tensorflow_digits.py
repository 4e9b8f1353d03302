"""Trains a small CNN on scikit-learn's handwritten digits with a TensorFlow loop of its own.

    python examples/tensorflow_digits.py                            # one rank, also without Horovod
    ./horovodrun.sh -np 4 python examples/tensorflow_digits.py      # four

Only what is marked with "hvd" makes it a distributed script. The loop is exact: gradients are sums
over samples, divided by the samples of all ranks, so that a short last batch weighs what it should.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.tensorflow as hvd
from hvdkit.scaling import ScalingRecord, warmup_multiplier, warmup_start

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


def learning_rates(base: float, steps: int) -> list[float]:
    """One rate a step: a cosine, scaled by the number of ranks and warmed up."""
    record = ScalingRecord("linear", 1, hvd.size())  # hvd
    warmup, start = int(WARMUP_PART * steps), warmup_start(record.factor)
    return [
        base
        * (1 + math.cos(math.pi * step / steps))
        / 2
        * record.factor
        * warmup_multiplier(step, warmup, start)
        for step in range(steps)
    ]


def training_step(model: Any, optimizer: Any) -> Callable[[Any, Any], tf.Tensor]:
    """One step as a graph; it returns the mean loss over the samples of all ranks."""
    per_sample = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function(reduce_retracing=True)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        count = hvd.allreduce(tf.cast(tf.shape(labels)[0], tf.float32), op=hvd.Sum)  # hvd
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(per_sample(labels, model(images, training=True))) / count
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)  # hvd
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss, op=hvd.Sum)  # hvd

    return step


def evaluate(model: Any, part: Part) -> tuple[int, int]:
    """Correct answers and samples, over all ranks; each rank looks at its own share."""
    images, labels = (array[hvd.rank() :: hvd.size()] for array in part)  # hvd
    answers = np.argmax(model(images, training=False), axis=1)
    counts = tf.constant([int((answers == labels).sum()), len(labels)])
    correct, seen = hvd.allreduce(counts, op=hvd.Sum).numpy()  # hvd
    return int(correct), int(seen)


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
    parser.add_argument("--seed", type=int, default=0, help="weights and order")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.batch_size < 1 or not 0 < arguments.lr < math.inf:
        parser.error(f"an option is out of range: {vars(arguments)}.")
    return arguments


def main() -> int:
    """Trains and reports; 1 where the training diverged."""
    arguments = parse_arguments()
    hvd.init()  # hvd
    keras.utils.set_random_seed(arguments.seed + hvd.rank())  # each rank drops other features
    train, test = load_parts()
    batches = hvd.shard(train, arguments.batch_size, seed=arguments.seed)  # hvd

    model = build_model()
    optimizer = keras.optimizers.SGD(arguments.lr, momentum=0.9, nesterov=True)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([model.weights, optimizer.variables], root_rank=0)  # hvd
    rates = iter(learning_rates(arguments.lr, arguments.epochs * len(batches)))
    step = training_step(model, optimizer)

    start = time.perf_counter()
    for epoch in range(arguments.epochs):
        hvd.set_epoch(batches, epoch)  # hvd
        losses = []
        for images, labels in batches:
            optimizer.learning_rate = next(rates)
            losses.append(step(images, labels))
        loss = float(tf.reduce_mean(losses))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{arguments.epochs} loss {loss:.4f}", flush=True)
        if not math.isfinite(loss):
            if hvd.rank() == 0:
                print(
                    "error: the training diverged: expected a finite loss. Received: "
                    f"loss={loss}. Fix: lower --lr={arguments.lr}.",
                    file=sys.stderr,
                    flush=True,
                )
            return 1
    seconds = time.perf_counter() - start
    correct, count = evaluate(model, test)
    if hvd.rank() == 0:
        speed = arguments.epochs * len(train[1]) / seconds
        print(
            f"ranks {hvd.size()}, {speed:.0f} samples/s, "
            f"test accuracy {100 * correct / count:.2f} % ({correct} of {count})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
