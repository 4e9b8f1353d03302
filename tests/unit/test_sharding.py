"""Permutations, plans of steps, blocks and the cursor that survives another number of ranks."""

from __future__ import annotations

import doctest
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdkit import sharding
from hvdkit.sharding import Cursor, EpochPlan, epoch_permutation, even_block

SAMPLES = st.integers(0, 300)
SIZES = st.integers(1, 16)
BATCHES = st.one_of(st.integers(1, 40), st.integers(41, 10**6))
TAILS = st.sampled_from(sharding.TAILS)


def plan_or_reject(num_samples: int, batch_size: int, size: int, seen: int, tail: str) -> EpochPlan:
    assume(not (tail == "merge" and 0 < num_samples - seen < size))
    return EpochPlan(num_samples, batch_size, size, seen, tail)


def by_step(plan: EpochPlan, order: np.ndarray) -> list[list[list[int]]]:
    """For each step the batches of all ranks; fails where ranks have different numbers of steps."""
    per_rank = [[b.tolist() for b in plan.batches(order, rank)] for rank in range(plan.size)]
    return [list(batches) for batches in zip(*per_rank, strict=True)]


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(sharding).failed == 0


def test_no_framework_is_loaded() -> None:
    code = (
        "import sys, hvdkit.sharding\n"
        "print({'torch', 'tensorflow', 'keras', 'horovod'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@given(SAMPLES, st.integers(0, 2**40), st.integers(0, 1000))
def test_a_permutation_has_each_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_permutation(num_samples, seed, epoch)
    assert order.dtype == np.int64
    assert order.shape == (num_samples,)
    assert sorted(order) == list(range(num_samples))
    assert (epoch_permutation(num_samples, seed, epoch) == order).all()


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = [
        epoch_permutation(100, seed, epoch) for seed, epoch in itertools.product(range(9), range(9))
    ]
    assert len({order.tobytes() for order in orders}) == 81
    # Held for ever: checkpoints name only the seed and the epoch.
    assert epoch_permutation(8, seed=1, epoch=2).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]


def test_places_are_even() -> None:
    orders = np.stack([epoch_permutation(5, seed=3, epoch=epoch) for epoch in range(4000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=5) for place in range(5)])
    assert abs(counts - 800).max() < 5 * np.sqrt(4000 * 0.2 * 0.8)


@given(st.integers(0, 10**9), SIZES)
def test_blocks_are_contiguous_disjoint_and_even(total: int, size: int) -> None:
    blocks = [even_block(total, rank, size) for rank in range(size)]
    assert blocks[0][0] == 0
    assert blocks[-1][1] == total
    assert all(left[1] == right[0] for left, right in itertools.pairwise(blocks))
    lengths = [stop - start for start, stop in blocks]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(SAMPLES, BATCHES, SIZES, st.integers(0, 5))
def test_ranks_together_take_the_steps_of_one_process(
    num_samples: int, batch_size: int, size: int, epoch: int
) -> None:
    order = epoch_permutation(num_samples, 0, epoch)
    many = by_step(EpochPlan(num_samples, batch_size, size), order)
    alone = by_step(EpochPlan(num_samples, batch_size * size, 1), order)
    assert [list(itertools.chain(*batches)) for batches in many] == [
        batches[0] for batches in alone
    ]


@given(SAMPLES, BATCHES, SIZES, TAILS)
def test_each_sample_once_and_sizes_in_bounds(
    num_samples: int, batch_size: int, size: int, tail: str
) -> None:
    plan = plan_or_reject(num_samples, batch_size, size, 0, tail)
    order = epoch_permutation(num_samples, 5, 0)
    steps = by_step(plan, order)
    assert len(steps) == plan.steps
    used = [sample for batches in steps for batch in batches for sample in batch]
    assert used == order[: num_samples - plan.left_out].tolist()
    for step, batches in enumerate(steps):
        lengths = [len(batch) for batch in batches]
        assert max(lengths) - min(lengths) <= 1
        if step < len(steps) - 1:
            assert lengths == [batch_size] * size
        if tail != "even":
            assert min(lengths) > 0
        assert max(lengths) <= batch_size + (tail == "merge")
    if tail == "drop":
        assert plan.left_out == num_samples % (batch_size * size)
    else:
        assert plan.left_out == 0


