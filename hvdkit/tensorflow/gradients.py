"""Reduces the gradients of one backward pass, after making sure that all ranks have the same.

A rank that waits for a gradient which another rank does not have would wait for ever. So the
ranks first add up a few numbers: which gradients each has, whether they are sparse, and a
checksum of their names. Within ``tf.function`` the numbers are known from the start, so the sum
is taken beside the forward pass and costs no time; gradients go out once it is there.
"""

from __future__ import annotations

import functools
import itertools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdkit.compressor import name_of
from hvdkit.errors import SynchronizationError
from hvdkit.options import check_predivide
from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.ops_reduce import grouped_allreduce, reduce_compressed
from hvdkit.tensorflow.values import is_elastic, leaf_name, live, normalized, raw_variable, settled

_DIFFER = "Expected the same gradients on all ranks."
_FIX = (
    "Fix: compute the same loss from the same sources on every rank; for sources that only some "
    "ranks use, pass unconnected_gradients=tf.UnconnectedGradients.ZERO to gradient()."
)
_OTHER_NAMES = (
    "sources whose names or order differ between ranks, or another op, compression, groups, "
    "gradient_predivide_factor or number of passes"
)
_AGREEMENT = "same_gradients"
_SHOWN_NAMES = 8
_ABSENT, _DENSE, _SPARSE = range(3)


@dataclass(frozen=True)
class _Plan:
    """What is reduced: names of all gradients, positions that go together, and the options."""

    prefix: str
    names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    options: tuple[Any, ...]
    ignore_name_scope: bool


