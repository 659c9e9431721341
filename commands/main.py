"""The program `asyncgate`: its group of commands, and `serve`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from asyncgate import __version__
from asyncgate.parts.identity.startup import require_safe_start, warn_of_idle_settings
from asyncgate.parts.model import errors
from asyncgate.parts.model.settings import Configured
from asyncgate.parts.process.logs import start_logging
from asyncgate.parts.process.options import add_settings_options


class Commands(click.Group):
    """All commands; only `serve` is imported at once, so that it starts fast."""

    def main(self, *args: Any, **more: Any) -> Any:
        """Run the program; what the system refuses, such as a file on a full disk, ends it in one line."""
        replace_closed_streams()
        try:
            return super().main(*args, **more)
        except OSError as error:        # not of a pipe whose reader has gone: click ends the program
            if error.errno is None:
                raise
            click.echo(f"Error: cannot use {error.filename or 'a file, or the output'}: {error.strerror}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of all commands."""
        return sorted({*super().list_commands(ctx), *self._clients().list_commands(ctx)})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Find a command by its name."""
        return super().get_command(ctx, name) or self._clients().get_command(ctx, name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command, or suggest similar names."""
        return self._clients().resolve_command(ctx, args) if args[0] not in self.commands else (
            super().resolve_command(ctx, args))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; Ctrl-C, or what stops it, ends it in one line."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            from asyncgate.commands.calling import EXIT_INTERRUPTED
            click.echo("\nAborted!", err=True)
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
        except errors.Stopped as stop:
            from asyncgate.commands import calling, terminal
            raise calling.exit_with(terminal.escape_text(str(stop)), stop.exit_status) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands in sections."""
        from asyncgate.commands.cli import write_sections
        write_sections(self, ctx, formatter)

    def _clients(self) -> click.Group:
        from asyncgate.commands.cli import commands
        return commands


def replace_closed_streams() -> None:
    """Let a standard stream that is closed (`>&-`) lead nowhere; so no file of the program gets its number, either."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="asyncgate")
def main() -> None:
    """A durable task gate for agents that forget.

    Start with `asyncgate demo` (watch it work) or `asyncgate dev` (a gate for development).
    """


@main.command()
@click.option("--host", metavar="ADDRESS", help="Address to listen on; default 127.0.0.1.")
@click.option("--port", type=int, metavar="NUMBER", help="Port to listen on; default 8080, 0 for any free port.")
@click.option("--processes", type=click.IntRange(1, 256), default=1, metavar="NUMBER",
              help="Processes that share the port, on Postgres; default 1.")
@click.option("--sockets", "handed", hidden=True)       # what a parent hands over to each of them
@add_settings_options
def serve(configured: Configured, processes: int, handed: str | None) -> None:
    """Serve the gate until SIGTERM or Ctrl-C: running requests finish, and waiting polls are answered."""
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
