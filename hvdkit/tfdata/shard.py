"""Each rank's share of the data, for ``model.fit``, ``model.evaluate`` and loops of one's own.

What goes where is decided in :mod:`hvdkit.sharding`; ``docs/data.md`` has the rules.

What all ranks must agree on follows from the arguments alone, so nothing is communicated here and
no rank waits for another. In training every rank has the same number of steps, and no batch is
empty: Keras cannot run one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.sharding import Indices, epoch_permutation, even_block
from hvdkit.tfdata.sources import (
    Epochs,
    Settings,
    from_dataset,
    from_generator,
    has_list,
    passes,
    stream,
)


def shard(
    data: Any,
    batch_size: int | None,
    *,
    train: bool = True,
    shuffle: bool | int | None = None,
    seed: int = 0,
    drop_last: bool = False,
    num_samples: int | None = None,
    steps_per_epoch: int | None = None,
    first_epoch: int = 0,
    batched: bool | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> tf.data.Dataset:
    """This rank's batches of a data set that every rank can read in full.

    Args:
        data: NumPy arrays or tensors, alone or in nested tuples and dicts; or a
            ``tf.data.Dataset``, or a Python generator or a function that returns one, of samples.
        batch_size: Samples a rank and step; None if the elements of `data` are batches.
        train: Whether all ranks must have equally many steps. False splits the data for
            evaluation: each sample once over all ranks, the numbers of samples differ by at
            most 1, and those of batches may differ.
        shuffle: A new order each epoch. For arrays a permutation of all samples, the default in
            training; otherwise the size of a shuffle buffer, or True for one that holds
            everything, and by default none.
        seed: Seed of the order, the same on all ranks.
        drop_last: Leaves out the last, short step. Without it no sample is left out; where fewer
            samples than ranks are over, they join the step before.
        num_samples: Length of a source that does not know it. An epoch is its first so many
            elements; fewer are an error.
        steps_per_epoch: Steps of a source of unknown or no length; fewer are an error.
        first_epoch: Number of the first pass, for a job that resumes; see :func:`set_epoch`.
        batched: Whether the elements of `data` are batches; None takes it from `batch_size`,
            which is not used where they are.
        rank: This rank; None asks Horovod.
        size: Number of ranks; None asks Horovod.

    Returns:
        Batches, with a known number of steps except in the evaluation of a source without one.

    Raises:
        ValueError: Arguments do not fit each other or the data.
        TypeError: `data` is none of the kinds above.

    Example:
        >>> import numpy as np
        >>> batches = shard(np.arange(9), 2, shuffle=False, rank=1, size=2)
        >>> [batch.tolist() for batch in batches.as_numpy_iterator()]
        [[2, 3], [7, 8]]
    """
    settings = _settings(
        batch_size=None if batched else batch_size,
        train=train,
        shuffle=_buffer(shuffle, train, drop_last, data),
        seed=seed,
        drop_last=drop_last,
        num_samples=num_samples,
        steps_per_epoch=steps_per_epoch,
        first_epoch=first_epoch,
        rank=rank,
        size=size,
    )
    if batched is False and batch_size is None:
        raise ValueError("Expected a batch_size with batched=False. Received: batch_size=None.")
    epochs = Epochs(first_epoch)
    if isinstance(data, Iterator):
        result = stream(from_generator(data, settings), settings, epochs)
    elif isinstance(data, tf.data.Dataset) or callable(data):
        source = data if isinstance(data, tf.data.Dataset) else from_generator(data, settings)
        result = from_dataset(source, settings, epochs)
    else:
        result = _from_arrays(data, settings, epochs)
    # A data set accepts attributes; those derived from it read the same object.
    result._hvdkit_epochs = epochs
    return result


def set_epoch(dataset: tf.data.Dataset, epoch: int) -> None:
    """Says which epoch the next pass over a data set of :func:`shard` is.

    Without it a data set counts the passes that ran to their end, from `first_epoch` on. A job
    whose passes may end early, or that resumes with ``initial_epoch``, says the number itself,
    before each pass.

    Args:
        dataset: What :func:`shard` returned; data sets made from it follow.
        epoch: Number of the epoch, from 0.

    Raises:
        ValueError: The data set is another one, or the epoch is negative.

    Example:
        >>> import numpy as np
        >>> batches = shard(np.arange(4), 4, rank=0, size=1)
        >>> orders = [next(batches.as_numpy_iterator()).tolist()]
        >>> set_epoch(batches, 1)
        >>> orders.append(next(batches.as_numpy_iterator()).tolist())
        >>> orders[0] == orders[1]
        False
    """
    epochs = getattr(dataset, "_hvdkit_epochs", None)
    if epochs is None or epoch < 0:
        raise ValueError(
            "Expected the data set that shard() returned and an epoch >= 0. "
            f"Received: dataset={dataset!r}, epoch={epoch!r}. "
            "Fix: call set_epoch on shard()'s own result; maps and caches of it follow."
        )
    epochs.due = int(epoch)


def is_sharded(data: Any) -> bool:
    """Whether this is what :func:`shard` returned.

    Example:
        >>> is_sharded([1, 2])
        False
    """
    return hasattr(data, "_hvdkit_epochs")


def _settings(**values: Any) -> Settings:
    if (values["rank"] is None) != (values["size"] is None):
        raise ValueError(
            "Expected rank and size together. "
            f"Received: rank={values['rank']}, size={values['size']}."
        )
    if values["rank"] is None:
        from hvdkit.tensorflow.backend import mpi_ops  # not needed where both are given

        values["rank"], values["size"] = mpi_ops.rank(), mpi_ops.size()
    minimum = {"batch_size": 1, "steps_per_epoch": 1, "num_samples": 0, "first_epoch": 0, "seed": 0}
    for name, least in minimum.items():
        value = values[name]
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        needed = value is not None or name in ("first_epoch", "seed")
        if needed and not (whole and value >= least):
            raise ValueError(
                f"Expected {name} to be a whole number >= {least}. Received: {name}={value!r}."
            )
    even_block(0, values["rank"], values["size"])  # checks the two
    return Settings(**values)


def _buffer(shuffle: bool | int | None, train: bool, drop_last: bool, data: Any) -> int:
    arrays = not (isinstance(data, tf.data.Dataset | Iterator) or callable(data))
    if shuffle is None:
        shuffle = train and arrays
    if not train and (shuffle or drop_last):
        raise ValueError(
            "Expected neither shuffle nor drop_last for evaluation, which takes each sample once. "
            f"Received: shuffle={shuffle!r}, drop_last={drop_last!r}, train=False."
        )
    if not isinstance(shuffle, int) or shuffle < 0 or (arrays and shuffle not in (0, 1)):
        raise ValueError(
            "Expected shuffle to be True or False, or the size of a buffer if the data is not in "
            f"arrays. Received: shuffle={shuffle!r}."
        )
    return -1 if shuffle is True else int(shuffle)


def _from_arrays(data: Any, settings: Settings, epochs: Epochs) -> tf.data.Dataset:
    leaves = _leaves(data)
    count = len(leaves[0])
    if settings.batch_size is None or settings.num_samples not in (None, count):
        raise ValueError(
            "Expected a batch_size, and num_samples left out or equal to the rows of the arrays. "
            f"Received: batch_size={settings.batch_size} (None also with batched=True), "
            f"num_samples={settings.num_samples}, rows={count}."
        )
    rank, batch_size = settings.rank, settings.batch_size
    if settings.train:
        plan = settings.plan(count)
        steps = settings.steps(plan.steps)
        bounds = functools.partial(plan.rank_bounds, rank=rank)
    else:
        limit = settings.steps(-(-count // settings.per_global_step)) * settings.per_global_step
        start, stop = even_block(min(count, limit), rank, settings.size)
        steps = -(-(stop - start) // batch_size)

        def bounds(step: int) -> tuple[int, int]:
            return start + step * batch_size, min(start + (step + 1) * batch_size, stop)

    @functools.lru_cache(maxsize=1)
    def order(epoch: int) -> Indices:
        return epoch_permutation(count, settings.seed, epoch)

    def rows(epoch: int, step: int) -> list[np.ndarray]:
        start, stop = bounds(step)
        if settings.shuffle:
            return [leaf.take(order(int(epoch))[start:stop], axis=0) for leaf in leaves]
        return [leaf[start:stop] for leaf in leaves]

    dtypes = [tf.as_dtype(leaf.dtype) for leaf in leaves]
    last_is_full = steps > 0 and int(np.diff(bounds(steps - 1))[0]) == batch_size
    shapes = [(batch_size if last_is_full else None, *leaf.shape[1:]) for leaf in leaves]

    def batch(epoch: Any, step: Any) -> Any:
        found = tf.numpy_function(rows, [epoch, step], dtypes)
        for tensor, shape in zip(found, shapes, strict=True):
            tensor.set_shape(shape)
        return tf.nest.pack_sequence_as(data, found)

    def one_pass(epoch: Any) -> tf.data.Dataset:
        return tf.data.Dataset.range(steps).map(lambda step: batch(epoch, step))

    if not settings.shuffle:
        return one_pass(np.int64(0)).prefetch(tf.data.AUTOTUNE)
    return passes(one_pass, steps, epochs)


def _leaves(data: Any) -> list[np.ndarray]:
    flat = tf.nest.flatten(data)
    wrong = [
        type(leaf).__name__
        for leaf in flat
        if not (hasattr(leaf, "__array__") and hasattr(leaf, "shape")) or not len(leaf.shape)
    ]
    if has_list(data) or not flat or wrong:
        raise TypeError(
            "Expected arrays or tensors with an axis of samples, alone or in tuples and dicts; or "
            "a tf.data.Dataset, or a generator or a function that returns one. Received: "
            f"data of type {type(data).__name__} that holds {wrong or 'lists, or nothing'}. "
            "Fix: np.asarray() for a list of rows; tf.data.Dataset.from_tensor_slices() for "
            "ragged and sparse tensors, from_generator() for a keras.utils.PyDataset."
        )
    leaves = [np.asarray(leaf) for leaf in flat]
    lengths = [len(leaf) for leaf in leaves]
    if len(set(lengths)) > 1:
        raise ValueError(f"Expected arrays of equal length. Received: lengths={lengths}.")
    return leaves
