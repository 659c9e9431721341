"""What goes over the wire of a ledger: the gate in the role of MemoryGate (spec 20.12, 20.13, H.6)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw, Struct, field

from asyncgate.parts.model import wire

Whose = Annotated[str | None, wire.says("the tenant, by id or name; an operator may name any")]
Id = Annotated[str, Meta(min_length=1, max_length=200, pattern="^[^\\x00-\\x20/\\x7f]+$(?!\\n)")]


class End(Struct):
    """The sender or the recipient of a receipt."""

    kind: wire.Name
    id: wire.Name
    instance_id: str | None = None


class Arriving(Struct):
    """The fields of a receipt that a ledger or its readers need; the receipt is kept as it came (spec 20.7).

    A ledger refuses a receipt that a gate could not read: it would stand in the way of the others of its inbox.
    """

    receipt_id: Id
    receipt_type: wire.Name
    created_at: wire.Moment
    sender: End = field(name="from")
    to: End
    task_id: wire.Name | None = None
    asyncgate_instance: Annotated[str, Meta(max_length=200)] | None = None
    tenant_id: str | None = None
    lease_id: str | None = None
    schedule_id: str | None = None
    parents: list[Id] | None = None
    body: Raw = Raw(b"null")
    hash: str | None = None
    receipt_key: str | None = None
    delivered_at: datetime | None = None


class Linked(Struct):
    """What a stored receipt answers."""

    parents: list[Id] | None = None


class StoreReceipts(wire.Ask, kw_only=True):
    """Store one receipt, or many."""

    acts: ClassVar[bool] = False
    receipts: Annotated[list[Raw], wire.says("receipts as their authors wrote them; the body may also be one receipt")]
    alone: bool = False


class StoreReceipt(wire.Ask, kw_only=True):
    """Store one receipt, or many, by a tool."""

    acts: ClassVar[bool] = False
    receipt: Annotated[wire.AnyJson,
                       wire.says("a receipt as its author wrote it")] = field(default_factory=wire.nothing)
    receipts: Annotated[list[Raw], wire.says("or up to 500 of them")] = []


class ListFiled(wire.Ask, kw_only=True):
    """List the receipts of a ledger."""

    acts: ClassVar[bool] = False
    filters: ClassVar[bool] = True
    lists = "all"
    tenant: Whose = None
    to_kind: wire.Kind | None = None
    to_id: wire.Name | None = None
    task_id: wire.Name | None = None
    receipt_type: wire.Name | None = None
    asyncgate_instance: wire.Name | None = None
    since_receipt_id: Annotated[Id | None, wire.says("the last receipt seen; the page begins after it")] = None
    limit: Annotated[wire.Whole | None, wire.says("default 50, clamped to 200")] = None


class GetFiled(wire.Ask, kw_only=True):
    """Read one receipt of a ledger."""

    needed: ClassVar[tuple[str, ...]] = ("receipt_id",)
    receipt_id: Id = ""
    tenant: Whose = None


class GetChain(GetFiled, kw_only=True):
    """Read a receipt and all receipts that it answers."""


class Stored(Struct, omit_defaults=True):
    """The outcome for one receipt: stored now, stored before, or a problem."""

    receipt_id: str | None
    tenant_id: str | None = None
    stored_at: datetime | None = None
    replay: bool = False
    error: wire.Problem | None = None


class StoredAll(Struct):
    """The outcome for each receipt, in the order of the request."""

    results: list[Stored]


class Filed(Struct):
    """A page of receipts as they came, in the order of arrival, and the principal whose credential stored each."""

    receipts: list[Any]
    next_cursor: str | None = None
    cursor: str | None = None
    stated_by: list[wire.Principal | None] = []


class Chain(Struct):
    """A receipt and all receipts that it answers, as they came, children before parents."""

    receipt_id: str
    chain: list[Any]
    missing: list[str]      # parents that are not stored here
