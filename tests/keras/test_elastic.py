"""Elastic states of Keras on two ranks, with both backends."""

from __future__ import annotations

from tests.ranks import horovodrun_gloo, rank_tests

MODULE = "tests.keras.checks_elastic"

test_with_tensorflow = rank_tests(
    MODULE, sizes=(2,), launcher=horovodrun_gloo, environment={"KERAS_BACKEND": "tensorflow"}
)
test_with_torch = rank_tests(
    MODULE, sizes=(2,), launcher=horovodrun_gloo, environment={"KERAS_BACKEND": "torch"}
)
