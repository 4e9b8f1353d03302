"""Keras models under hvdkit and ``tf.distribute.MultiWorkerMirroredStrategy``, on one machine.

Both train the same model on the same data with two processes of one compute thread each. They
cannot share processes, so whole jobs take turns; each reports the median time of its steps, after
some to warm up. The result is the median over pairs of (strategy's step) / (hvdkit's step): above 1
hvdkit is faster.

    python benchmarks/keras_against_mirrored.py --pairs 5 --json result.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKERS, STEPS, BATCH = 2, 40, 32
TIMEOUT_S = 300


def train(mode: str, model_name: str, path: str) -> None:
    """One worker of a job; the first one writes its median step time to `path`."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy: Any = None
    if mode == "mirrored":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    else:
        import hvdkit.keras as hvd

        hvd.init()
        rank = hvd.rank()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from tensorflow_step_time import MODELS

    make, shape = MODELS[model_name]
    generator = np.random.default_rng(rank)
    inputs = tf.constant(generator.normal(size=(BATCH, *shape[1:])), tf.float32)
    labels = tf.constant(generator.integers(0, 10, BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step: Any
    if strategy is not None:
        # Keras 3 cannot fit() with this strategy, whose PerReplica values it does not know; its
        # optimizers reduce in a replica context.
        with strategy.scope():
            model = make()
            optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
            optimizer.build(model.trainable_variables)

        def replica_step() -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(inputs, training=True)) / WORKERS
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step = tf.function(lambda: strategy.run(replica_step))
    else:
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        model = hvd.distribute(
            make(), optimizer=optimizer, loss=loss_of, scale_lr="none", summary=False
        )
        step = tf.function(lambda: model.train_step((inputs, labels)))

    for _ in range(STEPS // 4):
        step()
    edges = [time.perf_counter()]
    for _ in range(STEPS):
        step()
        edges.append(time.perf_counter())
    if rank == 0:
        times = [after - before for before, after in itertools.pairwise(edges)]
        Path(path).write_text(json.dumps(statistics.median(times)))


def run(mode: str, model_name: str) -> float:
    """Runs one job; the median time of its steps, in seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "step.json")
        command = [sys.executable, __file__, "--worker", mode, model_name, path]
        if mode == "hvdkit":
            mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.defpath}")
            assert mpirun is not None, "mpirun is not beside this Python"
            options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
            subprocess.run(
                [mpirun, "-np", str(WORKERS), *options, *command],
                env=environment,
                check=True,
                timeout=TIMEOUT_S,
            )
        else:
            addresses = [f"127.0.0.1:{free_port()}" for _ in range(WORKERS)]
            workers = []
            for index in range(WORKERS):
                task = {"type": "worker", "index": index}
                config = json.dumps({"cluster": {"worker": addresses}, "task": task})
                workers.append(subprocess.Popen(command, env={**environment, "TF_CONFIG": config}))
            try:
                codes = [worker.wait(TIMEOUT_S) for worker in workers]
            finally:
                for worker in workers:
                    worker.kill()
            assert codes == [0] * WORKERS, codes
        return float(json.loads(Path(path).read_text()))


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Runs pairs of jobs and reports the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("mlp", "cnn"), default=["mlp", "cnn"])
    parser.add_argument("--pairs", type=int, default=5, help="jobs of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    report = {}
    for model_name in arguments.models:
        pairs = []
        for number in range(arguments.pairs):
            order = ("hvdkit", "mirrored") if number % 2 else ("mirrored", "hvdkit")
            pairs.append({mode: run(mode, model_name) for mode in order})
        ratio = statistics.median(pair["mirrored"] / pair["hvdkit"] for pair in pairs)
        medians = {
            mode: statistics.median(pair[mode] for pair in pairs) for mode in ("hvdkit", "mirrored")
        }
        report[model_name] = {"ratio": ratio, "median_step_s": medians, "pairs": pairs}
        print(
            f"{model_name}: hvdkit {medians['hvdkit'] * 1e3:.1f} ms, MultiWorkerMirroredStrategy "
            f"{medians['mirrored'] * 1e3:.1f} ms, ratio {ratio:.2f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        train(*sys.argv[2:])
    else:
        main()
