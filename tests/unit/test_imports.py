"""What importing the package loads: no framework, in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "tensorflow", "keras", "horovod", "numpy", "jax", "mpi4py")


@pytest.mark.parametrize(
    "module",
    ["hvdkit", "hvdkit.errors", "hvdkit.envvars", "hvdkit.optional", "hvdkit.world",
     "hvdkit.scaling", "hvdkit.options", "hvdkit.one_rank", "hvdkit.pickled",
     "hvdkit.compressor", "hvdkit.cli"],
)  # fmt: skip
def test_core_and_command_line_load_no_framework(module: str) -> None:
    code = (
        f"import sys, {module}\nprint(sorted({{n.partition('.')[0] for n in sys.modules}} "
        f"& set({HEAVY!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_torch_adapter_loads_no_tensorflow() -> None:
    code = "import sys, hvdkit.torch\nprint('tensorflow' in sys.modules, 'keras' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False False"), done.stderr
