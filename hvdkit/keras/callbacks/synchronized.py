"""Callbacks that keep ranks together: one start, one set of metrics, one end."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from hvdkit.errors import SynchronizationError, UnsupportedError
from hvdkit.keras import metrics
from hvdkit.keras.agreement import gather
from hvdkit.keras.backend import BACKEND, adapter, keras
from hvdkit.keras.optimizer import controllers_of, parts_of
from hvdkit.keras.state import broadcast_model

logger = logging.getLogger(__name__)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Starts all ranks with the root's model, optimizer and metrics, built or loaded or new.

    Also the epoch that ``BackupAndRestore`` resumes with is the root's. XLA, which lacks
    Horovod's operations, is turned off in the model; and the first step proves that a reduction
    ran.

    With the TensorFlow backend ``fit`` builds a model that is not built yet in its first step, so
    the broadcast comes right after that one, as in Horovod. :func:`hvdkit.keras.distribute`
    builds it before.

    Args:
        root_rank: The rank whose values count.
        device: No effect; kept for scripts written for Horovod.
        local_variables: Variables that stay each rank's own.

    Example:
        >>> import hvdkit.keras as hvd
        >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables: list[Any] = []
        self._done = False
        self._proved = False
        given = [] if local_variables is None else local_variables
        for variable in given if isinstance(given, (list, tuple, set)) else [given]:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable out of the broadcast."""
        self.local_variables.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts, once."""
        turn_off_xla(self.model)
        check_layers(self.model)
        told = gather(
            "the beginning of fit()",
            (getattr(self.model, "_initial_epoch", None), (self.params or {}).get("steps")),
        )
        _check_steps([steps for _, steps in told])
        if self._done:
            return
        self.model._initial_epoch = told[self.root_rank][0]
        if self.model.built:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank, self.local_variables)
        self._done = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first batch, makes sure that gradients were reduced."""
        if not self._done:
            self._broadcast()
        if not self._proved and adapter.size() > 1:
            self._proved = check_reduces(self.model)


def _check_steps(steps: list[int | None]) -> None:
    if len(set(steps)) > 1 and None not in steps:
        raise SynchronizationError(
            "Expected the same number of batches on all ranks, each of which waits for the others' "
            f"gradients. Received: {steps}, by rank. Fix: hvd.shard(data, batch_size), or "
            "steps_per_epoch."
        )


def check_layers(model: Any) -> None:
    """Raises UnsupportedError where a layer is told to synchronize, but could not over Horovod."""
    for layer in model._flatten_layers():
        is_plain = isinstance(layer, keras.layers.BatchNormalization)
        if is_plain and getattr(layer, "synchronized", False) and adapter.size() > 1:
            raise UnsupportedError(
                "BatchNormalization(synchronized=True) synchronizes tf.distribute's replicas, not "
                f"Horovod's ranks. Received: layer {layer.name!r}. Fix: "
                "hvdkit.tensorflow.SyncBatchNormalization (TensorFlow backend), or leave "
                "synchronized out."
            )


def check_reduces(model: Any) -> bool:
    """Raises SynchronizationError where a model has trained a step without a reduction.

    Returns:
        Whether a reduction is proved: not yet where loss scaling has skipped all steps so far.
    """
    controllers = controllers_of(model.optimizer)
    if not controllers:
        # A train_step of the user's own may reduce by itself.
        if type(model).train_step is keras.Model.train_step:
            raise SynchronizationError(
                "The model trains on each rank alone: its optimizer reduces nothing. Received: "
                f"optimizer={type(model.optimizer).__name__}. Fix: compile the model with "
                "hvd.DistributedOptimizer(optimizer), or call hvd.distribute(model)."
            )
        return True
    if any(controller.applications for controller in controllers):
        return True
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if not scaled or any(int(part.iterations) for part in parts_of(model.optimizer)):
        raise SynchronizationError(
            f"The first step of Keras {keras.__version__} ran without reducing its gradients. "
            "Expected Model.train_step to call optimizer.apply(). Fix: install Keras 3.3 to 3.15, "
            "or call optimizer.apply(gradients, variables) in your train_step."
        )
    return False


def turn_off_xla(model: Any) -> None:
    """Makes a model's training step one without XLA."""
    if BACKEND != "tensorflow" or not model.jit_compile:
        return
    logger.warning(
        "XLA cannot compile Horovod's operations: jit_compile of the model is now False."
    )
    model.jit_compile = False
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes the epochs' metrics those over the samples of all ranks.

    It changes what the model itself reports, so that every consumer has the same numbers wherever
    this callback stands in the list: History, the progress bar's last line, CSVLogger,
    TensorBoard, ModelCheckpoint, EarlyStopping and ReduceLROnPlateau. See
    :mod:`hvdkit.keras.metrics` for how. The moving statistics of ``BatchNormalization`` layers
    become the mean over ranks at each epoch's end, so that one model is validated and saved.
    Within ``fit``, ``model.evaluate`` in a callback stays one rank's own.

    Attributes:
        validates_together: Whether all ranks validate; if not, its results are each rank's own.

    Args:
        device: No effect; kept for scripts written for Horovod.

    Example:
        >>> import hvdkit.keras as hvd
        >>> callbacks = [hvd.callbacks.MetricAverageCallback()]
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.validates_together = True
        self._installed = False

    def on_train_begin(self, logs: Any = None) -> None:
        """From here on, all ranks are in ``fit``."""
        self._installed = metrics.install(self.model, self.validates_together)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Makes sure that no rank is still validating, which would wait for the others."""
        if self._installed:
            gather("the end of an epoch", None)

    def on_train_end(self, logs: Any = None) -> None:
        """Later evaluations are each rank's own again."""
        if self._installed:
            metrics.uninstall(self.model)
            self._installed = False


class StopTogether(keras.callbacks.Callback):  # type: ignore[misc]
    """Stops all ranks at the same point when a callback on one of them wants to stop.

    A rank that stops alone leaves the others waiting for its gradients. Must stand after the
    callbacks that may stop.

    Args:
        every: ``"epoch"``: all ranks stop at the end of the epoch, at no cost. ``"batch"``: right
            after the batch, at the cost of one small reduction a batch.

    Raises:
        ValueError: `every` is neither.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> callbacks = [keras.callbacks.TerminateOnNaN(), hvd.callbacks.StopTogether()]
    """

    def __init__(self, every: str = "epoch") -> None:
        super().__init__()
        if every not in ("epoch", "batch"):
            raise ValueError(f"Expected every to be 'epoch' or 'batch'. Received: {every=}.")
        self.every = every
        self._wanted = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets what an earlier ``fit`` wanted."""
        self._wanted = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes note of a wish to stop; or asks the other ranks."""
        self._wanted = self._wanted or bool(self.model.stop_training)
        self.model.stop_training = self.every == "batch" and self._any_wants()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Asks all ranks."""
        self._wanted = self._wanted or bool(self.model.stop_training)
        self.model.stop_training = self._any_wants()

    def _any_wants(self) -> bool:
        if adapter.size() == 1:
            return self._wanted
        return any(gather("the question who wants to stop", self._wanted))
