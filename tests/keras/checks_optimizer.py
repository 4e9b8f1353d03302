"""DistributedOptimizer of Keras on real ranks, against one process with the big batch."""

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
from pathlib import Path
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
    train_alone,
    weights_of,
)

EACH, STEPS = 4, 5


def shares(hvd: Any, data: tuple[Any, Any], each: int = EACH, passes: int = 1) -> list[Any]:
    """This rank's micro-batches, in the order of steps."""
    big = each * hvd.size()
    return [
        tuple(part[number * big + hvd.rank() * each :][:each] for part in data)
        for number in range(len(data[0]) // big)
    ]


def big_batches(hvd: Any, data: tuple[Any, Any], passes: int = 1) -> list[Any]:
    """What one process computes its steps from."""
    big = EACH * hvd.size() * passes
    count = len(data[0]) // big
    return [tuple(part[number * big :][:big] for part in data) for number in range(count)]


def train(hvd: Any, optimizer: Any, data: Any, **compile_arguments: Any) -> Any:
    model = network()
    model.compile(optimizer, cross_entropy(), **compile_arguments)
    for inputs, targets in shares(hvd, data):
        model.train_on_batch(inputs, targets)
    return model


def all_optimizers() -> dict[str, type]:
    """Every optimizer that keras.optimizers exports, by name."""
    found = {}
    for name in dir(keras.optimizers):
        member = getattr(keras.optimizers, name)
        around_others = ("LossScaleOptimizer", "MultiOptimizer")
        if name in ("Optimizer", *around_others) or not isinstance(member, type):
            continue
        if issubclass(member, keras.optimizers.Optimizer):
            found[name] = member
    return found


def number(variable: Any) -> float:
    """The only element of a variable."""
    return float(keras.ops.convert_to_numpy(variable)[0])


def check_every_optimizer_in_a_graph_and_eagerly(hvd: Any) -> None:
    found = all_optimizers()
    assert len(found) >= 12, found
    data = samples(EACH * hvd.size() * STEPS)
    batches = big_batches(hvd, data)
    for number, (name, kind) in enumerate(found.items()):

        def make(kind: Any = kind, rate: float = 1.0 if name == "Adadelta" else 0.01) -> Any:
            return kind(rate)

        eagerly = number % 3 != 0  # graphs take long to trace; each kind gets its share
        model = train(hvd, hvd.DistributedOptimizer(make()), data, run_eagerly=eagerly)
        assert equal_on_all_ranks(hvd, weights_of(model)), name
        reference = train_alone(make(), batches, run_eagerly=eagerly)
        assert distance(network(), model) > 1e-3, f"{name} has not trained"
        # Signs of gradients near 0 may turn out differently where sums are rounded.
        bound = 3e-2 if name in ("Lion", "Muon") else 1e-5
        assert distance(model, reference) < bound, (name, distance(model, reference))


def check_options_of_keras_act_on_reduced_gradients(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * STEPS)
    for options in (
        {"clipnorm": 0.02},
        {"global_clipnorm": 0.05},
        {"clipvalue": 0.004},
        {"weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 64.0},
        {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
    ):

        def make(options: Any = options) -> Any:
            return keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **options})

        model = train(hvd, hvd.DistributedOptimizer(make()), data)
        reference = train_alone(make(), big_batches(hvd, data))
        assert distance(model, reference) < 1e-5, (options, distance(model, reference))


def check_accumulation(hvd: Any) -> None:
    for eagerly in (False, True):
        for make in (
            lambda **keywords: keras.optimizers.SGD(0.1, momentum=0.9, **keywords),
            lambda **keywords: keras.optimizers.Adam(0.01, global_clipnorm=0.5, **keywords),
        ):
            data = samples(EACH * hvd.size() * 2 * 3)
            reference = train_alone(make(), big_batches(hvd, data, passes=2), run_eagerly=eagerly)
            for optimizer in (
                hvd.DistributedOptimizer(make(gradient_accumulation_steps=2)),
                hvd.DistributedOptimizer(
                    make(), backward_passes_per_step=2, average_aggregated_gradients=True
                ),
            ):
                model = train(hvd, optimizer, data, run_eagerly=eagerly)
                assert distance(model, reference) < 1e-5, distance(model, reference)


def check_accumulated_sums(hvd: Any) -> None:
    """backward_passes_per_step adds gradients up, as in Horovod."""
    data = samples(EACH * hvd.size() * 2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model = train(hvd, optimizer, data)
    reference = train_alone(keras.optimizers.SGD(0.2), big_batches(hvd, data, passes=2))
    assert distance(model, reference) < 1e-5


def check_accumulation_of_a_used_optimizer(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 4)
    used = network()
    used.compile(keras.optimizers.Adam(0.01), cross_entropy())
    half = [part[: len(part) // 2] for part in data]
    for inputs, targets in big_batches(hvd, half):
        used.train_on_batch(inputs, targets)
    hvd.DistributedOptimizer(
        used.optimizer, backward_passes_per_step=2, average_aggregated_gradients=True
    )
    used.make_train_function(force=True)
    for inputs, targets in shares(hvd, [part[len(part) // 2 :] for part in data]):
        used.train_on_batch(inputs, targets)
    batches = big_batches(hvd, half)
    batches += big_batches(hvd, [part[len(part) // 2 :] for part in data], passes=2)
    assert distance(used, train_alone(keras.optimizers.Adam(0.01), batches)) < 1e-5


def check_sum(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 2)
    model = train(hvd, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum), data)
    reference = train_alone(keras.optimizers.SGD(0.1 * hvd.size()), big_batches(hvd, data))
    assert distance(model, reference) < 1e-5


def check_options_of_the_reduction(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 3)
    reference = train_alone(keras.optimizers.SGD(0.1), big_batches(hvd, data))
    for options, bound in (
        ({"groups": 2}, 1e-5),
        ({"device_dense": "/cpu:0"} if hvd.BACKEND == "tensorflow" else {}, 1e-5),
        ({"gradient_predivide_factor": 2.0}, 1e-5),
        ({"gradient_predivide_factor": 2.0, "groups": 1}, 1e-5),
        ({"compression": hvd.Compression.fp16}, 1e-3),
        ({"compression": hvd.Compression.bf16}, 5e-3),
        ({"compression": hvd.Compression.fp16, "groups": 1}, 1e-3),
    ):
        model = train(hvd, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), data)
        assert distance(model, reference) < bound, (options, distance(model, reference))
        assert equal_on_all_ranks(hvd, weights_of(model))


def check_groups_of_variables(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 2)
    model = network()
    groups = [model.trainable_weights[:3]]
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=groups), cross_entropy()
    )
    for inputs, targets in shares(hvd, data):
        model.train_on_batch(inputs, targets)
    assert distance(model, train_alone(keras.optimizers.SGD(0.1), big_batches(hvd, data))) < 1e-5


def check_compressed_gradients_neither_overflow_nor_vanish(hvd: Any) -> None:
    for size_of_gradient in (4e4, 2e-8, 1e30):
        variable = keras.Variable(np.zeros(3, "float32"))
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16
        )
        optimizer.apply([keras.ops.full((3,), size_of_gradient)], [variable])
        moved = keras.ops.convert_to_numpy(variable.value)
        assert np.allclose(moved, -size_of_gradient, rtol=1e-3, atol=0), moved


def check_process_set(hvd: Any) -> None:
    evens = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=evens)
    optimizer.apply([keras.ops.full((1,), float(hvd.rank()))], [variable])
    members = range(0, hvd.size(), 2)
    expected = sum(members) / len(members) if evens.included() else hvd.rank()
    assert abs(number(variable) + expected) < 1e-6
    hvd.barrier()
    hvd.remove_process_set(evens)


def check_local_variables(hvd: Any) -> None:
    for scaled in (True, False):
        shared, local = (keras.Variable(np.zeros(1, "float32")) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), scale_local_gradients=scaled
        )
        optimizer.register_local_var(local)
        gradients = [keras.ops.full((1,), 1.0 + hvd.rank()) for _ in range(2)]
        optimizer.apply(gradients, [shared, local])
        mine = (1.0 + hvd.rank()) / (hvd.size() if scaled else 1)
        assert abs(number(shared) + (1.0 + hvd.size()) / 2) < 1e-6
        assert abs(number(local) + mine) < 1e-6


def check_local_layers(hvd: Any) -> None:
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[-1]
    )
    model.compile(optimizer, cross_entropy())
    for inputs, targets in shares(hvd, samples(EACH * hvd.size())):
        model.train_on_batch(inputs, targets)
    first, last = weights_of(model)[:2], weights_of(model)[2:]
    assert equal_on_all_ranks(hvd, first)
    assert not equal_on_all_ranks(hvd, last)
    with pytest.raises(ValueError, match="not built"):
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(), local_layers=[keras.layers.Dense(1)]
        )


def check_sparse_gradients(hvd: Any) -> None:
    def embedding() -> Any:
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(7, 3), keras.layers.Flatten()]
        )
        model.set_weights([np.arange(21.0).reshape(7, 3) / 21])
        return model

    generator = np.random.default_rng(5)
    inputs = generator.integers(0, 7, (2 * hvd.size(), 2)).astype("int32")
    targets = generator.normal(size=(2 * hvd.size(), 6)).astype("float32")
    reference = embedding()
    reference.compile(keras.optimizers.Adam(0.1), "mse")
    reference.train_on_batch(inputs, targets)
    mine = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    model = embedding()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    model.train_on_batch(inputs[mine], targets[mine])
    assert distance(model, reference) < 1e-5
    # Adam squares each row of a sparse gradient by itself, so dense ones need a linear optimizer.
    reference = embedding()
    reference.compile(keras.optimizers.SGD(1.0), "mse")
    reference.train_on_batch(inputs, targets)
    for options, bound in (
        ({}, 1e-5),
        ({"sparse_as_dense": True}, 1e-5),
        ({"compression": hvd.Compression.fp16}, 1e-3),
        ({"groups": 1}, 1e-5),
    ):
        model = embedding()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options), "mse")
        model.train_on_batch(inputs[mine], targets[mine])
        assert distance(model, reference) < bound, (options, distance(model, reference))


