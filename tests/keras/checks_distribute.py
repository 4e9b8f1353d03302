"""hvdkit.keras.distribute on real ranks, against one process with the big batch."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdkit.errors import SynchronizationError, UnsupportedError
from hvdkit.scaling import ScalingRecord, warmup_multiplier
from tests.keras.checks_optimizer import EACH, STEPS, big_batches, number, shares
from tests.keras.networks import (
    cross_entropy,
    distance,
    equal_on_all_ranks,
    network,
    samples,
    train_alone,
    weights_of,
)


def distributed(hvd: Any, optimizer: Any, **options: Any) -> Any:
    options = {"scale_lr": "none", "summary": False, "loss": cross_entropy(), **options}
    return hvd.distribute(network(), optimizer=optimizer, **options)


def train(model: Any, batches: list[Any]) -> Any:
    for inputs, targets in batches:
        model.train_on_batch(inputs, targets)
    return model


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def check_parity_with_the_big_batch(hvd: Any) -> None:
    for passes in (1, 2):
        data = samples(EACH * hvd.size() * passes * STEPS)
        for name, make in OPTIMIZERS.items():
            model = train(distributed(hvd, make(), accumulate=passes), shares(hvd, data))
            reference = train_alone(make(), big_batches(hvd, data, passes))
            assert distance(model, reference) < 1e-5, (passes, name, distance(model, reference))
            assert equal_on_all_ranks(hvd, weights_of(model))


def uneven(hvd: Any, steps: int, passes: int) -> tuple[list[Any], list[Any]]:
    """Micro-batches of 1 to 5 samples a rank, and the big batches that they are parts of."""
    sizes = np.random.default_rng(2).integers(1, 6, (steps, passes, hvd.size()))
    inputs, targets = samples(int(sizes.sum()))
    mine, big, start = [], [], 0
    for step in sizes:
        first = start
        for row in step:
            before = start + int(row[: hvd.rank()].sum())
            part = slice(before, before + int(row[hvd.rank()]))
            mine.append((inputs[part], targets[part]))
            start += int(row.sum())
        big.append((inputs[first:start], targets[first:start]))
    return mine, big


def check_uneven_batches(hvd: Any) -> None:
    for passes in (1, 2):
        for eagerly in (False, True):
            mine, big = uneven(hvd, 4, passes)
            model = distributed(hvd, OPTIMIZERS["sgd"](), accumulate=passes, run_eagerly=eagerly)
            reference = train_alone(OPTIMIZERS["sgd"](), big)
            assert distance(train(model, mine), reference) < 1e-5, (passes, eagerly)


def check_rank_weighting(hvd: Any) -> None:
    mine, _ = uneven(hvd, 1, 1)
    model = train(distributed(hvd, keras.optimizers.SGD(0.1), weighting="ranks"), mine)
    alone = [
        weights_of(train_alone(keras.optimizers.SGD(0.1), [batch]))
        for batch in hvd.allgather_object(mine[0])
    ]
    for ours, theirs in zip(weights_of(model), zip(*alone, strict=True), strict=True):
        assert np.allclose(ours, np.mean(theirs, axis=0), atol=1e-6)


def check_fit_and_metrics(hvd: Any) -> None:
    """History, validation and evaluation are those of one process with all samples."""
    count = 8 * hvd.size() + 3 * 4 * hvd.size()
    inputs, targets = samples(count)
    held = 8 * hvd.size()
    own, size = hvd.rank(), hvd.size()
    validation = slice(held + own, None, size)

    def compiled() -> Any:
        top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")
        return {"metrics": ["accuracy", top], "loss": cross_entropy()}

    reference = network()
    reference.compile(OPTIMIZERS["sgd"](), **compiled())
    expected = reference.fit(
        inputs[:held],
        targets[:held],
        batch_size=4 * size,
        epochs=2,
        shuffle=False,
        validation_data=(inputs[held:], targets[held:]),
        verbose=0,
    ).history
    model = distributed(hvd, OPTIMIZERS["sgd"](), **compiled())
    order = np.arange(held).reshape(-1, size, 4)[:, own].ravel()
    history = model.fit(
        inputs[order],
        targets[order],
        batch_size=4,
        epochs=2,
        shuffle=False,
        validation_data=(inputs[validation], targets[validation]),
    ).history
    assert list(history) == list(expected)
    for name, values in expected.items():
        assert np.allclose(history[name], values, atol=1e-6), (name, history[name], values)
    assert len(set(map(str, hvd.allgather_object(history)))) == 1
    evaluated = hvd.evaluate(model, inputs[validation], targets[validation], return_dict=True)
    alone = reference.evaluate(inputs[held:], targets[held:], verbose=0, return_dict=True)
    for name, value in alone.items():
        assert abs(evaluated[name] - value) < 1e-6, (name, evaluated, alone)
    if hvd.rank() == 0:  # one rank may evaluate by itself
        model.evaluate(inputs, targets, verbose=0)


def check_uneven_evaluation(hvd: Any) -> None:
    """Also where the last rank has nothing to evaluate."""
    inputs, targets = samples(2 * hvd.size() - 1 if hvd.size() > 1 else 2)
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    model = distributed(hvd, keras.optimizers.SGD(0.1), metrics=metrics)
    alone = model.evaluate(inputs, targets, verbose=0, return_dict=True)
    per_rank = -(-len(inputs) // max(1, hvd.size() - 1))
    mine = slice(hvd.rank() * per_rank, (hvd.rank() + 1) * per_rank)
    if len(inputs[mine]):
        together = hvd.evaluate(model, inputs[mine], targets[mine], return_dict=True)
    else:
        from hvdkit.keras.metrics import over_all_ranks

        together = over_all_ranks(model, {})
    for name, value in alone.items():
        assert abs(together[name] - value) < 1e-6, (together, alone)


def check_state_of_the_root_is_everywhere(hvd: Any) -> None:
    model = network()
    model.compile(OPTIMIZERS["adam"](), cross_entropy())
    if hvd.rank() == 0:
        train(model, big_batches(hvd, samples(EACH * hvd.size() * 2)))
    else:
        model.set_weights([weight + 1 for weight in weights_of(model)])
    model = hvd.distribute(model, scale_lr="none", summary=False)
    assert equal_on_all_ranks(hvd, weights_of(model))
    state = [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]
    assert int(model.optimizer.iterations) == 2
    assert equal_on_all_ranks(hvd, state)


def check_models_that_are_built_later(hvd: Any) -> None:
    for train_by in ("fit", "train_on_batch"):
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
        model = hvd.distribute(model, optimizer="sgd", loss="mse", summary=False)
        inputs = np.random.default_rng(hvd.rank()).normal(size=(4, 3)).astype("float32")
        targets = np.zeros((4, 4), "float32")
        if train_by == "fit":
            model.fit(inputs, targets, verbose=0)
        else:
            model.train_on_batch(inputs, targets)
        trained = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_weights]
        assert equal_on_all_ranks(hvd, trained), train_by


def check_seeds_stay_each_ranks_own(hvd: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=100 + hvd.rank())])
    before = keras.ops.convert_to_numpy(model.layers[0].seed_generator.state)
    hvd.broadcast_model(model)
    after = keras.ops.convert_to_numpy(model.layers[0].seed_generator.state)
    assert np.array_equal(before, after)


def mean_of_outputs(y_true: Any, y_pred: Any) -> Any:
    """A loss whose gradient does not depend on the weights."""
    return keras.ops.mean(y_pred, axis=-1)


def applied_rates(hvd: Any, optimizer: Any, steps: int, **options: Any) -> list[float]:
    """The rates that steps really used: gradients of 1 move a weight by them."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((1, 1))])
    model = hvd.distribute(
        model,
        optimizer=optimizer,
        loss=mean_of_outputs,
        summary=False,
        **options,
    )
    rates, announced = [], []
    for _ in range(steps):
        before = weights_of(model)[0].item()
        announced.append(hvd.effective_lr(model.optimizer))
        model.train_on_batch(np.ones((2, 1), "float32"), np.ones((2, 1), "float32"))
        rates.append(before - weights_of(model)[0].item())
    assert np.allclose(rates, announced, rtol=1e-5), (rates, announced)
    return rates


