"""A training script as one writes it for Horovod, here on scikit-learn's handwritten digits.

It runs on Horovod alone as well: replace ``hvdkit.torch`` by ``horovod.torch`` in the import
below. examples/torch_digits.py shows the shorter way, with ``hvd.distribute``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdkit.torch as hvd

TEST_SAMPLES = 360


class Net(nn.Module):
    """A small CNN for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits, shape (n, 10)."""
        features = F.relu(self.conv1(images))
        features = F.max_pool2d(F.relu(self.conv2(features)), 2)
        features = F.relu(self.fc1(features.flatten(1)))
        return F.log_softmax(self.fc2(features), dim=1)


def make_loader(dataset: TensorDataset, batch_size: int) -> DataLoader:
    """Batches of this rank's share."""
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    epoch: int,
) -> None:
    """One epoch over this rank's share."""
    model.train()
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()


def metric_average(value: float, name: str) -> float:
    """The mean of a number over ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Loss and accuracy on the test part."""
    model.eval()
    loss = 0.0
    correct = 0
    for images, labels in loader:
        output = model(images)
        loss += F.nll_loss(output, labels, reduction="sum").item()
        correct += int((output.argmax(dim=1) == labels).sum())
    samples = len(loader.sampler)
    return (
        metric_average(loss / samples, "avg_loss"),
        metric_average(correct / samples, "avg_accuracy"),
    )


def main() -> None:
    """Trains, and prints loss and accuracy after each epoch."""
    parser = argparse.ArgumentParser(description="Digits with Horovod's own API")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train_part = TensorDataset(images[:-TEST_SAMPLES], labels[:-TEST_SAMPLES])
    test_part = TensorDataset(images[-TEST_SAMPLES:], labels[-TEST_SAMPLES:])
    train_loader = make_loader(train_part, args.batch_size)
    test_loader = make_loader(test_part, args.batch_size)

    model = Net()
    # Adasum adds steps so that they need no larger learning rate with more ranks.
    lr_scaler = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )

    for epoch in range(1, args.epochs + 1):
        train(model, optimizer, train_loader, epoch)
        loss, accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
