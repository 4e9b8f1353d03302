"""Broadcast of state on two and four ranks."""

from __future__ import annotations

from tests.ranks import rank_tests

test_state = rank_tests("tests.torch.checks_state", sizes=(2, 4))