def check_scaled_rate_and_warmup(hvd: Any) -> None:
    size = hvd.size()
    for start, first in (("base", 1.0 / size), ("zero", 0.0)):
        rates = applied_rates(hvd, keras.optimizers.SGD(0.5), 6, warmup_steps=4, warmup_start=start)
        expected = [0.5 * size * warmup_multiplier(step, 4, first) for step in range(6)]
        assert np.allclose(rates, expected, rtol=1e-5), (rates, expected)
    rates = applied_rates(
        hvd, keras.optimizers.SGD(0.5), 2, scale_lr="sqrt", base_global_batch=2, batch_size=8
    )
    assert np.allclose(rates, 0.5 * (4 * size) ** 0.5, rtol=1e-5)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.4, 0.2, 0.1])
    rates = applied_rates(hvd, keras.optimizers.SGD(schedule), 5)
    assert np.allclose(rates, [r * size for r in (0.4, 0.4, 0.2, 0.2, 0.1)], rtol=1e-5)


def check_a_schedule_counts_optimizer_steps(hvd: Any) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    data = samples(EACH * hvd.size() * 2 * 3)
    model = distributed(hvd, keras.optimizers.SGD(schedule), accumulate=2)
    reference = train_alone(keras.optimizers.SGD(schedule), big_batches(hvd, data, 2))
    assert distance(train(model, shares(hvd, data)), reference) < 1e-5


