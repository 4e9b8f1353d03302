"""Shares of ``tf.data.Dataset`` and generators, and what they have in common with arrays.

:mod:`hvdkit.tfdata` is the public side of this.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.sharding import EpochPlan, even_block

INFINITE = tf.data.INFINITE_CARDINALITY
UNKNOWN = tf.data.UNKNOWN_CARDINALITY
OnePass = Callable[[Any], tf.data.Dataset]


class Epochs:
    """Which epoch the next pass over a data set is."""

    def __init__(self, due: int) -> None:
        self.due = due


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`shard` once they are checked."""

    batch_size: int | None
    train: bool
    shuffle: int  # size of the buffer for a tf.data.Dataset; 0 for none, -1 for all samples
    seed: int
    drop_last: bool
    num_samples: int | None
    steps_per_epoch: int | None
    first_epoch: int
    rank: int
    size: int

    @property
    def per_step(self) -> int:
        """Elements of the source that one rank takes in a step."""
        return 1 if self.batch_size is None else self.batch_size

    @property
    def per_global_step(self) -> int:
        """Elements of the source that all ranks take in a step."""
        return self.per_step * self.size

    def plan(self, count: int) -> EpochPlan:
        """The steps over a source of `count` elements."""
        whole = self.batch_size is None or self.drop_last
        plan = EpochPlan(count, self.per_step, self.size, tail="drop" if whole else "merge")
        if self.train and plan.steps == 0:
            unit = "samples" if self.batch_size is not None else "batches"
            raise ValueError(
                f"Expected enough {unit} for one step of all ranks. Received: {count} {unit}, "
                f"per step and rank={self.per_step}, size={self.size}, "
                f"drop_last={self.drop_last}. Fix: use fewer ranks or smaller batches."
            )
        return plan

    def steps(self, available: int) -> int:
        """`available`, or the smaller number that was declared."""
        declared = self.steps_per_epoch
        if declared is not None and declared > available:
            raise ValueError(
                f"Expected steps_per_epoch of at most {available}, which is what the data has. "
                f"Received: steps_per_epoch={declared}. Fix: leave it out for data of known "
                "length; an epoch is then all of it."
            )
        return available if declared is None else declared


def has_list(data: Any) -> bool:
    # tf.data would stack a list's entries into one tensor.
    if isinstance(data, dict):
        return any(map(has_list, data.values()))
    return isinstance(data, list) or (isinstance(data, tuple) and any(map(has_list, data)))


def passes(one_pass: OnePass, steps: int, epochs: Epochs) -> tf.data.Dataset:
    """A data set whose every pass is ``one_pass(epoch)`` of the epoch that is due.

    A pass counts once its last batch is *delivered*. Counting beginnings would be wrong: Keras
    takes a batch to build a model, and creates iterators that it does not use; counting what the
    prefetch has read would be wrong for the same reason.
    """

    def due() -> np.int64:
        return np.int64(epochs.due)

    def delivered(epoch: np.int64, step: np.int64) -> np.int64:
        if step == steps - 1:
            epochs.due = int(epoch) + 1
        return step

    def begin(_: Any) -> Any:
        epoch = tf.numpy_function(due, [], tf.int64)
        epoch.set_shape(())
        return epoch

    def number(epoch: Any) -> tf.data.Dataset:
        return one_pass(epoch).enumerate().map(lambda step, batch: (epoch, step, batch))

    def deliver(epoch: Any, step: Any, batch: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(delivered, [epoch, step], tf.int64)]):
            return tf.nest.map_structure(tf.identity, batch)

    numbered = tf.data.Dataset.range(1).map(begin).flat_map(number)
    result = numbered.prefetch(tf.data.AUTOTUNE).map(deliver)
    return _no_more_prefetch(result.apply(tf.data.experimental.assert_cardinality(steps)))


