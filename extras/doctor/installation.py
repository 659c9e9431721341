"""What the checks look at: the settings of a gate, where they came from, and the gate itself if it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from asyncgate import Engine
from asyncgate.parts.model.settings import Setting, Settings, list_settings


class Installation(Struct, frozen=True):
    """One gate with all that belongs to it."""

    settings: Settings
    origins: Mapping[str, str] = {}         # where each setting came from; a running gate does not know
    environ: Mapping[str, str] = {}         # with it: the variables that name files
    public_url: str = ""                    # where others reach the gate, if it is known
    clock: Callable[[], float] = time.time
    running: Engine | None = None

    @property
    def database_file(self) -> Path | None:
        """Return the file of a SQLite database; None for other databases."""
        path = self.settings.database.url.removeprefix("sqlite:///")
        return None if path in (self.settings.database.url, ":memory:") else Path(path)

    def changed(self, prefix: str) -> list[str]:
        """Return the settings below a name, or with that name, that somebody has set."""
        return [setting.name for setting in list_settings(Settings)
                if (setting.name == prefix or setting.name.startswith(f"{prefix}.")) and self.is_set(setting)]

    def is_set(self, setting: Setting) -> bool:
        """Whether somebody has set a setting; a running gate knows only whether it differs from its default."""
        if self.origins:
            return self.origins.get(setting.name, "default") != "default"
        return bool(self.value(setting.name) != setting.default)

    def value(self, name: str) -> object:
        """Return the value of a setting."""
        node: object = self.settings
        for part in name.split("."):
            node = getattr(node, part)
        return node
