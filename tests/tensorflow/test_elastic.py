"""Elastic states on two ranks."""

from __future__ import annotations

from tests.ranks import horovodrun_gloo, rank_tests

test_elastic = rank_tests("tests.tensorflow.checks_elastic", sizes=(2,), launcher=horovodrun_gloo)
