"""hvd.distribute on one, two and four ranks."""

from __future__ import annotations

from tests.ranks import rank_tests

test_distribute = rank_tests("tests.torch.checks_distribute", sizes=(1, 2, 4))
