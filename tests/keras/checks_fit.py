"""What ``fit`` does beside the steps: results, validation, moving statistics, refusals."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvdkit.errors import SynchronizationError, UnsupportedError
from tests.keras.networks import (
    cross_entropy,
    distance,
    equal_on_all_ranks,
    network,
    samples,
    weights_of,
)


def distributed(hvd: Any, model: Any = None, rate: float = 0.1, **options: Any) -> Any:
    model = network() if model is None else model
    options = {"loss": cross_entropy(), "scale_lr": "none", "summary": False, **options}
    return hvd.distribute(model, optimizer=keras.optimizers.SGD(rate), **options)


def part(hvd: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's samples, `count` of them."""
    inputs, targets = samples(count * hvd.size())
    own = slice(hvd.rank() * count, (hvd.rank() + 1) * count)
    return inputs[own], targets[own]


def plain_callbacks(hvd: Any) -> list[Any]:
    return [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]


def check_positional_arguments(hvd: Any) -> None:
    inputs, targets = part(hvd, 8)
    seen: list[int] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    distributed(hvd).fit(inputs, targets, 4, 2, 0, [note])
    assert seen == [0, 1]


def check_a_callback_may_evaluate_on_one_rank(hvd: Any) -> None:
    inputs, targets = part(hvd, 8)
    held = samples(5)
    model = distributed(hvd, rate=0.0)
    results: list[float] = []

    def evaluate(epoch: int, logs: Any) -> None:
        if hvd.rank() == 0:
            results.append(model.evaluate(*held, verbose=0))

    note = keras.callbacks.LambdaCallback(on_epoch_end=evaluate)
    shared = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: results.append(
            hvd.evaluate(model, *part(hvd, 3), verbose=0)
        )
    )
    history = model.fit(
        inputs, targets, batch_size=4, epochs=1, verbose=0, callbacks=[note, shared]
    )
    plain = network()
    plain.compile("sgd", cross_entropy())
    if hvd.rank() == 0:
        assert abs(results[0] - plain.evaluate(*held, verbose=0)) < 1e-6
    assert abs(results[-1] - plain.evaluate(*samples(3 * hvd.size()), verbose=0)) < 1e-6
    expected = plain.evaluate(*samples(8 * hvd.size()), verbose=0)
    assert abs(history.history["loss"][0] - expected) < 1e-6


def check_validation_on_the_root_only(hvd: Any) -> None:
    held = samples(5)
    model = distributed(hvd)
    history = model.fit(
        *part(hvd, 8),
        batch_size=4,
        epochs=2,
        verbose=0,
        validation_data=held if hvd.rank() == 0 else None,
        callbacks=[keras.callbacks.EarlyStopping("loss", patience=3)],
    ).history
    assert len(history["loss"]) == 2
    assert ("val_loss" in history) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        plain = network()
        plain.compile("sgd", cross_entropy())
        plain.set_weights(weights_of(model))
        assert abs(history["val_loss"][-1] - plain.evaluate(*held, verbose=0)) < 1e-6
    assert equal_on_all_ranks(hvd, [np.array(history["loss"]), *weights_of(model)])


def check_validation_on_the_root_only_is_said_where_all_are_asked(hvd: Any) -> None:
    if hvd.size() == 1:
        return
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), cross_entropy())
    held = samples(5) if hvd.rank() == 0 else None
    with pytest.raises(SynchronizationError, match=r"ranks \[0\]: results of an eval"):
        model.fit(
            *part(hvd, 8), verbose=0, validation_data=held, callbacks=plain_callbacks(hvd), epochs=2
        )


def check_other_numbers_of_batches_are_said(hvd: Any) -> None:
    if hvd.size() == 1:
        return
    inputs, targets = part(hvd, 8)
    count = 8 - 4 * hvd.rank()
    with pytest.raises(SynchronizationError, match=r"same number of batches.*\[2, 1\]"):
        distributed(hvd).fit(inputs[:count], targets[:count], batch_size=4, verbose=0)


class OwnLoss(keras.Sequential):  # type: ignore[misc]
    """Reports a loss that no metric has seen, as a step written by hand does."""

    own_rank = 0

    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        for metric in self.metrics:
            metric.reset_state()
        loss = keras.ops.convert_to_tensor(4.0 + self.own_rank)
        return {"loss": loss, "root": keras.ops.sqrt(loss)}


