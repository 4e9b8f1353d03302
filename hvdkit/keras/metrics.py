"""Metrics over the samples of all ranks, exactly as one process with all samples has them.

Keras' metrics keep sums (a total and a count, a confusion matrix, ...) that may be added over the
parts of a data set. So the sums of all ranks are added, and each metric computes its result from
them: accuracy, AUC or F1 come out right, where a mean of the ranks' results would not.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdkit.errors import SynchronizationError
from hvdkit.keras.agreement import gather
from hvdkit.keras.backend import adapter, keras

_HOOK = "_get_metrics_result_or_logs"
_OF_FIT = "_use_cached_eval_dataset"
"""What ``fit`` passes to ``evaluate``, and nobody else does."""


class _Results:
    """Which of a model's results are those over all ranks; lives on the model while some are.

    ``fit`` and the validation within it are all ranks' business, while a callback may call
    ``model.evaluate`` on one rank alone.

    Args:
        model: The model.
        validates_together: Whether all ranks validate, so that its results are those of all.
    """

    def __init__(self, model: Any, validates_together: bool) -> None:
        self._model = model
        self._own_result, self._own_evaluate = getattr(model, _HOOK), model.evaluate
        self._validates_together = validates_together
        self._evaluating: bool | None = None
        self.asked = False
        """Whether an ``evaluate`` of all ranks is running."""

    def result(self, logs: Any) -> Any:
        """In place of the model's method, which ends an epoch or an evaluation."""
        own = self._own_result(logs)
        if self._evaluating is None:
            average_moving_statistics(self._model)
            return over_all_ranks(self._model, own, "results of an epoch")
        return (
            over_all_ranks(self._model, own, "results of an evaluation")
            if self._evaluating
            else own
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's method."""
        before = self._evaluating
        validating = bool(kwargs.get(_OF_FIT)) and self._validates_together
        self._evaluating = self.asked or validating
        try:
            return self._own_evaluate(*args, **kwargs)
        finally:
            self._evaluating = before


@contextlib.contextmanager
def global_metrics(model: Any) -> Iterator[None]:
    """Within it, ``evaluate`` reports metrics over all ranks. All ranks must be in it.

    Args:
        model: The model whose results are meant.
    """
    if adapter.size() == 1:
        yield
        return
    installed = install(model)
    results = vars(model)[_HOOK].__self__
    results.asked = True
    try:
        yield
    finally:
        results.asked = False
        if installed:
            uninstall(model)


def install(model: Any, validates_together: bool = True) -> bool:
    """Makes the results of ``fit`` those of all ranks; False if they are already, or on one rank.

    Args:
        model: The model whose results are meant.
        validates_together: Whether all ranks validate within ``fit``.
    """
    if adapter.size() == 1 or _HOOK in vars(model):
        return False
    if not hasattr(model, _HOOK):
        raise SynchronizationError(
            f"Keras {keras.__version__} lacks Model.{_HOOK}, where hvdkit averages metrics. Fix: "
            "install Keras 3.3 to 3.15."
        )
    results = _Results(model, validates_together)
    object.__setattr__(model, _HOOK, results.result)
    object.__setattr__(model, "evaluate", results.evaluate)
    return True


def uninstall(model: Any) -> None:
    """Makes a model's epoch results its own again."""
    if vars(model).pop(_HOOK, None) is not None:
        vars(model).pop("evaluate", None)


def over_all_ranks(
    model: Any, logs: Mapping[str, Any] | None, what: str = "results of an evaluation"
) -> dict[str, Any]:
    """An epoch's results over the samples of all ranks.

    Args:
        model: The model whose metrics hold this rank's sums.
        logs: This rank's results. Those that are no result of the model's metrics are averaged by
            samples; ranks may have different ones.
        what: What they are results of.

    Returns:
        The results, the same on all ranks.

    Raises:
        SynchronizationError: The ranks' models have different metrics, or are not at the same
            point of their work.
    """
    own = {name: _number(value) for name, value in (logs or {}).items()}
    variables = [variable for metric in model.metrics for variable in metric.variables]
    sums = [_array(variable) for variable in variables]
    names = [metric.name for metric in model.metrics]
    entry = _Entry(sums, own, _of_metrics(model, own), _samples(model), names)
    told = gather(what, entry)
    present = [other for other in told if other.logs]
    if not present:
        return own
    _check_alike([other.metric_names for other in present])
    exact = _from_sums(model, variables, sums, [other.sums for other in present]) if own else {}
    if len(present) < len(told):
        # A rank without a single batch has no metrics to compute with.
        results = gather(what, exact)
        exact = next(result for result in results if result)
    # A train_step of one's own may return other numbers under the names of metrics.
    counted = set.intersection(*(other.of_metrics for other in present))
    entries = [(other.logs, other.samples) for other in present]
    reported = dict.fromkeys(name for logs, _ in entries for name in logs)
    return {
        name: exact[name] if name in counted and name in exact else _by_samples(name, entries)
        for name in reported
    }


@dataclasses.dataclass
class _Entry:
    """What one rank tells the others of its results."""

    sums: list[np.ndarray]
    logs: dict[str, Any]
    of_metrics: set[str]
    """Which of `logs` are what the metrics would say."""
    samples: float
    metric_names: list[str]


def _of_metrics(model: Any, own: Mapping[str, Any]) -> set[str]:
    if not own:
        return set()
    results = {name: _number(value) for name, value in model.get_metrics_result().items()}
    return {name for name, value in own.items() if name in results and _equal(value, results[name])}


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, dict) or isinstance(other, dict):
        return bool(value == other)
    shapes = np.shape(value) == np.shape(other)
    return shapes and bool(np.allclose(value, other, rtol=1e-5, atol=0, equal_nan=True))


