"""hvd.elastic of TensorFlow on real ranks over Gloo, whose jobs can start again in a process."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf


def check_a_failed_operation_starts_again(hvd: Any) -> None:
    """Also one whose name Horovod's own `run` does not know."""
    weight = tf.Variable(0.0)
    state = hvd.elastic.TensorFlowState([weight], runs=0)

    @hvd.elastic.run
    def train(state: Any) -> str:
        runs = state.runs + 1
        weight.assign(5.0)
        state.runs = runs
        if failures:
            failures.pop()
            raise tf.errors.UnknownError(None, None, "HorovodGroupedAllreduce has failed")
        return f"ended with {hvd.size()} ranks"

    failures = [1]
    assert train(state) == f"ended with {hvd.size()} ranks"
    assert state.runs == 1, "restored before the second run"


def check_other_errors_are_raised(hvd: Any) -> None:
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        raise tf.errors.UnknownError(None, None, "the disk is full")

    with pytest.raises(tf.errors.UnknownError, match="disk is full"):
        train(state)


def check_sync_sends_variables_and_objects(hvd: Any) -> None:
    weight = tf.Variable([float(hvd.rank()), 1.0])
    state = hvd.elastic.TensorFlowState([weight], seen=[hvd.rank()])
    weight.assign([10.0 + hvd.rank(), 2.0])  # drifted apart
    state.seen.append(hvd.rank())
    state.save()
    state.sync()
    assert weight.numpy().tolist() == [10.0, 2.0]
    assert state.seen == [0, 0]


def check_restore_leaves_out_what_was_not_committed(hvd: Any) -> None:
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)], seen=["first"])
    state.seen.append("not committed")
    state.restore()
    assert state.seen == ["first"]
    state.seen.append("second")
    state.save()
    state.seen.append("not committed")
    state.restore()
    state.seen.append("nor this")
    state.restore()
    assert state.seen == ["first", "second"]


def check_keras_models(hvd: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
    state.sync()
    weights = model.get_weights()
    assert len({str(told) for told in hvd.allgather_object(weights)}) == 1
    model.train_on_batch(tf.ones([4, 2]), tf.zeros([4, 1]))
    state.epoch = 1
    state.restore()
    assert str(model.get_weights()) == str(weights)
    assert int(model.optimizer.iterations) == 0
    assert state.epoch == 0
    with pytest.raises(ValueError, match="built model"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))
