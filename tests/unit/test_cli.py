"""The command line: quick help, no framework, frozen options, exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from hvdkit.cli import COMMANDS, main

GOLDEN = Path(__file__).parent.parent / "golden"
HEAVY = ("torch", "tensorflow", "keras", "horovod", "numpy", "jax")
HELP_LIMIT_S = 0.150


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("statement", ["import hvdkit, hvdkit.cli", "run(['--help'])"])
def test_neither_import_nor_help_loads_a_framework(statement: str) -> None:
    script = f"""
import sys
def run(arguments):
    from hvdkit.cli import main
    main(arguments, standalone_mode=False)
{statement}
loaded = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_a_command_loads_no_framework(name: str) -> None:
    script = f"""
import sys
from hvdkit.cli import main
main(["{name}", "--help"], standalone_mode=False)
loaded = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    times = []
    # The quickest of several: other work on the machine only ever adds time.
    for _ in range(15):
        started = time.perf_counter()
        done = python("-m", "hvdkit", "--help")
        times.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr
    assert min(times) < HELP_LIMIT_S, times


def test_the_options_are_as_in_the_golden_file() -> None:
    lines = []
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        lines.append(name)
        for parameter in command.params:
            names = " ".join([*parameter.opts, *parameter.secondary_opts])
            lines.append(f"  {names} ({parameter.type.name})")
    assert "\n".join(lines) + "\n" == (GOLDEN / "cli_options.txt").read_text()


def test_the_table_of_commands_is_that_of_the_modules() -> None:
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.help


def test_an_unknown_command_is_a_usage_error() -> None:
    done = python("-m", "hvdkit", "bild")
    assert done.returncode == 2
    assert "No such command 'bild'" in done.stderr


def test_the_version_is_the_packages() -> None:
    import hvdkit

    assert python("-m", "hvdkit", "--version").stdout.strip().endswith(hvdkit.__version__)
