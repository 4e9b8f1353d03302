"""The ``hvdkit`` command. A subcommand's module is imported when that subcommand runs."""

from __future__ import annotations

import importlib
import sys

import click

from hvdkit import __version__
from hvdkit.errors import HvdkitError

# Name, module below this package, and the line that `hvdkit --help` shows without importing it.
COMMANDS = {
    "build": "Build Horovod for the frameworks of this environment.",
}


class LazyGroup(click.Group):
    """A group whose subcommands are loaded by name: the command ``x`` is ``hvdkit.cli.x.command``.

    Example:
        >>> LazyGroup(name="hvdkit").list_commands(click.Context(click.Command("hvdkit")))[:1]
        ['build']
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of one subcommand."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hvdkit.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Runs the subcommand; an error of ours is one message and exit code 1."""
        try:
            return super().invoke(ctx)
        except HvdkitError as error:
            click.echo(f"hvdkit: error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hvdkit")
def main() -> None:
    """Horovod that installs again, and trains right."""


def run() -> None:
    """Entry point of the console script and of ``python -m hvdkit``."""
    sys.exit(main(prog_name="hvdkit"))
