"""Whom a stored row is about: its tenant, and which principals it names.

A row is about a principal if a field that is declared to name persons names it, if it belongs to a task that the
principal owns or was the last to work on, or if it belongs to a person who acts as that principal.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec import Struct

from asyncgate import Engine
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.identity.revocations import name_principal
from asyncgate.parts.model import cards, queries, stored, stored_journal, stored_oauth, stored_webhooks, wire
from asyncgate.parts.model.content import decode_json

# Fields that hold an id alone, and members of an audit line that do.
BARE_FIELDS = {"principal_ai", "lost_to", "principals"}
LISTS = {"lost_to", "principals"}       # several ids, as JSON
BARE_MEMBERS = {"link_for", "worker", "worker_id"}
# Members of an audit line that are ids, and the rows that these belong to.
REFERENCES: dict[str, type[Struct]] = {
    "key_id": stored.Key, "issued": stored.Key, "rotated": stored.Key, "rotated_to": stored.Key, "revoked": stored.Key,
    "about_key": stored.Key,
    "session_id": stored_oauth.Grant, "about_session": stored_oauth.Grant, "user_id": stored_oauth.User,
    "about_user": stored_oauth.User, "about_users": stored_oauth.User}


REVOKED: dict[str, type[Struct]] = {"session": stored_oauth.Grant, "client": stored_oauth.OAuthClient,
                                    "user": stored_oauth.User}


def may_name(table: type[Struct]) -> bool:
    """Whether rows of a table may be about a principal; those about the tenant as a whole are not."""
    return table is stored.Archived or (table is not stored.Account and cards.is_personal(table))


class Subject:
    """A tenant, or one principal of it; remembers what it has looked up."""

    def __init__(self, engine: Engine, tenant_id: str, whom: wire.Principal | None) -> None:
        self.engine, self.tenant_id, self.whom = engine, tenant_id, whom
        self.directory = Directory(engine)
        self.tasks: dict[str, bool] = {}
        self.owners: dict[tuple[type[Struct], str], Any] = {}

    def home_of(self, table: type[Struct]) -> str:
        """Return the tenant in which rows of a table stand."""
        return self.directory.tenant_id if cards.CARDS[table].of_operator else self.tenant_id

    async def has(self, row: Struct, receipt: stored.Receipt | None = None) -> bool:
        """Whether a row, perhaps with its archived receipt, is about this tenant and this principal."""
        if cards.CARDS[type(row)].of_operator and await self._tenant_of(row) != self.tenant_id:
            return False
        return self.whom is None or await self._names(row, receipt, self.whom)

    async def look_ahead(self, rows: list[Any], after: str) -> None:
        """Learn who worked on the tasks behind a key in one read, where each alone would need one."""
        tasks = [row for row in rows if isinstance(row, stored.Task)]
        if self.whom is None or not tasks:
            return
        leases = await self.engine.backend.page(self.tenant_id, queries.Rows(stored.Lease, after, len(tasks)))
        last = leases[-1].task_id if len(leases) == len(tasks) else tasks[-1].task_id
        busy = {lease.task_id for lease in leases if names_principal(lease, self.whom)}
        self.tasks.update((task.task_id, task.task_id in busy or names_principal(task, self.whom))
                          for task in tasks if task.task_id <= last)

    # Tenants.

    async def _tenant_of(self, row: Any) -> str:
        """Return the tenant that a row of the authorization server is for: the operator's, unless it names another."""
        if isinstance(row, stored_oauth.Consent):
            row = await self._find(stored_oauth.User, row.user_id)
        if isinstance(row, stored_oauth.Revocation):
            if row.kind in ("principal", "token"):
                return str(row.subject).partition(" ")[0]
            row = await self._find(REVOKED[row.kind], row.subject)
        return getattr(row, "tenant", None) or self.directory.tenant_id

    async def _find(self, table: type[Struct], id: str) -> Any:
        """Return a row by its id, or None."""
        if (table, id) not in self.owners:
            self.owners[table, id] = await self.engine.backend.record(self.home_of(table), table, id)
        return self.owners[table, id]

    # Principals.

    async def _names(self, row: Any, receipt: stored.Receipt | None, whom: wire.Principal) -> bool:
        if names_principal(row, whom) or (receipt is not None and names_principal(receipt, whom)):
            return True
        match row:
            case stored.Task() | stored.Lease() | stored.Progress() | stored.Event() | stored_journal.RecordedStep(
                ) | stored_webhooks.WebhookDelivery():
                return await self._has_task(row.task_id, whom)
            case stored.Outgoing():
                sent = await self.engine.backend.receipt(self.tenant_id, row.receipt_id)
                return sent is not None and names_principal(sent, whom)
            case stored_oauth.Consent():
                user = await self._find(stored_oauth.User, row.user_id)
                return user is not None and names_principal(user, whom)
            case stored_oauth.Revocation():
                return await self._is_revoked(row, whom)
            case stored.Audit():
                return await self._has_line(decode_json(row.body), whom)
            case stored.Pauses():
                return mentions(decode_json(row.listed), whom)
        return False

    async def _has_task(self, task_id: str, whom: wire.Principal) -> bool:
        """Whether the principal owns a task, or was the last that worked on it."""
        if task_id not in self.tasks:
            snapshot = await self.engine.backend.task(self.tenant_id, task_id)
            self.tasks[task_id] = snapshot is not None and any(
                row is not None and names_principal(row, whom) for row in snapshot[:2])
        return self.tasks[task_id]

    async def _is_revoked(self, row: stored_oauth.Revocation, whom: wire.Principal) -> bool:
        """Whether a revocation is of the principal, of a session of it, or of a person who acts as it."""
        if row.kind == "principal":
            return row.subject == name_principal(self.tenant_id, whom.kind, whom.id)
        if row.kind not in ("session", "user"):
            return False        # of a token only its id is known, and a program is used by many
        owner = await self._find(stored_oauth.Grant if row.kind == "session" else stored_oauth.User, row.subject)
        return owner is not None and names_principal(owner, whom)

    async def _has_line(self, body: Any, whom: wire.Principal) -> bool:
        """Whether a line of the audit log names the principal, or a credential, a session or a person of it.

        The log of the default tenant also has what the authorization server did for other tenants.
        """
        if {body.get("tenant"), body.get("of_tenant")} - {None, self.tenant_id}:
            return False
        if mentions(body, whom) or any(body.get(name) == whom.id for name in BARE_MEMBERS):
            return True
        for name in body.keys() & REFERENCES.keys():
            for id in body[name] if isinstance(body[name], list) else [body[name]]:
                owner = await self._find(REFERENCES[name], id)
                if owner is not None and getattr(owner, "tenant", self.tenant_id) == self.tenant_id and whom.same(
                        wire.Principal(owner.principal_kind, owner.principal_id)):
                    return True
        return False


