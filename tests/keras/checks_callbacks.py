"""The callbacks of hvdkit.keras on real ranks."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdkit.errors import SynchronizationError
from hvdkit.scaling import warmup_multiplier
from tests.keras.networks import cross_entropy, equal_on_all_ranks, network, samples, weights_of


def compiled(hvd: Any, optimizer: Any = None, **options: Any) -> Any:
    model = network()
    optimizer = keras.optimizers.SGD(0.1) if optimizer is None else optimizer
    options = {"loss": cross_entropy(), **options}
    model.compile(hvd.DistributedOptimizer(optimizer), **options)
    return model


def shared_folder(hvd: Any) -> Path:
    return Path(hvd.broadcast_object(tempfile.mkdtemp(), 0))


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the learning rate of each batch; stands behind the callbacks that set it."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


def fit(model: Any, epochs: int, callbacks: list[Any], steps: int = 3, **options: Any) -> Any:
    inputs, targets = samples(4 * steps)
    return model.fit(
        inputs, targets, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0, **options
    )


def check_broadcast_of_a_built_model(hvd: Any) -> None:
    model = compiled(hvd, keras.optimizers.Adam(0.0))
    if hvd.rank():
        model.set_weights([weight + hvd.rank() for weight in weights_of(model)])
    fit(model, 1, [hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=hvd.size() - 1)])
    assert equal_on_all_ranks(hvd, weights_of(model))
    shift = 0 if hvd.size() == 1 else hvd.size() - 1
    assert np.allclose(weights_of(model)[0], weights_of(network())[0] + shift)


def check_broadcast_of_a_model_that_is_built_later(hvd: Any) -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization()])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, cross_entropy())
    fit(model, 2, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert equal_on_all_ranks(hvd, weights_of(model)[:2])
    state = [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
    assert equal_on_all_ranks(hvd, state)


def check_local_variables_are_not_broadcast(hvd: Any) -> None:
    model = compiled(hvd, keras.optimizers.SGD(0.0))
    model.set_weights([weight + hvd.rank() for weight in weights_of(network())])
    local = model.layers[0].kernel
    fit(model, 1, [hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local])])
    assert np.allclose(weights_of(model)[0], weights_of(network())[0] + hvd.rank())
    assert np.allclose(weights_of(model)[1], weights_of(network())[1])


def check_training_alone_is_said(hvd: Any) -> None:
    if hvd.size() == 1:
        return
    model = network()
    model.compile("sgd", cross_entropy())
    with pytest.raises(SynchronizationError, match="reduces nothing"):
        fit(model, 1, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def check_metrics_reach_every_callback(hvd: Any) -> None:
    """Whatever the order, and with exact results over all samples."""
    count = 4 * (hvd.size() + 1)
    inputs, targets = samples(count * hvd.size())
    share = slice(hvd.rank() * count, (hvd.rank() + 1) * count)
    folder = shared_folder(hvd)
    path = folder / f"log-{hvd.rank()}.csv"
    noted: list[dict[str, Any]] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: noted.append(dict(logs)))
    model = compiled(hvd, keras.optimizers.SGD(0.0), metrics=["accuracy"])
    callbacks = [keras.callbacks.CSVLogger(path), note, hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        inputs[share],
        targets[share],
        batch_size=4,
        epochs=2,
        validation_data=(inputs[share][: 1 + hvd.rank()], targets[share][: 1 + hvd.rank()]),
        callbacks=callbacks,
        verbose=0,
    ).history
    held = np.concatenate(
        [np.arange(rank * count, rank * count + 1 + rank) for rank in range(hvd.size())]
    )
    plain = network()
    plain.compile("sgd", cross_entropy(), metrics=["accuracy"])
    expected = plain.evaluate(inputs, targets, verbose=0, return_dict=True)
    validated = plain.evaluate(inputs[held], targets[held], verbose=0, return_dict=True)
    expected |= {f"val_{name}": value for name, value in validated.items()}
    with path.open() as file:
        logged = list(csv.DictReader(file))
    for epoch in range(2):
        for name, value in expected.items():
            assert abs(history[name][epoch] - value) < 1e-6, (name, history[name], value)
            assert abs(noted[epoch][name] - value) < 1e-6
            assert abs(float(logged[epoch][name]) - value) < 1e-6
    if hvd.rank() == 0:  # later evaluations are each rank's own
        model.evaluate(inputs[:4], targets[:4], verbose=0)
    hvd.barrier()


class OwnLogs(keras.Sequential):  # type: ignore[misc]
    """Its step reports a number of its own, and one more on rank 0."""

    own_rank = 0

    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        logs = {"own": keras.ops.convert_to_tensor(float(self.own_rank))}
        if self.own_rank == 0:
            logs["only_here"] = keras.ops.convert_to_tensor(7.0)
        return logs


def check_other_numbers_are_averaged_by_samples(hvd: Any) -> None:
    model = OwnLogs(network().layers)
    model.own_rank = hvd.rank()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), cross_entropy())
    inputs, targets = samples(hvd.rank() + 1)
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        inputs, targets, batch_size=hvd.rank() + 1, callbacks=callbacks, verbose=0
    ).history
    counts = np.arange(1, hvd.size() + 1)
    expected = float((np.arange(hvd.size()) * counts).sum() / counts.sum())
    assert abs(history["own"][0] - expected) < 1e-6, history
    assert history["only_here"][0] == 7.0


class Extremes(keras.metrics.Metric):  # type: ignore[misc]
    """A metric of two results, from sums."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_pred, "float32")))
        self.count.assign_add(keras.ops.cast(keras.ops.size(y_pred), "float32"))

    def result(self) -> Any:
        return {"mean_output": self.total / self.count, "outputs": self.count}


