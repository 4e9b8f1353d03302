"""The Keras and TensorFlow digits examples reach their accuracy on 1, 2 and 4 ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.parallel.test_examples import EXAMPLES, accuracy_in
from tests.ranks import job_environment, run_ranks

JOBS = [
    ("keras_digits.py", "tensorflow", 2),
    ("keras_digits.py", "tensorflow", 4),
    ("keras_digits.py", "torch", 2),
    ("tensorflow_digits.py", "tensorflow", 2),
    ("tensorflow_digits.py", "tensorflow", 4),
]


@pytest.mark.parametrize(("script", "backend", "size"), JOBS)
def test_digits_reach_97_percent_on_several_ranks(script: str, backend: str, size: int) -> None:
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = run_ranks(size, [str(EXAMPLES / script)], environment=environment)
    assert job.returncode == 0, job.report()
    assert accuracy_in(job.rank_logs[0], size) >= 97
    for rank in range(1, size):
        assert "epoch" not in job.rank_logs[rank].lower(), job.report()


@pytest.mark.parametrize("script", ["keras_digits.py", "tensorflow_digits.py"])
def test_digits_need_neither_a_launcher_nor_horovod(script: str) -> None:
    source = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: (\n"
        "    None if name.split('.')[0] == 'horovod' else find(name, package))\n"
        "sys.modules['horovod'] = None\n"
        f"sys.argv = [{str(EXAMPLES / script)!r}]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    outputs = []
    for command in ([str(EXAMPLES / script)], ["-c", source]):
        done = subprocess.run(
            [sys.executable, *command],
            env=job_environment({"KERAS_BACKEND": "tensorflow"}),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(accuracy_in(done.stdout, 1))
    assert min(outputs) >= 97
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("script", ["keras_digits.py", "tensorflow_digits.py"])
def test_digits_refuse_wrong_options(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--lr", "nan"],
        env=job_environment({"KERAS_BACKEND": "tensorflow"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "out of range" in done.stderr
    assert "Traceback" not in done.stderr
