"""The console under /console: a page for people, made of the files in `page/`.

The files are those that lie there when the gate starts, found by their whole names; each is read when it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from asyncgate.extras.console.calls import describe_console, make_calls
from asyncgate.parts.model import connection, errors
from asyncgate.parts.model.console import CONSOLE
from asyncgate.parts.model.content import encode_json

if TYPE_CHECKING:
    from asyncgate.parts.faces.serving import Serving

FIRST_FILE = "index.html"
MEDIA = {".css": b"text/css; charset=utf-8", ".html": b"text/html; charset=utf-8",
         ".js": b"text/javascript; charset=utf-8", ".png": b"image/png", ".svg": b"image/svg+xml"}
# Nothing from elsewhere, no script or style inside the page, and no text becomes markup: `innerHTML` is refused.
POLICY = (b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
          b"form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
          b"trusted-types 'none'")
WALLS = [(b"content-security-policy", POLICY), (b"cross-origin-opener-policy", b"same-origin"),
         (b"cross-origin-resource-policy", b"same-origin")]
OFF = "the console of this gate is off; the setting console.enabled turns it on"


def make_routes(gate: Serving) -> list[Route]:
    """Return the routes of the console, or, if it is off, the routes that say how to turn it on."""
    if not gate.settings.console.enabled:
        return [Route(path, Off(gate)) for path in (CONSOLE, f"{CONSOLE}/{{name:path}}")]
    pages = Files(gate, files("asyncgate.extras.console").joinpath("page"))
    calls = [Route(path, call) for path, call in make_calls(gate).items()]
    # Relatively, because a proxy may add a path prefix.
    redirect = OpenPath(gate, lambda: (302, b"", [(b"location", b"console/")]))
    about = OpenPath(gate, lambda: (200, encode_json(describe_console(gate))))
    return [Route(CONSOLE, redirect), Route(f"{CONSOLE}/about", about), *calls,
            Route(f"{CONSOLE}/{{name:path}}", pages)]


class Files:
    """The files of the page, by their names below /console/."""

    def __init__(self, gate: Serving, folder: Traversable) -> None:
        self.gate, self.paths = gate, dict(find_files(folder))

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Answer GET and HEAD with a file, or with 304 if the browser has it already."""
        try:
            name = require_read(scope)["path_params"]["name"] or FIRST_FILE
            body = self._read(name)
        except errors.GateError as refusal:
            return await send_refusal(self.gate, send, scope, refusal)
        scope["asyncgate.limits"] = ()      # one view is forty files: they cost a visitor no calls
        tag = b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode()
        more = [*WALLS, (b"cache-control", b"no-cache"), (b"etag", tag)]
        kind = (b"content-type", MEDIA[find_ending(name)])
        if is_known(scope["headers"], tag):
            return await self.gate.send(send, scope, 304, b"", more, kind)
        await self.gate.send(send, scope, 200, body, more, kind)

    def _read(self, name: str) -> bytes:
        """Read a file; raises NotFound, also for one that is gone since the start."""
        try:
            return self.paths[name].read_bytes()
        except (KeyError, OSError):
            raise errors.NotFound(f"the console has no such file; {CONSOLE}/ is its page") from None


class OpenPath:
    """A path that answers everybody alike."""

    def __init__(self, gate: Serving, make: Callable[[], tuple[Any, ...]]) -> None:
        self.gate, self.make = gate, make

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Answer GET and HEAD; no credential is needed."""
        try:
            require_read(scope)
        except errors.GateError as refusal:
            return await send_refusal(self.gate, send, scope, refusal)
        await self.gate.send(send, scope, *self.make())


class Off:
    """The paths of a console that is off."""

    def __init__(self, gate: Serving) -> None:
        self.gate = gate

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Say which setting turns the console on."""
        await send_refusal(self.gate, send, scope, errors.NotFound(OFF))


def require_read(scope: connection.Scope) -> connection.Scope:
    """Return the request if it is a GET or HEAD; raises MethodNotAllowed."""
    if scope["method"] not in ("GET", "HEAD"):
        raise errors.MethodNotAllowed(f"{scope['path']} does not support {scope['method']}", allow=["GET", "HEAD"])
    return scope


async def send_refusal(gate: Serving, send: connection.Send, scope: connection.Scope,
                       refusal: errors.GateError) -> None:
    """Answer with a refusal."""
    await gate.send(send, scope, refusal.status, encode_json(refusal.body()), gate.describe_refusal(scope, refusal))


def is_known(headers: connection.Headers, tag: bytes) -> bool:
    """Whether the browser says that it has the file of this tag."""
    known = [part.strip().removeprefix(b"W/") for name, value in headers if name == b"if-none-match"
             for part in value.split(b",")]
    return tag in known or b"*" in known


def find_files(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    """Walk the files of a folder whose kind is known, with their names."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from find_files(path, f"{above}{path.name}/")
        elif find_ending(path.name) in MEDIA:
            yield f"{above}{path.name}", path


def find_ending(name: str) -> str:
    """Return the ending of a file's name, with its dot."""
    return f".{name.rpartition('.')[2]}"
