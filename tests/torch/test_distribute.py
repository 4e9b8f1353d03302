"""hvd.distribute on one, two and four ranks."""

from __future__ import annotations

import sys

from tests.ranks import horovodrun_gloo, rank_tests, run_job

test_distribute = rank_tests("tests.torch.checks_distribute", sizes=(1, 2, 4))
test_distribute_over_gloo = rank_tests(
    "tests.torch.checks_distribute", sizes=(2,), launcher=horovodrun_gloo
)

HALF_A_WINDOW = """
import torch, hvdkit.torch as hvd
hvd.init()
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer, optimizer = hvd.distribute(layer, optimizer, accumulate=2)
layer(torch.ones(1, 1)).mean().backward()
optimizer.step()
"""


def test_gradients_that_the_end_of_a_program_loses_are_said() -> None:
    said = "1 of 2 accumulated backward passes are in no step yet"
    lost = run_job([sys.executable, "-c", HALF_A_WINDOW], timeout_s=60)
    assert said in lost.stdout, lost.report()
    kept = run_job([sys.executable, "-c", HALF_A_WINDOW + "optimizer.flush()"], timeout_s=60)
    assert kept.returncode == 0
    assert said not in kept.stdout, kept.report()
