"""Sending variables on real ranks."""

from __future__ import annotations

from tests.ranks import rank_tests

test_state = rank_tests("tests.tensorflow.checks_state", sizes=(2, 4))