@given(SAMPLES, TAILS, st.integers(0, 2**32), st.data())
def test_a_job_may_go_on_with_other_ranks_and_batches(
    num_samples: int, tail: str, seed: int, data: st.DataObject
) -> None:
    cursor = Cursor(seed, epoch=3)
    used: list[int] = []
    for last in (False, False, True):
        size, batch_size = data.draw(SIZES), data.draw(BATCHES)
        plan = plan_or_reject(num_samples, batch_size, size, cursor.samples_seen, tail)
        order = epoch_permutation(num_samples, cursor.seed, cursor.epoch)
        done = plan.steps if last else data.draw(st.integers(0, plan.steps))
        for batches in by_step(plan, order)[:done]:
            used += itertools.chain(*batches)
        left_out = plan.left_out
        cursor = Cursor(seed, cursor.epoch, plan.seen_after(done))
        cursor = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    assert used == order[: num_samples - left_out].tolist()
    assert left_out == 0 or tail == "drop"
    assert cursor.samples_seen == len(used)


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "size", "tail", "last"),
    [
        (858, 32, 4, "even", [23, 23, 22, 22]),  # 90 samples after 6 steps of 128
        (9, 1, 2, "even", [1, 0]),  # nine batches over two ranks
        (9, 1, 2, "merge", [2, 1]),
        (9, 1, 2, "drop", [1, 1]),
        (3, 2, 8, "even", [1, 1, 1, 0, 0, 0, 0, 0]),
        (16, 2, 8, "merge", [2] * 8),
    ],
)
def test_last_steps(
    num_samples: int, batch_size: int, size: int, tail: str, last: list[int]
) -> None:
    plan = EpochPlan(num_samples, batch_size, size, tail=tail)
    assert [len(batch) for batch in by_step(plan, np.arange(num_samples))[-1]] == last


def test_no_samples_are_no_steps() -> None:
    for tail in sharding.TAILS:
        assert EpochPlan(0, 4, 3, tail=tail).steps == 0
        assert EpochPlan(9, 4, 3, samples_seen=9, tail=tail).steps == 0


def test_merge_refuses_fewer_samples_than_ranks() -> None:
    with pytest.raises(ValueError, match=r"Received: 3 samples left .*size=4\. Fix: .*'even'"):
        EpochPlan(3, 1, 4, tail="merge")
    with pytest.raises(ValueError, match="Received: 2 samples left of num_samples=10"):
        EpochPlan(10, 1, 4, samples_seen=8, tail="merge")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epoch_permutation(-1, 0, 0), r"Received: num_samples=-1\. Fix"),
        (lambda: epoch_permutation(4, 0.5, 0), r"Received: seed=0\.5\. Fix"),
        (lambda: epoch_permutation(4, 0, True), r"Received: epoch=True\. Fix"),
        (lambda: even_block(4, 2, 2), r"Received: rank=2, size=2\. Fix"),
        (lambda: even_block(4, 0, 0), r"Received: size=0\. Fix"),
        (lambda: EpochPlan(4, 0, 1), r"Received: batch_size=0\. Fix"),
        (lambda: EpochPlan(4, 1, 1, samples_seen=5), r"samples_seen=5, num_samples=4\. Fix"),
        (lambda: EpochPlan(4, 1, 1, tail="pad"), r"even, merge, drop\. Received: tail='pad'"),
        (lambda: EpochPlan(4, 1, 1).global_bounds(4), r"below 4\. Received: step=4\. Fix"),
        (lambda: EpochPlan(4, 1, 1).rank_bounds(0, 1), r"Received: rank=1, size=1\. Fix"),
        (lambda: EpochPlan(4, 1, 1).seen_after(-1), r"Received: steps=-1\. Fix"),
        (lambda: EpochPlan(4, 1, 1).batches(np.arange(3), 0), r"Received: len\(order\)=3\. Fix"),
        (lambda: Cursor(0, -1), r"Received: epoch=-1\. Fix"),
        (lambda: Cursor.from_dict({"seed": 1}), r"Received: keys=\['seed'\]\. Fix"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_numpy_integers_are_taken_and_json_gets_plain_ones() -> None:
    cursor = Cursor(np.int64(3), np.int32(1), np.int64(8))  # type: ignore[arg-type]
    assert json.dumps(cursor.to_dict()) == '{"seed": 3, "epoch": 1, "samples_seen": 8}'
    assert EpochPlan(np.int64(9), np.int64(2), 2).steps == 3  # type: ignore[arg-type]
