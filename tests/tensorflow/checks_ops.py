"""Checks of sums and averages on real ranks; see tests.ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow import mpi_ops as horovod

from hvdkit.errors import UnsupportedError
from tests.tensorflow.helpers import FLOATS, INTEGERS, both_ways, everywhere, same


def check_floats_are_reduced_with_every_operation(hvd):
    def rows(rank):
        return np.array([[0.5 + rank, -2.0], [3.0 - rank, 1.0]])

    every = everywhere(hvd, rows)
    expected = {
        hvd.Average: np.mean(every, 0),
        hvd.Sum: np.sum(every, 0),
        hvd.Min: np.min(every, 0),
        hvd.Max: np.max(every, 0),
        hvd.Product: np.prod(every, 0),
    }
    for dtype in FLOATS:
        for op, values in expected.items():
            given = tf.cast(rows(hvd.rank()), dtype)
            for result in both_ways(lambda x, op=op: hvd.allreduce(x, op=op, name="x"), given):
                same(result, values, dtype)


def check_scale_factors_are_applied(hvd):
    mean = np.mean(everywhere(hvd, lambda rank: rank + 1.0))
    for prescale, postscale in ((0.5, 4.0), (-3.0, 1.0), (1e-9, 1e9), (1e9, 1e-9), (0.0, 1.0)):
        factors = {"prescale_factor": prescale, "postscale_factor": postscale}
        given = tf.constant([hvd.rank() + 1.0], tf.float64)
        same(hvd.allreduce(given, **factors), [mean * prescale * postscale])
        same(
            hvd.allreduce(given, op=hvd.Sum, **factors), [mean * hvd.size() * prescale * postscale]
        )
    low = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Max, prescale_factor=-2.0)
    same(low, [-2.0])


def check_integer_averages_are_rounded_to_nearest(hvd):
    rank, size = hvd.rank(), hvd.size()
    raw = horovod._allreduce(tf.constant([int(rank == size - 1)]), name="raw", op=horovod.Average)
    assert raw.numpy().tolist() == [0]
    numbers = [rank, 4 * rank, 3, 100 + int(rank == 0)]
    totals = np.sum(everywhere(hvd, lambda r: [r, 4 * r, 3, 100 + int(r == 0)]), 0)
    expected = [round(int(total) / size) for total in totals]
    for dtype in INTEGERS:
        given = tf.cast(numbers, dtype)
        for result in both_ways(lambda x: hvd.allreduce(x, name="mean"), given):
            assert result.dtype == dtype
            assert result.numpy().tolist() == expected
    negative = hvd.allreduce(tf.constant([-rank, -3 * rank - 1]))
    totals = np.sum(everywhere(hvd, lambda r: [-r, -3 * r - 1]), 0)
    assert negative.numpy().tolist() == [round(int(total) / size) for total in totals]
    huge = hvd.allreduce(tf.constant([2**62 + rank], tf.int64))
    assert huge.numpy().tolist() == [2**62 + round(sum(range(size)) / size)]
    assert hvd.allreduce(tf.constant(2 * rank)).numpy() == size - 1


def check_integers_are_summed_and_compared(hvd):
    rank, size = hvd.rank(), hvd.size()
    for dtype in INTEGERS:
        given = tf.cast([rank + 1, 2], dtype)
        results = {
            op: hvd.allreduce(given, op=op).numpy().tolist()
            for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
        }
        assert results == {
            hvd.Sum: [size * (size + 1) // 2, 2 * size],
            hvd.Min: [1, 2],
            hvd.Max: [size, 2],
            hvd.Product: [int(np.prod(range(1, size + 1))), 2**size],
        }
    flags = tf.constant([rank == 0, True, False])
    assert hvd.allreduce(flags, op=hvd.Max).numpy().tolist() == [True, True, False]
    assert hvd.allreduce(flags, op=hvd.Min).numpy().tolist() == [False, True, False]


def check_complex_numbers_are_averaged(hvd):
    mean = (hvd.size() - 1) / 2
    for dtype in (tf.complex64, tf.complex128):
        result = hvd.allreduce(tf.cast([hvd.rank() * (1 - 2j)], dtype))
        same(result, [mean * (1 - 2j)], dtype)


def check_half_averages_neither_overflow_nor_vanish(hvd):
    for value in (6e4, 6e-8):
        given = tf.constant([value], tf.float16)
        for result in both_ways(lambda x: hvd.allreduce(x, name="half"), given):
            assert result.numpy().tolist() == given.numpy().tolist()


def check_dtypes_that_cannot_be_reduced_are_said(hvd):
    with pytest.raises(ValueError, match=r"Cannot reduce this dtype with Average.*dtype=string"):
        hvd.allreduce(tf.constant(["a"]))
    with pytest.raises(ValueError, match=r"Cannot reduce this dtype with Sum.*dtype=bool"):
        hvd.allreduce(tf.constant([True]), op=hvd.Sum)


def check_scalars_and_empty_tensors_are_reduced(hvd):
    same(hvd.allreduce(tf.constant(float(hvd.rank()))), (hvd.size() - 1) / 2)
    for shape in ([0], [0, 3]):
        for result in both_ways(lambda x: hvd.allreduce(x, name="empty"), tf.zeros(shape)):
            assert result.shape == shape


def check_arrays_and_variables_of_both_kinds_are_accepted(hvd):
    rank, mean = float(hvd.rank()), (hvd.size() - 1) / 2
    for value in ([rank], np.array([rank]), tf.Variable([rank]), keras.Variable([rank])):
        same(hvd.allreduce(value), [mean])
        same(hvd.grouped_allreduce([value])[0], [mean])
        assert hvd.allgather(value).numpy().tolist() == list(range(hvd.size()))
        assert hvd.broadcast(value, hvd.size() - 1).numpy().tolist() == [hvd.size() - 1]
        assert hvd.grouped_allgather([value])[0].shape == [hvd.size()]
    wide = keras.Variable([rank] * hvd.size())
    assert hvd.alltoall(wide).numpy().tolist() == list(range(hvd.size()))
    same(hvd.reducescatter(wide), [mean])
    assert [t.shape for t in hvd.grouped_reducescatter([wide])] == [[1]]


def check_groups_may_mix_dtypes(hvd):
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2

    def reduce(*tensors):
        return hvd.grouped_allreduce(list(tensors), name="mixed")

    given = [tf.cast([rank], dtype) for dtype in (tf.float32, tf.int32, tf.bfloat16, tf.float64)]
    for results in both_ways(reduce, *given):
        assert [result.dtype for result in results] == [tensor.dtype for tensor in given]
        for result, expected in zip(results, (mean, round(mean), mean, mean), strict=True):
            same(result, [expected])
    assert hvd.grouped_allreduce([]) == []


def check_gradients_are_those_of_the_operations(hvd):
    rank, size = hvd.rank(), hvd.size()
    weight = rank + 1.0
    mean_weight = (size + 1) / 2
    cases = {
        hvd.Average: mean_weight,
        hvd.Sum: mean_weight * size,
    }
    for dtype in FLOATS:
        value = tf.cast([1.0, 2.0], dtype)
        for op, expected in cases.items():

            def slope(x, op=op, dtype=dtype):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = tf.reduce_sum(hvd.allreduce(x, op=op, name="y") * tf.cast(weight, dtype))
                return tape.gradient(y, x)

            for gradient in both_ways(slope, value):
                same(gradient, [expected] * 2, dtype)
    value = tf.ones([2])
    with tf.GradientTape() as tape:
        tape.watch(value)
        y = tf.reduce_sum(hvd.broadcast(value, 0) * weight)
    same(tape.gradient(y, value), [mean_weight * (rank == 0)] * 2)
    value = tf.ones([2, 2], tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(value)
        y = tf.reduce_sum(hvd.allgather(value) * tf.cast(weight, tf.bfloat16))
    same(tape.gradient(y, value), np.full([2, 2], mean_weight), tf.bfloat16)


def check_constants_are_reduced_in_every_call(hvd):
    """Horovod's operation is folded into the graph, and a lone new trace would wait for ever."""

    @tf.function
    def total(count):
        return hvd.allreduce(tf.constant([count]), op=hvd.Sum, name="total")

    # Each rank traces for its own numbers; only rank 0 has seen all of them at the end.
    for number in range(4):
        mine = number if hvd.rank() == 0 else 0
        expected = number
        assert total(mine).numpy().tolist() == [expected]


