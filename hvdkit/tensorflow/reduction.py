"""Sums and averages of lists of dense tensors, right beside joined ranks.

Ranks that have called ``join`` take part in Horovod's reductions with zeros. A *marker*, one more
number in the same operation, tells how many ranks are active: averages are divided by them, and
Min, Max and Product, which zeros would spoil, raise an error. Only the global process set can
have joined ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.errors import UnsupportedError
from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.values import is_elastic, live, ranks_of, settled
from hvdkit.tensorflow.wire import Wire, encode, op_name

_SPOILED_BY_ZEROS = (mpi_ops.Min, mpi_ops.Max, mpi_ops.Product)
_JOINED = (
    "Min, Max and Product cannot leave out ranks that have called hvd.join(), whose zeros are in "
    "the result. Fix: call them before any rank joins, or use op=Sum or op=Average."
)


def takes_census(op: int, process_set: Any) -> bool:
    """Whether the result depends on how many ranks have joined."""
    return (
        op in (mpi_ops.Average, *_SPOILED_BY_ZEROS)
        and process_set.process_set_id == 0
        and (is_elastic() or process_set.size() > 1)
    )


def reduce_tensors(
    tensors: Sequence[tf.Tensor],
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    ignore_name_scope: bool = False,
    active: Any = None,
) -> list[tf.Tensor]:
    """One allreduce of one or more dense tensors of any dtypes; differentiable.

    Args:
        tensors: What this rank contributes.
        name: The operation's name, the same on all ranks.
        op: Average, Sum, Adasum, Min, Max or Product.
        prescale_factor: Applied to the contributions.
        postscale_factor: Applied to the results.
        process_set: The ranks that take part.
        ignore_name_scope: Leaves the surrounding name scopes out of the name.
        active: How many ranks contribute, where that is known; else it is counted.
    """
    if op == mpi_ops.Adasum:
        _check_adasum(process_set)
    options = (op, prescale_factor, postscale_factor, process_set, ignore_name_scope, active)
    if not any(_differentiable(tensor) for tensor in tensors):
        return _reduce(tensors, name, *options)

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> tuple[Any, Any]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            positions = [i for i, tensor in enumerate(inputs) if _differentiable(tensor)]
            parts = [upstream[index] for index in positions]
            if op in _SPOILED_BY_ZEROS:
                chosen = [tf.equal(inputs[index], outputs[index]) for index in positions]
                reduced = _of_extremes(parts, chosen, name, op, process_set, ignore_name_scope)
            else:
                # As in Horovod, the gradient of an operation is the same operation on gradients.
                reduced = reduce_tensors(parts, f"{name}_grad", *options)
            results: list[tf.Tensor | None] = [None] * len(inputs)
            for index, result in zip(positions, reduced, strict=True):
                results[index] = result
            return results

        outputs = _reduce(inputs, name, *options)
        return outputs, gradient

    return list(reduced(*tensors))


def _of_extremes(
    upstream: Sequence[tf.Tensor],
    chosen: Sequence[tf.Tensor],
    name: str,
    op: int,
    process_set: Any,
    ignore_name_scope: bool,
) -> list[tf.Tensor]:
    """Gradients of Min and Max: the ranks' sum, to where the result came from, in equal shares."""
    if op == mpi_ops.Product:
        raise UnsupportedError(
            "op=Product has no gradient here. Fix: tf.stop_gradient(), or the exponential of a sum "
            "of logarithms."
        )
    shares = [tf.cast(mask, part.dtype) for mask, part in zip(chosen, upstream, strict=True)]
    rest = (mpi_ops.Sum, 1.0, 1.0, process_set, ignore_name_scope)
    sums = reduce_tensors([*upstream, *shares], f"{name}_grad", *rest)
    totals, counts = sums[: len(upstream)], sums[len(upstream) :]
    return [
        total * share / tf.maximum(count, 1)
        for total, share, count in zip(totals, shares, counts, strict=True)
    ]