@dataclass(frozen=True)
class GradientReduction:
    """The options of ``DistributedGradientTape``; see there.

    Args:
        name: Name scope of the operations.
        device_dense: Where dense gradients are reduced.
        device_sparse: Where sparse gradients are reduced.
        compression: How the numbers travel.
        sparse_as_dense: Reduces sparse gradients as dense ones.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies it.
        groups: A number of groups, or lists of variables, that are reduced together; or None.
        process_set: The ranks that take part.
        ignore_name_scope: Names operations by `name` alone. Surrounding name scopes may differ
            between ranks: Keras numbers its models, layers and optimizers.
        passes: Backward passes that the gradients come from, the same on all ranks.

    Raises:
        ValueError: Options that do not go together.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> from hvdkit.tensorflow.gradients import GradientReduction
        >>> GradientReduction("mine", op=hvd.Sum).groups is None
        True
    """

    name: str
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = mpi_ops.Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: Any = mpi_ops.global_process_set
    ignore_name_scope: bool = False
    passes: int = 1

    def __post_init__(self) -> None:
        check_predivide(self.gradient_predivide_factor, self.op, mpi_ops.Average)
        lists = isinstance(self.groups, (list, tuple))
        if self.groups is not None and not lists and not _is_positive(self.groups):
            raise ValueError(
                "Expected groups as a number of at least 1, or as a list of lists of variables. "
                f"Received: groups={self.groups!r}."
            )

    def __call__(
        self, grads: Sequence[Any], sources: Sequence[Any], use_generic_names: bool = False
    ) -> list[Any]:
        """Reduces `grads`, of which some may be None, the gradients of `sources`.

        Raises:
            SynchronizationError: Ranks have different gradients; on all ranks. In a graph it is
                ``tf.errors.InvalidArgumentError``.
        """
        grads = list(grads)
        if self.sparse_as_dense:
            grads = [_densified(grad) for grad in grads]
        if not self.process_set.included():
            return grads
        if self.process_set.size() == 1 and not is_elastic():
            return grads
        prefix = f"{normalized(self.name)}_" if self.ignore_name_scope else ""
        names = tuple(
            f"{prefix}grad_{i}" + ("" if use_generic_names else f"_{leaf_name(source)}")
            for i, source in enumerate(sources)
        )
        groups = self._groups_of(grads, sources)
        without_scope = use_generic_names or self.ignore_name_scope
        plan = _Plan(prefix, names, groups, self._options(sources), without_scope)
        if not tf.executing_eagerly():
            return self._reduce(grads, plan)
        # Within a function operations run side by side, and have the names they were given.
        # Tapes are made anew in every step, so functions are kept by what they depend on.
        key = (
            *(self.name, self.device_dense, self.device_sparse, self.compression, self.op),
            *(self.gradient_predivide_factor, tuple(self.process_set.ranks or ())),
            *(self.process_set.process_set_id, plan, tuple(map(_kind, grads)), mpi_ops.size()),
        )
        function = _functions.get(key)
        if function is None:
            # What is kept must not keep the variables of a model that is no longer in use.
            call = functools.partial(replace(self, groups=None)._reduce, plan=plan)
            function = _functions[key] = tf.function(call, reduce_retracing=True, autograph=False)
        try:
            return list(function(grads))
        except tf.errors.OpError as error:
            if _DIFFER in error.message or "Mismatched" in error.message:
                raise SynchronizationError(_readable(error.message)) from error
            raise

    def _options(self, sources: Sequence[Any]) -> tuple[Any, ...]:
        """What else has to be the same on all ranks, whose operations would wait for ever."""
        groups = self.groups
        if isinstance(groups, (list, tuple)):
            numbers = {raw_variable(source).ref(): i for i, source in enumerate(sources)}
            groups = tuple(
                tuple(numbers.get(raw_variable(member).ref()) for member in group)
                for group in groups
            )
        factor, kind = self.gradient_predivide_factor, name_of(self.compression)
        return self.op, factor, self.passes, kind, groups

    def _groups_of(self, grads: Sequence[Any], sources: Sequence[Any]) -> tuple[Any, ...]:
        """Positions of the gradients that are reduced together."""
        present = [index for index, grad in enumerate(grads) if grad is not None]
        if self.groups is None:
            return tuple((index,) for index in present)
        if not isinstance(self.groups, (list, tuple)):
            count = min(int(self.groups), len(present))
            bounds = [len(present) * number // max(count, 1) for number in range(count + 1)]
            return tuple(tuple(present[start:end]) for start, end in itertools.pairwise(bounds))
        positions = {raw_variable(sources[index]).ref(): index for index in present}
        groups = []
        for group in self.groups:
            found = [positions.pop(raw_variable(variable).ref(), None) for variable in group]
            groups.append(tuple(index for index in found if index is not None))
        listed = {index for group in groups for index in group}
        groups += [(index,) for index in present if index not in listed]
        return tuple(group for group in groups if group)

    def _reduce(self, grads: Sequence[Any], plan: _Plan) -> list[Any]:
        results: list[Any] = [None] * len(grads)
        with tf.name_scope(normalized(f"{self.name}_Allreduce")):
            agreed, active = self._agreement(grads, plan)
            with tf.control_dependencies([agreed]):
                for number, group in enumerate(plan.groups):
                    alone = plan.names[group[0]] if len(group) == 1 else None
                    label = alone or f"{plan.prefix}grad_group_{number}"
                    members = [_after(grads[index]) for index in group]
                    reduced = self._reduce_group(members, label, plan.ignore_name_scope, active)
                    for index, result in zip(group, reduced, strict=True):
                        results[index] = result
        return results

    def _reduce_group(
        self, grads: Sequence[Any], label: str, ignore_name_scope: bool, active: Any
    ) -> list[Any]:
        predivide = self.gradient_predivide_factor
        if any(isinstance(grad, tf.IndexedSlices) for grad in grads):
            return grouped_allreduce(
                grads,
                device_dense=self.device_dense,
                device_sparse=self.device_sparse,
                compression=self.compression,
                op=self.op,
                prescale_factor=1.0 / predivide,
                postscale_factor=predivide,
                process_set=self.process_set,
                ignore_name_scope=ignore_name_scope,
                name=label,
            )
        factors = (self.op, 1.0 / predivide, predivide, self.process_set, ignore_name_scope)
        with tf.device(self.device_dense):
            return reduce_compressed(grads, label, self.compression, *factors, active)

    def _agreement(self, grads: Sequence[Any], plan: _Plan) -> tuple[Any, tf.Tensor]:
        """An assertion that all ranks hold such gradients, and how many ranks take part."""
        kinds = [_kind(grad) for grad in grads]
        counted = [[int(kind == other) for kind in kinds] for other in (_DENSE, _SPARSE)]
        # Numbers are equal exactly if n times the sum of their squares is their sum squared,
        # which fits 64 bits on up to 46340 ranks.
        checksum = zlib.crc32(repr((plan.names, plan.options)).encode()) & 0xFFFF
        numbers = tf.constant([1, checksum, checksum**2, *counted[0], *counted[1]], tf.int64)
        total = settled(
            mpi_ops._allreduce(
                live(numbers),
                name=f"{plan.prefix}{_AGREEMENT}",
                op=mpi_ops.Sum,
                ignore_name_scope=plan.ignore_name_scope,
                process_set=self.process_set,
            )
        )
        active = total[0]
        same = tf.equal(active * total[2], total[1] * total[1])
        counts = tf.reshape(total[3:], [2, len(kinds)])
        everywhere = tf.equal(counts, 0) | tf.equal(counts, active)
        agreeing = tf.reduce_all(everywhere, axis=0)
        differing = tf.boolean_mask(
            tf.constant(list(plan.names), tf.string), tf.logical_not(agreeing)
        )
        assertion = tf.debugging.Assert(
            same & tf.reduce_all(agreeing),
            [
                f"{_DIFFER} {_FIX} Received: None, dense or sparse gradients, not the same on all "
                "ranks, for",
                tf.cond(same, lambda: differing, lambda: tf.constant([_OTHER_NAMES])),
            ],
            summarize=_SHOWN_NAMES,
        )
        return assertion, active


_functions: dict[Any, Any] = {}


def _readable(message: str) -> str:
    """What TensorFlow's assertion says, in the order of hvdkit's messages."""
    named = re.search(rf"{re.escape(_DIFFER)}.*?(Received: .*?)\] \[(.*?)\]", message, re.DOTALL)
    if named is None:
        other = "numbers of sources" if _AGREEMENT in message else "shapes or dtypes of a gradient"
        told = re.search(r"Mismatched [^\n]*", message)
        cause = told.group() if told else message
        return f"{_DIFFER} Received: other {other} on some ranks ({cause}). {_FIX}"
    return f"{_DIFFER} {named.group(1)} {named.group(2)}. {_FIX}"


def _is_positive(groups: Any) -> bool:
    return isinstance(groups, int) and not isinstance(groups, bool) and groups > 0


def _kind(grad: Any) -> int:
    if grad is None:
        return _ABSENT
    return _SPARSE if isinstance(grad, tf.IndexedSlices) else _DENSE


def _densified(grad: Any) -> Any:
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def _after(grad: Any) -> Any:
    """The gradient, once the control dependencies around are fulfilled."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(grad.values), tf.identity(grad.indices), grad.dense_shape
        )
    return tf.identity(grad)