def check_numbers_of_a_step_under_the_names_of_metrics(hvd: Any) -> None:
    model = OwnLoss([keras.Input((6,)), keras.layers.Dense(3)])
    model.own_rank = hvd.rank()
    history = distributed(hvd, model).fit(*part(hvd, 8), batch_size=4, verbose=0).history
    assert history["loss"] == [4.0 + (hvd.size() - 1) / 2]


def check_a_first_step_that_loss_scaling_skips(hvd: Any) -> None:
    model = network(dtype="mixed_float16")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**24)
    model = hvd.distribute(
        model, optimizer=scaled, loss=cross_entropy(), summary=False, run_eagerly=True
    )
    model.fit(*part(hvd, 80), batch_size=4, verbose=0)
    assert int(scaled.inner_optimizer.iterations) > 0
    assert float(scaled.dynamic_scale) < 2.0**24
    assert equal_on_all_ranks(hvd, weights_of(model))


def check_moving_statistics_are_those_of_all_ranks(hvd: Any) -> None:
    """One model is validated and saved; before, each rank had its own."""
    layers = [keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5)]
    model = distributed(hvd, keras.Sequential([*layers, keras.layers.Dense(3)]), rate=0.0)
    inputs, targets = part(hvd, 8)
    inputs = inputs + hvd.rank()
    model.spare = keras.layers.BatchNormalization()  # which no step uses, so it is never built
    validated: list[Any] = []
    note = keras.callbacks.LambdaCallback(
        on_test_begin=lambda logs: validated.append(weights_of(model)[2])
    )
    model.fit(
        inputs, targets, batch_size=8, verbose=0, callbacks=[note], validation_data=samples(4)
    )
    names = [weight.path.split("/")[-1] for weight in model.weights]
    mean = weights_of(model)[names.index("moving_mean")]
    everyone = np.concatenate(hvd.allgather_object(inputs))
    assert np.allclose(mean, 0.5 * everyone.mean(axis=0), atol=1e-6)
    assert np.array_equal(validated[0], mean)
    assert equal_on_all_ranks(hvd, weights_of(model))


def check_layers_that_synchronize_over_something_else(hvd: Any) -> None:
    if hvd.size() == 1 or keras.backend.backend() != "tensorflow":
        return
    layer = keras.layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
    with pytest.raises(UnsupportedError, match=r"synchronized=True.*batch_normalization"):
        distributed(hvd, model)


def check_a_model_that_clips_already(hvd: Any) -> None:
    """As one that was saved with ``max_grad_norm`` has it."""
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1.5)
    options = {"optimizer": optimizer, "loss": cross_entropy(), "summary": False}
    hvd.distribute(network(), max_grad_norm=1.5, **options)
    assert optimizer.global_clipnorm == 1.5
    other = keras.optimizers.SGD(0.1, global_clipnorm=1.0)
    with pytest.raises(ValueError, match="clips gradients already"):
        hvd.distribute(network(), max_grad_norm=1.5, **{**options, "optimizer": other})


class Twice(keras.Sequential):  # type: ignore[misc]
    """Takes two steps with each batch."""

    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        return super().train_step(data)


def check_two_steps_with_each_batch(hvd: Any) -> None:
    inputs, targets = samples(4 * hvd.size())
    own = slice(hvd.rank() * 4, (hvd.rank() + 1) * 4)
    models = [Twice([keras.Input((6,)), keras.layers.Dense(3)]) for _ in range(2)]
    models[1].set_weights(weights_of(models[0]))
    alone, model = models
    hvd.broadcast_model(alone)
    alone.compile(keras.optimizers.SGD(0.1), cross_entropy())
    model = distributed(hvd, model)
    for _ in range(3):
        alone.train_on_batch(inputs, targets)
        model.train_on_batch(inputs[own], targets[own])
    assert distance(model, alone) < 1e-6


def check_ranks_that_made_other_numbers_of_models(hvd: Any) -> None:
    """Keras numbers models and optimizers, and names operations by them."""
    for _ in range(hvd.rank()):
        network().compile("sgd", cross_entropy())
    model = distributed(hvd)
    model.fit(*part(hvd, 8), batch_size=4, verbose=0)
    assert equal_on_all_ranks(hvd, weights_of(model))


def check_options_that_differ_between_ranks(hvd: Any) -> None:
    if hvd.size() == 1:
        return
    odd = hvd.rank() > 0
    for options in ({"compression": "fp16" if odd else "none"}, {"accumulate": 2 if odd else 1}):
        model = distributed(hvd, run_eagerly=True, **options)
        with pytest.raises(SynchronizationError, match=r"Expected the same \w+"):
            model.fit(*part(hvd, 16), batch_size=4, verbose=0)