def check_different_gradients_are_said(hvd: Any) -> None:
    variables = [keras.Variable(np.zeros(1, "float32"), name=name) for name in ("a", "b")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    ones = keras.ops.ones((1,))
    gradients = [ones, None if hvd.rank() == hvd.size() - 1 else ones]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of the missing gradient
        with pytest.raises(SynchronizationError, match="same"):
            optimizer.apply(gradients, variables)


def check_mixed_precision_decides_once(hvd: Any) -> None:
    """An overflow on one rank makes all skip the step and lower the scale."""
    for around in (True, False):
        variable = keras.Variable(np.zeros(1, "float32"))
        inner = keras.optimizers.SGD(1.0)
        if around:
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
            )
        else:  # as model.compile does
            optimizer = keras.optimizers.LossScaleOptimizer(
                hvd.DistributedOptimizer(inner), initial_scale=8.0
            )
        last = hvd.rank() == hvd.size() - 1
        optimizer.apply([keras.ops.full((1,), np.inf if last else 8.0)], [variable])
        assert float(optimizer.dynamic_scale) == 4.0
        assert number(variable) == 0.0
        optimizer.apply([keras.ops.full((1,), 4.0 * (1 + hvd.rank()))], [variable])
        assert abs(number(variable) + (1 + hvd.size()) / 2) < 1e-6
        assert int(optimizer.step_counter) == 1