def check_metrics_beyond_means(hvd: Any) -> None:
    """What is no mean of ranks' results: areas, ratios of counts, metrics of several results."""

    def metrics() -> list[Any]:
        return [
            keras.metrics.AUC(name="auc"),
            keras.metrics.F1Score(threshold=0.5, name="f1"),
            keras.metrics.RootMeanSquaredError(name="rmse"),
            Extremes(),
        ]

    def binary() -> Any:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
        model.set_weights([np.linspace(-1, 1, 6).reshape(6, 1), np.zeros(1)])
        return model

    count = 5 * hvd.size() + 3
    inputs, classes = samples(count)
    targets = (classes > 0).astype("float32")[:, np.newaxis]
    reference = binary()
    reference.compile("sgd", "binary_crossentropy", metrics=metrics())
    expected = reference.evaluate(inputs, targets, verbose=0, return_dict=True)
    model = binary()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD()), "binary_crossentropy", metrics=metrics()
    )
    last = hvd.rank() == hvd.size() - 1
    mine = slice(5 * hvd.rank(), None if last else 5 * hvd.rank() + 5)
    together = hvd.evaluate(model, inputs[mine], targets[mine], verbose=0, return_dict=True)
    assert together.keys() == expected.keys()
    extremes = model.metrics[1].metrics[-1]
    assert float(extremes.count) == len(inputs[mine]), "the rank's own sums are left as they were"
    for name, value in expected.items():
        assert np.allclose(_flat(together[name]), _flat(value), atol=1e-5), (name, together, value)


def _flat(value: Any) -> np.ndarray:
    parts = value.values() if isinstance(value, dict) else [value]
    return np.concatenate([np.ravel(keras.ops.convert_to_numpy(part)) for part in parts])


def check_warmup(hvd: Any) -> None:
    steps, epochs, size = 3, 2, hvd.size()
    for initial_epoch in (0, 1):
        rates = Rates()
        model = compiled(hvd, keras.optimizers.SGD(0.4))
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=epochs)
        history = fit(model, 4, [warmup, rates], steps, initial_epoch=initial_epoch)
        expected = [
            0.4 * warmup_multiplier(step, epochs * steps, 1.0 / size)
            for step in range(initial_epoch * steps, 4 * steps)
        ]
        assert np.allclose(rates.rates, expected, rtol=1e-6), (rates.rates, expected)
        assert np.isclose(history.history["lr"][-1], 0.4)
        # The formula of the documentation, at the end of each batch.
        done = (initial_epoch * steps + 1) / steps
        assert np.isclose(rates.rates[0], 0.4 / size * (1 + done * (size - 1) / epochs))


