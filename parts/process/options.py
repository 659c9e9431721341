"""The options of every command that reads the settings: --config, --database and --set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import click

from asyncgate.parts.model.settings import Configured, load_settings

__all__ = ["add_settings_loader", "add_settings_options"]


def add_settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config, --database and --set to a command, and pass it the loaded settings."""
    @add_settings_loader
    @wraps(command)
    def run(load: Callable[[], Configured], **options: Any) -> Any:
        return command(load(), **options)
    return run


def add_settings_loader(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, and pass it a function that loads the settings or raises SettingsError."""
    @click.option("--config", metavar="FILE", help="YAML file with settings.")
    @click.option("--database", metavar="URL", help="Database URL, such as sqlite:///gate.db.")
    @click.option("--set", "sets", metavar="NAME=VALUE", multiple=True,
                  help="Any setting; `asyncgate config` lists them. Repeatable.")
    @wraps(command)
    def run(config: str | None, database: str | None, sets: tuple[str, ...], **options: Any) -> Any:
        if bare := [setting for setting in sets if "=" not in setting]:
            raise click.BadParameter(f"{bare[0]!r} is not NAME=VALUE", param_hint="'--set'")
        flags = {name.strip(): value for name, _, value in (setting.partition("=") for setting in sets)}
        flags |= {"database.url": database} if database else {}
        flags |= {name: str(options.pop(name)) for name in ("host", "port") if options.get(name) is not None}
        return command(partial(load_settings, config, flags=flags),
                       **{name: value for name, value in options.items() if name not in ("host", "port")})
    return run
