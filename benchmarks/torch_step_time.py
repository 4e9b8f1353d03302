"""Step time of hvdkit's PyTorch optimizer against Horovod's own and a loop written by hand.

All variants train in the same processes, in blocks of a few steps that take turns; the order of
the turns rotates from round to round. A round gives one ratio for each variant: its median step
over the median step of the loop written by hand. What else the machine does meanwhile meets all
variants of a round alike, so the median over rounds is steady where absolute times are not.

    mpirun -np 2 --bind-to none python benchmarks/torch_step_time.py --json result.json
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import horovod
import horovod.torch as horovod_torch
import torch
from torch import nn
from turns import interval, parser_of

import hvdkit.torch as hvdkit_torch

LR = 1e-3
BASELINE = "by hand"
Step = Callable[[torch.Tensor, torch.Tensor], None]


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, as in ResNet-18 (He et al. 2016, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features of the same or half the height and width."""
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(images)))))
        return torch.relu(inner + self.shortcut(images))


def mlp() -> nn.Module:
    """10.0 million parameters in 8 tensors, of which one alone has 4.2 million."""
    return nn.Sequential(
        nn.Linear(784, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


def resnet() -> nn.Module:
    """ResNet-18 with a stem for small images: 11.2 million parameters in 62 tensors."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    channels_in = 64
    for channels in (64, 128, 256, 512):
        layers.append(Block(channels_in, channels, 1 if channels == 64 else 2))
        layers.append(Block(channels, channels, 1))
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (32, 784)),
    "resnet": (resnet, (4, 3, 32, 32)),
}
"""Model and shape of one rank's batch."""


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop's body that all variants share."""

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that all variants use."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def by_hand(model: nn.Module, compression: str) -> Step:
    """What one would write for this model alone: a hook a parameter, then wait in order."""
    optimizer = sgd(model)
    compressor = horovod_compression(compression)
    pending: list[tuple[torch.Tensor, int, Any]] = []

    def add_hook(name: str, parameter: torch.Tensor) -> None:
        def on_gradient(parameter: torch.Tensor) -> None:
            wire, context = compressor.compress(parameter.grad)
            handle = horovod_torch.allreduce_async_(wire, name=name, op=horovod_torch.Average)
            pending.append((parameter, handle, context))

        parameter.register_post_accumulate_grad_hook(on_gradient)

    for name, parameter in model.named_parameters():
        add_hook(f"by_hand.{name}", parameter)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        for parameter, handle, context in pending:
            reduced = compressor.decompress(horovod_torch.synchronize(handle), context)
            if context is not None:
                parameter.grad.copy_(reduced)  # type: ignore[union-attr]
        pending.clear()
        optimizer.step()

    return step


def with_horovod(model: nn.Module, compression: str) -> Step:
    """``horovod.torch.DistributedOptimizer``."""
    optimizer = horovod_torch.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression=horovod_compression(compression)
    )
    return training_step(model, optimizer)


def with_hvdkit(model: nn.Module, compression: str) -> Step:
    """``hvdkit.torch.DistributedOptimizer``."""
    optimizer = hvdkit_torch.DistributedOptimizer(
        sgd(model),
        model.named_parameters(),
        compression=getattr(hvdkit_torch.Compression, compression),
    )
    return training_step(model, optimizer)


def with_distribute(model: nn.Module, compression: str) -> Step:
    """``hvdkit.torch.distribute``, which also counts samples."""
    model, optimizer = hvdkit_torch.distribute(
        model, sgd(model), scale_lr="none", compression=compression, summary=False
    )
    return training_step(model, optimizer)


def horovod_compression(name: str) -> Any:
    """Horovod's compressor; it has no bf16, so fp16 stands for all 16-bit formats."""
    compressions = horovod_torch.Compression
    return compressions.none if name == "none" else compressions.fp16


VARIANTS: dict[str, Callable[[nn.Module, str], Step]] = {
    BASELINE: by_hand,
    "horovod": with_horovod,
    "hvdkit": with_hvdkit,
    "hvdkit distribute": with_distribute,
}


def time_steps(
    step: Step, batch: tuple[torch.Tensor, torch.Tensor], steps: int
) -> list[tuple[float, float]]:
    """Seconds of each of `steps` steps, elapsed and of this thread's CPU; one more goes ahead."""
    horovod_torch.barrier()
    step(*batch)
    edges = [(time.perf_counter(), time.thread_time())]
    for _ in range(steps):
        step(*batch)
        edges.append((time.perf_counter(), time.thread_time()))
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(edges)]


