"""The same model, trained by hvdkit.torch and by hvdkit.keras: one learning rate, one result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.keras.curve import RATE, STEPS, WARMUP
from tests.ranks import run_ranks


def run_curve(framework: str, backend: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    path = folder / f"{framework}-{backend}.npz"
    job = run_ranks(
        2,
        ["-m", "tests.keras.curve", framework, str(path)],
        timeout_s=120,
        environment={"KERAS_BACKEND": backend},
    )
    assert job.returncode == 0, job.report()
    with np.load(path) as result:
        return result["rates"], result["weights"]


@pytest.fixture(scope="module")
def torch_curve(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, np.ndarray]:
    return run_curve("torch", "torch", tmp_path_factory.mktemp("curve"))


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_takes_the_steps_of_torch(
    backend: str, torch_curve: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    expected_rates, expected = torch_curve
    rates, weights = run_curve("keras", backend, tmp_path)
    assert len(rates) == STEPS
    assert np.allclose(rates, expected_rates, rtol=1e-6)
    assert np.isclose(rates[WARMUP], 2 * RATE)
    assert np.abs(weights - expected).max() < 1e-4
    assert np.abs(weights - expected).max() < 1e-2 * np.abs(expected).max()
