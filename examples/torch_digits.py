"""Trains a small CNN on scikit-learn's 1,797 handwritten digits, on any number of ranks.

    python examples/torch_digits.py                            # one rank, also without Horovod
    ./horovodrun.sh -np 4 python examples/torch_digits.py      # four

Only what is marked with "hvd" makes it a distributed script.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import hvdkit.torch as hvd

SPLIT_SEED = 0
"""The test part is the same whatever the number of ranks and --seed."""
WARMUP_PART = 0.2
"""Part of all steps in which the learning rate rises to its scaled value."""

Part = tuple[torch.Tensor, torch.Tensor]


def load_parts() -> tuple[Part, Part]:
    """Training and test part: images of shape (n, 1, 8, 8) from 0 to 1, and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=SPLIT_SEED, stratify=digits.target
    )
    return (images[train], labels[train]), (images[test], labels[test])


def build_model() -> nn.Module:
    """Two convolutions and two linear layers, 75,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def epoch_batches(samples: int, epoch: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """This rank's batches of one epoch, as many on every rank.

    All ranks draw the same order and cut it into global batches; each takes its own part of each.
    The parts of the last one are smaller and may differ by one; hvd.distribute weighs samples.
    """
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    for start in range(0, samples, batch_size * hvd.size()):
        global_batch = order[start : start + batch_size * hvd.size()]
        yield np.array_split(global_batch, hvd.size())[hvd.rank()]


def train_epoch(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    part: Part,
    batches: Iterator[np.ndarray],
    advance: Callable[[], None],
) -> float:
    """One pass over the training part; returns the mean loss over the samples of all ranks."""
    images, labels = part
    total = torch.zeros(2, dtype=torch.float64)
    model.train()
    for batch in batches:
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if len(batch):
            total += torch.tensor([loss.item() * len(batch), len(batch)])
        advance()
    loss_sum, count = hvd.allreduce(total, name="loss", op=hvd.Sum).tolist()
    return loss_sum / count


@torch.no_grad()
def evaluate(model: nn.Module, part: Part) -> tuple[int, int]:
    """Correct answers and samples, over all ranks; each rank looks at its own share."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in part)
    model.eval()
    correct = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.tensor([int(correct), len(labels)])
    right, seen = hvd.allreduce(counts, name="correct", op=hvd.Sum).tolist()
    return right, seen


def on_terminal() -> bool:
    """Whether a person's terminal shows the output, where a bar can move.

    mpirun gives each rank a terminal of its own, without a width, and passes the output on.
    """
    return sys.stdout.isatty() and os.get_terminal_size().columns > 0


@contextlib.contextmanager
def progress(epochs: int, steps: int) -> Iterator[tuple[Callable[[], None], Callable[..., None]]]:
    """Shows the progress on rank 0: a moving bar on a terminal, else a line for each epoch.

    Yields a function to call after each step, and one to call after each epoch.
    """
    if hvd.rank() == 0 and on_terminal():
        from rich.progress import MofNCompleteColumn, Progress

        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns) as bar:
            task = bar.add_task("training", total=epochs * steps)
            yield (
                lambda: bar.advance(task),
                lambda epoch, loss: bar.update(task, description=f"epoch {epoch} loss {loss:.4f}"),
            )
        return

    def print_epoch(epoch: int, loss: float) -> None:
        if hvd.rank() == 0:
            done = 20 * epoch // epochs
            bar = "#" * done + "." * (20 - done)
            print(f"[{bar}] epoch {epoch}/{epochs} loss {loss:.4f}", flush=True)

    yield (lambda: None), print_epoch


def checked(kind: Callable[[str], Any], minimum: float, what: str) -> Callable[[str], Any]:
    """A type for argparse: a finite number that is at least `minimum`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            legal = minimum <= value < math.inf
        except ValueError:
            legal = False
        if not legal:
            raise argparse.ArgumentTypeError(f"expected {what}. Received: {text!r}.")
        return value

    return parse


def parse_arguments() -> argparse.Namespace:
    """The command line's options, checked."""
    count = checked(int, 1, "a whole number >= 1")
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=count, default=25, help="passes over the training part")
    parser.add_argument("--batch-size", type=count, default=16, help="samples a rank and backward")
    parser.add_argument(
        "--lr",
        type=checked(float, sys.float_info.min, "a finite number > 0"),
        default=0.04,
        help="learning rate for one rank's batch; scaled with the ranks",
    )
    parser.add_argument(
        "--compression",
        choices=("none", "fp16", "bf16"),
        default="none",
        help="format in which gradients travel",
    )
    parser.add_argument("--accumulate", type=count, default=1, help="backward passes a step")
    parser.add_argument(
        "--seed", type=checked(int, 0, "a whole number >= 0"), default=0, help="weights and order"
    )
    return parser.parse_args()


def main() -> int:
    """Trains and reports; 1 where the training diverged."""
    arguments = parse_arguments()
    hvd.init()  # hvd
    torch.manual_seed(arguments.seed)
    device = hvd.device()  # hvd
    train, test = (tuple(tensor.to(device) for tensor in part) for part in load_parts())
    samples = len(train[1])
    steps = math.ceil(samples / (arguments.batch_size * hvd.size()))
    optimizer_steps = math.ceil(arguments.epochs * steps / arguments.accumulate)

    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, optimizer_steps)
    model, optimizer, scheduler = hvd.distribute(  # hvd
        model,
        optimizer,
        scheduler,
        warmup_steps=int(WARMUP_PART * optimizer_steps),
        compression=arguments.compression,
        accumulate=arguments.accumulate,
    )

    torch.manual_seed(arguments.seed + hvd.rank())  # each rank drops other features
    start = time.perf_counter()
    with progress(arguments.epochs, steps) as (advance, end_epoch):
        for epoch in range(arguments.epochs):
            batches = epoch_batches(samples, epoch, arguments.batch_size, arguments.seed)
            loss = train_epoch(model, optimizer, scheduler, train, batches, advance)
            if not math.isfinite(loss):
                break
            end_epoch(epoch + 1, loss)
    if not math.isfinite(loss):
        if hvd.rank() == 0:
            print(
                f"error: the training diverged in epoch {epoch + 1}: expected a finite loss. "
                f"Received: loss={loss}. Fix: lower --lr={arguments.lr}.",
                file=sys.stderr,
                flush=True,
            )
        return 1
    optimizer.flush()  # a last window of --accumulate that is not full
    seconds = time.perf_counter() - start
    correct, count = evaluate(model, test)
    if hvd.rank() == 0:
        print(
            f"ranks {hvd.size()}, {arguments.epochs * samples / seconds:.0f} samples/s, "
            f"test accuracy {100 * correct / count:.2f} % ({correct} of {count})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
