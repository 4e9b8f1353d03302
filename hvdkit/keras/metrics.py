"""Metrics over the samples of all ranks, exactly as one process with all samples has them.

Keras' metrics keep sums (a total and a count, a confusion matrix, ...) that may be added over the
parts of a data set. So the sums of all ranks are added, and each metric computes its result from
them: accuracy, AUC or F1 come out right, where a mean of the ranks' results would not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdkit.errors import SynchronizationError
from hvdkit.keras.backend import adapter, keras

_HOOK = "_get_metrics_result_or_logs"


@contextlib.contextmanager
def global_metrics(model: Any) -> Iterator[None]:
    """Within it, ``fit`` and ``evaluate`` report metrics over all ranks. All ranks must be in it.

    Args:
        model: The model whose results are meant.
    """
    if not install(model):
        yield
        return
    try:
        yield
    finally:
        uninstall(model)


def install(model: Any) -> bool:
    """Makes a model's epoch results global; False if they are already, or on one rank."""
    if adapter.size() == 1 or _HOOK in vars(model):
        return False
    if not hasattr(model, _HOOK):
        raise SynchronizationError(
            f"Keras {keras.__version__} lacks Model.{_HOOK}, where hvdkit averages metrics. Fix: "
            "install Keras 3.3 to 3.15."
        )
    own = getattr(model, _HOOK)

    def result(logs: Any) -> Any:
        return over_all_ranks(model, own(logs))

    object.__setattr__(model, _HOOK, result)
    return True


def uninstall(model: Any) -> None:
    """Makes a model's epoch results its own again."""
    vars(model).pop(_HOOK, None)


def over_all_ranks(model: Any, logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """An epoch's results over the samples of all ranks.

    Args:
        model: The model whose metrics hold this rank's sums.
        logs: This rank's results. Those that no metric of the model accounts for are averaged by
            samples; ranks may have different ones.

    Returns:
        The results, the same on all ranks.

    Raises:
        SynchronizationError: The ranks' models have different metrics.
    """
    own = {name: _number(value) for name, value in (logs or {}).items()}
    variables = [variable for metric in model.metrics for variable in metric.variables]
    sums = [_array(variable) for variable in variables]
    names = [metric.name for metric in model.metrics]
    told = adapter.allgather_object((sums, own, _samples(model), names), name="hvdkit.metrics")
    present = [entry for entry in told if entry[1]]
    if not present:
        return own
    _check_alike([entry[3] for entry in present])
    exact = _from_sums(model, variables, sums, [entry[0] for entry in present]) if own else {}
    if len(present) < len(told):
        # A rank without a single batch has no metrics to compute with.
        results = adapter.allgather_object(exact, name="hvdkit.metrics.results")
        exact = next(result for result in results if result)
    entries = [(entry[1], entry[2]) for entry in present]
    names = dict.fromkeys(name for reported, _ in entries for name in reported)
    return {name: exact[name] if name in exact else _by_samples(name, entries) for name in names}


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
