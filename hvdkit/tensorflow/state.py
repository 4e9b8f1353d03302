"""Gives every rank the root's variables, after making sure that all ranks have the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.errors import SynchronizationError
from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.objects import allgather_object, broadcast_object
from hvdkit.tensorflow.ops_move import allgather, broadcast, broadcast_, check_root
from hvdkit.tensorflow.ops_reduce import allreduce
from hvdkit.tensorflow.values import raw_variable

PACK_BYTES = 64 * 2**20
"""Small variables travel together in buffers of at most this size."""

_SHOWN_DIFFERENCES = 5
_global = mpi_ops.global_process_set


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Any, root_rank: int, process_set: Any = _global, inplace: bool = False
) -> Any:
    """Gives all ranks the root's values.

    Also works within ``tf.function`` and in TensorFlow 1 graphs. Layers may have other names on
    other ranks: order, shapes and dtypes tell variables apart.

    Args:
        variables: ``tf.Variable`` or Keras 3 variables of any dtypes but strings: a list, a
            dictionary, nested ones, or a single one.
        root_rank: The rank whose values count, numbered among all ranks. Nothing changes there.
        process_set: The ranks that take part.
        inplace: Sends variables one by one and without copies, which saves memory.

    Returns:
        None; in a TensorFlow 1 graph the operation to run.

    Raises:
        SynchronizationError: Number, shapes or dtypes differ between ranks; on all ranks. In a
            graph it is ``tf.errors.InvalidArgumentError``.
        ValueError: Something is not a variable, or holds strings; or `root_rank` is no rank of
            the process set.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_variables({"w": tf.Variable([1.0])}, root_rank=0)
    """
    check_root(root_rank, process_set)
    named = list(_named_variables(variables, ""))
    eager = tf.executing_eagerly()
    # A function runs what changes variables by itself, and cannot return operations.
    wants_operation = not eager and not tf.inside_function()
    if process_set.size() == 1:
        return tf.no_op() if wants_operation else None
    structure = [_described(name, variable) for name, variable in named]
    if eager:
        _check_same(structure, root_rank, process_set)
        checks: list[Any] = []
    else:
        checks = [_same_in_graph(structure, process_set)]
    _check_sendable(named)
    raw = [variable for _, variable in named if variable.shape.num_elements() != 0]
    with tf.control_dependencies(checks):
        if inplace:
            done = _send_in_place(raw, root_rank, process_set)
        else:
            done = _send_packed(raw, root_rank, process_set)
    return tf.group(*done, *checks) if wants_operation else None


def _named_variables(variables: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(variables, Mapping):
        for key in sorted(variables, key=str):
            yield from _named_variables(variables[key], f"{name}{key}/")
    elif hasattr(variables, "assign"):
        own = getattr(variables, "path", None) or variables.name
        yield f"{name}{own}", raw_variable(variables)
    elif isinstance(variables, (str, bytes)) or not hasattr(variables, "__iter__"):
        raise ValueError(
            "Expected variables, or lists or dictionaries of them. Received: "
            f"{name}={type(variables).__name__}. Fix: pass model.variables, for example."
        )
    else:
        for value in variables:
            yield from _named_variables(value, name)


def _described(name: str, variable: Any) -> tuple[str, str]:
    """Name for messages, and what must be equal on all ranks."""
    dtype = tf.as_dtype(variable.dtype).base_dtype
    return name, f"shape={tuple(variable.shape)}, dtype={dtype.name}"


def _check_sendable(named: Sequence[tuple[str, Any]]) -> None:
    for name, variable in named:
        dtype = tf.as_dtype(variable.dtype)
        if not dtype.size or dtype.base_dtype in (tf.string, tf.resource, tf.variant):
            raise ValueError(
                f"Expected variables of numbers. Received: {name!r} with dtype={dtype.name}. "
                "Fix: leave it out, and send its value with hvd.broadcast_object."
            )


def _check_same(structure: list[tuple[str, str]], root_rank: int, process_set: Any) -> None:
    """Raises on all ranks where one rank's variables differ from the root's."""
    expected = broadcast_object(structure, root_rank, name="variables", process_set=process_set)
    differences = _differences(expected, structure)
    differing = allreduce(
        tf.constant([len(differences)], tf.int64),
        op=mpi_ops.Sum,
        name="hvdkit.variables.differ",
        process_set=process_set,
    )
    if int(differing[0]) == 0:
        return
    all_differences = allgather_object(differences, name="variables", process_set=process_set)
    ranks = process_set.ranks or range(len(all_differences))
    if process_set.process_set_id == 0:
        ranks = range(len(all_differences))
    lines = [
        f"rank {rank}: {'; '.join(found)}"
        for rank, found in zip(ranks, all_differences, strict=True)
        if found
    ]
    raise SynchronizationError(
        f"Expected the variables of rank {root_rank} on all ranks. Received: "
        f"{'. '.join(lines[:_SHOWN_DIFFERENCES])}. "
        "Fix: build the same model on every rank, and call it once before its variables are sent."
    )


def _differences(expected: list[tuple[str, str]], found: list[tuple[str, str]]) -> list[str]:
    lines = []
    if len(expected) != len(found):
        lines.append(f"{len(found)} variables instead of {len(expected)}")
    for (their_name, theirs), (our_name, ours) in zip(expected, found, strict=False):
        if theirs != ours:
            names = our_name if our_name == their_name else f"{our_name} (root: {their_name})"
            lines.append(f"{names} has {ours} instead of {theirs}")
    for name, described in expected[len(found) :]:
        lines.append(f"{name} ({described}) is missing")
    for name, described in found[len(expected) :]:
        lines.append(f"{name} ({described}) is not on the root")
    return lines[:_SHOWN_DIFFERENCES]


def _same_in_graph(structure: list[tuple[str, str]], process_set: Any) -> Any:
    """Compares all ranks' structures when the graph runs."""
    sums = [zlib.crc32(described.encode()) for _, described in structure]
    length = len(sums) + 1
    own = tf.constant([len(sums), *sums], tf.int64)
    label = "hvdkit.variables.same"
    gathered = allgather(own, name=label, process_set=process_set)
    count = process_set.size() * length
    # Where the numbers differ, ranks with too few compare with what is too much.
    padded = tf.pad(gathered, [[0, tf.maximum(count - tf.size(gathered), 0)]])[:count]
    rows = tf.reshape(padded, [process_set.size(), length])
    same = tf.reduce_all(tf.equal(rows, own), axis=0)
    names = tf.constant([f"{len(sums)} variables", *(f"{n}: {d}" for n, d in structure)])
    return tf.debugging.Assert(
        tf.reduce_all(same) & tf.equal(tf.size(gathered), count),
        [
            "Expected the same variables on all ranks. Fix: build the same model on every rank. "
            "Received others for",
            tf.boolean_mask(names, tf.logical_not(same)),
        ],
        summarize=_SHOWN_DIFFERENCES,
    )


