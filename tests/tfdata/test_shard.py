"""Shares of arrays, data sets and generators: unions, orders and step counts over all ranks.

Nothing is communicated, so one process plays all ranks.
"""

from __future__ import annotations

import doctest
import itertools
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tfdata as data_module
from hvdkit.sharding import EpochPlan, epoch_permutation
from hvdkit.tfdata import set_epoch, shard


def batches(dataset: tf.data.Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


def all_ranks(make: Callable[[], Any], size: int, *args: Any, **kwargs: Any) -> list[list[Any]]:
    """For each rank its batches; checks that the announced number of steps is the real one."""
    found = []
    for rank in range(size):
        dataset = shard(make(), *args, rank=rank, size=size, **kwargs)
        found.append(batches(dataset))
        assert dataset.cardinality() in (len(found[-1]), tf.data.UNKNOWN_CARDINALITY)
    return found


def global_batches(per_rank: list[list[list[int]]]) -> list[list[int]]:
    """For each step the samples of all ranks; fails where ranks differ in their number of steps."""
    return [list(itertools.chain(*step)) for step in zip(*per_rank, strict=True)]


def flat(nested: list[list[list[int]]]) -> list[int]:
    return [sample for rank in nested for batch in rank for sample in batch]


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(data_module).failed == 0


TRAINING = [(858, 32, 4), (9, 1, 2), (16, 2, 3), (5, 9, 5), (5, 2, 1)]


@pytest.mark.parametrize(("count", "batch_size", "size"), TRAINING)
def test_ranks_take_the_steps_of_one_process(count: int, batch_size: int, size: int) -> None:
    rows = np.arange(count)
    per_rank = all_ranks(lambda: rows, size, batch_size, seed=3)
    together = global_batches(per_rank)
    order = epoch_permutation(count, 3, 0).tolist()
    assert list(itertools.chain(*together)) == order
    rest = count % (batch_size * size)
    if rest == 0 or rest >= size:
        assert together == batches(shard(rows, batch_size * size, seed=3, rank=0, size=1))
    assert all(len(batch) == batch_size * size for batch in together[:-1])
    lengths = [len(rank[-1]) for rank in per_rank]
    assert 0 < min(lengths) <= max(lengths) <= min(lengths) + 1


def test_drop_last_leaves_out_the_short_step() -> None:
    together = global_batches(all_ranks(lambda: np.arange(858), 4, 32, drop_last=True))
    assert [len(batch) for batch in together] == [128] * 6
    spec = shard(np.arange(858), 32, drop_last=True, rank=0, size=4).element_spec
    assert spec.shape == (32,)
    assert shard(np.arange(858), 32, rank=0, size=4).element_spec.shape == (None,)


@pytest.mark.parametrize(("count", "drop_last"), [(0, False), (3, False), (0, True), (7, True)])
def test_training_on_too_few_samples_is_refused(count: int, drop_last: bool) -> None:
    with pytest.raises(ValueError, match=rf"Received: {count} samples.*size=4.*Fix: use fewer"):
        shard(np.arange(count), 2, drop_last=drop_last, rank=0, size=4)


@pytest.mark.parametrize("count", [0, 3, 37, 858])
def test_evaluation_takes_each_sample_once_in_order(count: int) -> None:
    per_rank = all_ranks(lambda: np.arange(count), 4, 8, train=False)
    assert flat(per_rank) == list(range(count))
    lengths = [len(flat([rank])) for rank in per_rank]
    assert max(lengths) - min(lengths) <= 1


def test_each_pass_is_the_next_epoch_with_its_own_order() -> None:
    dataset = shard(np.arange(20), 5, seed=9, rank=1, size=2)
    for epoch in range(3):
        expected = EpochPlan(20, 5, 2).batches(epoch_permutation(20, 9, epoch), 1)
        assert batches(dataset) == [batch.tolist() for batch in expected]
    unshuffled = shard(np.arange(20), 5, shuffle=False, rank=1, size=2)
    assert batches(unshuffled) == batches(unshuffled) == [list(range(5, 10)), list(range(15, 20))]


def test_a_resumed_job_goes_on_with_the_order_of_its_epoch() -> None:
    whole = shard(np.arange(20), 5, rank=0, size=2)
    epochs = [batches(whole) for _ in range(4)]
    assert batches(shard(np.arange(20), 5, first_epoch=3, rank=0, size=2)) == epochs[3]
    set_epoch(whole, 1)
    assert [batches(whole) for _ in range(2)] == epochs[1:3]


def test_a_pass_that_was_left_is_not_counted() -> None:
    dataset = shard(np.arange(8), 2, rank=0, size=2)  # two steps: the prefetch reads both
    first = batches(dataset)
    set_epoch(dataset, 0)
    for _ in range(3):
        assert next(dataset.as_numpy_iterator()).tolist() == first[0]
    assert batches(dataset) == first
    assert batches(dataset) != first
    # A data set that is made from it follows, but is not the one to tell.
    doubled = dataset.map(lambda row: 2 * row)
    orders = [batches(doubled) for _ in range(2)]
    assert orders[0] != orders[1]
    set_epoch(dataset, 2)
    assert batches(doubled) == orders[0]
    with pytest.raises(ValueError, match=r"shard\(\) returned .* Fix"):
        set_epoch(doubled, 0)


def test_structures_stay_together() -> None:
    rows = np.arange(10)
    features = {"image": rows[:, None] * np.ones((1, 3), np.float32), "name": rows.astype(str)}
    weights = tf.constant(rows, tf.float16)
    dataset = shard((features, rows, weights), 2, rank=1, size=2, drop_last=True)
    assert dataset.element_spec == (
        {"image": tf.TensorSpec((2, 3), tf.float64), "name": tf.TensorSpec((2,), tf.string)},
        tf.TensorSpec((2,), tf.int64),
        tf.TensorSpec((2,), tf.float16),
    )
    for x, y, weight in dataset.as_numpy_iterator():
        assert (x["image"] == y[:, None]).all()
        assert x["name"].astype(int).tolist() == y.tolist() == weight.tolist()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [([1, 2, 3], TypeError), ("rows", TypeError), ((np.arange(3), None), TypeError),
     ((), TypeError), (np.float32(3), TypeError), ((np.arange(3), np.arange(4)), ValueError),
     (tf.ragged.constant([[1], [2, 3]]), TypeError)],
)  # fmt: skip
def test_other_data_is_refused(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Received: "):
        shard(wrong, 1, rank=0, size=1)


@pytest.mark.parametrize("shuffle", [None, True])
@pytest.mark.parametrize(("count", "batch_size", "size"), TRAINING)
def test_a_data_set_gives_each_element_once_in_equal_steps(
    count: int, batch_size: int, size: int, shuffle: int | None
) -> None:
    per_rank = all_ranks(lambda: tf.data.Dataset.range(count), size, batch_size, shuffle=shuffle)
    together = global_batches(per_rank)
    assert sorted(itertools.chain(*together)) == list(range(count))
    assert len(together) == EpochPlan(count, batch_size, size, tail="merge").steps
    assert all(rank and min(map(len, rank)) > 0 for rank in per_rank)
    if shuffle is None:
        for step, batch in enumerate(together[:-1]):
            start = step * batch_size * size
            assert sorted(batch) == list(range(start, start + batch_size * size))


def test_a_shuffled_data_set_has_the_same_order_on_all_ranks_and_another_each_epoch() -> None:
    per_rank = []
    for rank in range(2):
        tf.random.set_seed(rank + 1)  # programs do this for dropout
        dataset = shard(tf.data.Dataset.range(40), 5, shuffle=16, rank=rank, size=2)
        per_rank.append([batches(dataset) for _ in range(3)])
    tf.random.set_seed(None)
    for epoch in zip(*per_rank, strict=True):
        assert sorted(flat(list(epoch))) == list(range(40))
    assert per_rank[0][0] != per_rank[0][1] != per_rank[0][2]
    resumed = shard(tf.data.Dataset.range(40), 5, shuffle=16, first_epoch=2, rank=1, size=2)
    assert batches(resumed) == per_rank[1][2]
    other = shard(tf.data.Dataset.range(40), 5, shuffle=16, seed=1, rank=0, size=2)
    assert batches(other) != per_rank[0][0]


def test_drop_last_and_declared_steps_of_a_data_set() -> None:
    per_rank = all_ranks(lambda: tf.data.Dataset.range(15), 4, 2, drop_last=True)
    assert flat(per_rank) == [0, 4, 1, 5, 2, 6, 3, 7]
    per_rank = all_ranks(lambda: tf.data.Dataset.range(15), 2, 2, steps_per_epoch=2)
    assert sorted(flat(per_rank)) == list(range(8))
    with pytest.raises(ValueError, match=r"at most 4.* Received: steps_per_epoch=5"):
        shard(tf.data.Dataset.range(15), 2, steps_per_epoch=5, rank=0, size=2)


@pytest.mark.parametrize("count", [0, 3, 37])
@pytest.mark.parametrize("known", [True, False])
def test_evaluation_of_a_data_set_takes_each_element_once(count: int, known: bool) -> None:
    def make() -> tf.data.Dataset:
        source = tf.data.Dataset.range(count)
        return source if known else source.filter(lambda _: True)

    per_rank = all_ranks(make, 4, 8, train=False)
    found = flat(per_rank)
    assert (found if known else sorted(found)) == list(range(count))


def test_structures_of_a_data_set() -> None:
    rows = np.arange(8)
    for source in (
        tf.data.Dataset.from_tensor_slices(({"a": rows}, rows)),
        tf.data.Dataset.from_tensor_slices(({"a": rows}, rows)).filter(lambda x, y: True),
    ):
        dataset = shard(source, 2, steps_per_epoch=2, shuffle=8, rank=1, size=2)
        found = [(x["a"].tolist(), y.tolist()) for x, y in dataset.as_numpy_iterator()]
        assert len(found) == 2
        assert all(x == y for x, y in found)


def test_nine_batches_over_two_ranks() -> None:
    def make() -> tf.data.Dataset:
        return tf.data.Dataset.range(18).batch(2)

    with pytest.warns(UserWarning, match="1 of 9 batches are left out .* all 2 ranks take 4 steps"):
        rank_0 = batches(shard(make(), None, rank=0, size=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_1 = batches(shard(make(), None, rank=1, size=2, drop_last=True))
        evaluated = all_ranks(make, 2, 2, batched=True, train=False)
    assert rank_0 == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert rank_1 == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert flat(evaluated) == list(range(18))
    assert [len(rank) for rank in evaluated] == [5, 4]
    with pytest.raises(ValueError, match=r"Received: 9 batches.*size=10"):
        shard(make(), None, rank=0, size=10)


def test_batches_that_are_taken_for_samples_are_warned_of() -> None:
    source = tf.data.Dataset.range(8).batch(2)
    with pytest.warns(UserWarning, match="batch_size=None"):
        shard(source.map(lambda x: x).prefetch(1), 2, rank=0, size=2)
    assert flat(all_ranks(source.unbatch, 2, 2, num_samples=8))


def test_an_order_that_differs_between_ranks_is_refused() -> None:
    source = tf.data.Dataset.range(8)
    unordered = tf.data.Options()
    unordered.deterministic = False
    for wrong, what in (
        (source.shuffle(8).map(lambda x: x), "without a seed"),
        (source.map(lambda x: x, num_parallel_calls=2, deterministic=False), "deterministic=False"),
        (source.with_options(unordered), "options with deterministic=False"),
        (tf.data.Dataset.sample_from_datasets([source, source]), "_RandomDataset without a seed"),
        (tf.data.Dataset.random().take(8), "_RandomDataset without a seed"),
        (source.flat_map(lambda i: tf.data.Dataset.range(i).shuffle(3)), "without a seed in its"),
    ):
        with pytest.raises(ValueError, match=f"same on all ranks.*{what}.*Fix: pass a seed"):
            shard(wrong, 2, rank=0, size=2)
        if wrong.cardinality() == 8:
            assert len(batches(shard(wrong, 2, rank=0, size=1))) == 4
    for right in (
        lambda: source.shuffle(8, seed=1, reshuffle_each_iteration=False),
        lambda: source.batch(2).flat_map(
            lambda part: tf.data.Dataset.from_tensor_slices(part).shuffle(2, seed=1)
        ),
        lambda: tf.data.Dataset.choose_from_datasets(
            [source.take(4), source.skip(4)], tf.data.Dataset.range(2).repeat()
        ),
    ):
        assert sorted(flat(all_ranks(right, 2, 2, num_samples=8))) == list(range(8))


def test_an_order_that_depends_on_the_passes_before_is_warned_of() -> None:
    source = tf.data.Dataset.range(8).shuffle(8, seed=1)
    with pytest.warns(UserWarning, match="one more, after which samples are taken twice"):
        shard(source.map(lambda x: x), 2, rank=0, size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(source, 2, rank=0, size=1)


def unknown(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).filter(lambda _: True)


def generator(count: int) -> Any:
    return (np.float32(number) for number in range(count))


@pytest.mark.parametrize(
    "make",
    [lambda: unknown(99), lambda: tf.data.Dataset.range(99).repeat(), lambda: generator(99),
     lambda: lambda: generator(99)],
)  # fmt: skip
def test_a_length_that_nobody_tells_is_an_error(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected .*steps.* Fix: pass "):
        shard(make(), 2, rank=0, size=2)
    per_rank = all_ranks(make, 2, 3, steps_per_epoch=4)
    assert [len(rank) for rank in per_rank] == [4, 4]
    assert [sorted(step) for step in global_batches(per_rank)] == [
        list(range(start, start + 6)) for start in range(0, 24, 6)
    ]


def test_a_declared_length_is_checked() -> None:
    assert sorted(flat(all_ranks(lambda: unknown(9), 2, 2, num_samples=9))) == list(range(9))
    with pytest.raises(tf.errors.FailedPreconditionError, match="10 element"):
        batches(shard(unknown(9), 2, num_samples=10, rank=0, size=2))
    assert sorted(flat(all_ranks(lambda: unknown(9), 2, 2, num_samples=8))) == list(range(8))
    assert flat(all_ranks(lambda: unknown(9), 2, 2, num_samples=8, train=False)) == list(range(8))
    for wrong in ({"num_samples": 9}, {"steps_per_epoch": 2, "shuffle": True}):
        with pytest.raises(ValueError, match=r"num_samples=9|Fix: shuffle=10_000"):
            shard(generator(9), 2, rank=0, size=2, **wrong)
    with pytest.raises(ValueError, match=r"num_samples=10, elements=9"):
        shard(tf.data.Dataset.range(9), 2, num_samples=10, rank=0, size=2)


@pytest.mark.parametrize(
    "make", [lambda: unknown(23), lambda: generator(23), lambda: lambda: generator(23)]
)
def test_a_short_source_ends_all_ranks_in_the_same_step(make: Callable[[], Any]) -> None:
    for rank in range(2):
        iterator = iter(shard(make(), 3, steps_per_epoch=4, rank=rank, size=2))
        assert len([next(iterator) for _ in range(3)]) == 3
        with pytest.raises(Exception, match=r"=4 steps of 6 samples.* ran short"):
            next(iterator)
    with pytest.raises(tf.errors.FailedPreconditionError, match="4 element"):
        batches(shard(unknown(0), 3, steps_per_epoch=4, rank=0, size=2))


def test_epochs_of_an_endless_source_go_on() -> None:
    source = tf.data.Dataset.range(100).repeat()
    dataset = shard(source, 2, steps_per_epoch=3, rank=0, size=2)
    assert batches(dataset) == [[0, 2], [4, 6], [8, 10]]
    assert next(dataset.as_numpy_iterator()).tolist() == [12, 14]  # as Keras builds a model
    assert batches(dataset) == [[12, 14], [16, 18], [20, 22]]
    resumed = shard(source, 2, steps_per_epoch=3, first_epoch=1, rank=0, size=2)
    assert batches(resumed) == [[12, 14], [16, 18], [20, 22]]
    shuffled = all_ranks(lambda: source, 2, 2, steps_per_epoch=3, shuffle=5)
    assert len(set(flat(shuffled))) == 12
    assert flat(shuffled) != sorted(flat(shuffled))


def test_generators_of_batches() -> None:
    def make() -> Any:
        return ({"x": np.full((rows, 2), rows)} for rows in (4, 4, 3, 2))

    for rank, lengths in ((0, [4, 3]), (1, [4, 2])):
        dataset = shard(make, None, steps_per_epoch=2, rank=rank, size=2)
        assert dataset.element_spec == {"x": tf.TensorSpec((None, 2), tf.int64)}
        assert [len(batch["x"]) for batch in dataset] == lengths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"batch_size": 0}, "batch_size=0"), ({"batch_size": None}, "batch_size=None"),
     ({"batched": True}, "batch_size=None"), ({"seed": -1}, "seed=-1"),
     ({"shuffle": 100}, "shuffle=100"), ({"shuffle": True, "train": False}, "train=False"),
     ({"drop_last": True, "train": False}, "drop_last=True, train=False"),
     ({"num_samples": 7}, "num_samples=7, rows=8"), ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
     ({"steps_per_epoch": 3}, "at most 2.*steps_per_epoch=3"), ({"rank": 2}, "rank=2, size=2"),
     ({"first_epoch": -1}, "first_epoch=-1"), ({"rank": None}, "rank=None, size=2")],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Expected .*{message}"):
        shard(np.arange(8), **{"batch_size": 2, "rank": 0, "size": 2, **arguments})


def test_the_rank_is_asked_of_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
    backend = SimpleNamespace(mpi_ops=ranks)
    monkeypatch.setitem(sys.modules, "hvdkit.tensorflow.backend", backend)
    assert batches(shard(np.arange(9), 3, shuffle=False)) == [[3, 4, 5]]


class Seen(keras.Model):
    """Remembers the rows that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.rows: list[list[int]] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.rows.append(batch[1].numpy().astype(int).tolist())
        return super().train_step(batch)


@pytest.mark.parametrize("initial_epoch", [0, 2])
def test_fit_sees_the_order_of_each_epoch(initial_epoch: int) -> None:
    rows = np.arange(9, dtype=np.float32)
    dataset = shard((rows[:, None], rows), 2, rank=0, size=2)
    model = Seen()  # not built: Keras takes a batch before the first epoch
    model.compile("sgd", "mse", run_eagerly=True)
    numbers = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: set_epoch(dataset, epoch)
    )
    epochs = {"initial_epoch": initial_epoch, "epochs": 4, "verbose": 0, "shuffle": False}
    model.fit(dataset, callbacks=[numbers], **epochs)
    plan = EpochPlan(9, 2, 2, tail="merge")
    orders = [epoch_permutation(9, 0, epoch) for epoch in range(initial_epoch, 4)]
    expected = [batch.tolist() for order in orders for batch in plan.batches(order, 0)]
    assert model.rows == expected
    # The same where passes are counted.
    counted = shard((rows[:, None], rows), 2, first_epoch=initial_epoch, rank=0, size=2)
    model = Seen()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(counted, **epochs)
    assert model.rows == expected


def test_evaluate_and_fit_compiled() -> None:
    x, y = np.ones((11, 2), np.float32), np.arange(11, dtype=np.float32)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(shard((x, y), 2, rank=0, size=2), epochs=2, verbose=0, shuffle=False)
    alone = model.evaluate(x, y, verbose=0)
    shares = [shard((x, y), 2, train=False, rank=rank, size=2) for rank in range(2)]
    losses = [model.evaluate(share, verbose=0) for share in shares]
    assert (losses[0] * 6 + losses[1] * 5) / 11 == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: tf.data.Dataset.range(99).repeat(), lambda: generator(99)]
)
def test_a_resumed_epoch_of_an_endless_source(make: Callable[[], Any], peek: bool) -> None:
    whole = shard(make(), 2, steps_per_epoch=3, rank=0, size=2)
    passes = [batches(whole) for _ in range(4)]
    resumed = shard(make(), 2, steps_per_epoch=3, rank=0, size=2)
    if peek:  # as Keras does to build a model
        assert np.array_equal(next(iter(resumed)), passes[0][0])
    set_epoch(resumed, 2)
    assert batches(resumed) == passes[2]
    set_epoch(resumed, 3)
    assert batches(resumed) == passes[3]
    set_epoch(resumed, 0)  # another fit() goes on where the last one ended
    assert batches(resumed) != passes[0]
