"""Runs collectives and training on one rank and prints JSON, for test_local_ops."""

from __future__ import annotations

import json
import warnings

import keras
import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.tensorflow.backend import HOROVOD_INSTALLED, mpi_ops

DTYPES = (
    *(tf.float32, tf.float64, tf.float16, tf.bfloat16),
    *(tf.int64, tf.int32, tf.uint8, tf.bool, tf.complex64, tf.string),
)


def plain(value):
    """A value that JSON can hold and that keeps dtype and shape."""
    if isinstance(value, tf.IndexedSlices):
        return ["slices", plain(value.values), plain(value.indices)]
    if tf.is_tensor(value):
        return [value.dtype.name, list(value.shape), str(value.numpy().tolist())]
    if isinstance(value, (list, tuple)):
        return ["list", *map(plain, value)]
    return value


def attempt(function, *args, **keywords):
    """The result, or the kind of error."""
    try:
        return plain(function(*args, **keywords))
    except (ValueError, NotImplementedError, tf.errors.OpError) as error:
        known = isinstance(error, (ValueError, NotImplementedError))
        return f"raises {type(error).__name__ if known else 'OpError'}"


def values():
    for dtype in DTYPES:
        if dtype == tf.string:
            yield tf.constant([["a"]])
        else:
            yield tf.cast([[0, 1], [3, 2]], dtype)


def reductions(report):
    for value in values():
        for op in ("Average", "Sum", "Min", "Max", "Product", "Adasum"):
            number = getattr(hvd, op)
            for factors in ({}, {"prescale_factor": 0.3, "postscale_factor": 3.0}):
                key = f"{value.dtype.name} {op} {factors}"
                for function in (hvd.allreduce, hvd.reducescatter):
                    report[f"{function.__name__} {key}"] = attempt(
                        function, value, op=number, **factors
                    )
                for function in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
                    report[f"{function.__name__} {key}"] = attempt(
                        function, [value, value], op=number, **factors
                    )
        for name in ("fp16", "bf16"):
            report[f"{name} {value.dtype.name}"] = attempt(
                hvd.allreduce, value, compression=getattr(hvd.Compression, name)
            )


def moves(report):
    for value in values():
        for shaped in (value, value[0][0], value[:0]):
            key = f"{shaped.dtype.name} {list(shaped.shape)}"
            report[f"allgather {key}"] = attempt(hvd.allgather, shaped)
            report[f"grouped_allgather {key}"] = attempt(hvd.grouped_allgather, [shaped, shaped])
            report[f"broadcast {key}"] = attempt(hvd.broadcast, shaped, 0)
            report[f"broadcast 1 {key}"] = attempt(hvd.broadcast, shaped, 1)
            for splits in (None, [2], [0]):
                report[f"alltoall {splits} {key}"] = attempt(hvd.alltoall, shaped, splits)
        variable = tf.Variable(value)
        report[f"broadcast_ {value.dtype.name}"] = attempt(hvd.broadcast_, [variable], 0)


def rest(report):
    leaf = tf.range(4.0)
    for function in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with tf.GradientTape() as tape:
            tape.watch(leaf)
            target = tf.reduce_sum(function(leaf) * tf.range(4.0))
        report[f"gradient {function.__name__}"] = plain(tape.gradient(target, leaf))
    slices = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([0, 0]), [3, 1])
    report["sparse"] = plain(hvd.allreduce(slices))
    report["join"] = [int(hvd.join()), int(hvd.join())]
    report["barrier"] = hvd.barrier()
    asked = "rank size local_rank local_size cross_rank cross_size is_homogeneous is_initialized"
    report["place"] = [getattr(hvd, name)() for name in asked.split()]
    asked = "rank_op size_op local_rank_op local_size_op process_set_included_op"
    report["ops"] = [plain(getattr(hvd, name)()) for name in asked.split()]
    built = "mpi_built nccl_built ddl_built ccl_built cuda_built rocm_built gloo_built"
    report["kinds"] = [type(getattr(hvd, name)()).__name__ for name in built.split()]
    report["numbers"] = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    whole = hvd.global_process_set
    report["set"] = [whole.size(), whole.rank(), whole.included(), whole.ranks, str(whole)]
    report["removed"] = hvd.remove_process_set(whole)
    report["set in use"] = attempt(hvd.allreduce, leaf, process_set=hvd.ProcessSet([0]))
    report["powers"] = [hvd.check_num_rank_power_of_2(number) for number in range(9)]
    report["op"] = [
        hvd.handle_average_backwards_compatibility(op=None, average=None),
        hvd.handle_average_backwards_compatibility(op=hvd.Max, average=None),
    ]


def training(report):
    """A plain script in Horovod's manner."""
    for compiled in (False, True):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.1)
        hvd.broadcast_variables(model.variables, root_rank=0)

        def step(x, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        run = tf.function(step) if compiled else step
        for _ in range(3):
            run(tf.random.uniform([4, 3]))
        report[f"trained {compiled}"] = [plain(v.value + 0) for v in model.variables]
    report["objects"] = [hvd.broadcast_object({"a": 1}), hvd.allgather_object([2])]
    norm = hvd.SyncBatchNormalization()
    report["norm"] = plain(norm(tf.constant([[1.0], [3.0]]), training=True))


def main() -> None:
    warnings.simplefilter("ignore")
    report = {"before init": attempt(mpi_ops.size), "initialized": mpi_ops.is_initialized()}
    hvd.init()
    for part in (reductions, moves, rest, training):
        part(report)
    hvd.shutdown()
    report["after shutdown"] = mpi_ops.is_initialized()
    print(json.dumps([HOROVOD_INSTALLED, report]))


if __name__ == "__main__":
    main()
