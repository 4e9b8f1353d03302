"""One rank of a group of checks: ``python -m tests.rank_main MODULE FOLDER``."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch

import hvdkit.torch as hvd
from tests.ranks import check_names


def main() -> None:
    module_name, folder = sys.argv[1:]
    faulthandler.register(signal.SIGTERM, chain=True)  # says where a hang is when it is ended
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    module = importlib.import_module(module_name)
    report = Path(folder) / f"rank-{hvd.rank()}.json"
    outcomes: dict[str, str] = {}
    for name in check_names(module_name):
        print(f"[{name}]", flush=True)
        torch.manual_seed(1234)
        outcomes[name] = "started and did not end"
        report.write_text(json.dumps(outcomes))
        try:
            with warnings.catch_warnings():
                getattr(module, name)(hvd)
            outcomes[name] = "passed"
        except BaseException:  # noqa: BLE001 - whatever it is, it must reach the report
            outcomes[name] = f"rank {hvd.rank()} raised\n{traceback.format_exc()}"
            report.write_text(json.dumps(outcomes))
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the other ranks may wait in a collective; the launcher ends them
        report.write_text(json.dumps(outcomes))
        hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