def _send_in_place(variables: Sequence[Any], root_rank: int, process_set: Any) -> list[Any]:
    by_device: dict[str, list[Any]] = {}
    for variable in variables:
        by_device.setdefault(variable.device or "", []).append(variable)
    sent: list[Any] = []
    for number, group in enumerate(by_device.values()):
        label = f"hvdkit.variables.inplace{number}"
        sent += broadcast_(group, root_rank, name=label, process_set=process_set)
    return sent


def _send_packed(variables: Sequence[Any], root_rank: int, process_set: Any) -> list[Any]:
    done = []
    for number, pack in enumerate(_packs(variables)):
        tensors = [tf.convert_to_tensor(variable) for variable in pack]
        whole = tf.concat([_to_bytes(tensor) for tensor in tensors], 0)
        label = f"hvdkit.variables.pack{number}"
        received = broadcast(whole, root_rank, name=label, process_set=process_set)
        parts = tf.split(received, [_nbytes(variable) for variable in pack])
        for variable, tensor, part in zip(pack, tensors, parts, strict=True):
            done.append(variable.assign(_from_bytes(part, tensor)))
    return done


def _nbytes(variable: Any) -> int:
    return int(variable.shape.num_elements()) * int(tf.as_dtype(variable.dtype).size)


def _packs(variables: Sequence[Any]) -> Iterator[list[Any]]:
    pack: list[Any] = []
    size = 0
    for variable in variables:
        nbytes = _nbytes(variable)
        if pack and size + nbytes > PACK_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(variable)
        size += nbytes
    if pack:
        yield pack


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    if tensor.dtype != tf.uint8:
        tensor = tf.bitcast(tensor, tf.uint8)
    return tf.reshape(tensor, [-1])


def _from_bytes(part: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    dtype = like.dtype
    if dtype in (tf.bool, tf.uint8):
        return tf.reshape(tf.cast(part, dtype), like.shape)
    if dtype.size == 1:
        return tf.reshape(tf.bitcast(part, dtype), like.shape)
    return tf.reshape(tf.bitcast(tf.reshape(part, [-1, dtype.size]), dtype), like.shape)


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that gives all ranks the root's variables of a TensorFlow 1 graph.

    Raises:
        RuntimeError: Operations run eagerly here, so that there are no global variables.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> with tf.Graph().as_default():
        ...     op = hvd.broadcast_global_variables(root_rank=0)
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "Expected a TensorFlow 1 graph: eager programs have no global variables. Received: "
            "a call outside of a graph. Fix: hvd.broadcast_variables(model.variables, root_rank=0)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks the root's variables when a TensorFlow 1 session was made.

    Args:
        root_rank: The rank whose values count.
        device: Where the operations run.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> hooks = [hvd.BroadcastGlobalVariablesHook(root_rank=0)]
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device

    def begin(self) -> None:
        """Adds the operation to the graph before the graph is finished."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self.bcast_op)
