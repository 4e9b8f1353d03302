"""The operations that move data and do not add it up: gather, broadcast, exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.values import as_tensor, live, op_label, ranks_of, raw_variable, settled
from hvdkit.tensorflow.wire import movable

_global = mpi_ops.global_process_set

_IN_PLACE = (
    *(tf.uint8, tf.int8, tf.int32, tf.int64),
    *(tf.float16, tf.float32, tf.float64, tf.bool),
)


@tf.autograph.experimental.do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = _global,
) -> tf.Tensor:
    """Puts the tensors of all ranks one after the other, in the order of ranks; differentiable.

    Args:
        tensor: At least one dimension; the first may differ between ranks, and be 0.
        name: The same on all ranks; None takes the tensor's.
        ignore_name_scope: Leaves TensorFlow's name scopes out of the name.
        process_set: The ranks that take part.

    Raises:
        ValueError: A tensor without dimensions, or of strings.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allgather(tf.constant([1, 2])).numpy().tolist()
        [1, 2]
    """
    label = op_label("Allgather", name, tensor)
    return _gather(as_tensor(tensor), label, ignore_name_scope, process_set)


@tf.autograph.experimental.do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = _global,
) -> list[tf.Tensor]:
    """Like :func:`allgather` for several tensors, of any dtypes, that are ready together.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> [t.numpy().tolist() for t in hvd.grouped_allgather([tf.ones(1), tf.constant([2])])]
        [[1.0], [2]]
    """
    tensors = list(tensors)
    if not tensors:
        return []
    label = op_label("GroupedAllgather", name, tensors[0])
    given = [as_tensor(tensor) for tensor in tensors]
    for tensor in given:
        _check_rows(tensor, "allgather")
    moved = [movable(tensor) for tensor in given]
    # Horovod's grouped operation takes one dtype at a time.
    groups: dict[Any, list[int]] = {}
    for index, (payload, _) in enumerate(moved):
        groups.setdefault(payload.dtype, []).append(index)
    results: list[Any] = [None] * len(moved)
    for number, members in enumerate(groups.values()):
        outputs = mpi_ops.grouped_allgather(
            [live(moved[index][0]) for index in members],
            name=label if number == 0 else f"{label}_part{number}",
            ignore_name_scope=ignore_name_scope,
            process_set=process_set,
        )
        for index, output in zip(members, outputs, strict=True):
            results[index] = moved[index][1](settled(output))
    return results


def _gather(tensor: tf.Tensor, label: str, ignore_name_scope: bool, process_set: Any) -> tf.Tensor:
    _check_rows(tensor, "allgather")
    payload, restore = movable(tensor)
    gathered = mpi_ops.allgather(
        live(payload), name=label, ignore_name_scope=ignore_name_scope, process_set=process_set
    )
    return restore(settled(gathered))


def _check_rows(tensor: tf.Tensor, operation: str) -> None:
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{operation} moves rows and needs a tensor of at least one dimension. Received: "
            "shape=(). Fix: tf.reshape(tensor, [1])."
        )


@tf.autograph.experimental.do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = _global,
) -> tf.Tensor:
    """The root's tensor on every rank; differentiable.

    Args:
        tensor: The same shape and dtype on all ranks.
        root_rank: The rank whose tensor counts, numbered among all ranks.
        name: The same on all ranks; None takes the tensor's.
        ignore_name_scope: Leaves TensorFlow's name scopes out of the name.
        process_set: The ranks that take part.

    Raises:
        ValueError: `root_rank` is no rank of the process set.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast(tf.constant([1, 2]), root_rank=0).numpy().tolist()
        [1, 2]
    """
    check_root(root_rank, process_set)
    label = op_label("Broadcast", name, tensor)
    payload, restore = movable(as_tensor(tensor))
    received = mpi_ops.broadcast(
        live(payload),
        root_rank,
        name=label,
        ignore_name_scope=ignore_name_scope,
        process_set=process_set,
    )
    return restore(settled(received))


def check_root(root_rank: int, process_set: Any) -> None:
    """Refuses a root that no rank of the process set is.

    Raises:
        ValueError: `root_rank` is none of its ranks.
    """
    ranks = list(range(mpi_ops.size()))
    if process_set.process_set_id != 0:
        ranks = process_set.ranks or ranks
    if root_rank not in ranks:
        raise ValueError(
            f"Expected root_rank among the ranks {ranks}. Received: root_rank={root_rank}."
        )


@tf.autograph.experimental.do_not_convert
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = _global,
) -> list[tf.Tensor]:
    """Gives variables the root's values, in place, in one operation without copies.

    Args:
        variables: ``tf.Variable`` or Keras 3 variables, all on one device.
        root_rank: The rank whose values count, numbered among all ranks.
        name: The same on all ranks.
        process_set: The ranks that take part.

    Returns:
        The new values.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> [t.numpy().tolist() for t in hvd.broadcast_([tf.Variable([1.0])], root_rank=0)]
        [[1.0]]
    """
    check_root(root_rank, process_set)
    raw = [raw_variable(variable) for variable in variables]
    label = op_label("BroadcastInplace", name)
    done: list[tf.Operation] = []
    in_place = [v for v in raw if _has_handle(v) and v.dtype in _IN_PLACE]
    copied = [v for v in raw if not any(v is other for other in in_place)]
    if in_place and ranks_of(process_set) is not None and process_set.size() > 1:
        sent = mpi_ops.MPI_LIB.horovod_broadcast_inplace_resource(
            [variable.handle for variable in in_place],
            # Numbered, since Keras variables of different layers may have one name.
            variable_names=[f"variable_{number}" for number in range(len(in_place))],
            name=label,
            root_rank=root_rank,
            process_set_id=process_set.process_set_id,
        )
        if sent is not None:
            done.append(sent)
    for number, variable in enumerate(copied):
        value = broadcast(variable, root_rank, f"{label}_copied_{number}", False, process_set)
        done.append(variable.assign(value))
    with tf.control_dependencies([] if tf.executing_eagerly() else done):
        return [tf.identity(variable) for variable in raw]


def _has_handle(variable: Any) -> bool:
    return isinstance(variable, tf.Variable) and hasattr(variable, "handle")


@tf.autograph.experimental.do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = _global,
) -> Any:
    """Sends each rank its rows of this rank's tensor; differentiable.

    Args:
        tensor: At least one dimension.
        splits: How many rows go to each rank; None shares them out evenly.
        name: The same on all ranks; None takes the tensor's.
        ignore_name_scope: Leaves TensorFlow's name scopes out of the name.
        process_set: The ranks that take part.

    Returns:
        The rows that came, in the order of ranks; with `splits` also how many came from each.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.alltoall(tf.constant([1, 2])).numpy().tolist()
        [1, 2]
    """
    label = op_label("Alltoall", name, tensor)
    tensor = as_tensor(tensor)
    _check_rows(tensor, "alltoall")
    payload, restore = movable(tensor)
    keywords = {
        "name": label,
        "ignore_name_scope": ignore_name_scope,
        "process_set": process_set,
    }
    if splits is None:
        return restore(settled(mpi_ops.alltoall(live(payload), **keywords)))
    counts = tf.convert_to_tensor(splits)
    if not counts.dtype.is_integer and counts.shape.num_elements() != 0:
        raise ValueError(f"Expected splits as whole numbers of rows. Received: {splits!r}.")
    counts = tf.cast(counts, tf.int32)
    rows, received = mpi_ops.alltoall(live(payload), splits=counts, **keywords)
    settled(received)
    return restore(rows), received
