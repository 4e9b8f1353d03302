"""DistributedOptimizer on two and four ranks."""

from __future__ import annotations

from tests.ranks import horovodrun_gloo, rank_tests

test_optimizer = rank_tests("tests.torch.checks_optimizer", sizes=(2, 4))
test_optimizer_over_gloo = rank_tests(
    "tests.torch.checks_optimizer", sizes=(2,), launcher=horovodrun_gloo
)
