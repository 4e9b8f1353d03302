"""The public allreduce and reducescatter functions, with gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.compressor import check_compression
from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.ops_move import grouped_allgather
from hvdkit.tensorflow.reduction import reduce_tensors
from hvdkit.tensorflow.values import as_tensor, live, normalized, op_label, ranks_of, settled
from hvdkit.tensorflow.wire import encode, op_name

_global = mpi_ops.global_process_set


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = _global,
    ignore_name_scope: bool = False,
) -> Any:
    """Averages (or sums, ...) `tensor` over ranks; differentiable.

    Other than in Horovod: bfloat16 and the other dtypes listed in the error for an unknown one;
    Keras 3 variables; integer averages are rounded to nearest; 16-bit floats are summed in
    float32; ranks that have joined weigh nothing; ``Compression.fp16`` cannot overflow.

    Args:
        tensor: A tensor, variable or array of the same shape and dtype on all ranks, or
            ``tf.IndexedSlices``, also without rows on some ranks.
        average: Deprecated; use `op`.
        device_dense: Where the operation runs for dense tensors.
        device_sparse: Where the operation runs for ``tf.IndexedSlices``.
        compression: How the numbers travel.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Applied to `tensor`.
        postscale_factor: Applied to the result.
        name: The same on all ranks; None takes the tensor's.
        process_set: The ranks that take part.
        ignore_name_scope: Leaves TensorFlow's name scopes out of the name.

    Raises:
        ValueError: The dtype cannot be reduced with `op`.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allreduce(tf.constant([1.5], tf.bfloat16), op=hvd.Sum).numpy().tolist()
        [1.5]
    """
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        label = op_label("Allreduce", name, tensor.values)
        options = (label, op, *factors, process_set, ignore_name_scope)
        with tf.device(device_sparse):
            return _reduce_sparse([tensor], *options)[0]
    label = op_label("Allreduce", name, tensor)
    options = (label, compression, op, *factors, process_set, ignore_name_scope)
    with tf.device(device_dense):
        return reduce_compressed([as_tensor(tensor)], *options)[0]


@tf.autograph.experimental.do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Like :func:`allreduce` for several tensors, of any dtypes, that are ready together.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> [t.numpy().tolist() for t in hvd.grouped_allreduce([tf.ones(1), tf.constant([2])])]
        [[1.0], [2]]
    """
    if not tensors:
        return tensors
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    first = tensors[0]
    label = op_label(
        "GroupedAllreduce", name, first.values if isinstance(first, tf.IndexedSlices) else first
    )
    options = (op, *factors, process_set, ignore_name_scope)
    results: list[Any] = [None] * len(tensors)
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [index for index in range(len(tensors)) if index not in sparse]
    if sparse:
        with tf.device(device_sparse):
            reduced = _reduce_sparse([tensors[i] for i in sparse], label, *options)
        for index, result in zip(sparse, reduced, strict=True):
            results[index] = result
    if dense:
        with tf.device(device_dense):
            given = [as_tensor(tensors[index]) for index in dense]
            reduced = reduce_compressed(given, label, compression, *options)
        for index, result in zip(dense, reduced, strict=True):
            results[index] = result
    return results


def reduce_compressed(
    tensors: Sequence[tf.Tensor],
    label: str,
    compression: Any,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    ignore_name_scope: bool = False,
    active: Any = None,
) -> list[tf.Tensor]:
    """Dense tensors, compressed on their way; `active` as in :func:`reduce_tensors`."""
    factors = (op, prescale_factor, postscale_factor, process_set, ignore_name_scope)
    check_compression(compression)
    if not hasattr(compression, "reduce"):
        pairs = [compression.compress(tensor) for tensor in tensors]
        reduced = reduce_tensors([wire for wire, _ in pairs], label, *factors, active)
        return [
            compression.decompress(wire, context)
            for wire, (_, context) in zip(reduced, pairs, strict=True)
        ]
    # Only sums are worth compressing, and only floats can be.
    summed = op in (mpi_ops.Average, mpi_ops.Sum)
    if not summed or not all(tensor.dtype.is_floating for tensor in tensors):
        return reduce_tensors(tensors, label, *factors, active)

    @tf.custom_gradient
    def compressed(*inputs: tf.Tensor) -> tuple[Any, Any]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            return reduce_compressed(upstream, f"{label}_grad", compression, *factors)

        return compression.reduce(inputs, label, *factors), gradient

    return list(compressed(*tensors))


