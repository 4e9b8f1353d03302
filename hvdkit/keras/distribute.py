"""``distribute``: everything that makes a one-process Keras script right on many ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from hvdkit import options
from hvdkit.errors import SynchronizationError, UnsupportedError
from hvdkit.keras import metrics
from hvdkit.keras.agreement import gather
from hvdkit.keras.backend import BACKEND, adapter, collectives, keras
from hvdkit.keras.callbacks.standard import standard
from hvdkit.keras.callbacks.synchronized import (
    MetricAverageCallback,
    check_layers,
    turn_off_xla,
)
from hvdkit.keras.controller import LearningRateFactor, ReductionController
from hvdkit.keras.data import SetEpoch, is_sharded
from hvdkit.keras.optimizer import controllers_of, distribute_optimizer, parts_of, set_passes
from hvdkit.keras.settings import ReductionSettings
from hvdkit.keras.state import broadcast_model

COMPRESSIONS = {
    "none": adapter.Compression.none,
    "fp16": adapter.Compression.fp16,
    "bf16": adapter.Compression.bf16,
}


def distribute(
    model: Any,
    *,
    scale_lr: str = "linear",
    base_global_batch: int | None = None,
    batch_size: int | None = None,
    warmup_steps: int = 0,
    warmup_start: str = "base",
    compression: Any = "none",
    accumulate: int = 1,
    weighting: str = "samples",
    max_grad_norm: float | None = None,
    root_rank: int = 0,
    summary: bool = True,
    **compile_arguments: Any,
) -> Any:
    """Makes a Keras model ready to train on all ranks.

    Broadcasts the root's model and optimizer; makes the optimizer reduce gradients as an exact
    mean over all samples of a step; scales the learning rate by the ratio of global batches and
    warms it up. ``model.fit`` gets the callbacks of :func:`hvdkit.keras.callbacks.standard`, and
    is quiet on the other ranks. Each rank passes its own part of the data (:func:`shard`)::

        model = hvd.distribute(model, optimizer="adam", loss="mse", warmup_steps=100)
        model.fit(hvd.shard((inputs, targets), batch_size=32), epochs=3)

    The learning rate is multiplied only while the optimizer applies gradients. Outside,
    ``model.optimizer.learning_rate``, schedules and callbacks keep the rates of the user's own
    script, so nothing is scaled twice and a saved model goes on with another number of ranks;
    :func:`effective_lr` gives the rate that counts.

    Args:
        model: A Keras model, built or not. Losses must be means over samples, Keras' default.
        scale_lr: ``"linear"``, ``"sqrt"`` or ``"none"``: by what the learning rate follows the
            ratio of global batch sizes.
        base_global_batch: Samples a step that the learning rate was chosen for. Left out, that is
            one rank's batch: the ratio is ranks x accumulate.
        batch_size: Samples of one rank's batch; needed with `base_global_batch`.
        warmup_steps: Optimizer steps until the full rate.
        warmup_start: ``"base"``, from the unscaled rate (Goyal et al. 2017,
            https://arxiv.org/abs/1706.02677); ``"zero"``, from 0.
        compression: ``"none"``, ``"fp16"``, ``"bf16"``, or a class of ``Compression``.
        accumulate: Batches a step; their gradients are averaged.
        weighting: ``"samples"``: every sample weighs the same, also where batches are uneven.
            ``"ranks"``: every batch weighs the same, whatever its size.
        max_grad_norm: Clips the norm of the reduced gradients; None for none.
        root_rank: The rank whose state all ranks start from.
        summary: Whether the root prints what was done, in a few lines.
        compile_arguments: Passed to ``model.compile`` first; left out, the model must be
            compiled.

    Returns:
        `model` itself.

    Raises:
        ValueError: An option is wrong; the text lists the legal values.
        SynchronizationError: The ranks' models differ in structure.
        UnsupportedError: ``jit_compile=True`` was asked for, which cannot hold Horovod's
            operations.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model = hvd.distribute(model, optimizer="sgd", loss="mse", summary=False)
        >>> history = model.fit(keras.ops.ones((8, 2)), keras.ops.ones((8, 1)), verbose=0)
    """
    adapter.size()  # says so where hvd.init() was forgotten
    options.check_options(
        scale_lr=scale_lr,
        warmup_steps=warmup_steps,
        warmup_start=warmup_start,
        accumulate=accumulate,
        weighting=weighting,
        max_grad_norm=max_grad_norm,
    )
    chosen = options.chosen_compression(compression, COMPRESSIONS)
    settings = ReductionSettings(compression=chosen)
    record = options.scaling_record(
        scale_lr, base_global_batch, batch_size, accumulate, adapter.size()
    )
    _check_model(model, compile_arguments)
    if compile_arguments:
        model.compile(**{"jit_compile": False, **compile_arguments})
    _check_losses(model)
    check_layers(model)
    optimizer = model.optimizer
    _check_accumulation(optimizer, accumulate)
    _set_clipping(optimizer, max_grad_norm)

    controllers = distribute_optimizer(optimizer, settings, counts_samples=weighting == "samples")
    start = options.start_multiplier(record, warmup_start)
    for controller in controllers:
        controller.lr_factor = LearningRateFactor(record, warmup_steps, start)
        controller.counts_updates = accumulate > 1
    set_passes(optimizer, accumulate)
    turn_off_xla(model)
    _prepare_model(model, controllers, root_rank)
    if summary and adapter.rank() == root_rank:
        rates = [float(part.learning_rate) for part in parts_of(optimizer)]
        done = (record, warmup_steps, chosen, accumulate, weighting, adapter.size())
        print(options.summary_of(rates, *done), flush=True)
    return model


def effective_lr(optimizer: Any) -> float:
    """The learning rate that the next step really uses: scaled and warmed up.

    Args:
        optimizer: An optimizer of Keras, distributed or not; of a ``MultiOptimizer``, one of its
            ``optimizers``.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.effective_lr(keras.optimizers.SGD(0.5))
        0.5
    """
    (part,) = parts_of(optimizer)
    factors = [c.lr_factor for c in controllers_of(part) if c.lr_factor is not None]
    factor = factors[0].at(int(part.iterations)) if factors else 1.0
    return float(part.learning_rate) * factor


def evaluate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``model.evaluate`` over the data of all ranks, each of which passes its own part.

    Unlike ``model.evaluate``, which one rank may call alone, all ranks have to call it.

    Args:
        model: A compiled Keras model.
        args: What ``model.evaluate`` takes.
        kwargs: What ``model.evaluate`` takes.

    Returns:
        What ``model.evaluate`` returns, the same on all ranks, exact for every metric of Keras
        and whatever the number of ranks.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> ones = keras.ops.ones((4, 2))
        >>> loss = hvd.evaluate(model, ones, ones[:, :1], verbose=0)
    """
    if adapter.rank() and "verbose" not in kwargs:
        kwargs["verbose"] = 0
    with metrics.global_metrics(model):
        return model.evaluate(*args, **kwargs)


def _prepare_model(model: Any, controllers: list[ReductionController], root_rank: int) -> None:
    """Counts samples, broadcasts once the variables exist, and adds callbacks to ``fit``."""
    for name in ("train_step", "fit", "make_train_function"):
        vars(model).pop(name, None)  # of an earlier call, before the model was compiled again
    own_step, own_fit, own_make = model.train_step, model.fit, model.make_train_function

    @functools.wraps(own_step)
    def train_step(data: Any) -> Any:
        if not controllers_of(model.optimizer):
            raise SynchronizationError(
                "The model was compiled again after hvd.distribute(), with an optimizer that "
                "reduces nothing. Received: "
                f"optimizer={type(model.optimizer).__name__}. Fix: call hvd.distribute(model, "
                "...) again, after or instead of model.compile()."
            )
        with contextlib.ExitStack() as scopes:
            for controller in controllers:
                scopes.enter_context(controller.batch_scope(_samples_of(data)))
            return own_step(data)

    @functools.wraps(own_make)
    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        # Called by fit() and train_on_batch() when they have built the model.
        object.__delattr__(model, "make_train_function")
        broadcast_model(model, root_rank)
        return own_make(*args, **kwargs)

    @functools.wraps(own_fit)
    def fit(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(own_fit).bind(*args, **kwargs).arguments
        data = given.get("x")
        if is_sharded(data):
            given.setdefault("shuffle", False)  # it is the data set's own; Keras warns of True
        given["callbacks"] = _callbacks_of(given, root_rank)
        if adapter.rank() != root_rank and given.get("verbose", "auto") == "auto":
            given["verbose"] = 0
        try:
            return own_fit(**given)
        finally:
            metrics.uninstall(model)  # an exception ends no callback

    object.__setattr__(model, "train_step", train_step)
    object.__setattr__(model, "fit", fit)
    model.train_function = None
    if model.built:
        broadcast_model(model, root_rank)
    else:
        collectives.build_before_training(model)
        object.__setattr__(model, "make_train_function", make_train_function)


def _callbacks_of(given: Mapping[str, Any], root_rank: int) -> Any:
    """The callbacks of a ``fit`` with such arguments: the user's own and the standard ones."""
    callbacks = given.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    own = [callback for callback in several if callback is not None]
    data = given.get("x")
    callbacks = standard([*([SetEpoch(data)] if is_sharded(data) else []), *own], root_rank)
    validates = given.get("validation_data") is not None or bool(given.get("validation_split"))
    if adapter.size() > 1:
        together = all(gather("the call of fit()", validates))
        for callback in callbacks:
            if isinstance(callback, MetricAverageCallback):
                callback.validates_together = together
    return callbacks


def _samples_of(data: Any) -> Any:
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    first = next(leaf for leaf in keras.tree.flatten(inputs) if leaf is not None)
    return collectives.length_of(first)


def _check_model(model: Any, compile_arguments: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected a keras.Model. Received: model={type(model).__name__}.")
    if compile_arguments.get("jit_compile") is True and BACKEND == "tensorflow":
        raise UnsupportedError(
            "XLA cannot compile Horovod's operations. Received: jit_compile=True. Fix: leave it "
            "out, or pass jit_compile=False."
        )
    if not compile_arguments and not model.compiled:
        raise ValueError(
            "Expected a compiled model, or the arguments of model.compile. Received: neither. "
            "Fix: hvd.distribute(model, optimizer=..., loss=...)."
        )


def _check_losses(model: Any) -> None:
    """A sum over samples has no mean over ranks that one process would compute."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    for loss in losses:
        if getattr(loss, "reduction", None) == "sum":
            raise ValueError(
                "Expected losses that are means over the samples of a batch. Received: "
                f"{type(loss).__name__}(reduction='sum'). Fix: reduction='sum_over_batch_size'."
            )


def _check_accumulation(optimizer: Any, accumulate: int) -> None:
    for part in parts_of(optimizer):
        own = part.gradient_accumulation_steps
        if own not in (None, accumulate):
            raise ValueError(
                f"The optimizer accumulates over {own} batches. Received: {accumulate=}. "
                f"Fix: pass accumulate={own}, so that the learning rate is scaled by it."
            )


def _set_clipping(optimizer: Any, max_grad_norm: float | None) -> None:
    if max_grad_norm is None:
        return
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ValueError(
            "A MultiOptimizer clips each of its parts by itself. Expected max_grad_norm=None. "
            "Fix: pass global_clipnorm to its optimizers."
        )
    (part,) = parts_of(optimizer)
    given = {
        name: getattr(part, name)
        for name in ("clipnorm", "global_clipnorm", "clipvalue")
        if getattr(part, name) is not None
    }
    if given and given != {"global_clipnorm": max_grad_norm}:  # as a model that was saved has it
        raise ValueError(
            f"The optimizer clips gradients already. Received: {given} in the optimizer and "
            f"{max_grad_norm=}. Fix: use one of them; both act on reduced gradients."
        )
    part.global_clipnorm = max_grad_norm
