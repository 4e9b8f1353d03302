"""Checks of the gradient tapes on real ranks; see tests.ranks."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.errors import SynchronizationError
from tests.tensorflow.helpers import both_ways, same


def check_structures_of_sources_are_kept(hvd):
    rank, size = hvd.rank(), hvd.size()
    mean = (size - 1) / 2
    first, second = tf.Variable([1.0, 2.0]), keras.Variable([3.0])
    unused = tf.Variable(1.0)
    tensor = tf.constant([5.0])

    def slopes():
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(first * rank) + tf.reduce_sum(second * 2.0) * rank
            loss += tf.reduce_sum(tensor * tensor) * (rank + 1)
        tape = hvd.DistributedGradientTape(tape)
        assert isinstance(tape, tf.GradientTape)
        return tape.gradient(loss, {"a": [first, (second, unused)], "b": tensor})

    for result in both_ways(slopes):
        assert sorted(result) == ["a", "b"]
        same(result["a"][0], [mean, mean])
        assert isinstance(result["a"][1], tuple)
        same(result["a"][1][0], [2 * mean])
        assert result["a"][1][1] is None
        same(result["b"], [10 * (mean + 1)])

    def single():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(second * float(rank))
        return tape.gradient(loss, second)

    for result in both_ways(single):
        same(result, [mean])


def check_every_option_gives_its_formula(hvd):
    rank, size = hvd.rank(), hvd.size()
    mean = (size + 1) / 2
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([[1.0]]), tf.Variable(3.0), tf.Variable([2.0])]
    factors = [1.0, 2.0, -3.0, 0.5]
    cases = [
        ({}, mean, 1e-6),
        ({"op": hvd.Sum}, mean * size, 1e-6),
        ({"gradient_predivide_factor": 3.0}, mean, 1e-6),
        ({"groups": 1}, mean, 1e-6),
        ({"groups": 3}, mean, 1e-6),
        ({"groups": 9, "op": hvd.Sum}, mean * size, 1e-6),
        ({"groups": [[weights[0], weights[2]], [weights[3]]]}, mean, 1e-6),
        ({"groups": 2, "gradient_predivide_factor": 2.0}, mean, 1e-6),
        ({"compression": hvd.Compression.fp16}, mean, 2e-3),
        ({"compression": hvd.Compression.fp16, "groups": 2}, mean, 2e-3),
        ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, mean * size, 2e-2),
        ({"compression": hvd.Compression.bf16, "gradient_predivide_factor": 8.0}, mean, 2e-2),
        ({"device_dense": "/cpu:0"}, mean, 1e-6),
    ]
    for options, scale, rtol in cases:

        def slopes(options=options):
            with tf.GradientTape() as tape:
                loss = tf.add_n(
                    [tf.reduce_sum(w * f) for w, f in zip(weights, factors, strict=True)]
                )
                loss *= rank + 1.0
            return hvd.DistributedGradientTape(tape, **options).gradient(loss, weights)

        for result in both_ways(slopes):
            for gradient, weight, factor in zip(result, weights, factors, strict=True):
                same(gradient, np.full(weight.shape, factor * scale), rtol=rtol)


def check_compression_keeps_large_and_small_gradients(hvd):
    weight = tf.Variable([1.0])
    for magnitude in (4e4, 2e-8):

        def slope(magnitude=magnitude):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * magnitude)
            options = {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 2.0}
            return hvd.DistributedGradientTape(tape, groups=1, **options).gradient(loss, weight)

        for result in both_ways(slope):
            same(result, [magnitude], rtol=1e-3)


def check_adasum_gives_back_equal_gradients(hvd):
    weight = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * weight)
    result = hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, [weight])
    same(result[0], [2.0, 4.0])


def check_half_gradients_are_averaged_safely(hvd):
    for dtype in (tf.float16, tf.bfloat16):
        weight = tf.Variable(tf.cast([1.0], dtype))

        def slope(weight=weight, dtype=dtype):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * tf.cast(49152.0, dtype))
            return hvd.DistributedGradientTape(tape).gradient(loss, weight)

        for result in both_ways(slope):
            assert result.dtype == dtype
            assert tf.cast(result, tf.float32).numpy().tolist() == [49152.0]


def check_sparse_gradients_are_reduced(hvd):
    rank, size = hvd.rank(), hvd.size()
    table = tf.Variable(np.ones([5, 2]), dtype=tf.float64)
    dense = tf.Variable([1.0], dtype=tf.float64)
    # Rank r looks up r rows, rank 0 none.
    rows = tf.constant([r % 5 for r in range(rank)], tf.int64)
    total = np.zeros([5, 2])
    for r in range(size):
        for row in range(r):
            total[row % 5] += r
    for options, scale in (
        ({}, 1 / size),
        ({"op": hvd.Sum}, 1.0),
        ({"groups": 1}, 1 / size),
        ({"gradient_predivide_factor": 2.0}, 1 / size),
        ({"sparse_as_dense": True}, 1 / size),
        ({"sparse_as_dense": True, "op": hvd.Sum, "groups": 1}, 1.0),
    ):

        def slopes(options=options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows)) * rank
                loss += tf.reduce_sum(dense) * rank
            tape = hvd.DistributedGradientTape(tape, **options)
            return tape.gradient(loss, [table, dense])

        for result in both_ways(slopes):
            assert isinstance(result[0], tf.IndexedSlices) != bool(options.get("sparse_as_dense"))
            same(tf.convert_to_tensor(result[0]), total * scale)
            same(result[1], [sum(range(size)) * scale])


def check_persistent_tapes_and_output_gradients(hvd):
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    weight = tf.Variable([1.0, 1.0])

    def slopes():
        with tf.GradientTape(persistent=True) as tape:
            first = weight * rank
            second = weight * weight * rank
        tape = hvd.DistributedGradientTape(tape)
        upstream = tf.constant([2.0, 3.0])
        return (
            tape.gradient(first, weight, output_gradients=upstream),
            tape.gradient(second, [weight])[0],
        )

    for first, second in both_ways(slopes):
        same(first, [2 * mean, 3 * mean])
        same(second, [2 * mean, 2 * mean])


def check_unconnected_sources_may_be_zero(hvd):
    rank, size = hvd.rank(), hvd.size()
    weight, other = tf.Variable([1.0]), tf.Variable([[1.0, 1.0]])
    zero = tf.UnconnectedGradients.ZERO

    def slopes(by_position):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) + (tf.reduce_sum(other) if rank == 1 else 0.0)
        tape = hvd.DistributedGradientTape(tape)
        if by_position:
            return tape.gradient(loss, [weight, other], None, zero)
        return tape.gradient(loss, [weight, other], unconnected_gradients=zero)

    for by_position in (True, False):
        for result in both_ways(functools.partial(slopes, by_position)):
            same(result[0], [1.0])
            same(result[1], [[1 / size, 1 / size]])


def check_gradients_that_some_ranks_lack_are_an_error_everywhere(hvd):
    rank = hvd.rank()
    shared, odd = tf.Variable([1.0], name="shared"), keras.Variable([1.0], name="odd")
    table = tf.Variable([[1.0]], name="table")

    def missing():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + (tf.reduce_sum(odd * 1.0) if rank == 1 else 0.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [shared, odd])

    def sparse_here():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [0]) if rank == 1 else table * 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [table])

    def fewer():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + tf.reduce_sum(odd * 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [shared, odd][: 1 + (rank != 1)])

    def reordered():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + tf.reduce_sum(odd * 1.0)
        return hvd.DistributedGradientTape(tape).gradient(
            loss, [shared, odd] if rank else [odd, shared]
        )

    def none_at_all():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared)
        return hvd.DistributedGradientTape(tape).gradient(loss, [shared] if rank else [])

    for function, message in (
        (none_at_all, "other numbers of sources"),
        (missing, r"same gradients.*grad_1_odd"),
        (sparse_here, r"same gradients.*grad_0_table"),
        (fewer, "other numbers of sources"),
        (reordered, "names or order differ"),
    ):
        with pytest.raises(SynchronizationError, match=message):
            function()
        with pytest.raises(tf.errors.OpError):
            tf.function(function)()
    hvd.barrier()


def check_no_sources_give_no_gradients(hvd):
    with tf.GradientTape() as tape:
        loss = tf.constant(1.0)
    assert hvd.DistributedGradientTape(tape).gradient(loss, []) == []


def check_options_that_differ_between_ranks_are_an_error_everywhere(hvd):
    """Their operations would wait for each other for ever."""
    if hvd.size() == 1:
        return
    first, second = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    odd = hvd.rank() > 0
    compressions = hvd.Compression.none, hvd.Compression.fp16
    lists = [[first, second]], [[second, first]]
    for options, told in (
        ({"compression": compressions[odd]}, "another op, compression, groups"),
        ({"groups": 1 if odd else None}, "another op, compression, groups"),
        ({"groups": lists[odd]}, "another op, compression, groups"),
        ({"gradient_predivide_factor": 2.0 if odd else 1.0}, "gradient_predivide_factor"),
    ):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first * first) + tf.reduce_sum(second)
        with pytest.raises(SynchronizationError, match=told):
            hvd.DistributedGradientTape(tape, **options).gradient(loss, [first, second])
    uneven = tf.Variable(tf.ones(2 + odd))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(uneven)
    with pytest.raises(SynchronizationError, match=r"other shapes or dtypes.*Mismatched ALLREDUCE"):
        hvd.DistributedGradientTape(tape).gradient(loss, [uneven])


def check_unconnected_gradients_may_be_named_by_a_string(hvd):
    variable, unused = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = variable * variable
    tape = hvd.DistributedGradientTape(tape)
    assert [float(grad) for grad in tape.gradient(loss, [variable, unused], None, "zero")] == [4, 0]
