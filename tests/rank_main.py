"""One rank of a group of checks: ``python -m tests.rank_main MODULE FOLDER``.

The checks of ``tests.torch`` get ``hvdkit.torch``, and so on for the other adapters.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import operator
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import check_names


def load_adapter(name: str) -> tuple[Any, Callable[[int], object]]:
    """The adapter of a framework, initialized, and what seeds that framework."""
    hvd: Any = importlib.import_module(f"hvdkit.{name}")
    framework: Any = importlib.import_module(name)
    if name == "torch":
        framework.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    seed = {
        "torch": "manual_seed",
        "tensorflow": "random.set_seed",
        "keras": "utils.set_random_seed",
    }[name]
    return hvd, operator.attrgetter(seed)(framework)


def main() -> None:
    module_name, folder = sys.argv[1:]
    faulthandler.register(signal.SIGTERM, chain=True)  # says where a hang is when it is ended
    hvd, seed = load_adapter(module_name.split(".")[1])
    module = importlib.import_module(module_name)
    report = Path(folder) / f"rank-{hvd.rank()}.json"
    outcomes: dict[str, str] = {}
    for name in check_names(module_name):
        print(f"[{name}]", flush=True)
        seed(1234)
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
