"""Which principals a request names: its sender, and the one that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from asyncgate.parts.model import errors, queries, wire
from asyncgate.parts.model.identities import lower_ids
from asyncgate.parts.model.members import Unreadable

A2A_SESSION = "a2a:"


def read_principal(ask: wire.Ask) -> wire.Principal | None:
    """Return the sender that a request names: its creator, else its worker, else its principal.

    Half a name is refused, because a default for the other half would name somebody else.
    """
    by = getattr(ask, "created_by", None)
    if isinstance(by, wire.CreatedBy):
        if who := by.principal_id or by.id:
            return wire.Principal(by.principal_kind or by.kind or "agent", who,
                                  by.principal_instance_id or by.instance_id)
        raise make_half_name_error("created_by", "principal_id")
    if who := getattr(ask, "worker_id", None):
        return wire.Principal(ask.worker_kind or "worker", who, ask.worker_instance_id)  # type: ignore[attr-defined]
    if isinstance(ask, wire.AsPrincipal) and (who := ask.principal_id or ask.agent_id):
        return wire.Principal(ask.principal_kind or "agent", who, ask.principal_instance_id or ask.agent_instance_id)
    for part in ("worker_kind", "principal_kind"):
        if isinstance(ask, wire.AsPrincipal | wire.AsWorker) and getattr(ask, part, None):
            raise make_half_name_error(part, part.replace("kind", "id"))
    return None


def make_half_name_error(part: str, other: str) -> errors.InvalidRequest:
    """Return the refusal of a kind without an id."""
    return errors.InvalidRequest(f"{part} alone names nobody: say {other} too, or leave both out")


def names_nobody(ask: wire.Ask) -> bool:
    """Whether a request does not name its sender."""
    return all(getattr(ask, name, None) is None for name in ("created_by", "worker_id", "worker_kind", "principal_id",
                                                             "principal_kind", "agent_id"))


def read_instance_id(ask: wire.Ask) -> str | None:
    """Return the instance that a request names, with or without its principal."""
    names = ("worker_instance_id", "principal_instance_id", "agent_instance_id")
    named = (getattr(ask, name, None) for name in names if isinstance(ask, wire.AsPrincipal | wire.AsWorker))
    return next(filter(None, named), None)


def find_context(session: str | None) -> str | None:
    """Return the context in which a creator came over A2A, which its session tells; None for other faces."""
    return session.removeprefix(A2A_SESSION) if session is not None and session.startswith(A2A_SESSION) else None


def make_filter(part: str, kind: str | None, name: str, id: str | None) -> wire.Principal | None:
    """Return the principal that a filter names; an id alone matches any kind, a kind alone is refused.

    An id alone may also be the whole principal, as `agent:ada` or as `{"principal_kind": "agent", …}` (18.5, 1).
    """
    if id and not kind:
        kind, id = read_whole_principal(id, name)
    if kind and not id:
        raise make_half_name_error(part, name)
    return wire.Principal(kind or queries.ANY_KIND, id) if id else None


def read_whole_principal(text: str, name: str) -> tuple[str | None, str]:
    """Read a principal with its kind; a text of another form is an id."""
    if text.startswith("{"):
        try:
            principal = msgspec.json.decode(text, type=wire.CreatedBy)
        except msgspec.DecodeError as wrong:
            raise errors.InvalidRequest(f"{name}: {wrong}") from None
        if not (id := principal.principal_id or principal.id):
            raise make_half_name_error(name, "principal_id")
        return principal.principal_kind or principal.kind, id
    kind, _, id = text.partition(":")
    return (kind, id) if kind in get_args(wire.Kind) and id else (None, text)


def list_creations(ask: wire.CreateTasks) -> Iterator[wire.CreateTask]:
    """Yield the tasks of a batch; a task without a creator gets that of the batch."""
    creator, items = read_principal(ask), list[Any](ask.tasks)
    for item in items:
        if creator and not isinstance(item, Unreadable) and names_nobody(item):
            item.created_by = wire.CreatedBy(principal_kind=creator.kind,  # type: ignore[arg-type]
                                             principal_id=creator.id, instance_id=creator.instance_id)
        yield item


def list_completions(ask: wire.CompleteTasks) -> Iterator[wire.Complete]:
    """Yield the completions of a batch; one without a worker gets that of the batch."""
    items: list[Any] = ask.tasks
    for item in items:
        if not isinstance(item, Unreadable) and item.worker_id is None:
            item.worker_kind, item.worker_id = ask.worker_kind, ask.worker_id
            item.worker_instance_id = ask.worker_instance_id
        if not isinstance(item, Unreadable):
            lower_ids(item)     # before they are loaded
        yield item


def require_addressable(name: str) -> None:
    """Refuse a name that no path can hold: clients take . and .. for steps between paths (RFC 3986 5.2.4)."""
    if name in (".", ".."):
        raise errors.InvalidRequest(f"{name} cannot be a name: it is a step in the paths of REST; use another one")