def check_velocity_is_corrected(hvd: Any) -> None:
    """Warmup acts on the whole step, as in PyTorch, whose momentum holds no learning rate."""
    size, rate, momentum = hvd.size(), 0.1, 0.9
    record = ScalingRecord("linear", 1, size)
    for make in (
        lambda: keras.optimizers.SGD(rate, momentum=momentum),
        lambda: keras.optimizers.SGD(rate, momentum=momentum, nesterov=True),
    ):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.zeros((1, 1))])
        model = hvd.distribute(
            model,
            optimizer=make(),
            loss=mean_of_outputs,
            warmup_steps=5,
            summary=False,
        )
        position, buffer = 0.0, 0.0
        for step in range(8):
            model.train_on_batch(np.ones((2, 1), "float32"), np.ones((2, 1), "float32"))
            buffer = momentum * buffer + 1.0
            direction = 1.0 + momentum * buffer if model.optimizer.nesterov else buffer
            factor = record.factor * warmup_multiplier(step, 5, 1.0 / size)
            position -= rate * factor * direction
            assert abs(weights_of(model)[0].item() - position) < 1e-5 * abs(position), step


def check_warmup_goes_on_after_a_resume(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 6)
    batches = shares(hvd, data)
    options = {"scale_lr": "linear", "warmup_steps": 5}
    straight = train(distributed(hvd, OPTIMIZERS["sgd"](), **options), batches)
    first = train(distributed(hvd, OPTIMIZERS["sgd"](), **options), batches[:3])
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), 0))
    if hvd.rank() == 0:
        first.save(folder / "model.keras")
    hvd.barrier()
    assert abs(float(first.optimizer.learning_rate) - 0.1) < 1e-7
    loaded = keras.models.load_model(folder / "model.keras")
    resumed = hvd.distribute(loaded, summary=False, **options)
    assert distance(train(resumed, batches[3:]), straight) < 1e-6
    hvd.barrier()


def check_clipping_of_reduced_gradients(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 3)
    model = train(
        distributed(hvd, keras.optimizers.SGD(0.5), max_grad_norm=0.05), shares(hvd, data)
    )
    reference = train_alone(keras.optimizers.SGD(0.5, global_clipnorm=0.05), big_batches(hvd, data))
    assert distance(model, reference) < 1e-5


def check_compression(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 3)
    reference = train_alone(keras.optimizers.SGD(0.1), big_batches(hvd, data))
    for compression, bound in (("fp16", 1e-3), ("bf16", 5e-3)):
        model = distributed(hvd, keras.optimizers.SGD(0.1), compression=compression)
        away = distance(train(model, shares(hvd, data)), reference)
        assert away < bound, (compression, away)
        assert hvd.size() == 1 or away > 0


def check_steps_per_execution(hvd: Any) -> None:
    if hvd.BACKEND != "tensorflow":
        return  # Keras has it with TensorFlow only
    data = samples(EACH * hvd.size() * 4)
    model = distributed(hvd, OPTIMIZERS["adam"](), steps_per_execution=2)
    inputs = np.concatenate([batch[0] for batch in shares(hvd, data)])
    targets = np.concatenate([batch[1] for batch in shares(hvd, data)])
    model.fit(inputs, targets, batch_size=EACH, shuffle=False, verbose=0)
    reference = train_alone(OPTIMIZERS["adam"](), big_batches(hvd, data))
    assert distance(model, reference) < 1e-5


def check_sharded_data(hvd: Any) -> None:
    """fit on shards of a data set: the steps of one process with the big batch, resumed too."""
    data = samples(4 * hvd.size() * 3 + 3)
    reference = network()
    reference.compile(OPTIMIZERS["sgd"](), cross_entropy())
    order_of = hvd.shard(np.arange(len(data[0])), 4 * hvd.size(), seed=5, rank=0, size=1)
    for epoch in range(3):
        hvd.set_epoch(order_of, epoch)
        for rows in order_of.as_numpy_iterator():
            reference.train_on_batch(data[0][rows], data[1][rows])
    straight = distributed(hvd, OPTIMIZERS["sgd"]())
    straight.fit(hvd.shard(data, 4, seed=5), epochs=3, verbose=0)
    if hvd.size() <= 3:  # else the last 3 samples join the step before
        assert distance(straight, reference) < 1e-5
    resumed = distributed(hvd, OPTIMIZERS["sgd"]())
    resumed.fit(hvd.shard(data, 4, seed=5), epochs=1, verbose=0)
    resumed.fit(hvd.shard(data, 4, seed=5), initial_epoch=1, epochs=3, verbose=0)
    assert distance(resumed, straight) < 1e-6
    evaluated = hvd.evaluate(resumed, hvd.shard(data, 5, train=False), verbose=0)
    assert abs(evaluated - resumed.evaluate(*data, verbose=0)) < 1e-6


