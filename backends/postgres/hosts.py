"""How Postgres is reached: one host of several, and what to tell the operator when there is none.

A server that hangs takes connections and says nothing, so each host has a time limit of its own, and the one that
worked last is tried first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg

from asyncgate.parts.model.errors import NotNow, StartupError

CONNECT_SECONDS = 5.0
PORT = 5432
# The database is not to be had now; the last one is what asyncpg says of a connection that broke in the middle.
AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# Another host of the same database would say the same.
DEFINITE = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)


class Hosts:
    """The hosts of a URL, the last good one first."""

    def __init__(self, url: str, seconds: float) -> None:
        self.urls = one_by_one(url)
        most = min(CONNECT_SECONDS, seconds)
        # Of several each has so much that one hung host leaves time for the next, and for what is to be done there.
        self.seconds = most if len(self.urls) == 1 else most / (len(self.urls) + 1)

    async def connect(self, *_: Any, **given: Any) -> asyncpg.Connection:
        """Connect to the first host that answers; takes what `asyncpg.connect` does, but for the address."""
        if len(self.urls) > 1 and wants_nothing(self.urls[0]):
            given["target_session_attrs"] = "read-write"    # a standby is of no use
        problems: dict[str, Exception] = {}
        for url in list(self.urls):
            try:
                db = await asyncpg.connect(url, **{**given, "timeout": self.seconds})
            except DEFINITE:
                raise
            except AWAY as error:
                problems[url] = error
                self._move(url, len(self.urls))
            else:
                self._move(url, 0)
                return db
        raise problem_of(problems)

    def _move(self, url: str, place: int) -> None:
        self.urls.remove(url)
        self.urls.insert(place, url)


def as_user(url: str, user: str) -> str:
    """Return a URL that logs in as somebody else, whose password is where Postgres looks for those not in URLs."""
    parts = urlsplit(url)
    query = "&".join(one for one in parts.query.split("&") if one.partition("=")[0] not in ("user", "password"))
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}", query=query).geturl()


def one_by_one(url: str) -> list[str]:
    """Return a URL for each host that a URL names before its path; Postgres separates them by commas."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    return [parts._replace(netloc=f"{login}{at}{host}").geturl() for host in hosts.split(",")]


def wants_nothing(url: str) -> bool:
    """Whether nobody has said which kind of server is meant."""
    return "target_session_attrs=" not in urlsplit(url).query and "PGTARGETSESSIONATTRS" not in os.environ


def address(url: str) -> str:
    """Return host and port of a URL, without the credentials."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    if not host:
        return "the host of its settings"
    return unquote(host) if host.rpartition("]")[2].count(":") else f"{unquote(host)}:{PORT}"


def problem_of(problems: dict[str, Exception]) -> Exception:
    """Return the one error that says of each host why it is not to be had."""
    first, *others = problems.values()
    if not others and isinstance(first, asyncpg.PostgresError):
        return first  # type: ignore[no-any-return]  # asyncpg has no types
    text = "; ".join(f"{address(url)}: {reason(error)}" for url, error in problems.items())
    silent = all(isinstance(error, TimeoutError) for error in problems.values())
    return (TimeoutError if silent else ConnectionError)(text)


def reason(error: Exception) -> str:
    """Return why a host is not to be had, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "it may only be read, or is otherwise not what target_session_attrs asks for"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def startup_error(error: Exception, url: str, what: str = "the database") -> StartupError:
    """Return the one line that says why a database cannot be used, and what to do."""
    where, user = ", ".join(map(address, one_by_one(url))), urlsplit(url).username or "the user of this process"
    name = unquote(urlsplit(url).path.lstrip("/")) or user
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return StartupError(f"there is no database {name!r} at {where}: make it with `createdb {flags(url)}{name}`, "
                            "then run `asyncgate migrate --database URL`")
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return StartupError(f"Postgres at {where} does not let in {unquote(user)}: {error}; the password belongs into "
                            "database.url, and `asyncgate migrate` makes the role asyncgate_app")
    if isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in str(error):
        return StartupError(f"PgBouncer answers at {where}: set database.pgbouncer=true, and database.direct_url to "
                            "the address of Postgres itself")
    if isinstance(error, ValueError):
        return StartupError(f"database.url is not the URL of a Postgres: {error}")
    if isinstance(error, OSError | TimeoutError):
        return NotNow(f"cannot reach {what}: {str(error) or where}; is Postgres running there, and is database.url "
                      "right?")
    return NotNow(f"cannot use {what} at {where}: {str(error) or type(error).__name__}")


def flags(url: str) -> str:
    """Return the options by which the programs of Postgres find the server of a URL."""
    def named() -> Iterator[str]:
        host, _, port = address(one_by_one(url)[0]).rpartition(":")
        if host:
            yield f"-h {host.strip('[]')} -p {port} "
    return "".join(named())
