"""The extras: what joins the gate from a folder of its own in `extras/`, without which it serves all the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct
from starlette.routing import Route

import asyncgate
from asyncgate import Engine, Extension, Operation
from asyncgate.parts.faces.rest import Endpoint
from asyncgate.parts.faces.serving import Serving
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.identity.ways import Identity
from asyncgate.parts.process.duties import Duty

if TYPE_CHECKING:
    from asyncgate.parts.metrics.shown import Family


class Opening(Serving, Protocol):
    """A gate to which an extra joins its routes, before anything is open."""

    identity: Identity
    open_paths: Set[str]        # that pages of any site may call
    endpoints: dict[str, Endpoint]      # by path; {} stands for the path parameter
    joined: dict[str, Any]      # what extras keep at a gate, by their names
    when_opened: list[Callable[[Engine, Guard], None]]


class Extra(Struct, frozen=True, kw_only=True):
    """What `EXTRA` in the file extra.py of a folder joins to the gate."""

    operations: Sequence[Operation] = ()
    extensions: Callable[[Engine], Sequence[Extension]] = lambda engine: ()         # of each engine
    routes: Callable[[Opening], list[Route]] = lambda gate: []                      # of the app
    duties: Callable[[Engine], dict[str, Duty]] = lambda engine: {}                 # for the upkeep
    beside: Callable[[Engine], AbstractAsyncContextManager[object]] | None = None   # entered while the gate serves
    commands: Mapping[str, str] = {}    # of `asyncgate` or, behind a blank, of a group, with the modules that have them
    families: Sequence[Family] = ()     # what /metrics shows of it


@cache
def find_extras() -> dict[str, Extra]:
    """Return the extras that are installed, by name."""
    folder = Path(asyncgate.__path__[0], "extras")
    names = sorted(path.parent.name for path in folder.glob("*/extra.py"))
    return {name: import_module(f"asyncgate.extras.{name}.extra").EXTRA for name in names}


def list_families() -> list[Family]:
    """Return what /metrics shows of the core and of the extras."""
    from asyncgate.parts.metrics.shown import FAMILIES
    return [*FAMILIES, *(family for extra in find_extras().values() for family in extra.families)]