def _differentiable(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _reduce(
    tensors: Sequence[tf.Tensor],
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    ignore_name_scope: bool,
    active: Any,
) -> list[tf.Tensor]:
    ranks = ranks_of(process_set)
    wires = [encode(t, op, prescale_factor, postscale_factor, ranks, True) for t in tensors]
    counting = active is None and takes_census(op, process_set)
    reduced: list[Any] = [None] * len(wires)
    for number, members in enumerate(_parts(wires)):
        part = [wires[index] for index in members]
        payloads = [wire.payload for wire in part]
        if counting and number == 0:
            payloads.append(_marker(part[0]))
        outputs = _send(
            payloads,
            name if number == 0 else f"{name}_part{number}",
            part[0],
            process_set,
            ignore_name_scope,
        )
        if counting and number == 0:
            active = _read_marker(outputs[-1], part[0], ranks)
        for index, output in zip(members, outputs, strict=False):
            reduced[index] = output
    contributors = ranks if active is None else active
    if counting and op in _SPOILED_BY_ZEROS:
        with tf.control_dependencies([_assert_none_joined(contributors, ranks, op)]):
            reduced = [tf.identity(output) for output in reduced]
    return [w.decode(r, contributors) for w, r in zip(wires, reduced, strict=True)]


def _parts(wires: Sequence[Wire]) -> list[list[int]]:
    """Splits a group into wires that one operation can reduce: Horovod's have one dtype."""
    parts: dict[tuple[Any, ...], list[int]] = {}
    for index, wire in enumerate(wires):
        parts.setdefault((wire.payload.dtype, wire.op, wire.prescale), []).append(index)
    return list(parts.values())


def _send(
    payloads: Sequence[tf.Tensor],
    name: str,
    wire: Wire,
    process_set: Any,
    ignore_name_scope: bool,
) -> list[tf.Tensor]:
    keywords = {
        "name": name,
        "op": wire.op,
        "prescale_factor": wire.prescale,
        "ignore_name_scope": ignore_name_scope,
        "process_set": process_set,
    }
    shown = [live(payload) for payload in payloads]
    if len(shown) == 1:
        return [settled(mpi_ops._allreduce(shown[0], **keywords))]
    return settled(list(mpi_ops._grouped_allreduce(shown, **keywords)))


def _marker(wire: Wire) -> tf.Tensor:
    """What each active rank adds; a joined rank's zero shows in the result of every operation."""
    return tf.constant([-1 if wire.op == mpi_ops.Max else 1], dtype=wire.payload.dtype)


def _read_marker(reduced: tf.Tensor, wire: Wire, ranks: Any) -> tf.Tensor:
    """How many ranks are active; for Min, Max and Product 0 if not all are."""
    number = tf.cast(reduced[0], tf.float64)
    if wire.op == mpi_ops.Average:
        number *= tf.cast(ranks, tf.float64)
    if wire.op in _SPOILED_BY_ZEROS:
        complete = tf.not_equal(number, 0.0)
        return tf.where(complete, tf.cast(ranks, tf.int64), tf.zeros((), tf.int64))
    return tf.cast(tf.round(number / wire.prescale), tf.int64)


def _assert_none_joined(active: Any, ranks: Any, op: int) -> Any:
    return tf.debugging.Assert(
        tf.equal(active, tf.cast(ranks, tf.int64)), [f"{_JOINED} Received: op={op_name(op)}"]
    )


def _check_adasum(process_set: Any) -> None:
    if process_set.process_set_id != 0:
        raise NotImplementedError(
            "Adasum needs all ranks. Expected the global process set. Received: "
            f"process_set={process_set}. Fix: leave process_set out, or use op=Average."
        )
    if mpi_ops.size() > 1 and not mpi_ops.mpi_enabled():
        raise NotImplementedError(
            "Horovod's Adasum is built on MPI. Expected a job on MPI. Received: a job on Gloo. "
            "Fix: start it with `horovodrun --mpi` or mpirun, or use op=Average."
        )
    if not mpi_ops.check_num_rank_power_of_2(mpi_ops.size()):
        raise NotImplementedError(
            "Adasum adds ranks in pairs. Expected a power of two as the number of ranks. "
            f"Received: size={mpi_ops.size()}. Fix: start 2, 4, 8, ... ranks, or use op=Average."
        )
