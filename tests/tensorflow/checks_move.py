"""Checks of what gathers, broadcasts, exchanges and scatters on real ranks; see tests.ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tensorflow.helpers import FLOATS, INTEGERS, both_ways, everywhere, same


def check_rows_of_any_number_and_dtype_are_gathered(hvd):
    rank, size = hvd.rank(), hvd.size()
    expected = np.concatenate([np.full([r, 2], r) for r in range(size)])
    dtypes = (*INTEGERS, *FLOATS, tf.uint64, tf.bool, tf.complex64)
    for dtype in dtypes:
        rows = tf.cast(tf.fill([rank, 2], rank), dtype)
        for result in both_ways(lambda x: hvd.allgather(x, name="rows"), rows):
            assert result.dtype == dtype
            np.testing.assert_array_equal(
                tf.cast(result, tf.float64) if dtype == tf.bfloat16 else result,
                expected.astype(bool) if dtype == tf.bool else expected,
            )
    first, second = hvd.grouped_allgather([tf.fill([rank], 1.0), tf.fill([1, 1], rank)])
    assert first.shape == [sum(range(size))]
    assert second.numpy().tolist() == [[r] for r in range(size)]
    with pytest.raises(ValueError, match="at least one dimension"):
        hvd.allgather(tf.constant(1))


def check_any_dtype_is_broadcast(hvd):
    root = hvd.size() - 1
    for dtype in (*INTEGERS, *FLOATS, tf.uint64, tf.bool, tf.complex128):
        value = tf.cast([hvd.rank(), 1], dtype)
        for result in both_ways(lambda x: hvd.broadcast(x, root, name="any"), value):
            assert result.dtype == dtype
            expected = tf.cast([root, 1], dtype)
            assert bool(tf.reduce_all(tf.equal(result, expected)))
    with pytest.raises(ValueError, match="root_rank among the ranks"):
        hvd.broadcast(tf.zeros(1), hvd.size())
    with pytest.raises(ValueError, match="dtype=string"):
        hvd.broadcast(tf.constant(["a"]), 0)


def check_variables_of_one_name_are_broadcast_in_place(hvd):
    rank, root = hvd.rank(), hvd.size() - 1
    given = [
        keras.Variable([float(rank)], name="kernel"),
        keras.Variable([2.0 * rank], name="kernel"),
        tf.Variable([rank, 3]),
        tf.Variable(tf.cast([rank], tf.bfloat16)),
    ]
    values = hvd.broadcast_(given, root)
    expected = [[root], [2 * root], [root, 3], [root]]
    assert [np.asarray(v).tolist() for v in given] == expected
    assert [np.asarray(v).tolist() for v in values] == expected


def check_rows_are_exchanged(hvd):
    rank, size = hvd.rank(), hvd.size()
    for dtype in (tf.float32, tf.int64, tf.bfloat16, tf.uint32):
        # Rank r sends k + 1 rows to rank k.
        splits = [k + 1 for k in range(size)]
        rows = tf.cast(tf.repeat(tf.range(size) + 10 * rank, splits), dtype)
        for received, counts in both_ways(
            lambda x, splits=splits: hvd.alltoall(x, splits, name="exchange"), rows
        ):
            assert received.dtype == dtype
            expected = [rank + 10 * r for r in range(size) for _ in range(rank + 1)]
            assert tf.cast(received, tf.int32).numpy().tolist() == expected
            assert counts.numpy().tolist() == [rank + 1] * size
    even = hvd.alltoall(tf.range(size) + 10 * rank)
    assert even.numpy().tolist() == [rank + 10 * r for r in range(size)]


def check_parts_of_sums_are_scattered(hvd):
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2

    def rows(dtype):
        return tf.cast([[rank, k] for k in range(size)], dtype)

    for dtype in (*FLOATS, tf.int8, tf.int32, tf.int64):
        for op, expected in (
            (hvd.Sum, [[total, rank * size]]),
            (hvd.Average, [[total / size, rank]]),
        ):
            if dtype.is_integer:
                expected = np.round(expected)
            for result in both_ways(
                lambda x, op=op: hvd.reducescatter(x, op=op, name="part"), rows(dtype)
            ):
                same(result, expected, dtype)
    first, second = hvd.grouped_reducescatter([rows(tf.float32), rows(tf.int32)], op=hvd.Sum)
    assert first.numpy().tolist() == second.numpy().tolist() == [[total, rank * size]]
    with pytest.raises(ValueError, match="op=Max"):
        hvd.reducescatter(rows(tf.float32), op=hvd.Max)
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.reducescatter(tf.constant(1.0))


def check_sparse_rows_are_added_up(hvd):
    rank, size = hvd.rank(), hvd.size()

    def dense(r):
        # Rank 0 has no rows; rank r has row 1 twice and row r % 4.
        result = np.zeros([4, 2])
        for row in [1, 1, r % 4] if r else []:
            result[row] += r
        return result

    rows = [1, 1, rank % 4] if rank else []
    every = everywhere(hvd, dense)
    for op, expected in ((hvd.Sum, np.sum(every, 0)), (hvd.Average, np.mean(every, 0))):
        for dtype in FLOATS:
            slices = tf.IndexedSlices(
                tf.cast(tf.fill([len(rows), 2], rank), dtype),
                tf.constant(rows, tf.int64),
                tf.constant([4, 2], tf.int64),
            )
            for result in both_ways(lambda x, op=op: hvd.allreduce(x, op=op, name="s"), slices):
                assert isinstance(result, tf.IndexedSlices)
                same(tf.convert_to_tensor(result), expected, dtype)
        mixed = hvd.grouped_allreduce([tf.ones([1]), slices], op=op, postscale_factor=2.0)
        same(mixed[0], [2.0 * (size if op == hvd.Sum else 1)])
        same(tf.convert_to_tensor(mixed[1]), 2 * expected)
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.allreduce(slices, op=hvd.Min)


def check_process_sets_leave_others_out(hvd):
    last = hvd.size() - 1
    pair = hvd.add_process_set([0, last]) if hvd.size() > 2 else hvd.global_process_set
    if pair.included():
        value = tf.constant([hvd.rank()])
        assert hvd.allreduce(value, op=hvd.Sum, process_set=pair).numpy().tolist() == [last]
        mean = hvd.allreduce(tf.constant([float(hvd.rank())]), process_set=pair)
        same(mean, [last / 2])
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            mean = hvd.allreduce(
                tf.constant([float(hvd.rank())]), process_set=pair, compression=compression
            )
            same(mean, [last / 2])
        slices = tf.IndexedSlices(tf.fill([1, 1], float(hvd.rank())), tf.constant([0]), [2, 1])
        if hvd.rank() == 0:
            slices = tf.IndexedSlices(tf.zeros([0, 1]), tf.zeros([0], tf.int32), [2, 1])
        result = hvd.allreduce(slices, process_set=pair)
        same(tf.convert_to_tensor(result), [[last / 2], [0.0]])
        assert hvd.allgather(value, process_set=pair).numpy().tolist() == [0, last]
        assert hvd.broadcast(value, last, process_set=pair).numpy().tolist() == [last]
        assert hvd.allgather_object(hvd.rank(), process_set=pair) == [0, last]
        assert hvd.broadcast_object(hvd.rank(), last, process_set=pair) == last
        hvd.barrier(pair)
    hvd.barrier()
    if hvd.size() > 2:
        with pytest.raises(ValueError, match="root_rank among"):
            hvd.broadcast(tf.zeros(1), 1, process_set=pair)
        hvd.remove_process_set(pair)
    loose = hvd.ProcessSet([0])
    with pytest.raises(ValueError, match="add_process_set"):
        hvd.allreduce(tf.zeros(1), process_set=loose)


def check_objects_are_sent(hvd):
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    kinds = [{"epoch": rank}, [rank], "text", None]
    expected = [{"epoch": root}, [root], "text", None][root]
    assert hvd.broadcast_object(kinds[rank], root_rank=root) == expected
    assert hvd.broadcast_object_fn(root_rank=1)((rank, "x")) == (1, "x")
    objects = hvd.allgather_object({"rank": rank, "rows": list(range(rank))})
    assert objects == [{"rank": r, "rows": list(range(r))} for r in range(size)]


def check_an_object_that_cannot_be_sent_fails_everywhere(hvd):
    from hvdkit.errors import SynchronizationError

    bad = (line for line in "generator")
    kind = TypeError if hvd.rank() == 1 else SynchronizationError
    with pytest.raises(kind):
        hvd.broadcast_object(bad if hvd.rank() == 1 else 1, root_rank=1)
    with pytest.raises(kind):
        hvd.allgather_object(bad if hvd.rank() == 1 else 1)
    assert hvd.allgather_object(1) == [1] * hvd.size()
