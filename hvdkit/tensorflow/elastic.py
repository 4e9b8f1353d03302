"""``hvd.elastic`` for TensorFlow: Horovod's elastic jobs, without its silent faults.

Horovod's ``run`` takes an error of an operation for success where it is none of three names, so
that a failed step ends the training with None; its ``TensorFlowState.sync`` sends nothing in
TensorFlow 2; and states keep the very objects that the training goes on to change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdkit.elastic import CopiedObjects, run_fn
from hvdkit.optional import require
from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.objects import broadcast_object
from hvdkit.tensorflow.ops import init, shutdown
from hvdkit.tensorflow.state import broadcast_variables
from hvdkit.tensorflow.values import raw_variable

_exceptions = require("horovod.common.exceptions", feature="hvd.elastic", extra="horovod")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a training function again, from its last commit, when ranks fail, come or go.

    Args:
        func: Takes a state first, for example a :class:`TensorFlowState`. It must not communicate
            before its state has been synchronized.

    Returns:
        A function of the same arguments. A failed operation of Horovod starts `func` again; every
        other error is raised.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> @hvd.elastic.run
        ... def train(state):
        ...     return state.epoch
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except (tf.errors.UnknownError, tf.errors.InternalError) as error:
            if "Horovod" in error.message:
                raise _exceptions.HorovodInternalError(error) from error
            raise

    return run_fn(wrapper, _reset)  # type: ignore[no-any-return]


def _reset() -> None:
    shutdown()
    init()


class TensorFlowState(CopiedObjects):
    """State of a list of variables, and of objects.

    Args:
        variables: ``tf.Variable`` or Keras 3 variables.
        session: Not possible; for TensorFlow 1 use Horovod's own class.
        kwargs: Objects, which become attributes.

    Raises:
        ValueError: No variables, or a session.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> weight = tf.Variable(1.0)
        >>> state = hvd.elastic.TensorFlowState([weight], epoch=0)
        >>> _ = weight.assign(2.0)
        >>> state.restore()
        >>> float(weight)
        1.0
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None or not tf.executing_eagerly():
            raise ValueError(
                "Expected eager execution. Received: a session or a graph. Fix: for TensorFlow 1 "
                "use horovod.tensorflow.elastic.TensorFlowState."
            )
        self.variables = [raw_variable(variable) for variable in variables or ()]
        if not self.variables:
            raise ValueError(
                "Expected the variables to keep: eager programs have no global ones. Received: "
                f"variables={variables!r}. Fix: pass model.variables + optimizer.variables."
            )
        self._keep()
        super().__init__(
            lambda obj: broadcast_object(obj, 0, name="elastic"), mpi_ops.rank, **kwargs
        )

    def save(self) -> None:
        """Keeps values and objects, for :meth:`restore`."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Goes back to what was kept."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Takes over rank 0's values and objects."""
        broadcast_variables(self.variables, root_rank=0)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        self._values = [variable.numpy() for variable in self.variables]


class TensorFlowKerasState(TensorFlowState):
    """State of a Keras 3 model with TensorFlow's backend and its optimizer, and of objects.

    Args:
        model: A built model.
        optimizer: Left out, the one that the model is compiled with.
        backend: No effect; kept for scripts written for Horovod.
        kwargs: Objects, which become attributes.

    Raises:
        ValueError: The model is not built.

    Example:
        >>> import keras, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> state = hvd.elastic.TensorFlowKerasState(model, batch=0, epoch=0)
        >>> state.commit()
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                "Expected a built model. Fix: call model.build(input_shape) before this."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        variables = list(model.weights)
        if self.optimizer is not None:
            if not self.optimizer.built:
                self.optimizer.build(model.trainable_variables)
            variables += self.optimizer.variables
        super().__init__(variables, **kwargs)
