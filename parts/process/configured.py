"""The options that every command over settings has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import click

from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import Configured, SettingsError, load_settings

__all__ = ["configurable", "configured"]


class Unready(click.ClickException):
    """Ends a command that cannot begin; with 2 where the settings are wrong."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_code = status     # type: ignore[misc]  # click declares it for the class


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that every command over settings has, and hand it what they add up to."""
    @configurable
    @wraps(command)
    def run(load: Callable[[], Configured], **options: Any) -> Any:
        try:
            return command(load(), **options)
        except (SettingsError, StartupError) as wrong:
            raise Unready(str(wrong), wrong.exit_status) from None
    return run


def configurable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options, and hand it what loads the settings; it raises SettingsError."""
    @click.option("--config", metavar="FILE", help="YAML file with settings.")
    @click.option("--database", metavar="URL", help="Where to store everything, such as sqlite:///gate.db.")
    @click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Any setting that `config` lists.")
    @wraps(command)
    def run(config: str | None, database: str | None, sets: tuple[str, ...], **options: Any) -> Any:
        flags = {name.strip(): value for name, _, value in (one.partition("=") for one in sets)}
        flags |= {"database.url": database} if database else {}
        flags |= {name: str(options.pop(name)) for name in ("host", "port") if options.get(name) is not None}
        return command(partial(load_settings, config, flags=flags),
                       **{name: value for name, value in options.items() if name not in ("host", "port")})
    return run
