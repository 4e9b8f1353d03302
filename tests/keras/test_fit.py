"""What fit does beside the steps, with both backends of Keras."""

from __future__ import annotations

from tests.ranks import rank_tests

MODULE = "tests.keras.checks_fit"

test_with_tensorflow = rank_tests(
    MODULE, sizes=(2,), timeout_s=600, environment={"KERAS_BACKEND": "tensorflow"}
)
test_with_torch = rank_tests(
    MODULE, sizes=(1, 2), timeout_s=600, environment={"KERAS_BACKEND": "torch"}
)