def measure(model_name: str, compression: str, rounds: int, steps: int) -> torch.Tensor:
    """Seconds of every step, the slowest rank's: variants x rounds x steps x (elapsed, CPU)."""
    make, shape = MODELS[model_name]
    torch.manual_seed(horovod_torch.rank())
    batch = torch.randn(shape), torch.randint(10, shape[:1])
    variants = []
    for make_step in VARIANTS.values():
        torch.manual_seed(0)
        variants.append(make_step(make(), compression))
    for step in variants:  # allocators, oneDNN's choices, Horovod's cache of responses
        time_steps(step, batch, steps)
    seconds = torch.zeros(len(variants), rounds, steps, 2, dtype=torch.float64)
    for round_index in range(rounds):
        for turn in range(len(variants)):
            which = (turn + round_index) % len(variants)
            seconds[which, round_index] = torch.tensor(time_steps(variants[which], batch, steps))
    return horovod_torch.allreduce(seconds, name=f"seconds.{model_name}", op=horovod_torch.Max)


def summarize(seconds: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Median step and the ratios to the loop written by hand, for each variant.

    The time of the training thread alone is less disturbed by what else the machine does than
    the elapsed time: it has the adapter's own work, but not the waiting.
    """
    per_round = seconds.quantile(0.5, dim=2)
    ratios = per_round / per_round[list(VARIANTS).index(BASELINE)]
    result = {}
    for index, name in enumerate(VARIANTS):
        row: dict[str, Any] = {}
        for kind, label in enumerate(("elapsed", "thread_cpu")):
            values = ratios[index, :, kind].tolist()
            row[label] = {
                "median_step_s": seconds[index, ..., kind].quantile(0.5).item(),
                "ratio_to_by_hand": statistics.median(values),
                "ratio_interval_95": interval(values),
            }
        result[name] = row
    return result


def print_table(model_name: str, rows: dict[str, dict[str, Any]]) -> None:
    """One line for each variant."""
    columns = [f"{kind:>9} {'ratio':>8}   95 % interval  " for kind in ("ms", "CPU ms")]
    print(f"\n{model_name:18}{''.join(columns)}")
    for name, row in rows.items():
        line = f"{name:18}"
        for figures in row.values():
            low, high = figures["ratio_interval_95"]
            line += f"{figures['median_step_s'] * 1e3:9.2f} {figures['ratio_to_by_hand']:8.4f}"
            line += f"   {low:.4f} - {high:.4f}"
        print(line, flush=True)


def main() -> None:
    """Measures every model and reports on rank 0."""
    parser = parser_of(__doc__, MODELS)
    parser.add_argument("--compression", choices=("none", "fp16", "bf16"), default="none")
    arguments = parser.parse_args()
    horovod_torch.init()
    torch.set_num_threads(1)
    root = horovod_torch.rank() == 0
    results = {}
    for model_name in arguments.models:
        seconds = measure(model_name, arguments.compression, arguments.rounds, arguments.steps)
        results[model_name] = summarize(seconds)
        if root:
            print_table(model_name, results[model_name])
    if root and arguments.json:
        report = {
            "ranks": horovod_torch.size(),
            "compression": arguments.compression,
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "horovod": horovod.__version__,
            "models": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
