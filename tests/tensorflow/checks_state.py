"""Checks of sending variables on real ranks; see tests.ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.errors import SynchronizationError

DTYPES = (
    *(tf.bool, tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.uint32, tf.int64, tf.uint64),
    *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128),
)


def numbers(variable):
    tensor = tf.convert_to_tensor(variable)
    return tf.cast(tensor, tf.complex128).numpy().tolist()


def check_variables_of_every_dtype_and_shape_are_sent(hvd):
    rank, root = hvd.rank(), hvd.size() - 1

    def value(dtype, shape, r):
        return tf.cast(tf.fill(shape, 3 * r % 2 if dtype == tf.bool else r + 1), dtype)

    for inplace in (False, True):
        for shape in ([], [3], [2, 2], [0, 4]):
            mine = [tf.Variable(value(dtype, shape, rank)) for dtype in DTYPES]
            assert hvd.broadcast_variables(mine, root, inplace=inplace) is None
            for variable, dtype in zip(mine, DTYPES, strict=True):
                assert variable.dtype == dtype
                assert numbers(variable) == numbers(value(dtype, shape, root))


def check_keras_models_and_optimizers_are_sent(hvd):
    if hvd.rank() == 0:
        keras.layers.Dense(1).build((None, 1))  # numbers the names of later layers otherwise
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [
            keras.layers.Input([4]),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=hvd.rank()),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(hvd.rank() + 7)
    everything = {"model": model.variables, "optimizer": (optimizer.variables,)}
    hvd.broadcast_variables(everything, root_rank=1)
    flat = [np.asarray(v).tolist() for v in (*model.variables, *optimizer.variables)]
    assert hvd.allgather_object(flat) == [flat] * hvd.size()
    assert int(optimizer.iterations) == 8
    assert float(optimizer.learning_rate) == pytest.approx(0.2)
    # The root's own first layer was made from seed 1.
    keras.utils.set_random_seed(1)
    fresh = keras.layers.Dense(3)
    fresh.build((None, 4))
    np.testing.assert_array_equal(fresh.kernel, model.layers[0].kernel)


def check_a_single_variable_and_generators_are_sent(hvd):
    single = keras.Variable([float(hvd.rank())])
    hvd.broadcast_variables(single, 1)
    assert numbers(single) == [1]
    pair = [tf.Variable(hvd.rank()), tf.Variable(-hvd.rank())]
    hvd.broadcast_variables((variable for variable in pair), 1)
    assert [int(v) for v in pair] == [1, -1]
    hvd.broadcast_variables([], 0)
    generator = tf.random.Generator.from_seed(hvd.rank())
    hvd.broadcast_variables(generator.state, 0)
    draws = hvd.allgather(generator.uniform([1]))
    assert len(set(draws.numpy().tolist())) == 1


def check_many_packs_are_sent(hvd):
    from hvdkit.tensorflow import state

    before = state.PACK_BYTES
    state.PACK_BYTES = 16
    try:
        mine = [tf.Variable(tf.fill([count], float(hvd.rank()))) for count in (1, 5, 2, 1, 9)]
        hvd.broadcast_variables(mine, 1)
    finally:
        state.PACK_BYTES = before
    assert all(set(variable.numpy()) == {1.0} for variable in mine)


def check_other_shapes_are_an_error_on_all_ranks(hvd):
    rank = hvd.rank()
    cases = {
        "weight.*shape=.4,.*instead of.*3,": [
            tf.Variable(tf.zeros([3 + (rank == 1)]), name="weight")
        ],
        "weight.*float64 instead of.*float32": [
            tf.Variable(tf.zeros([1], tf.float64 if rank == 1 else tf.float32), name="weight")
        ],
        "2 variables instead of 1.*extra.*not on the root": [
            tf.Variable(1.0, name="first"),
            *([tf.Variable(1.0, name="extra")] if rank == 1 else []),
        ],
        "0 variables instead of 1.*first.*missing": [tf.Variable(1.0, name="first")] * (rank != 1),
    }
    for message, mine in cases.items():
        before = [numbers(variable) for variable in mine]
        with pytest.raises(SynchronizationError, match=f"rank 1: .*{message}"):
            hvd.broadcast_variables(mine, 0)
        assert [numbers(variable) for variable in mine] == before
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum) == hvd.size()


def check_what_is_no_variable_is_said(hvd):
    with pytest.raises(ValueError, match="Expected variables"):
        hvd.broadcast_variables([3], 0)
    with pytest.raises(ValueError, match="dtype=string"):
        hvd.broadcast_variables([tf.Variable("text")], 0)
    with pytest.raises(ValueError, match="root_rank among"):
        hvd.broadcast_variables([tf.Variable(1.0)], 17)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def check_variables_are_sent_within_a_function(hvd):
    rank = hvd.rank()
    mine = [tf.Variable([float(rank)]), keras.Variable([rank, 2]), tf.Variable(rank > 0)]

    @tf.function
    def send(inplace):
        hvd.broadcast_variables(mine, root_rank=1, inplace=inplace)
        return tf.identity(mine[0])

    for inplace in (False, True):
        mine[0].assign([float(rank)])
        assert send(inplace).numpy().tolist() == [1.0]
        assert [numbers(v) for v in mine] == [[1], [1, 2], 1]
    wrong = [tf.Variable(1.0, name="fine"), tf.Variable(tf.zeros([1 + (rank == 1)]), name="odd")]
    short = wrong[: 1 if rank == 1 else 2]
    for variables in (wrong, short):
        with pytest.raises(tf.errors.InvalidArgumentError, match="same variables on all ranks"):
            tf.function(lambda v=variables: hvd.broadcast_variables(v, 0))()


def check_variables_of_old_graphs_are_sent(hvd):
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.get_variable("a", initializer=tf.constant([1.0 + hvd.rank()]))
        v1.get_variable("b", initializer=tf.constant(hvd.rank()), use_resource=False)
        hook = hvd.BroadcastGlobalVariablesHook(root_rank=1)
        with v1.train.SingularMonitoredSession(hooks=[hook]) as session:
            values = session.run(v1.global_variables())
        assert [np.asarray(value).tolist() for value in values] == [[2.0], 1]
        with v1.Session() as session:
            assert hvd.broadcast_object(hvd.rank(), root_rank=1, session=session) == 1
            assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    with tf.Graph().as_default(), pytest.raises(ValueError, match="session"):
        hvd.broadcast_object(1, root_rank=1)


def check_variables_are_sent_within_a_process_set(hvd):
    last = hvd.size() - 1
    pair = hvd.add_process_set([0, last]) if hvd.size() > 2 else hvd.global_process_set
    mine = [tf.Variable([hvd.rank()] * 2, name="wide")]
    if pair.included():
        hvd.broadcast_variables(mine, last, process_set=pair)
        odd = [tf.Variable(tf.zeros([1 + (hvd.rank() == last)]), name="odd")]
        with pytest.raises(SynchronizationError, match=f"rank {last}: .*odd"):
            hvd.broadcast_variables(odd, 0, process_set=pair)
    expected = last if pair.included() else hvd.rank()
    assert numbers(mine[0]) == [expected] * 2
    hvd.barrier()
    if hvd.size() > 2:
        hvd.remove_process_set(pair)
