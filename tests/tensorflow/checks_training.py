"""Checks that ranks train to the weights of one process with all of the data; see tests.ranks."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

STEPS = 8
BATCH = 6


def made_model(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input([5], dtype="float64"),
            keras.layers.Dense(7, activation="tanh", dtype="float64"),
            keras.layers.Dense(1, dtype="float64"),
        ]
    )


def batches(size):
    """The global batches: (steps, size * BATCH, features), and the targets."""
    random = np.random.default_rng(3)
    x = random.normal(size=(STEPS, size * BATCH, 5))
    return x, np.sin(x.sum(-1, keepdims=True))


def train(model, x, y, wrap, compiled):
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)

    def step(features, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features, training=True) - targets))
        grads = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    run = tf.function(step) if compiled else step
    for features, targets in zip(x, y, strict=True):
        run(tf.constant(features), tf.constant(targets))
    return [variable.numpy() for variable in model.trainable_variables]


def check_ranks_train_as_one_process_with_the_whole_batch(hvd):
    rank, size = hvd.rank(), hvd.size()
    x, y = batches(size)
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    alone = train(made_model(0), x, y, lambda tape: tape, True)
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": float(size)}):
        for compiled in (False, True):
            model = made_model(rank)
            hvd.broadcast_variables(model.variables, root_rank=0)
            weights = train(
                model,
                x[:, mine],
                y[:, mine],
                lambda tape, options=options: hvd.DistributedGradientTape(tape, **options),
                compiled,
            )
            for ours, theirs in zip(weights, alone, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
            everyones = hvd.allgather_object([w.tolist() for w in weights])
            assert everyones == [everyones[0]] * size


def check_embeddings_train_as_one_process_with_the_whole_batch(hvd):
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(5)
    rows = random.integers(0, 9, (STEPS, size * BATCH))
    start = random.normal(size=(9, 3))

    def trained(table, chosen, wrap):
        for indices in chosen:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, indices) ** 2)
            gradient = wrap(tape).gradient(loss, table)
            table.assign_sub(0.5 * tf.convert_to_tensor(gradient))
        return table.numpy()

    alone = trained(tf.Variable(start), rows, lambda tape: tape)
    mine = rows[:, rank * BATCH : (rank + 1) * BATCH]
    together = trained(tf.Variable(start), mine, hvd.DistributedGradientTape)
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-9)


def check_sync_batch_normalization_is_that_of_the_whole_batch(hvd):
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(7)
    # Rank r has r + 2 samples; a large offset shows whether digits get lost.
    counts = [r + 2 for r in range(size)]
    whole = random.normal(size=(sum(counts), 4, 3)).astype("float32") + 100.0
    start = sum(counts[:rank])
    mine = whole[start : start + counts[rank]]
    upstream = random.normal(size=whole.shape).astype("float32")
    reference = keras.layers.BatchNormalization()
    layer = hvd.SyncBatchNormalization()
    reference.build(whole.shape)
    layer.build(whole.shape)

    def run(norm, values, weights):
        with tf.GradientTape() as tape:
            tape.watch(values)
            output = norm(values, training=True)
            loss = tf.reduce_sum(output * weights)
        return output, tape.gradient(loss, values)

    expected, slope = run(reference, tf.constant(whole), tf.constant(upstream))
    part = slice(start, start + counts[rank])
    for function in (run, tf.function(lambda v, w: run(layer, v, w))):
        output, ours = (
            run(layer, tf.constant(mine), tf.constant(upstream[part]))
            if function is run
            else function(tf.constant(mine), tf.constant(upstream[part]))
        )
        np.testing.assert_allclose(output, expected[part], atol=2e-4)
        np.testing.assert_allclose(ours, slope[part], atol=2e-4)
    mean = whole.astype("float64").mean((0, 1))
    np.testing.assert_allclose(layer.moving_mean, mean * (1 - 0.99**2), rtol=1e-4)
    np.testing.assert_allclose(reference.moving_mean, mean * 0.01, rtol=1e-4)


def check_sync_batch_normalization_leaves_masked_steps_out(hvd):
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(11)
    whole = random.normal(size=(size * 3, 4, 2)).astype("float32")
    mask = random.integers(0, 2, (size * 3, 4)).astype(bool)
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    mine = slice(3 * rank, 3 * rank + 3)
    output = layer(tf.constant(whole[mine]), training=True, mask=tf.constant(mask[mine]))
    kept = whole[mask]
    np.testing.assert_allclose(layer.moving_mean, kept.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, kept.var(0), rtol=1e-4)
    expected = (whole[mine] - kept.mean(0)) / np.sqrt(kept.var(0) + 1e-3)
    np.testing.assert_allclose(output, expected, atol=1e-4)


def check_state_may_be_sent_within_the_first_step(hvd):
    """As in Horovod's own examples: the optimizer has its variables after a step only."""
    keras.utils.set_random_seed(hvd.rank())
    model = made_model(hvd.rank())
    optimizer = keras.optimizers.Adam(0.05)

    @tf.function
    def step(x, first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        if first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for number in range(5):
        step(tf.random.normal([BATCH, 5], dtype=tf.float64), number == 0)
    state = [v.numpy().tolist() for v in (*model.variables, *optimizer.variables)]
    assert hvd.allgather_object(state) == [state] * hvd.size()


def check_loss_scales_are_one_for_all_ranks(hvd):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    layer.build((None, 3))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0)
    optimizer.build(layer.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(tf.cast(layer(x), tf.float32)))
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
        grads = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(grads, layer.trainable_variables, strict=True))

    for bad in (False, True, False):
        inputs = tf.ones([2, 3]) * (hvd.rank() + 1.0)
        step(inputs * float("inf") if bad and hvd.rank() == 1 else inputs)
    assert float(optimizer.dynamic_scale) == 128.0
    state = [layer.kernel.numpy().tolist(), layer.bias.numpy().tolist()]
    assert np.isfinite(state[0]).all()
    assert hvd.allgather_object(state) == [state] * hvd.size()


def check_sync_batch_normalization_in_models_of_other_numbers(hvd):
    """Keras numbers models and layers by how many a rank made before."""
    for _ in range(hvd.rank()):
        keras.Sequential([keras.Input((2,)), hvd.SyncBatchNormalization()])
    inputs = keras.Input((2,))
    side_by_side = [hvd.SyncBatchNormalization()(inputs + shift) for shift in range(4)]
    model = keras.Model(inputs, keras.layers.Add()(side_by_side))
    function = tf.function(lambda inputs: model(inputs, training=True))
    whole = np.arange(4.0 * hvd.size(), dtype="float32").reshape(-1, 2) ** 2
    own = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    expected = 4 * keras.layers.BatchNormalization()(whole, training=True).numpy()
    assert np.allclose(function(whole[own]), expected[own], atol=1e-4)


def check_sync_batch_normalization_is_saved(hvd):
    layer = hvd.SyncBatchNormalization(momentum=0.5)
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert isinstance(again, hvd.SyncBatchNormalization)
    assert again.momentum == 0.5