def check_mixed_precision_in_fit(hvd: Any) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, cross_entropy())
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        inputs, targets = samples(EACH * hvd.size())
        mine = slice(EACH * hvd.rank(), EACH * (hvd.rank() + 1))
        if hvd.rank() == 0:
            inputs = inputs * 1e6  # overflows half precision on this rank alone
        model.train_on_batch(inputs[mine], targets[mine])
        assert float(model.optimizer.dynamic_scale) == 2.0**14
        assert distance(model, network()) == 0.0
        inputs, targets = samples(EACH * hvd.size())
        model.train_on_batch(inputs[mine], targets[mine])
        assert distance(model, network()) > 1e-3
        assert equal_on_all_ranks(hvd, weights_of(model))
    finally:
        keras.config.set_dtype_policy("float32")


def check_state_is_kept(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 4)
    batches = big_batches(hvd, data)
    model = network()
    model.compile(keras.optimizers.Adam(0.01), cross_entropy())
    for inputs, targets in batches[:2]:
        model.train_on_batch(inputs, targets)
    optimizer = model.optimizer
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert int(optimizer.iterations) == 2
    model.make_train_function(force=True)
    for inputs, targets in shares(hvd, data)[2:]:
        model.train_on_batch(inputs, targets)
    assert distance(model, train_alone(keras.optimizers.Adam(0.01), batches)) < 1e-5


