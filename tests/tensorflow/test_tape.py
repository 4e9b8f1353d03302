"""Gradient tapes and training on real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.ranks import job_environment, mpirun, rank_tests, run_job

test_tape = rank_tests("tests.tensorflow.checks_tape", sizes=(2, 4))
test_tape_use = rank_tests("tests.tensorflow.checks_tape_use", sizes=(2, 4))
test_training = rank_tests("tests.tensorflow.checks_training", sizes=(2, 4))

STEPS = """
import keras, tensorflow as tf
import hvdkit.tensorflow as hvd
hvd.init()
if hvd.rank() == 0:
    keras.layers.Dense(1)  # other layers of this rank have other numbers
layer = keras.layers.Dense(2)
layer(tf.ones([1, 3]))
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 3])))
    return hvd.DistributedGradientTape(tape).gradient(loss, layer.trainable_variables)
step(), tf.function(step)()
hvd.shutdown()
"""


def test_gradients_have_readable_names_in_a_timeline(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    environment = job_environment({"HOROVOD_TIMELINE": str(timeline)})
    command = [*mpirun(2), sys.executable, "-c", STEPS]
    job = run_job(command, timeout_s=120, environment=environment)
    assert job.returncode == 0, job.report()
    # Horovod may leave the list without its end.
    text = timeline.read_text().rstrip().removesuffix("]").rstrip().rstrip(",")
    names = {
        event["args"]["name"]
        for event in json.loads(text + "]")
        if event.get("name") == "process_name" and "name" in event["args"]
    }
    scope = "DistributedGradientTape_Allreduce/"
    assert {name for name in names if scope in name} == {
        f"{scope}same_gradients",
        f"{scope}grad_0_kernel",
        f"{scope}grad_1_bias",
    }