def check_turns_of_a_loop_do_not_mix(hvd):
    """Turns that do not depend on each other could run one operation twice at a time."""
    size = hvd.size()
    turns = 100

    @tf.function
    def loop(count):
        total, half, rows = 0, 0.0, 0
        for turn in tf.range(count):
            total += hvd.allreduce(turn, op=hvd.Sum, name="turn")
            half += hvd.allreduce(
                tf.cast(turn, tf.float32), compression=hvd.Compression.fp16, name="half"
            )
            rows += tf.size(hvd.allgather(tf.fill([hvd.rank()], turn), name="rows"))
        return total, half, rows

    total, half, rows = loop(tf.constant(turns))
    assert int(total) == size * turns * (turns - 1) // 2
    np.testing.assert_allclose(half, turns * (turns - 1) / 2, rtol=1e-3)
    assert int(rows) == turns * size * (size - 1) // 2


def check_adasum_gives_back_what_all_ranks_have(hvd):
    value = tf.constant([1.0, -2.0])
    for dtype in (tf.float32, tf.bfloat16):
        same(hvd.allreduce(tf.cast(value, dtype), op=hvd.Adasum), value.numpy(), dtype)


def check_old_arguments_are_understood(hvd):
    value = tf.constant([1.0])
    with pytest.warns(DeprecationWarning, match="average"):
        same(hvd.allreduce(value, average=False), [hvd.size()])
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(value, average=True, op=hvd.Sum)