def check_schedule(hvd: Any) -> None:
    rates = Rates()
    model = compiled(hvd)
    callbacks = [
        hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, end_epoch=2),
        hvd.callbacks.LearningRateScheduleCallback(0.8, lambda epoch: 0.1**epoch, start_epoch=2),
        rates,
    ]
    fit(model, 4, callbacks, steps=2)
    expected = [0.1, 0.1, 0.4, 0.4, 8e-3, 8e-3, 8e-4, 8e-4]
    assert np.allclose(rates.rates, expected, rtol=1e-5), rates.rates
    rates = Rates()
    smooth = hvd.callbacks.LearningRateScheduleCallback(
        1.0, lambda epoch: 1.0 + epoch, staircase=False
    )
    fit(model, 2, [smooth, rates], steps=2)
    assert np.allclose(rates.rates, [1.0, 1.5, 2.0, 2.5])


def check_momentum_correction(hvd: Any) -> None:
    """A velocity is brought to the new rate; Adam's moments are left alone."""

    def trained(optimizer: Any, correct: bool) -> Any:
        model = compiled(hvd, optimizer)
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 1.0 / (1 + epoch), momentum_correction=correct
        )
        fit(model, 3, [schedule], steps=1, shuffle=False)
        return model

    position, buffer = network(), [np.zeros_like(weight) for weight in weights_of(network())]
    position.compile(keras.optimizers.SGD(1.0), cross_entropy())
    inputs, targets = samples(4)
    for epoch in range(3):
        before = weights_of(position)
        position.train_on_batch(inputs, targets)
        gradients = [old - new for old, new in zip(before, weights_of(position), strict=True)]
        buffer = [0.9 * held + g for held, g in zip(buffer, gradients, strict=True)]
        rate = 0.1 / (1 + epoch)
        position.set_weights([w - rate * held for w, held in zip(before, buffer, strict=True)])
    corrected = trained(keras.optimizers.SGD(0.1, momentum=0.9), True)
    for ours, theirs in zip(weights_of(corrected), weights_of(position), strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)
    uncorrected = trained(keras.optimizers.SGD(0.1, momentum=0.9), False)
    assert not np.allclose(weights_of(uncorrected)[0], weights_of(position)[0], atol=1e-6)
    same = [weights_of(trained(keras.optimizers.Adam(0.1), correct)) for correct in (True, False)]
    assert all(np.array_equal(*pair) for pair in zip(*same, strict=True))


def check_rates_that_cannot_be_set(hvd: Any) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model = compiled(hvd, keras.optimizers.SGD(schedule))
    with pytest.raises(ValueError, match="ExponentialDecay, which sets the rate itself"):
        fit(model, 1, [hvd.callbacks.LearningRateWarmupCallback(0.1)])
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)

    def batches() -> Any:
        while True:
            yield samples(4)

    model = compiled(hvd)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1)
    model.fit(batches(), steps_per_epoch=2, callbacks=[warmup], verbose=0)


