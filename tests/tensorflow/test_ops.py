"""The collectives on real ranks."""

from __future__ import annotations

import sys

from tests.ranks import rank_tests, run_job

test_collectives = rank_tests("tests.tensorflow.checks_ops", sizes=(2, 4))
test_moves = rank_tests("tests.tensorflow.checks_move", sizes=(2, 4))
test_compression = rank_tests("tests.tensorflow.checks_compression", sizes=(2, 4))
test_join = rank_tests("tests.tensorflow.checks_join", sizes=(2, 4))


def test_mpi_that_has_ended_is_said() -> None:
    """Without the check MPI ends the process with a code of its own."""
    code = "import hvdkit.tensorflow as hvd; hvd.init(); assert hvd.mpi_enabled(); "
    code += "hvd.shutdown(); hvd.init()"
    job = run_job([sys.executable, "-c", code], timeout_s=60)
    assert job.returncode == 1, job.report()
    assert "LaunchError: MPI has ended in this process" in job.stdout
