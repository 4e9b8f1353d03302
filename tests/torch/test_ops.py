"""The collectives on real ranks."""

from __future__ import annotations

from tests.ranks import rank_tests

test_collectives = rank_tests("tests.torch.checks_ops", sizes=(2, 4))
test_join = rank_tests("tests.torch.checks_join", sizes=(2, 4))
