"""Checks of local layers, optimizers and functions around tapes, on real ranks; see tests.ranks."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from hvdkit.tensorflow import gradients as gradients_module
from tests.tensorflow.helpers import both_ways, same


def check_layers_may_stay_local(hvd):
    rank, size = hvd.rank(), hvd.size()
    mean = (size + 1) / 2
    local = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    inputs = tf.ones([1, 2]) * (rank + 1.0)
    sources = None
    for scaled in (True, False):

        def slopes(scaled=scaled):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(local(inputs)) + tf.reduce_sum(shared(inputs))
            tape = hvd.PartialDistributedGradientTape(
                tape, local_layers=[local], scale_local_gradients=scaled
            )
            variables = [*local.trainable_variables, *shared.trainable_variables]
            return tape.gradient(loss, variables)

        local(inputs), shared(inputs)
        for result in both_ways(slopes):
            same(result[0], [[(rank + 1) / (size if scaled else 1)]] * 2)
            same(result[1], [[mean]] * 2)
    assert sources is None
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(local(inputs)) + tf.reduce_sum(shared(inputs))
    tape = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(local.kernel)
    own, common = tape.get_local_and_global_gradients(loss, [shared.kernel, local.kernel])
    assert own[0][0] is local.kernel
    same(own[0][1], [[rank + 1.0]] * 2)
    same(common[0][1], [[mean]] * 2)
    with pytest.raises(ValueError, match="Keras layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def check_process_sets_leave_others_out(hvd):
    rank, last = hvd.rank(), hvd.size() - 1
    pair = hvd.add_process_set([0, last]) if hvd.size() > 2 else hvd.global_process_set
    weight = tf.Variable([1.0])

    def slope():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * rank)
        return hvd.DistributedGradientTape(tape, process_set=pair).gradient(loss, weight)

    for result in both_ways(slope):
        same(result, [last / 2 if pair.included() else rank])
    hvd.barrier()
    if hvd.size() > 2:
        hvd.remove_process_set(pair)


def check_second_derivatives_are_reduced(hvd):
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    weight = tf.Variable([2.0])

    def slopes():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(weight**3) * rank
            first = hvd.DistributedGradientTape(inner).gradient(loss, weight)
        return first, outer.gradient(first, weight)

    for first, second in both_ways(slopes):
        same(first, [12 * mean])
        # The gradient of an average is the average of the gradients: every rank's own slope.
        same(second, [12 * rank])


def check_wrong_options_are_said(hvd):
    tape = tf.GradientTape()
    with pytest.raises(ValueError, match="needs op=Average"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    for groups in (0, -1, 1.5, "all", True):
        with pytest.raises(ValueError, match="Received: groups="):
            hvd.DistributedGradientTape(tape, groups=groups)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedGradientTape(tape, num_groups=2)


def check_keras_optimizers_get_op_and_groups(hvd):
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) / 2
    for options, slope in (
        ({}, total / size),
        ({"op": hvd.Sum, "groups": 2}, total),
        ({"gradient_predivide_factor": 2.0, "compression": hvd.Compression.fp16}, total / size),
    ):
        weights = [keras.Variable([1.0]), keras.Variable([[2.0]])]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), **options)
        optimizer.apply([tf.constant([1.0 * rank]), tf.constant([[2.0 * rank]])], weights)
        same(weights[0], [1.0 - 0.5 * slope], rtol=1e-3)
        same(weights[1], [[2.0 - slope]], rtol=1e-3)


def check_old_optimizers_are_horovods(hvd):
    v1 = tf.compat.v1
    mean = (hvd.size() - 1) / 2
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=tf.constant([1.0]))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize(tf.reduce_sum(weight) * float(hvd.rank()))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            same(session.run(weight), [1.0 - mean])
    with pytest.raises(ValueError, match="Expected a Keras optimizer"):
        hvd.DistributedOptimizer(3)
    with pytest.raises(ValueError, match="needs op=Average"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)


def check_eager_steps_share_one_graph(hvd):
    weight = tf.Variable([1.0])
    gradients_module._functions.clear()
    for step in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * (hvd.rank() + step))
        tape = hvd.DistributedGradientTape(tape)
        same(tape.gradient(loss, weight), [(hvd.size() - 1) / 2 + step])
    assert len(gradients_module._functions) == 1
    (function,) = gradients_module._functions.values()
    assert function.experimental_get_tracing_count() == 1


def check_a_rank_may_trace_anew_alone(hvd):
    rank, size = hvd.rank(), hvd.size()
    weight = tf.Variable([1.0])

    @tf.function
    def slope(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.reduce_sum(x))
        return hvd.DistributedGradientTape(tape).gradient(loss, weight)

    # Batches of other sizes on one rank only: it traces more often than the others.
    for count in (1, 2, 3, 2):
        mine = count if rank == 0 else 1
        same(slope(tf.ones([mine])), [(count + size - 1) / size])


def check_tapes_in_one_function_do_not_mix(hvd):
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    first, second = tf.Variable([1.0]), tf.Variable([1.0])

    @tf.function
    def slopes():
        with tf.GradientTape() as one:
            loss = tf.reduce_sum(first * rank)
        with tf.GradientTape() as two:
            other = tf.reduce_sum(second * rank * 10.0)
        return (
            hvd.DistributedGradientTape(one).gradient(loss, first),
            hvd.DistributedGradientTape(two).gradient(other, second),
        )

    for _ in range(3):
        a, b = slopes()
        same(a, [mean])
        same(b, [10 * mean])


def check_steps_in_a_loop_within_a_function(hvd):
    rank, mean = hvd.rank(), (hvd.size() + 1) / 2
    weight = tf.Variable([1.0])

    @tf.function
    def loop(steps):
        for x in tf.data.Dataset.range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * tf.cast(x, tf.float32)) * (rank + 1.0)
            gradient = hvd.DistributedGradientTape(tape).gradient(loss, weight)
            weight.assign_sub(0.01 * gradient)

    loop(100)
    same(weight, [1.0 - 0.01 * mean * 100 * 99 / 2], rtol=1e-5)