def _reduce_sparse(
    slices: Sequence[tf.IndexedSlices],
    label: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    ignore_name_scope: bool,
) -> list[tf.IndexedSlices]:
    """Gathers the rows of all ranks; their sum is the reduction of what they stand for."""
    if op not in (mpi_ops.Average, mpi_ops.Sum):
        raise NotImplementedError(
            "tf.IndexedSlices can be reduced with op=Average or op=Sum. Received: "
            f"op={op_name(op)}. Fix: pass sparse_as_dense=True, or tf.convert_to_tensor(slices)."
        )
    if op == mpi_ops.Average and not all(s.values.dtype.is_floating for s in slices):
        raise ValueError(
            "The average of tf.IndexedSlices needs values of a float dtype. Received: dtypes="
            f"{[s.values.dtype.name for s in slices]}. Fix: cast the values to tf.float32."
        )
    keywords = {"ignore_name_scope": ignore_name_scope, "process_set": process_set}
    values = grouped_allgather([s.values for s in slices], name=f"{label}_values", **keywords)
    indices = grouped_allgather([s.indices for s in slices], name=f"{label}_indices", **keywords)
    factor = prescale_factor * postscale_factor
    results = []
    for given, rows, positions in zip(slices, values, indices, strict=True):
        if op == mpi_ops.Average:
            rows = rows / tf.cast(ranks_of(process_set), rows.dtype)
        if factor != 1.0:
            rows = rows * tf.constant(factor, rows.dtype)
        results.append(tf.IndexedSlices(rows, positions, dense_shape=given.dense_shape))
    return results


@tf.autograph.experimental.do_not_convert
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = mpi_ops.Average,
    name: str | None = None,
    process_set: Any = _global,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces over ranks and leaves each rank its part of the first dimension; differentiable.

    Args:
        tensor: The same shape and dtype on all ranks, at least one dimension.
        device_dense: Where the operation runs.
        compression: Only its ``compress`` and ``decompress`` are used, and for fp16 and bf16
            nothing is, since the sums are taken in float32.
        op: Average or Sum.
        name: The same on all ranks; None takes the tensor's.
        process_set: The ranks that take part.
        ignore_name_scope: Leaves TensorFlow's name scopes out of the name.
        prescale_factor: Applied to `tensor`.
        postscale_factor: Applied to the result.

    Raises:
        ValueError: Another `op`, or a tensor without dimensions.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(tf.constant([1.0, 2.0])).numpy().tolist()
        [1.0, 2.0]
    """
    label = op_label("Reducescatter", name, tensor)
    options = (prescale_factor, postscale_factor, process_set, ignore_name_scope)
    with tf.device(device_dense):
        return _scatter([as_tensor(tensor)], label, compression, op, *options)[0]


@tf.autograph.experimental.do_not_convert
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = mpi_ops.Average,
    process_set: Any = _global,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Like :func:`reducescatter` for several tensors, of any dtypes, that are ready together.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.grouped_reducescatter([tf.ones(2)], op=hvd.Sum)[0].numpy().tolist()
        [1.0, 1.0]
    """
    if not tensors:
        return tensors
    label = op_label("GroupedReducescatter", None, tensors[0])
    options = (prescale_factor, postscale_factor, process_set, False)
    with tf.device(device_dense):
        return _scatter([as_tensor(t) for t in tensors], label, compression, op, *options)


def _scatter(
    tensors: Sequence[tf.Tensor],
    label: str,
    compression: Any,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    ignore_name_scope: bool,
) -> list[tf.Tensor]:
    _check_scatterable(tensors, op)
    ranks = ranks_of(process_set)
    plain = hasattr(compression, "reduce")
    pairs = [(t, None) if plain else compression.compress(t) for t in tensors]
    keywords = {"ignore_name_scope": ignore_name_scope, "process_set": process_set}

    def send(number: int) -> tf.Tensor:
        wire = encode(pairs[number][0], op, prescale_factor, postscale_factor, ranks)
        # Horovod has no census here: it refuses this operation beside joined ranks.
        reduced = mpi_ops._reducescatter(
            live(wire.payload),
            name=normalized(f"{label}_{number}"),
            op=wire.op,
            prescale_factor=wire.prescale,
            **keywords,
        )
        return wire.decode(settled(reduced), ranks)

    return _uncompressed(compression, plain, pairs, send)


def _uncompressed(
    compression: Any,
    plain: bool,
    pairs: Sequence[tuple[tf.Tensor, Any]],
    send: Callable[[int], tf.Tensor],
) -> list[tf.Tensor]:
    results = [send(number) for number in range(len(pairs))]
    if plain:
        return results
    return [compression.decompress(r, c) for r, (_, c) in zip(results, pairs, strict=True)]


def _check_scatterable(tensors: Sequence[tf.Tensor], op: int) -> None:
    if op not in (mpi_ops.Average, mpi_ops.Sum):
        raise ValueError(
            f"reducescatter expects op=Average or op=Sum. Received: op={op_name(op)}. "
            "Fix: use allreduce and keep this rank's part."
        )
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise ValueError(
            "reducescatter splits the first dimension of a tensor among ranks. Received: a "
            "tensor without dimensions. Fix: use allreduce."
        )


def _chosen_op(op: int | None, average: bool | None) -> int:
    if average is None:
        chosen = mpi_ops.Average if op is None else op
        legal = range(mpi_ops.Average, mpi_ops.Product + 1)
        if isinstance(chosen, bool) or chosen not in legal:
            raise ValueError(
                "Expected op to be hvd.Average, Sum, Adasum, Min, Max or Product. Received: "
                f"op={op!r}."
            )
        return int(chosen)
    if op is not None:
        raise ValueError(
            "Expected op or average, not both. Received: "
            f"op={op}, average={average}. Fix: leave average out."
        )
    warnings.warn(
        "Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3
    )
    return int(mpi_ops.Average if average else mpi_ops.Sum)
