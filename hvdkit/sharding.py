"""How the samples of a data set are split over ranks: permutations, steps, blocks and a cursor.

Pure arithmetic, so that PyTorch and TensorFlow/Keras feed the same samples in the same steps.

An epoch is one permutation that all ranks share. Each step takes the next *global batch* of it,
``batch_size * size`` samples, and rank r takes the r-th contiguous block of that. So N ranks take
the steps of one process with the N-fold batch, sample for sample; what is done is a single number,
the samples seen; and a job can go on with any other number of ranks and any other batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
TAILS = ("even", "merge", "drop")


def _check_whole(minimum: int, fix: str, **values: object) -> None:
    """Raises ``ValueError`` unless each value is a whole number that is not too small."""
    for name, value in values.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or value < minimum:  # type: ignore[operator]
            raise ValueError(
                f"Expected {name} to be a whole number >= {minimum}. "
                f"Received: {name}={value!r}. Fix: {fix}"
            )


def _check_rank(rank: int, size: int) -> None:
    _check_whole(1, "pass the number of ranks of the job.", size=size)
    _check_whole(0, "pass the number of this rank, counted from 0.", rank=rank)
    if rank >= size:
        raise ValueError(
            f"Expected rank below size. Received: rank={rank}, size={size}. "
            "Fix: ranks count from 0 to size - 1."
        )


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> Indices:
    """The order of all samples in one epoch.

    It depends on nothing but the arguments: not on the rank, nor on the number of ranks.

    Args:
        num_samples: Samples in the data set.
        seed: Seed of the data order, equal on all ranks.
        epoch: Number of the epoch, from 0.

    Returns:
        Each of ``0 .. num_samples - 1`` once; int64, shape ``(num_samples,)``.

    Raises:
        ValueError: An argument is not a whole number >= 0.

    Example:
        >>> epoch_permutation(6, seed=0, epoch=0).tolist()
        [3, 2, 1, 0, 4, 5]
        >>> sorted(epoch_permutation(6, seed=0, epoch=1).tolist())
        [0, 1, 2, 3, 4, 5]
    """
    _check_whole(0, "pass len(dataset).", num_samples=num_samples)
    _check_whole(0, "use one non-negative seed on all ranks.", seed=seed)
    _check_whole(0, "count epochs from 0.", epoch=epoch)
    # Sorting raw bits instead of Generator.permutation: NumPy guarantees the stream of a bit
    # generator for good, that of Generator's methods only within a release, and a checkpoint may
    # be resumed under another one.
    bits = np.random.PCG64(np.random.SeedSequence((int(seed), int(epoch))))
    keys = np.asarray(bits.random_raw(int(num_samples)), dtype=np.uint64)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def even_block(total: int, rank: int, size: int) -> tuple[int, int]:
    """A rank's block where `total` samples are split as evenly as possible.

    The blocks are contiguous, disjoint and in the order of the ranks; no sample is padded or left
    out; lengths differ by at most 1, the longer ones first. This is the split for evaluation.

    Args:
        total: Number of samples to split.
        rank: Whose block.
        size: Number of ranks.

    Returns:
        Start and stop; equal where there are fewer samples than ranks and none is left for this.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> [even_block(10, rank, 4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    _check_whole(0, "pass the number of samples.", total=total)
    _check_rank(rank, size)
    base, longer = divmod(total, size)
    start = rank * base + min(rank, longer)
    return start, start + base + (rank < longer)


@dataclass(frozen=True)
class Cursor:
    """Where a job stands in its data, in global samples: free of ranks and batch sizes.

    Args:
        seed: Seed of the data order.
        epoch: Number of the epoch, from 0.
        samples_seen: How many samples of the epoch's permutation all ranks together have used.

    Raises:
        ValueError: A value is not a whole number >= 0.

    Example:
        >>> cursor = Cursor(seed=7, epoch=2, samples_seen=640)
        >>> Cursor.from_dict(cursor.to_dict()) == cursor
        True
        >>> cursor.next_epoch()
        Cursor(seed=7, epoch=3, samples_seen=0)
    """

    seed: int
    epoch: int = 0
    samples_seen: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check_whole(0, "take the cursor from a checkpoint, or start anew.", **{name: value})
            object.__setattr__(self, name, int(value))  # NumPy's integers are not JSON

    def next_epoch(self) -> Cursor:
        """The beginning of the epoch after this one."""
        return Cursor(self.seed, self.epoch + 1)

    def to_dict(self) -> dict[str, int]:
        """As a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Back from :meth:`to_dict`.

        Raises:
            ValueError: A key is missing or unknown, or a value is out of its range.
        """
        expected = sorted(cls.__dataclass_fields__)
        if sorted(values) != expected:
            raise ValueError(
                f"Expected a cursor with keys {expected}. Received: keys={sorted(values)}. "
                "Fix: pass what to_dict() gave."
            )
        return cls(**values)


@dataclass(frozen=True)
class EpochPlan:
    """The training steps of one epoch, or of what is left of it; the same number on all ranks.

    All steps but the last take ``batch_size * size`` samples. The rest, if there is one, goes by
    `tail`:

    * ``"even"``: one more step, split as evenly as possible. It is the step that one process with
      the big batch would take. With fewer samples than ranks some ranks have an *empty* batch.
    * ``"merge"``: the same, but a rest of fewer samples than ranks joins the step before, whose
      batches grow by at most 1. No rank ever has an empty batch. A whole plan of fewer samples
      than ranks cannot be had this way and is refused.
    * ``"drop"``: the rest is left out of this epoch (:attr:`left_out` says how much).

    Under each rule no sample is used twice, and gradients must be weighted by the samples of each
    rank in the last step for an exact mean.

    Args:
        num_samples: Samples in the data set.
        batch_size: Samples a rank and step.
        size: Number of ranks.
        samples_seen: Samples of this epoch that are done, as in :class:`Cursor`.
        tail: ``"even"``, ``"merge"`` or ``"drop"``.

    Raises:
        ValueError: A number is out of its range, the tail is unknown, or ``"merge"`` has fewer
            samples than ranks.

    Example:
        >>> plan = EpochPlan(num_samples=10, batch_size=2, size=2)
        >>> plan.steps, [plan.rank_bounds(2, rank) for rank in range(2)]
        (3, [(8, 9), (9, 10)])
        >>> EpochPlan(10, batch_size=4, size=1, samples_seen=plan.seen_after(1)).global_bounds(0)
        (4, 8)
    """

    num_samples: int
    batch_size: int
    size: int
    samples_seen: int = 0
    tail: str = "even"

    def __post_init__(self) -> None:
        _check_whole(0, "pass len(dataset).", num_samples=self.num_samples)
        _check_whole(1, "pass the samples a rank and step.", batch_size=self.batch_size)
        _check_whole(1, "pass the number of ranks of the job.", size=self.size)
        _check_whole(0, "take it from a Cursor.", samples_seen=self.samples_seen)
        if self.samples_seen > self.num_samples:
            raise ValueError(
                "Expected samples_seen of at most num_samples. Received: "
                f"samples_seen={self.samples_seen}, num_samples={self.num_samples}. Fix: use the "
                "data set that the cursor was made with, or begin the next epoch."
            )
        if self.tail not in TAILS:
            raise ValueError(
                f"Expected tail to be one of {', '.join(TAILS)}. Received: tail={self.tail!r}."
            )
        if self.tail == "merge" and 0 < self.remaining < self.size:
            raise ValueError(
                "Expected at least one sample for each rank. Received: "
                f"{self.remaining} samples left of num_samples={self.num_samples}, "
                f"size={self.size}. Fix: use fewer ranks; or, if batches may be empty, "
                "tail='even'; or leave these samples out with tail='drop'."
            )

    @property
    def global_batch(self) -> int:
        """Samples of a full step, all ranks together."""
        return self.batch_size * self.size

    @property
    def remaining(self) -> int:
        """Samples of the epoch that were not seen when this plan began."""
        return self.num_samples - self.samples_seen

    @property
    def steps(self) -> int:
        """Number of steps, the same on all ranks."""
        full, rest = divmod(self.remaining, self.global_batch)
        least = {"even": 1, "merge": self.size, "drop": self.global_batch}[self.tail]
        # A merge needs a full step to join; __post_init__ has refused the plans without one.
        return full + (rest >= least)

    @property
    def left_out(self) -> int:
        """Samples that no rank uses in this epoch; 0 unless ``tail="drop"``."""
        return self.num_samples - self.seen_after(self.steps)

    def global_bounds(self, step: int) -> tuple[int, int]:
        """Start and stop, in the epoch's permutation, of the samples of all ranks in a step.

        Raises:
            ValueError: The plan has no such step.
        """
        _check_whole(0, "count steps from 0.", step=step)
        if step >= self.steps:
            raise ValueError(
                f"Expected step below {self.steps}. Received: step={step}. "
                "Fix: go on with the plan of the next epoch."
            )
        start = self.samples_seen + step * self.global_batch
        if step == self.steps - 1 and self.tail != "drop":
            return start, self.num_samples
        return start, start + self.global_batch

    def rank_bounds(self, step: int, rank: int) -> tuple[int, int]:
        """Start and stop, in the epoch's permutation, of one rank's batch in a step.

        Raises:
            ValueError: The plan has no such step or rank.
        """
        start, stop = self.global_bounds(step)
        first, last = even_block(stop - start, rank, self.size)
        return start + first, start + last

    def seen_after(self, steps: int) -> int:
        """``samples_seen`` for a :class:`Cursor` once so many steps of this plan are done.

        Raises:
            ValueError: The plan has fewer steps.
        """
        _check_whole(0, "pass the number of finished steps.", steps=steps)
        return self.samples_seen if steps == 0 else self.global_bounds(steps - 1)[1]

    def batches(self, order: Indices, rank: int) -> Iterator[Indices]:
        """A rank's batches, as sample indices.

        Args:
            order: All samples in the order of the epoch; see :func:`epoch_permutation`.
            rank: Whose batches.

        Returns:
            An iterator over :attr:`steps` arrays; views into `order`.

        Raises:
            ValueError: `order` does not have `num_samples` entries, or there is no such rank.

        Example:
            >>> plan = EpochPlan(num_samples=7, batch_size=2, size=2)
            >>> [batch.tolist() for batch in plan.batches(np.arange(7), rank=1)]
            [[2, 3], [6]]
        """
        _check_rank(rank, self.size)
        if len(order) != self.num_samples:
            raise ValueError(
                f"Expected an order of num_samples={self.num_samples} entries. "
                f"Received: len(order)={len(order)}. Fix: use epoch_permutation(num_samples, ...)."
            )
        return (order[slice(*self.rank_bounds(step, rank))] for step in range(self.steps))