class OwnStep(keras.Sequential):  # type: ignore[misc]
    """A model with a train_step of the user's own."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def check_models_with_a_step_of_their_own(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 2)
    model = OwnStep(network().layers)
    model = hvd.distribute(
        model, optimizer=OPTIMIZERS["sgd"](), loss=cross_entropy(), scale_lr="none", summary=False
    )
    reference = train_alone(OPTIMIZERS["sgd"](), big_batches(hvd, data))
    assert distance(train(model, shares(hvd, data)), reference) < 1e-5


def check_a_model_that_is_compiled_again(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 4)
    model = distributed(hvd, OPTIMIZERS["sgd"]())
    model.compile("sgd", cross_entropy())
    with pytest.raises(SynchronizationError, match="compiled again"):
        train(model, shares(hvd, data))
    model = distributed(hvd, OPTIMIZERS["sgd"]())
    train(model, shares(hvd, data)[:2])
    model.layers[0].trainable = False
    model = hvd.distribute(
        model, optimizer=OPTIMIZERS["adam"](), loss=cross_entropy(), scale_lr="none", summary=False
    )
    train(model, shares(hvd, data)[2:])
    batches = big_batches(hvd, data)
    reference = train_alone(OPTIMIZERS["sgd"](), batches[:2])
    reference.layers[0].trainable = False
    reference.compile(OPTIMIZERS["adam"](), cross_entropy())
    assert distance(model, train(reference, batches[2:])) < 1e-5


def check_a_loop_around_the_model_is_said(hvd: Any) -> None:
    model = distributed(hvd, keras.optimizers.SGD(0.1))
    gradients = [keras.ops.ones(weight.shape) for weight in model.trainable_weights]
    for _ in range(2):
        with pytest.raises(SynchronizationError, match="how many samples"):
            model.optimizer.apply(gradients, model.trainable_weights)
        model.train_on_batch(*samples(4))  # whose samples are not those of the next gradients


def check_xla(hvd: Any) -> None:
    if hvd.BACKEND != "tensorflow":
        return
    with pytest.raises(UnsupportedError, match="jit_compile"):
        distributed(hvd, keras.optimizers.SGD(0.1), jit_compile=True)
    data = samples(EACH * hvd.size())
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    with pytest.raises(UnsupportedError, match="XLA cannot compile"):
        train(model, [(data[0][:4], np.ones((4, 3)))])
    # "auto" is True where there is a GPU: the callback turns it off.
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model = network()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), cross_entropy(), jit_compile=True
    )
    inputs, targets = shares(hvd, data)[0]
    model.fit(inputs, targets, callbacks=[callback], verbose=0)
    assert distance(model, train_alone(keras.optimizers.SGD(0.1), big_batches(hvd, data))) < 1e-5


def check_summary_is_said_once(hvd: Any) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        distributed(hvd, keras.optimizers.SGD(0.1), scale_lr="linear", summary=True)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("hvdkit:")]
    assert len(lines) == (3 if hvd.rank() == 0 else 0), lines
    if hvd.rank() == 0:
        assert f"learning rate 0.1 -> {0.1 * hvd.size():g} (linear)" in lines[1], lines


def check_arguments(hvd: Any) -> None:
    for options, text in (
        ({"scale_lr": "cubic"}, "scale_lr"),
        ({"weighting": "tokens"}, "weighting"),
        ({"compression": "int8"}, "compression"),
        ({"accumulate": 0}, "accumulate"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"batch_size": 8}, "together"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"loss": keras.losses.MeanSquaredError(reduction="sum")}, "sum_over_batch_size"),
    ):
        with pytest.raises(ValueError, match=text):
            distributed(hvd, keras.optimizers.SGD(0.1), **options)
    with pytest.raises(ValueError, match="compiled model"):
        hvd.distribute(network())
    with pytest.raises(ValueError, match=r"keras.Model"):
        hvd.distribute("model")
    with pytest.raises(ValueError, match="accumulate=3"):
        distributed(hvd, keras.optimizers.SGD(gradient_accumulation_steps=3), accumulate=2)
    with pytest.raises(ValueError, match="clips gradients already"):
        distributed(hvd, keras.optimizers.SGD(clipnorm=1.0), max_grad_norm=1.0)
    with pytest.raises(ValueError, match="distributed already"):
        distributed(hvd, hvd.DistributedOptimizer(keras.optimizers.SGD()))
    assert number(keras.Variable([1.0])) == 1.0
