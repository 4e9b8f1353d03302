"""hvd.elastic of Keras on real ranks over Gloo, whose jobs can start again in a process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.keras.networks import cross_entropy, equal_on_all_ranks, network, samples, weights_of


def compiled(hvd: Any) -> Any:
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), cross_entropy())
    return model


def check_a_training_that_fails_starts_again(hvd: Any) -> None:
    from horovod.common.exceptions import HorovodInternalError

    model = compiled(hvd)
    model.set_weights([weight + hvd.rank() for weight in weights_of(model)])
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, seen=[])
    inputs, targets = samples(8)
    started: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> int:
        started.append(state.epoch)
        assert equal_on_all_ranks(hvd, weights_of(model))
        state.seen.append("not committed")
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ]
        model.fit(
            inputs,
            targets,
            initial_epoch=state.epoch,
            epochs=state.epoch + 2,
            callbacks=callbacks,
            verbose=0,
        )
        if len(started) == 1:
            model.set_weights([weight * np.nan for weight in weights_of(model)])
            raise HorovodInternalError("a rank is gone")
        return int(state.epoch)

    assert train(state) == 4
    assert started == [0, 2]
    assert all(np.isfinite(weight).all() for weight in weights_of(model))
    assert int(model.optimizer.iterations) == 4
    assert state.batch == 0


def check_epochs_that_count_from_zero_again(hvd: Any) -> None:
    state = hvd.elastic.KerasState(compiled(hvd), epoch=5)
    inputs, targets = samples(8)
    callbacks = [hvd.elastic.UpdateEpochStateCallback(state)]
    state.model.fit(inputs, targets, epochs=2, callbacks=callbacks, verbose=0)
    assert state.epoch == 7


def check_restore(hvd: Any) -> None:
    model = compiled(hvd)
    state = hvd.elastic.KerasState(model, seen=["first"])
    before = weights_of(model)
    model.train_on_batch(*samples(8))
    state.seen.append("not committed")
    state.restore()
    assert all(map(np.array_equal, weights_of(model), before))
    assert int(model.optimizer.iterations) == 0
    assert state.seen == ["first"]


def check_an_optimizer_of_its_own(hvd: Any) -> None:
    """Of a loop written by hand, whose model is not compiled."""
    model = network()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    state = hvd.elastic.KerasState(model, optimizer=optimizer)
    for variable in optimizer.variables:
        variable.assign(keras.ops.ones_like(variable) * (1 + hvd.rank()))
    state.sync()
    for variable in optimizer.variables:
        assert np.all(keras.ops.convert_to_numpy(variable) == 1)