def check_saved_models_load_without_hvdkit(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 4)
    own = keras.optimizers.Adam(0.01, name="own")
    plain_text = keras.saving.serialize_keras_object(own)
    model = train(hvd, hvd.DistributedOptimizer(own), data)
    plain_kind = type(keras.optimizers.Adam())
    assert type(model.optimizer) is not plain_kind
    assert model.optimizer.__class__ is plain_kind
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), 0))
    if hvd.rank() == 0:
        model.save(folder / "model.keras")
    hvd.barrier()
    assert keras.saving.serialize_keras_object(model.optimizer) == plain_text
    plain = keras.models.load_model(folder / "model.keras")
    assert type(plain.optimizer) is plain_kind
    assert int(plain.optimizer.iterations) == 4
    again = hvd.load_model(folder / "model.keras")
    assert int(again.optimizer.iterations) == 4
    for inputs, targets in shares(hvd, data):
        again.train_on_batch(inputs, targets)
    batches = big_batches(hvd, data)
    assert distance(again, train_alone(keras.optimizers.Adam(0.01), batches * 2)) < 1e-5
    hvd.barrier()


def check_copies_are_distributed(hvd: Any) -> None:
    original = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert copied is not original
        variable = keras.Variable(np.zeros(1, "float32"))
        copied.apply([keras.ops.ones((1,))], [variable])
        assert number(variable) == -hvd.size()


class Doubled(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer of a user's own."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * 2, variable, learning_rate)

    def _parallel_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        super()._parallel_update_step([grad * 2 for grad in grads], variables, learning_rate)


class Careless(keras.optimizers.SGD):  # type: ignore[misc]
    """One that steps without the hooks of Keras."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.build(trainable_variables)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign(variable - gradient)


def check_optimizers_of_the_users_own(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 3)
    model = train(hvd, hvd.DistributedOptimizer(Doubled(0.1)), data)
    assert distance(model, train_alone(keras.optimizers.SGD(0.2), big_batches(hvd, data))) < 1e-5
    variable = keras.Variable(np.zeros(1, "float32"))
    careless = hvd.DistributedOptimizer(Careless(0.1))
    with pytest.raises(SynchronizationError, match="without the hook"):
        careless.apply([keras.ops.ones((1,))], [variable])


class Future(keras.optimizers.SGD):  # type: ignore[misc]
    """As from a Keras that has renamed its hooks."""

    _clip_gradients = None


def check_an_unknown_keras_is_refused(hvd: Any) -> None:
    with pytest.raises(UnsupportedError, match="_clip_gradients"):
        hvd.DistributedOptimizer(Future(0.1))


def check_two_optimizers(hvd: Any) -> None:
    """As of a generator and a discriminator, with equal names."""
    first, second = (keras.Variable(np.zeros(2, "float32"), name="w") for _ in range(2))
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]
    for _ in range(3):
        for factor, (optimizer, variable) in enumerate(
            zip(optimizers, (first, second), strict=True), start=1
        ):
            gradient = keras.ops.full((2,), float(factor * hvd.rank()))
            optimizer.apply([gradient], [variable])
    mean = (hvd.size() - 1) / 2
    assert np.allclose(keras.ops.convert_to_numpy(first.value), -3 * mean)
    assert np.allclose(keras.ops.convert_to_numpy(second.value), -6 * mean)


def check_multi_optimizer(hvd: Any) -> None:
    data = samples(EACH * hvd.size() * 3)

    def make() -> Any:
        parts = {".*bias": keras.optimizers.SGD(0.3)}
        optimizers = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), parts)
        return keras.optimizers.MultiOptimizer(optimizers)

    model = train(hvd, hvd.DistributedOptimizer(make()), data)
    assert distance(model, train_alone(make(), big_batches(hvd, data))) < 1e-5
    chooser = keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD())
    with pytest.raises(ValueError, match="by a function"):
        hvd.DistributedOptimizer(chooser)


def check_arguments(hvd: Any) -> None:
    sgd = keras.optimizers.SGD
    for arguments, text in (
        ({"op": hvd.Adasum}, "op=Average or op=Sum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average"),
        ({"backward_passes_per_step": 0}, "whole number"),
        ({"groups": -1}, "groups"),
        ({"compression": "fp16"}, "compress and decompress"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(), **arguments)
    with pytest.raises(ValueError, match="asked for twice"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=3), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))
    with pytest.raises(ValueError, match=r"Expected a keras.optimizers.Optimizer"):
        hvd.DistributedOptimizer("sgd")
    with pytest.warns(DeprecationWarning, match="groups"):
        hvd.DistributedOptimizer(sgd(), num_groups=2)
    if hvd.BACKEND == "torch":
        with pytest.warns(UserWarning, match="no effect"):
            hvd.DistributedOptimizer(sgd(), device_dense="/cpu:0")