def _no_more_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def from_dataset(source: tf.data.Dataset, settings: Settings, epochs: Epochs) -> tf.data.Dataset:
    _check_source(source, settings)
    count = int(source.cardinality())
    if settings.num_samples is not None:
        if count not in (UNKNOWN, settings.num_samples):
            raise ValueError(
                "Expected num_samples to be the number of elements. "
                f"Received: num_samples={settings.num_samples}, elements={count} "
                "(-1: endless). Fix: leave it out, or declare steps_per_epoch if it is endless."
            )
        count = settings.num_samples
        source = source.take(count).apply(tf.data.experimental.assert_cardinality(count))
    if count < 0 and settings.steps_per_epoch is None and (settings.train or count == INFINITE):
        raise ValueError(
            "Expected to know the length of the data, so that all ranks take the same number of "
            f"steps. Received: a source of {'endless' if count == INFINITE else 'unknown'} length. "
            "Fix: pass steps_per_epoch=..., or num_samples=... if you know the number of elements."
        )
    if count == INFINITE:
        return stream(source, settings, epochs)
    if count == UNKNOWN and settings.steps_per_epoch is None:
        mine = source.shard(settings.size, settings.rank)
        return _batch(mine, settings).prefetch(tf.data.AUTOTUNE)
    return _known(source, count, settings, epochs)