def names_principal(row: Struct, whom: wire.Principal) -> bool:
    """Whether a field that is declared to name persons names a principal."""
    return has_name(type(row), row, whom)


def has_name(table: type[Struct], row: Any, whom: wire.Principal) -> bool:
    """Whether a row of a table names a principal."""
    pairs, singles = list_names(table)
    return (any(getattr(row, kind) == whom.kind and getattr(row, id) == whom.id for kind, id in pairs)
            or any(is_name(name, getattr(row, name), whom) for name in singles))


def is_name(field: str, value: str | None, whom: wire.Principal) -> bool:
    """Whether one text names a principal: by kind and id, or in some fields by the id alone."""
    if value is None or field not in BARE_FIELDS:
        return value == str(whom)
    return whom.id in decode_json(value) if field in LISTS else value == whom.id


@cache
def list_names(table: type[Struct]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the fields of a table that name a principal: the pairs of kind and id, and the single ones."""
    named = cards.list_fields(table, cards.Says.PRINCIPAL)
    pairs = [(name, id) for name in named
             if name.endswith("kind") and (id := f"{name.removesuffix('kind')}id") in named]
    paired = {name for pair in pairs for name in pair}
    return pairs, [name for name in named if name not in paired]


def mentions(tree: Any, whom: wire.Principal) -> bool:
    """Whether JSON has a principal: as members for kind and id, or as a text of both."""
    if isinstance(tree, list):
        return any(mentions(part, whom) for part in tree)
    if not isinstance(tree, dict):
        return bool(tree == str(whom))
    pairs = (name.removesuffix("kind") for name, value in tree.items() if name.endswith("kind") and value == whom.kind)
    return any(tree.get(f"{start}id") == whom.id for start in pairs) or any(
        mentions(part, whom) for part in tree.values())
