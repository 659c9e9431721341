"""The caller: who asks, as a credential says, and what that credential is good for."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.trace import Trace


class ShownToken(Struct, frozen=True):
    """Which access token a caller has shown, by the ids with which it can be revoked."""

    subject: str
    token_id: str | None
    session_id: str | None
    client_id: str | None


class ShownSession(Struct, frozen=True):
    """Which session of the console a caller has shown, and when it began."""

    id: str
    begun_at: float


class Caller(Struct, frozen=True):
    """Who asks, as the credential says; `bound` when it names the principal, else the request may."""

    tenant_id: str
    principal: wire.Principal
    role: wire.Role
    scopes: frozenset[str]
    bound: bool = True
    key_id: str | None = None           # of an issued key, and what that is limited to; None is any
    capabilities: frozenset[str] | None = None
    task_types: frozenset[str] | None = None
    issued_at: float | None = None      # of an access token
    token: ShownToken | None = None     # of an access token
    trace: Trace | None = None          # to which the request belongs that creates tasks
    console: ShownSession | None = None     # of the console, in which the credential was sealed
    no_new_tasks: errors.GateError | None = None   # why it can create none now; a repeated creation gets the first task
    note_wait: Callable[[str], None] | None = None      # told for which task's end its call waits

    @property
    def unlimited(self) -> bool:
        """Whether the caller may change what belongs to others: an admin with admin:write (spec 21.5.2, 21.8.3)."""
        return self.role == "system" or (self.role == "admin" and "admin:write" in self.scopes)

    @property
    def sees_all(self) -> bool:
        """Whether the caller may read what others own; tasks:read covers one's own, also for an admin (21.8.3)."""
        return self.unlimited or (self.role == "admin" and "admin:read" in self.scopes)


def forbid(caller: Caller, why: str, required_role: str = "admin") -> errors.Forbidden:
    """Make the error for a caller without the right (21.5.3); it names the role that would do, if it is another."""
    needed = {} if caller.role in required_role.split(" or ") else {"required_role": required_role}
    return errors.Forbidden(why, **needed, your_role=caller.role)


def forbid_type(caller: Caller) -> errors.Forbidden:
    """Refuse a task of a type that the key is not for."""
    return forbid(caller, f"this key is valid only for tasks of the types {', '.join(sorted(caller.task_types or ()))}")


def keep_within(caller: Caller, ask: wire.LeaseNext) -> None:
    """Limit a claim to the capabilities and types of its credential (spec 21.2.2)."""
    if caller.capabilities is not None:
        ask.capabilities = (ask.capabilities or frozenset()) & caller.capabilities
    if caller.task_types is not None:
        wanted = ask.accept_types or caller.task_types
        if not (both := wanted & caller.task_types):
            raise forbid_type(caller)
        ask.accept_types = both


def forbid_scope(caller: Caller, why: str, required_scope: str) -> errors.Forbidden:
    """Make the error for a caller whose role would do, without a scope (spec 21.5.3)."""
    return errors.Forbidden(why, required_scope=required_scope, your_role=caller.role)


def forbid_beyond(caller: Caller, beyond: frozenset[str], deed: str, cure: str) -> errors.Forbidden:
    """Make the error for a deed that needs scopes which the caller does not have itself."""
    scopes = sorted(beyond)
    return forbid_scope(caller, f"this credential has no scope {', '.join(scopes)}, so it cannot {deed}; {cure}",
                        " and ".join(scopes))


def forbid_giving(caller: Caller, beyond: frozenset[str], deed: str) -> errors.Forbidden:
    """Make the error for a caller that would give others scopes which it does not have itself."""
    return forbid_beyond(caller, beyond, deed, "name only scopes that it has")


NOBODY = Caller("", wire.Principal("system", "nobody"), "agent", frozenset(), bound=False)      # may ask for health
