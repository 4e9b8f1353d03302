"""DistributedOptimizer on two and four ranks."""

from __future__ import annotations

from tests.ranks import rank_tests

test_optimizer = rank_tests("tests.torch.checks_optimizer", sizes=(2, 4))