def _known(
    source: tf.data.Dataset, count: int, settings: Settings, epochs: Epochs
) -> tf.data.Dataset:
    """Of a source that ends, or of the declared number of steps from its beginning."""
    if count == UNKNOWN:
        assert settings.steps_per_epoch is not None
        steps, split = settings.steps_per_epoch, functools.partial(_exactly, settings=settings)
    elif settings.train:
        plan = settings.plan(count)
        steps = settings.steps(plan.steps)
        split = functools.partial(_planned, plan=plan, steps=steps, settings=settings)
        _warn_of_left_out(plan, settings)
    else:
        per_step = settings.per_global_step
        count = min(count, settings.steps(-(-count // per_step)) * per_step)
        start, stop = even_block(count, settings.rank, settings.size)
        mine = source.skip(start).take(stop - start)
        return _batch(mine, settings).prefetch(tf.data.AUTOTUNE)
    if not settings.shuffle:
        exact = split(source).apply(tf.data.experimental.assert_cardinality(steps))
        return exact.prefetch(tf.data.AUTOTUNE)
    buffer = settings.shuffle if settings.shuffle > 0 else count
    if buffer < 1:
        raise ValueError(
            "Expected the size of a shuffle buffer, since the data does not tell its length. "
            "Received: shuffle=True. Fix: shuffle=10_000, or pass num_samples."
        )
    return passes(
        lambda epoch: split(_shuffled(source, buffer, settings.seed, epoch)), steps, epochs
    )


def _batch(source: tf.data.Dataset, settings: Settings, full: bool = False) -> tf.data.Dataset:
    if settings.batch_size is None:
        return source
    return source.batch(settings.batch_size, drop_remainder=full or settings.drop_last)


def _planned(
    source: tf.data.Dataset, plan: EpochPlan, steps: int, settings: Settings
) -> tf.data.Dataset:
    """The steps of a plan; within each the elements go round the ranks.

    A global batch has the same elements as if each rank had a block of it, and shard() is fast.
    """
    start, stop = plan.global_bounds(plan.steps - 1)
    batches = _batch(source.shard(settings.size, settings.rank), settings)
    if stop - start > plan.global_batch:
        first, last = even_block(stop - start, settings.rank, settings.size)
        batches = batches.rebatch([plan.batch_size] * (plan.steps - 1) + [last - first])
    return batches.take(steps)


def _declared(source: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
    """Steps without end. Whole global batches only, so that all ranks see the same last one."""
    in_tuple = isinstance(source.element_spec, tuple)

    def mine(*window: Any) -> tf.data.Dataset:
        elements = tf.data.Dataset.zip(tuple(window) if in_tuple else window[0])
        return elements.shard(settings.size, settings.rank)

    windows = source.window(settings.per_global_step, drop_remainder=True)
    return _batch(windows.flat_map(mine), settings, full=True)


def _exactly(source: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
    """As many steps as were declared, or an error that says what is wrong."""

    def fail(*batch: Any) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(False, [_shortage(settings)])]):
            same = tf.nest.map_structure(tf.identity, batch)
        return same if isinstance(batches.element_spec, tuple) else same[0]

    batches = _declared(source, settings)
    return batches.concatenate(batches.take(1).map(fail)).take(settings.steps_per_epoch)


def _shortage(settings: Settings) -> str:
    unit = "batches" if settings.batch_size is None else "samples"
    return (
        f"Expected data for steps_per_epoch={settings.steps_per_epoch} steps of "
        f"{settings.per_global_step} {unit} (size={settings.size} ranks). Received: fewer; the "
        "source ran short. Fix: declare fewer steps, or repeat() the source."
    )


def _shuffled(source: tf.data.Dataset, buffer: int, seed: int, epoch: Any) -> tf.data.Dataset:
    # Within the function of a flat_map this sets the seed of that function's graph. The program's
    # own, which ranks may set differently, would otherwise enter into the order.
    tf.compat.v1.set_random_seed(seed % (2**31 - 1) + 1)
    return source.shuffle(buffer, seed=epoch, reshuffle_each_iteration=False)


class _Stream:
    """Passes that go on where the last one ended: for sources that have no end or one pass only."""

    def __init__(self, batches: tf.data.Dataset, settings: Settings, epochs: Epochs) -> None:
        self.batches = batches
        self.settings = settings
        self.epochs = epochs
        self.iterator: Iterator[Any] | None = None
        self.held: list[Any] = []
        self.fresh = True
        """Whether no pass has gone beyond its first batch, so that another epoch may be begun."""

    def one_pass(self) -> Iterator[Any]:
        """The next batches, as many as an epoch has steps."""
        steps = self.settings.steps_per_epoch or 0
        if self.iterator is None:
            self.iterator = iter(self.batches)
        if self.fresh and self.epochs.due > self.settings.first_epoch:
            self._leave_out((self.epochs.due - self.settings.first_epoch) * steps)
        for step in range(steps):
            # Keras takes one batch to build a model and begins anew: that batch comes again.
            again = step == 0 and self.held
            batch = self.held[0] if again else next(self.iterator, self)
            if batch is self:
                raise ValueError(_shortage(self.settings))
            self.held = [batch] if step == 0 and steps > 1 else []
            self.fresh = self.fresh and bool(self.held)
            yield batch

    def _leave_out(self, count: int) -> None:
        """What a training that is resumed had before."""
        for _ in range(count - len(self.held)):
            if next(self.iterator, self) is self:  # type: ignore[arg-type]
                raise ValueError(_shortage(self.settings))
        self.held, self.fresh = [], False


def stream(source: tf.data.Dataset, settings: Settings, epochs: Epochs) -> tf.data.Dataset:
    steps = settings.steps_per_epoch
    if steps is None or settings.num_samples is not None:
        raise ValueError(
            "Expected steps_per_epoch, and no num_samples, for a generator. "
            f"Received: steps_per_epoch={steps}, num_samples={settings.num_samples}. "
            "Fix: pass steps_per_epoch, the same on all ranks."
        )
    if settings.shuffle < 0:
        raise ValueError(
            "Expected the size of a shuffle buffer for a source without end. "
            "Received: shuffle=True. Fix: shuffle=10_000."
        )
    if settings.shuffle:
        plain = source
        source = tf.data.Dataset.from_tensors(np.int64(0)).flat_map(
            lambda epoch: _shuffled(plain, settings.shuffle, settings.seed, epoch)
        )
    batches = _declared(source, settings).skip(settings.first_epoch * steps)
    # The prefetch is within the stream. Behind it, batches of a pass that ends early would be lost.
    endless = _Stream(batches.prefetch(tf.data.AUTOTUNE), settings, epochs)
    result = tf.data.Dataset.from_generator(endless.one_pass, output_signature=batches.element_spec)
    return _no_more_prefetch(result.apply(tf.data.experimental.assert_cardinality(steps)))


def from_generator(data: Any, settings: Settings) -> tf.data.Dataset:
    """A generator, or a function that returns one, as a data set; it looks at one element."""
    again = data if callable(data) else None
    iterator = iter(data()) if again else data
    missing = object()
    first = next(iterator, missing)
    if first is missing or has_list(first):
        raise ValueError(
            "Expected a generator of arrays or numbers, in tuples or dicts. "
            f"Received: {'no element' if first is missing else first!r}."
        )

    def spec(leaf: Any) -> tf.TensorSpec:
        value = leaf if tf.is_tensor(leaf) else np.asarray(leaf)
        if settings.batch_size is None:
            return tf.TensorSpec((None, *value.shape[1:]), value.dtype)
        return tf.TensorSpec(value.shape, value.dtype)

    signature = tf.nest.map_structure(spec, first)
    elements = again or (lambda: itertools.chain([first], iterator))
    return tf.data.Dataset.from_generator(elements, output_signature=signature)


def _inputs(dataset: tf.data.Dataset) -> Iterable[tf.data.Dataset]:
    """The data set and what it was made of, as far as TensorFlow tells."""
    yield dataset
    for source in getattr(dataset, "_inputs", list)():
        yield from _inputs(source)


def _check_source(source: tf.data.Dataset, settings: Settings) -> None:
    chain = list(_inputs(source))
    faults = [f"{type(each).__name__} {fault}" for each in chain if (fault := _disorder(each))]
    if source.options().deterministic is False:
        faults.append("options with deterministic=False")
    if faults and settings.size > 1:
        raise ValueError(
            "Expected a data set whose order is the same on all ranks; otherwise samples are "
            f"taken twice and others never. Received: {', '.join(faults)}. "
            "Fix: pass a seed, or leave the shuffling to shard(..., shuffle=buffer_size)."
        )
    if settings.size > 1 and any(getattr(each, "_reshuffle_each_iteration", 0) for each in chain):
        warnings.warn(
            "This data set has a shuffle() that draws another order in each pass, so all ranks "
            "must make the same passes over it: a look at it on one rank alone is one more, after "
            "which samples are taken twice and others never. shard(..., shuffle=buffer_size) does "
            "not depend on that; shuffle(reshuffle_each_iteration=False) neither.",
            stacklevel=4,
        )
    # What shapes the elements last decides; the rest keeps them as they are.
    shaping = ("BatchDataset", "batchDataset", "FlatMapDataset", "InterleaveDataset")
    names = [type(each).__name__ for each in chain if type(each).__name__.endswith(shaping)]
    if settings.batch_size is not None and names and names[0].endswith("BatchDataset"):
        warnings.warn(
            "shard() takes the elements of a tf.data.Dataset as samples, but this one has a "
            f"batch() in it ({names[0]}). If its elements are batches, pass batch_size=None.",
            stacklevel=4,
        )


def _disorder(dataset: tf.data.Dataset) -> str:
    """Why the order of a data set may differ between ranks; empty if nothing says so."""
    if getattr(dataset, "_deterministic", "") == "false":
        return "with deterministic=False"
    if _draws(type(dataset).__name__) and _is_zero(_seeds_of(dataset)):
        return "without a seed"
    # What flat_map(), interleave() and the like make of each element.
    for function in getattr(dataset, "_functions", list)():
        graph = getattr(function.function, "graph", None)
        for operation in graph.get_operations() if graph is not None else ():
            if _draws(operation.type) and _is_zero(_seeds_within(operation)):
                return f"with a {operation.type} without a seed in its function"
    return ""


def _draws(kind: str) -> bool:
    """Whether data sets of this kind draw random numbers that decide over their order."""
    return "Dataset" in kind and ("Shuffle" in kind or "Random" in kind)


def _seeds_of(dataset: tf.data.Dataset) -> list[Any]:
    return [getattr(dataset, name, None) for name in ("_seed", "_seed2")]


def _seeds_within(operation: tf.Operation) -> list[Any]:
    names = [argument.name for argument in operation.op_def.input_arg]
    given = dict(zip(names, operation.inputs, strict=False))
    return [tf.get_static_value(given[name]) for name in ("seed", "seed2") if name in given]


def _is_zero(seeds: Sequence[Any]) -> bool:
    """Whether these are the two zeros by which TensorFlow asks for seeds by chance."""
    return bool(seeds) and all(seed is not None and int(seed) == 0 for seed in seeds)


def _warn_of_left_out(plan: EpochPlan, settings: Settings) -> None:
    if settings.batch_size is None and plan.left_out and not settings.drop_last:
        warnings.warn(
            f"{plan.left_out} of {plan.num_samples} batches are left out of each epoch, so that "
            f"all {plan.size} ranks take {plan.steps} steps. To use all samples, unbatch() the "
            "data set and pass a batch_size; drop_last=True says that this is meant.",
            stacklevel=5,
        )
