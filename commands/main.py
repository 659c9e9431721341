"""The program `asyncgate`: its group of commands, and `serve`."""

from __future__ import annotations

import sys
from typing import Any

import click

from asyncgate import __version__
from asyncgate.parts.identity.startup import require_safe_start, warn_of_idle_settings
from asyncgate.parts.model.settings import Configured
from asyncgate.parts.process.configured import configured
from asyncgate.parts.process.logs import start_logging


class Commands(click.Group):
    """`serve`, which starts at once, and all other commands, which are imported when somebody asks for one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name every command."""
        return sorted({*super().list_commands(ctx), *self._clients().list_commands(ctx)})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Find a command by its name."""
        return super().get_command(ctx, name) or self._clients().get_command(ctx, name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command of the first argument, or say which one is near."""
        return self._clients().resolve_command(ctx, args) if args[0] not in self.commands else (
            super().resolve_command(ctx, args))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the commands in sections."""
        from asyncgate.commands.cli import write_sections
        write_sections(self, ctx, formatter)

    def _clients(self) -> click.Group:
        from asyncgate.commands.cli import commands
        return commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="asyncgate")
def main() -> None:
    """A durable task gate for agents that forget.

    Begin with `asyncgate demo` (watch it work) or `asyncgate dev` (a gate to try things on).
    """


@main.command()
@click.option("--host", metavar="ADDRESS", help="Address to listen on; default 127.0.0.1.")
@click.option("--port", type=int, metavar="NUMBER", help="Port to listen on; default 8080, 0 takes any free one.")
@click.option("--processes", type=click.IntRange(1, 256), default=1, metavar="NUMBER",
              help="Processes that share the port, on Postgres; default 1.")
@click.option("--sockets", "handed", hidden=True)       # what a parent hands over to each of them
@configured
def serve(configured: Configured, processes: int, handed: str | None) -> None:
    """Serve the gate until it is told to stop (SIGTERM): what runs is committed, waiting polls are answered."""
    start_logging(configured.settings)
    require_safe_start(configured.settings)
    if handed is not None:
        from asyncgate.commands.processes import serve_as_one_of_several
        sys.exit(serve_as_one_of_several(configured.settings, handed))
    warn_of_idle_settings(configured)
    if processes > 1:
        from asyncgate.commands.processes import serve_several
        sys.exit(serve_several(configured.settings, processes))
    from asyncgate.parts.app import serve_forever
    sys.exit(serve_forever(configured.settings))