def average_moving_statistics(model: Any) -> None:
    """Gives all ranks the mean of their ``BatchNormalization`` layers' moving statistics.

    Each rank normalizes by its own batches; what is validated and saved has to be one model.

    Args:
        model: A built Keras model.
    """
    kind = keras.layers.BatchNormalization
    every = model._flatten_layers()
    layers = [layer for layer in every if isinstance(layer, kind) and layer.built]
    variables = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]
    if not variables:
        return
    own = [_array(variable).astype(np.float64) for variable in variables]
    flat = np.concatenate([array.reshape(-1) for array in own])
    wire = keras.ops.convert_to_tensor(flat, dtype="float64")
    mean = adapter.allreduce(wire, name="hvdkit.keras.moving_statistics")
    parts = np.split(_array(mean), np.cumsum([array.size for array in own])[:-1])
    for variable, array, part in zip(variables, own, parts, strict=True):
        variable.assign(part.reshape(array.shape))


def _from_sums(
    model: Any, variables: Sequence[Any], own: Sequence[Any], sums: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Results of the model's metrics, from the sums of all ranks."""
    try:
        for index, variable in enumerate(variables):
            variable.assign(_added([rank[index] for rank in sums], variable))
        return {name: _number(value) for name, value in model.get_metrics_result().items()}
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


def _added(values: Sequence[np.ndarray], variable: Any) -> np.ndarray:
    """One state of all ranks together, by the rule that the metric gave its variable."""
    rule = getattr(variable, "aggregation", "sum")
    wide = np.stack([np.asarray(value, np.float64) for value in values])
    if rule == "mean":
        return wide.mean(axis=0)
    if rule == "only_first_replica" or not np.issubdtype(np.asarray(values[0]).dtype, np.number):
        return np.asarray(values[0])
    return wide.sum(axis=0)


def _by_samples(name: str, entries: Sequence[tuple[Mapping[str, Any], float]]) -> Any:
    """The mean of one number over the samples of the ranks that report it."""
    parts = [(logs[name], samples) for logs, samples in entries if name in logs]
    if not any(samples for _, samples in parts):  # the model does not say how many there were
        parts = [(value, 1.0) for value, _ in parts]
    if isinstance(parts[0][0], dict):
        return {key: _by_samples(key, parts) for key in parts[0][0]}
    weight = sum(samples for _, samples in parts)
    # A rank without samples may report a number that is none.
    return _number(sum(np.asarray(value) * samples for value, samples in parts if samples) / weight)


def _samples(model: Any) -> float:
    tracker = getattr(model, "_loss_tracker", None)
    return 0.0 if tracker is None else float(tracker.count)


def _check_alike(names: Sequence[list[str]]) -> None:
    if any(other != names[0] for other in names):
        raise SynchronizationError(
            f"Expected the same metrics on all ranks. Received: {names}. Fix: compile the model "
            "with the same metrics on every rank."
        )


def _array(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(part) for name, part in value.items()}
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array
