"""``hvd.elastic`` for Keras 3: states and callbacks of jobs that start again in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdkit.elastic import CopiedObjects, run_fn
from hvdkit.keras.backend import BACKEND, adapter, keras
from hvdkit.keras.state import broadcast_model

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a training function again, from its last commit, when ranks fail, come or go.

    Args:
        func: Takes a :class:`KerasState` first. It must not communicate before its state has been
            synchronized.

    Returns:
        A function of the same arguments.

    Example:
        >>> import hvdkit.keras as hvd
        >>> @hvd.elastic.run
        ... def train(state):
        ...     return state.epoch
    """
    if BACKEND == "tensorflow":
        from hvdkit.tensorflow.elastic import run as run_tensorflow

        return run_tensorflow(func)
    return run_fn(func, _reset)  # type: ignore[no-any-return]


def _reset() -> None:
    adapter.shutdown()
    adapter.init()


class KerasState(CopiedObjects):
    """State of a Keras 3 model and its optimizer, and of objects.

    Args:
        model: A built model.
        optimizer: Left out, the one that the model is compiled with.
        kwargs: Objects, which become attributes; ``epoch`` and ``batch`` for the callbacks here.

    Raises:
        ValueError: The model is not built.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        >>> state.commit()
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                "Expected a built model. Fix: call model.build(input_shape) before this."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._keep()
        super().__init__(
            lambda obj: adapter.broadcast_object(obj, 0, name="elastic"), adapter.rank, **kwargs
        )

    def save(self) -> None:
        """Keeps weights, optimizer and objects, for :meth:`restore`."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Goes back to what was kept."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Takes over rank 0's weights, optimizer and objects."""
        broadcast_model(self.model, 0, optimizer=self.optimizer)
        self._keep()
        super().sync()

    def _variables(self) -> list[Any]:
        own = [] if self.optimizer is None else self.optimizer.variables
        return [*self.model.weights, *own]

    def _keep(self) -> None:
        self._values = [keras.ops.convert_to_numpy(variable) for variable in self._variables()]


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state every few batches and at the end of each epoch.

    Args:
        state: A state of this module.
        batches_per_commit: Batches between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts anew, alike on all ranks."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits where it is due."""
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the number of the last batch in ``state.batch``; 0 at the end of an epoch.

    Keras 3 gives callbacks no way to shorten an epoch: a training that starts again within one
    passes ``steps_per_epoch=steps - state.batch`` to ``fit`` itself.

    Args:
        state: A state with an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes note of the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with batch 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the number of finished epochs in ``state.epoch``.

    It counts on from the state's own number, whether ``fit`` was told of it by ``initial_epoch``
    or counts from 0 again.

    Args:
        state: A state with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._offset: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets how the last ``fit`` counted."""
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Finds out how ``fit`` counts."""
        if self._offset is None:
            self._offset = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Takes note of the epoch."""
        self.state.epoch = (self._offset or 0) + epoch + 1