def check_questions_are_answered(hvd):
    assert (int(hvd.size_op()), int(hvd.rank_op())) == (hvd.size(), hvd.rank())
    assert int(hvd.local_size_op()) == hvd.local_size()
    assert int(hvd.local_rank_op()) == hvd.local_rank()
    assert int(hvd.process_set_included_op()) == 1
    assert hvd.is_initialized()
    from hvdkit import world

    assert world.current().size == hvd.size()


def check_constants_that_are_equal_on_some_ranks_only(hvd):
    """TensorFlow merges equal operations, which must not happen to one rank alone."""

    @tf.function
    def both():
        first = hvd.allreduce(tf.constant([1.0]), name="merged.first", op=hvd.Sum)
        other = tf.constant([2.0 if hvd.rank() == 0 else 1.0])
        return first, hvd.allreduce(other, name="merged.second", op=hvd.Sum)

    for _ in range(2):
        first, second = both()
        same(first, [float(hvd.size())])
        same(second, [hvd.size() + 1.0])


def check_shapes_that_differ_between_ranks_are_an_error_everywhere(hvd):
    """Also in groups, where Horovod gave out memory that nothing had written."""
    if hvd.size() == 1:
        return
    rank = hvd.rank()
    odd, even = tf.ones([2 + rank]), tf.ones([3])
    turned = tf.ones([2, 3] if rank == 0 else [3, 2])
    bf16 = hvd.Compression.bf16
    calls = {
        "average": lambda: hvd.allreduce(odd),
        "max": lambda: hvd.allreduce(odd, op=hvd.Max),
        "first": lambda: hvd.grouped_allreduce([odd, even], op=hvd.Sum),
        "last": lambda: hvd.grouped_allreduce([even, odd], op=hvd.Sum),
        "gather": lambda: hvd.grouped_allgather([turned, even]),
        "fp16": lambda: hvd.grouped_allreduce([turned, even], compression=hvd.Compression.fp16),
        "bf16": lambda: hvd.allreduce(turned, compression=bf16),
        "bf16 group": lambda: hvd.grouped_allreduce(
            [tf.ones([4 + rank]), tf.ones([3 - rank])], compression=bf16
        ),
    }
    for what, call in calls.items():
        with pytest.raises(tf.errors.OpError) as error:
            call()
        assert "Mismatched" in str(error.value) or "same shapes" in str(error.value), what
    dynamic = tf.function(
        lambda tensor: hvd.allreduce(tensor, compression=bf16),
        input_signature=[tf.TensorSpec([None, None])],
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="same shapes"):
        dynamic(turned)


def check_gradients_of_extremes_go_where_they_came_from(hvd):
    rank, size = hvd.rank(), hvd.size()
    for op, chosen in ((hvd.Max, size - 1), (hvd.Min, 0)):
        values = tf.Variable([1.0 + rank, 7.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.allreduce(values, op=op)) * (1.0 + rank)
        total = size * (size + 1) / 2
        expected = [total if rank == chosen else 0.0, total / size]
        assert np.allclose(tape.gradient(loss, values), expected)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allreduce(values, op=hvd.Product))
    with pytest.raises(UnsupportedError, match="no gradient"):
        tape.gradient(loss, values)


def check_wrong_arguments_are_said(hvd):
    with pytest.raises(ValueError, match=r"Expected op to be .*Received: op='sum'"):
        hvd.allreduce(tf.ones(2), op="sum")
    with pytest.raises(ValueError, match="compression='fp16'"):
        hvd.allreduce(tf.ones(2), compression="fp16")
    with pytest.raises(ValueError, match="whole numbers of rows"):
        hvd.alltoall(tf.ones(3), splits=[1.5] * hvd.size())
