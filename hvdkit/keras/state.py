"""Gives all ranks one rank's model, optimizer and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdkit.keras.agreement import gather
from hvdkit.keras.backend import adapter, collectives
from hvdkit.keras.controller import identity
from hvdkit.keras.optimizer import controllers_of


def broadcast_model(
    model: Any, root_rank: int = 0, local_variables: Iterable[Any] = (), optimizer: Any = None
) -> None:
    """Gives all ranks the root's weights, optimizer state and metrics, in place.

    The states of random seeds stay each rank's own.

    Args:
        model: A built Keras model, compiled or not.
        root_rank: The rank whose values count.
        local_variables: Variables that stay each rank's own, besides those that were registered
            with the optimizer.
        optimizer: Left out, the one that the model is compiled with.

    Raises:
        ValueError: The model is not built.
        SynchronizationError: The ranks' models differ in structure.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> hvd.broadcast_model(model)
    """
    if not model.built:
        raise ValueError(
            "Expected a built model, whose variables exist. Received: a model that has not seen "
            "an input yet. Fix: call model.build(input_shape), or use "
            "BroadcastGlobalVariablesCallback, which waits for fit() to build it."
        )
    left_out = {identity(variable) for variable in local_variables}
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    metrics = getattr(model, "metrics_variables", [])
    built = optimizer is not None and optimizer.built
    told = gather("a broadcast of the model", (built, len(metrics)))
    variables = list(model.weights)
    if optimizer is not None:
        if any(other for other, _ in told) and not built:
            optimizer.build(model.trainable_variables)
        for controller in controllers_of(optimizer):
            left_out |= set(controller.local_variables)
        variables += optimizer.variables
    if len({count for _, count in told}) == 1:  # new ones are zeros, as at an epoch's beginning
        variables += metrics
    shared = {identity(v): v for v in variables if identity(v) not in left_out}
    collectives.broadcast_variables(list(shared.values()), root_rank)


def broadcast_global_variables(root_rank: int) -> Any:
    """As in Horovod: only for graphs of TensorFlow 1, where global variables exist.

    Raises:
        ValueError: In every other program.
    """
    own = getattr(adapter, "broadcast_global_variables", None)
    if own is None:
        raise ValueError(
            "Keras on PyTorch has no global variables. Fix: hvd.broadcast_model(model), or "
            "hvd.callbacks.BroadcastGlobalVariablesCallback."
        )
    return own(root_rank)
