"""Clipping, loss scaling and compression on two and four ranks."""

from __future__ import annotations

from tests.ranks import rank_tests

test_amp = rank_tests("tests.torch.checks_amp", sizes=(2, 4))
