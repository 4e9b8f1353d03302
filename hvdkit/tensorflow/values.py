"""What is given to an operation: tensors, TensorFlow's variables and Keras 3's; and their names."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import tensorflow as tf

from hvdkit import envvars
from hvdkit.tensorflow.backend import mpi_ops

FOLDED_BYTES = 100 * 1024
"""The largest result that TensorFlow's constant folding keeps."""


def raw_variable(value: Any) -> Any:
    """The ``tf.Variable`` within a Keras 3 variable; anything else as it is.

    Example:
        >>> import keras
        >>> from hvdkit.tensorflow.values import raw_variable
        >>> isinstance(raw_variable(keras.Variable([1.0])), tf.Variable)
        True
    """
    # A Keras variable cannot exist before Keras was imported, so this need not import it.
    keras_variable = getattr(sys.modules.get("keras"), "Variable", None)
    if keras_variable is not None and isinstance(value, keras_variable):
        return value.value
    return value


def as_tensor(value: Any) -> tf.Tensor:
    """A tensor of whatever an operation was given; the current value of a variable."""
    return tf.convert_to_tensor(raw_variable(value))


def op_label(kind: str, name: str | None, value: Any = None) -> str:
    """The name of an operation, equal on all ranks that build the same graph.

    Args:
        kind: What is done, as in ``allreduce``.
        name: The name the user gave; None takes the name of `value`.
        value: A tensor or variable; in a graph its name tells operations apart.
    """
    if name is None and value is not None and not tf.executing_eagerly():
        # Arrays have no name, and a Keras variable's name is that of its leaf only.
        name = f"Horovod{kind}_{getattr(raw_variable(value), 'name', 'value')}"
    return normalized(name or f"Horovod{kind}")


def normalized(name: str) -> str:
    """`name` with only the characters that TensorFlow allows in names of operations."""
    cleaned = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)
    return cleaned if re.match(r"[A-Za-z0-9.]", cleaned) else f"op{cleaned}"


def leaf_name(variable: Any) -> str:
    """A variable's own name without the layers around it and without a counter.

    Frameworks number layers and variables by how many a process made before, which may differ
    between ranks.
    """
    name = str(getattr(raw_variable(variable), "name", "tensor")).partition(":")[0]
    leaf = re.sub(r"_\d+$", "", name.rpartition("/")[2])
    return normalized(leaf or "tensor").replace("/", "_")


_labels: MutableMapping[Any, Counter[str]] = weakref.WeakKeyDictionary()


def numbered(label: str) -> str:
    """A label of its own for each use in a graph, whose operations may run side by side.

    For operations that are named without their name scopes.
    """
    if tf.executing_eagerly():
        return label
    used = _labels.setdefault(tf.compat.v1.get_default_graph(), Counter())
    used[label] += 1
    return label if used[label] == 1 else f"{label}.{used[label]}"


def is_elastic() -> bool:
    """Whether ranks may come and go while graphs that were traced before stay in use."""
    return os.environ.get(envvars.HOROVOD_ELASTIC) == "1"


def ranks_of(process_set: Any) -> Any:
    """How many ranks take part: a number, or in graphs of elastic jobs a scalar int64 tensor.

    Raises:
        ValueError: The process set is not in use.
    """
    ranks = process_set.size()
    if ranks is None:
        raise ValueError(
            f"The process set is not in use. Received: {process_set}. Fix: call "
            "hvd.add_process_set(process_set) on every rank, or hand it to hvd.init()."
        )
    if is_elastic() and not tf.executing_eagerly():
        return tf.cast(mpi_ops.size_op(process_set_id=process_set.process_set_id), tf.int64)
    return int(ranks)


def live(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, made to depend on something that a graph optimizer cannot know.

    Horovod's operations are not marked as stateful. One on a constant would run once, while its
    graph is optimized, and never again: a rank that traces a function anew alone would wait for
    the others for ever.
    """
    if tf.executing_eagerly():
        return tensor
    elements = tensor.shape.num_elements()
    if elements is not None and elements * tensor.dtype.size > FOLDED_BYTES:
        return tensor
    return tf.raw_ops.Select(condition=_running(), x=tensor, y=tensor)


def _running() -> tf.Tensor:
    """True, unknown to graph optimizers and another one each time.

    TensorFlow runs stateful operations in the order of the program: a size for each reduction,
    with those of :func:`settled`, would make every reduction wait for the one before. So a graph
    has one size, compared with a number that differs: operations with equal inputs are merged,
    and a rank on which two tensors happen to be equal would send one of them only.
    """
    graph = tf.compat.v1.get_default_graph()
    size, count = getattr(graph, "_hvdkit_size", (None, 0))
    with tf.control_dependencies(None):
        if size is None:
            size = mpi_ops.size_op()
        graph._hvdkit_size = size, count + 1
        return tf.greater(size, -count)


def settled(outputs: Any) -> Any:
    """What an operation of Horovod has put out, such that the graph waits for it.

    A loop starts its next turn when the stateful operations of the last one are done, which
    Horovod's are not. Without this the same operation could be under way twice.
    """
    if not tf.executing_eagerly():
        with tf.control_dependencies([tensor.op for tensor in tf.nest.flatten(outputs)]):
            mpi_ops.size_op()
    return outputs
