"""Step time of hvdkit's gradient tape and Keras adapter against plain Horovod's tape.

All variants train a Keras model in ``tf.function``, in the same processes, in blocks of a few
steps that take turns; the order of the turns rotates from round to round. A round gives one ratio
for each variant: its median step over that of ``horovod.tensorflow.DistributedGradientTape``.

    mpirun -np 2 --bind-to none python benchmarks/tensorflow_step_time.py --json result.json
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import horovod
import horovod.tensorflow as horovod_tensorflow
import keras
import numpy as np
import tensorflow as tf
from turns import interval, parser_of

import hvdkit.keras as hvdkit_keras
import hvdkit.tensorflow as hvdkit_tensorflow

BASELINE = "horovod tape"
Step = Callable[[tf.Tensor, tf.Tensor], Any]


def mlp() -> Any:
    """10.0 million parameters in 8 variables."""
    dense = keras.layers.Dense
    return keras.Sequential(
        [
            keras.Input((784,)),
            dense(2048, activation="relu"),
            dense(2048, activation="relu"),
            dense(2048, activation="relu"),
            dense(10),
        ]
    )


def cnn() -> Any:
    """1.7 million parameters in 18 variables: six convolutions, two dense layers."""
    layers = keras.layers
    convolutions: list[Any] = []
    for channels in (32, 64, 128):
        convolutions += [
            layers.Conv2D(channels, 3, padding="same", activation="relu"),
            layers.Conv2D(channels, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
        ]
    head = [layers.Flatten(), layers.Dense(704, activation="relu"), layers.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *convolutions, *head])


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (mlp, (32, 784)),
    "cnn": (cnn, (16, 32, 32, 3)),
}
"""Model and shape of one rank's batch."""


def sgd() -> Any:
    """The optimizer that all variants use."""
    return keras.optimizers.SGD(1e-3, momentum=0.9)


def cross_entropy() -> Any:
    """The loss of all variants."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loop(model: Any, wrap: Callable[[Any], Any], optimizer: Any) -> Step:
    """A training loop of one's own; `wrap` makes the tape a distributed one."""
    loss_of = cross_entropy()
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        gradients = wrap(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def with_horovod(model: Any) -> Step:
    """Horovod's tape over the variables inside Keras 3's, which is what works with it."""
    return loop(model, horovod_tensorflow.DistributedGradientTape, sgd())


def with_tape(model: Any) -> Step:
    """hvdkit's tape."""
    return loop(model, hvdkit_tensorflow.DistributedGradientTape, sgd())


def with_optimizer(model: Any) -> Step:
    """hvdkit's Keras optimizer behind an ordinary tape."""
    return loop(model, lambda tape: tape, hvdkit_keras.DistributedOptimizer(sgd()))


def with_distribute(model: Any) -> Step:
    """hvdkit.keras.distribute and Keras' own training step, which also counts samples."""
    model = hvdkit_keras.distribute(
        model, optimizer=sgd(), loss=cross_entropy(), scale_lr="none", summary=False
    )

    @tf.function
    def step(inputs: tf.Tensor, labels: tf.Tensor) -> None:
        model.train_step((inputs, labels))

    return step


VARIANTS: dict[str, Callable[[Any], Step]] = {
    BASELINE: with_horovod,
    "hvdkit tape": with_tape,
    "hvdkit optimizer": with_optimizer,
    "hvdkit distribute": with_distribute,
}


def time_steps(step: Step, batch: tuple[tf.Tensor, tf.Tensor], steps: int) -> list[float]:
    """Seconds of each of `steps` steps; one more goes ahead."""
    hvdkit_tensorflow.barrier()
    step(*batch)
    edges = [time.perf_counter()]
    for _ in range(steps):
        step(*batch)
        edges.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(edges)]


def measure(model_name: str, rounds: int, steps: int) -> np.ndarray:
    """Seconds of every step, the slowest rank's: variants x rounds x steps."""
    make, shape = MODELS[model_name]
    generator = np.random.default_rng(hvdkit_tensorflow.rank())
    inputs = tf.constant(generator.normal(size=shape), tf.float32)
    batch = inputs, tf.constant(generator.integers(0, 10, shape[0]))
    variants = []
    for make_step in VARIANTS.values():
        keras.utils.set_random_seed(0)
        variants.append(make_step(make()))
    for step in variants:  # tracing, allocators, Horovod's cache of responses
        time_steps(step, batch, steps)
    seconds = np.zeros((len(variants), rounds, steps))
    for round_index in range(rounds):
        for turn in range(len(variants)):
            which = (turn + round_index) % len(variants)
            seconds[which, round_index] = time_steps(variants[which], batch, steps)
    slowest = hvdkit_tensorflow.allreduce(
        tf.constant(seconds), name=f"seconds.{model_name}", op=hvdkit_tensorflow.Max
    )
    return np.asarray(slowest)


def summarize(seconds: np.ndarray) -> dict[str, dict[str, Any]]:
    """Median step and its ratio to the baseline, for each variant."""
    per_round = np.median(seconds, axis=2)
    ratios = per_round / per_round[list(VARIANTS).index(BASELINE)]
    return {
        name: {
            "median_step_s": float(np.median(seconds[index])),
            "ratio": statistics.median(ratios[index].tolist()),
            "ratio_interval_95": interval(ratios[index].tolist()),
        }
        for index, name in enumerate(VARIANTS)
    }


def print_table(model_name: str, rows: dict[str, dict[str, Any]]) -> None:
    """One line for each variant."""
    print(f"\n{model_name:18}{'ms':>9} {'ratio':>8}   95 % interval")
    for name, row in rows.items():
        low, high = row["ratio_interval_95"]
        line = f"{name:18}{row['median_step_s'] * 1e3:9.2f} {row['ratio']:8.4f}"
        print(f"{line}   {low:.4f} - {high:.4f}", flush=True)


def main() -> None:
    """Measures every model and reports on rank 0."""
    arguments = parser_of(__doc__, MODELS).parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvdkit_tensorflow.init()
    root = hvdkit_tensorflow.rank() == 0
    results = {}
    for model_name in arguments.models:
        results[model_name] = summarize(measure(model_name, arguments.rounds, arguments.steps))
        if root:
            print_table(model_name, results[model_name])
    if root and arguments.json:
        report = {
            "ranks": hvdkit_tensorflow.size(),
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "horovod": horovod.__version__,
            "models": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
