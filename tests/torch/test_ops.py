"""The collectives on real ranks."""

from __future__ import annotations

import sys

from tests.ranks import horovodrun_gloo, rank_tests, run_job

test_collectives = rank_tests("tests.torch.checks_ops", sizes=(2, 4))
test_join = rank_tests("tests.torch.checks_join", sizes=(2, 4))
test_collectives_over_gloo = rank_tests(
    "tests.torch.checks_ops", sizes=(2,), launcher=horovodrun_gloo
)
test_join_over_gloo = rank_tests("tests.torch.checks_join", sizes=(2,), launcher=horovodrun_gloo)


def test_mpi_that_has_ended_is_said() -> None:
    """Without the check MPI ends the process with a code of its own."""
    code = "import hvdkit.torch as hvd; hvd.init(); assert hvd.mpi_enabled(); hvd.shutdown(); "
    code += "hvd.init()"
    job = run_job([sys.executable, "-c", code], timeout_s=60)
    assert job.returncode == 1, job.report()
    assert "LaunchError: MPI has ended in this process" in job.stdout