class StopsHere(keras.callbacks.Callback):  # type: ignore[misc]
    """Wants to stop after the first batch, on one rank; counts what follows."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.stops = stops
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.stops:
            self.model.stop_training = True


def check_one_rank_that_stops(hvd: Any) -> None:
    for every, batches in (("epoch", 3), ("batch", 1)):
        model = compiled(hvd)
        counting = StopsHere(hvd.rank() == hvd.size() - 1)
        fit(model, 4, [counting, hvd.callbacks.StopTogether(every)])
        assert counting.batches == batches, (every, counting.batches)
        fit(model, 1, [StopsHere(False), hvd.callbacks.StopTogether(every)])
    with pytest.raises(ValueError, match="'epoch' or 'batch'"):
        hvd.callbacks.StopTogether("step")


def check_not_a_number_on_one_rank(hvd: Any) -> None:
    """Keras' own TerminateOnNaN, within distribute's fit."""
    model = hvd.distribute(
        network(), optimizer="sgd", loss=cross_entropy(), scale_lr="none", summary=False
    )
    inputs, targets = samples(12)
    if hvd.rank() == hvd.size() - 1:
        inputs[0] = np.nan
    history = model.fit(
        inputs, targets, batch_size=4, epochs=5, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    assert len(history.history["loss"]) == 1


def check_decisions_from_metrics(hvd: Any) -> None:
    """The ranks' own losses rise and fall at different times; their mean decides."""
    model = hvd.distribute(
        network(),
        optimizer=keras.optimizers.SGD(0.5),
        loss=cross_entropy(),
        summary=False,
        scale_lr="none",
    )
    inputs, targets = samples(8 * hvd.size())
    mine = slice(8 * hvd.rank(), 8 * hvd.rank() + 8)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=0, factor=0.5)
    history = model.fit(
        inputs[mine],
        targets[mine],
        batch_size=4,
        epochs=12,
        validation_data=(inputs[mine][:4], targets[mine][:4] * 0),
        callbacks=[stop, plateau],
    )
    told = hvd.allgather_object((len(history.epoch), float(model.optimizer.learning_rate)))
    assert len(set(told)) == 1, told
    assert told[0][0] < 12
    assert told[0][1] < 0.5
    assert equal_on_all_ranks(hvd, weights_of(model))


def check_writers_write_once(hvd: Any) -> None:
    folder = shared_folder(hvd)
    mine = folder / f"rank-{hvd.rank()}"
    model = compiled(hvd)
    callbacks = hvd.callbacks.standard(
        [
            keras.callbacks.CSVLogger(mine.with_suffix(".csv")),
            keras.callbacks.ModelCheckpoint(mine.with_suffix(".keras")),
            hvd.callbacks.BestModelCheckpoint("loss", filepath=str(mine) + ".best.keras"),
        ]
    )
    fit(model, 2, callbacks)
    hvd.barrier()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["rank-0.best.keras", "rank-0.csv", "rank-0.keras"], names
    if hvd.rank() == 0:
        assert "hvdkit" not in str(keras.models.load_model(mine.with_suffix(".keras")).optimizer)
    with pytest.raises(ValueError, match="filepath=None"):
        fit(model, 1, [hvd.callbacks.BestModelCheckpoint()])


def check_order(hvd: Any) -> None:
    stop = keras.callbacks.EarlyStopping("loss")
    own = hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=hvd.size() - 1)
    ordered = hvd.callbacks.standard([own, stop])
    assert [type(callback).__name__ for callback in ordered] == [
        "MetricAverageCallback",
        "EarlyStopping",
        "BroadcastGlobalVariablesCallback",
        "StopTogether",
    ]
    assert ordered[1] is stop
    assert ordered[2] is own
    assert len(hvd.callbacks.standard(ordered)) == 4


class Interrupts(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the training at the beginning of an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


def check_backup_and_restore(hvd: Any) -> None:
    """Only the root has the backup; all ranks resume with its epoch and state."""
    folder = Path(tempfile.mkdtemp())  # a folder of each rank's own
    straight = compiled(hvd, keras.optimizers.Adam(0.01))
    fit(straight, 4, hvd.callbacks.standard(), shuffle=False)
    model = compiled(hvd, keras.optimizers.Adam(0.01))
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    with pytest.raises(KeyboardInterrupt):
        fit(model, 4, hvd.callbacks.standard([backup, Interrupts()]), shuffle=False)
    model = compiled(hvd, keras.optimizers.Adam(0.01))
    model.set_weights([weight + 1 + hvd.rank() for weight in weights_of(model)])
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    history = fit(model, 4, hvd.callbacks.standard([backup]), shuffle=False)
    assert history.epoch == [2, 3], history.epoch
    for ours, theirs in zip(weights_of(model), weights_of(straight), strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)
