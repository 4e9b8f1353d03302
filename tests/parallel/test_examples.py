"""The examples do what they say, on one rank and on several."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ranks import ROOT, job_environment, run_ranks

EXAMPLES = ROOT / "examples"
DIGITS = str(EXAMPLES / "torch_digits.py")
SUMMARY = re.compile(
    r"^ranks (\d+), (\d+) samples/s, test accuracy ([\d.]+) % \((\d+) of (\d+)\)$", re.MULTILINE
)
LAST_EPOCH = re.compile(r"^epoch 8: loss ([\d.]+), accuracy ([\d.]+)$", re.MULTILINE)
TEST_SAMPLES = 360
IMPORT_HVDKIT = "import hvdkit.torch as hvd"
MNIST_OPTIONS = ("", "--fp16-allreduce", "--use-adasum")


def run_digits(size: int, *options: str) -> str:
    """Output of the digits example on `size` ranks; checks all that does not depend on options."""
    job = run_ranks(size, [DIGITS, *options])
    assert job.returncode == 0, job.report()
    for rank in range(1, size):
        assert job.rank_logs[rank] == "", f"rank {rank} printed something\n{job.report()}"
    return job.rank_logs[0]


def run_plain(*options: str, blocked: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the digits example without a launcher, without the package `blocked` if named."""
    command = [sys.executable, DIGITS, *options]
    if blocked:
        # Looks to importlib like a package that is not installed.
        source = (
            "import importlib.util, runpy, sys\n"
            "find = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda name, package=None: (\n"
            f"    None if name.split('.')[0] == {blocked!r} else find(name, package))\n"
            f"sys.modules[{blocked!r}] = None\n"
            f"sys.argv = {command[1:]!r}\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        command = [sys.executable, "-c", source]
    return subprocess.run(
        command, env=job_environment(), capture_output=True, text=True, timeout=300, check=False
    )


def accuracy_in(output: str, size: int) -> float:
    """Test accuracy in percent from the summary line, which stands once and last."""
    found = SUMMARY.findall(output)
    assert len(found) == 1, output
    assert output.rstrip().endswith(")"), output
    ranks, speed, percent, correct, count = found[0]
    assert int(ranks) == size
    assert int(speed) > 0
    assert int(count) == TEST_SAMPLES, "padded or missing test samples"
    assert float(percent) == pytest.approx(100 * int(correct) / TEST_SAMPLES, abs=0.005)
    return float(percent)


@pytest.mark.parametrize("size", [2, 4])
def test_digits_reach_97_percent_on_several_ranks(size: int) -> None:
    output = run_digits(size)
    assert accuracy_in(output, size) >= 97
    assert f"learning rate 0.04 -> {0.04 * size:g} (linear)" in output


def test_digits_need_neither_a_launcher_nor_horovod() -> None:
    with_horovod, without = run_plain(), run_plain(blocked="horovod")
    assert with_horovod.returncode == 0, with_horovod.stderr
    assert without.returncode == 0, without.stderr
    assert accuracy_in(with_horovod.stdout, 1) >= 97
    assert accuracy_in(without.stdout, 1) == accuracy_in(with_horovod.stdout, 1)


def test_digits_accumulate_and_compress() -> None:
    # 3 epochs of 180 batches, the last one of 3 and 2 samples, make 77 windows of 7 and one of 1.
    options = "--accumulate 7 --compression bf16 --epochs 3 --batch-size 4 --lr 0.01"
    output = run_digits(2, *options.split())
    assert accuracy_in(output, 2) >= 85
    assert "accumulation 7" in output
    assert "BF16" in output


def test_digits_stop_where_the_training_diverges() -> None:
    job = run_ranks(2, [DIGITS, "--lr", "1e6", "--epochs", "2"])
    assert job.returncode not in (0, None), job.report()
    assert job.rank_logs[0].count("error: the training diverged in epoch 1") == 1, job.report()
    assert "Traceback" not in job.report()
    assert "diverged" not in job.rank_logs[1]
    assert not SUMMARY.search(job.rank_logs[0])


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--epochs", "0", "a whole number >= 1"),
        ("--batch-size", "1.5", "a whole number >= 1"),
        ("--lr", "nan", "a finite number > 0"),
        ("--accumulate", "-2", "a whole number >= 1"),
        ("--seed", "-1", "a whole number >= 0"),
        ("--compression", "zip", "choose from"),
    ],
)
def test_digits_refuse_wrong_options(
    option: str,
    value: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # In this process: starting Python with torch takes seconds.
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torch_digits

    monkeypatch.setattr(sys, "argv", [DIGITS, option, value])
    with pytest.raises(SystemExit) as stop:
        torch_digits.parse_arguments()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("error:") == 1
    assert f"argument {option}" in error
    assert expected in error
    assert value in error


@functools.cache
def run_mnist(import_line: str) -> list[tuple[float, float]]:
    """Last loss and accuracy of the Horovod-style script on 2 ranks, for each of MNIST_OPTIONS.

    All runs share one job, since a start with torch takes longer than the training.
    """
    source = (EXAMPLES / "torch_mnist_horovod.py").read_text()
    assert source.count(IMPORT_HVDKIT + "\n") == 1
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(source.replace(IMPORT_HVDKIT, import_line))
        driver = (
            "import runpy, sys\n"
            f"for options in {MNIST_OPTIONS!r}:\n"
            f"    sys.argv = [{str(script)!r}, *options.split()]\n"
            "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        job = run_ranks(2, ["-c", driver])
    assert job.returncode == 0, job.report()
    found = LAST_EPOCH.findall(job.rank_logs[0])
    assert len(found) == len(MNIST_OPTIONS), job.report()
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


@pytest.mark.parametrize("option", MNIST_OPTIONS)
def test_a_horovod_script_needs_no_more_than_another_import(option: str) -> None:
    which = MNIST_OPTIONS.index(option)
    loss, accuracy = run_mnist(IMPORT_HVDKIT)[which]
    expected_loss, expected_accuracy = run_mnist("import horovod.torch as hvd")[which]
    assert accuracy > 0.85
    if option == "--fp16-allreduce":  # the scales differ, and rounding with them
        assert accuracy == pytest.approx(expected_accuracy, abs=0.05)
        assert loss == pytest.approx(expected_loss, rel=0.25)
    else:
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert accuracy == pytest.approx(expected_accuracy, abs=1 / TEST_SAMPLES + 1e-4)
