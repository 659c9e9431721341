"""The sink of the receiptgate profile: it stores receipts by `receiptgate.submit_receipt`, JSON-RPC at POST /mcp.

The two dialects of the schema exclude each other, and both give the same version number.  So the sink tries the newer
dialect first; if the ledger refuses the field that differs, the sink uses the older dialect from then on.  A receipt is
rendered once, in the newer dialect; the older form is derived from it, so every retry sends the same bytes.

ReceiptGate cannot return a gate's receipts in their own form, so the gate keeps them whole.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from asyncgate.extras.ledger import calls, sinks
from asyncgate.extras.ledger.pacing import LOOK_SECONDS, pace_of, same_receipt
from asyncgate.extras.ledger.sinks import receiptgate_schema

if TYPE_CHECKING:
    from asyncgate.extras.ledger.sinks import Sink
    from asyncgate.parts.model import queries, stored, wire
    from asyncgate.parts.model.settings import Settings

NEWER, OLDER = "1.1", "1.0"
LIST, MOST_OF_A_TASK = "receiptgate.list_task_receipts", 200
SUBMIT, LOOK, DIFFERENCE = "receiptgate.submit_receipt", "receiptgate.get_receipt", "obligation_id"
OF_THE_LEDGER = {"tenant_id", "stored_at"}      # fields that the ledger sets itself
# Codes that are about the ledger or the credential, not about the receipt.
AWAY_CODES = {"UNAUTHORIZED", "UNAUTHENTICATED", "RATE_LIMITED", "RATE_LIMIT_EXCEEDED", "SERVICE_UNAVAILABLE",
              "DATABASE_UNAVAILABLE", "UNAVAILABLE", "TIMEOUT"}
NOT_ABOUT_THE_RECEIPT = {"FORBIDDEN", "INTERNAL_ERROR", "UNKNOWN_TOOL"}
INVALID_PARAMETERS, WITHOUT_ACCEPT = -32602, "ESCALATE_WITHOUT_ACCEPT"

log = logging.getLogger("asyncgate")


class Invalid(sinks.Refusal):
    """The ledger refuses the receipt because of the field in which the dialects differ."""


class NobodyAccepted(sinks.Refusal):
    """The ledger keeps custody, but nobody has accepted this obligation."""


class ReceiptGate:
    """The adapter to a ledger that speaks JSON-RPC."""

    reads = False

    def __init__(self, settings: Settings) -> None:
        ours = settings.ledger
        self.url = ours.address + "/mcp"
        self.home, self.filed_under = settings.default_tenant_id, ours.tenant_id
        self.source, self.detects = settings.ledger.source_system, settings.ledger.dialect == "auto"
        self.digests = settings.ledger.contents == "digests"
        self.dialect = NEWER if self.detects else settings.ledger.dialect
        self.is_known = not self.detects
        token = ours.auth_token or os.environ.get(ours.auth_token_env, "")
        self.pace = pace_of(settings)
        self.calls = calls.Calls(token, 2 * self.pace.most)       # for queries beside the sending calls

    @property
    def binds(self) -> bool | None:
        """Whether the ledger keeps custody, and so binds a receipt to the credential that stored it."""
        return self.dialect == NEWER if self.is_known else None

    def render(self, tenant_id: str, receipt: stored.Receipt, task: stored.Task | None,
               lease: stored.Lease | None = None) -> bytes | None:
        """Return the receipt in the newer dialect; None for the many receipts that this ledger does not get."""
        filed_under = self.filed_under if self.filed_under and tenant_id == self.home else tenant_id
        return receiptgate_schema.ledger_receipt(filed_under, receipt, task, lease, self.source, self.digests)

    def handed(self, receipt: stored.Receipt, task: stored.Task, lease: stored.Lease | None = None,
               by_worker: bool = False) -> str | None:
        """Return the new `Task.handed` when a receipt takes the task away from its worker."""
        return receiptgate_schema.handed_after(receipt, task, lease, by_worker)

    def undone(self, content: bytes, receipt_id: str, at: float) -> bytes | None:
        """Return the receipt that undoes an acceptance: it returns custody, or in dialect 1.0 ends the obligation."""
        return receiptgate_schema.undo_acceptance(content, receipt_id, at, self.source)

    def taken_back(self, receipt_id: str, task: stored.Task, lease: stored.Lease | None = None) -> str | None:
        """Return the `Task.handed` that says that the gate has custody again."""
        return receiptgate_schema.Handed(lease.fence if lease else task.fence, receipt_id, None).text

    def handover(self, content: bytes) -> bytes | None:
        """Return the hand-over of custody, which only the gate can send; the worker itself stores the acceptance."""
        return receiptgate_schema.as_custody_only(content)

    def body(self, content: bytes) -> bytes:
        """Return the body of a rendered receipt, which may be cut."""
        return receiptgate_schema.write_canonical(json.loads(content)["body"])

    async def send(self, tenant_id: str, content: bytes) -> None:
        """Submit one receipt in this ledger's dialect; find the dialect out if it is not known."""
        dialect = self.dialect
        try:
            await self._submit(content, dialect)
            # a receipt that both dialects have
            self.is_known |= receiptgate_schema.in_dialect_1_0(content) is not None
            return
        except Invalid:
            if not self.detects:
                raise
        other = OLDER if dialect == NEWER else NEWER
        try:
            await self._submit(content, other)
        except Invalid:
            raise sinks.Refusal(f"the ledger accepts this receipt in neither dialect, {dialect} or {other}") from None
        except sinks.Refusal:     # refused for another reason than the dialect, so this is the ledger's dialect
            self._learn(other)
            raise
        self._learn(other)

    def _learn(self, dialect: str) -> None:
        if self.dialect != dialect:
            log.info("the ledger at %s speaks dialect %s", self.url, dialect)
        self.dialect, self.is_known = dialect, True

    async def of_task(self, tenant_id: str, task_id: str) -> list[dict[str, Any]]:
        """Return the receipts of a task, oldest first; raises Outage."""
        about = {"task_id": task_id, "sort": "asc", "include_payload": True, "limit": MOST_OF_A_TASK}
        try:
            told = await self._call(LIST, json.dumps(about).encode(), LOOK_SECONDS, MOST_OF_A_TASK * calls.BESIDE_BODY)
        except sinks.Refusal as refusal:
            raise sinks.Garbled(str(refusal)) from None
        rows = told.get("receipts") if isinstance(told, dict) else None
        if not isinstance(rows, list):
            raise sinks.Garbled(f"the ledger's answer to {LIST} has no list of receipts")
        payloads = [row["payload"] for row in rows if isinstance(row, dict) and isinstance(row.get("payload"), dict)]
        if any(DIFFERENCE in payload for payload in payloads):
            self._learn(NEWER)
        return payloads

    async def _submit(self, content: bytes, dialect: str) -> None:
        """Submit one receipt in one dialect.

        If nobody has accepted the obligation at the ledger, returning custody is a no-op, and a hand-over is sent as an
        acceptance.
        """
        receipt = receiptgate_schema.in_dialect_1_1(content) if dialect == NEWER else receiptgate_schema.in_dialect_1_0(
            content)
        if receipt is None:
            return
        try:
            await self._store(receipt)
        except NobodyAccepted:
            if receiptgate_schema.in_dialect_1_0(content) is None:
                return
            if (accepted := receiptgate_schema.as_accepted(content)) is None:
                raise
            await self._store(accepted)

    async def _store(self, receipt: bytes) -> None:
        result = await self._call(SUBMIT, b'{"receipt":%b}' % receipt)
        if not isinstance(result, dict) or result.get("receipt_id") != json.loads(receipt)["receipt_id"]:
            raise sinks.Garbled(f"the ledger did not confirm that it stored the receipt: {result}"[:calls.MOST_TOLD])

    async def holds(self, tenant_id: str, content: bytes) -> bool:
        """Whether the ledger has a receipt in any of the forms in which it may have been sent."""
        forms = (receiptgate_schema.in_dialect_1_1(content), receiptgate_schema.in_dialect_1_0(content),
                 receiptgate_schema.as_accepted(content))
        about = json.dumps({"receipt_id": json.loads(content)["receipt_id"]}).encode()
        try:
            theirs = await self._call(LOOK, about, LOOK_SECONDS)
        except sinks.Refusal:     # the ledger has no receipt with that id
            return False
        return any(same_receipt(form, theirs, OF_THE_LEDGER) for form in forms if form is not None)

    async def _call(self, tool: str, arguments: bytes, patience: float = 0.0, most_bytes: int = calls.SMALL) -> Any:
        """Call a tool with encoded arguments; return its result.  Raises Refusal and Outage."""
        body = (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"%b","arguments":%b}}'
                % (tool.encode(), arguments))
        seconds = max(self.pace.timeout_seconds, patience)
        answer = await self.calls.ask("POST", self.url, seconds=seconds, most_bytes=most_bytes, content=body)
        if answer.status_code != 200:
            raise calls.answer_error("POST", answer)
        try:
            told = json.loads(answer.content)
            error, result = told.get("error"), told.get("result")
        except (ValueError, AttributeError, RecursionError):
            raise sinks.Garbled("the ledger's answer is not JSON-RPC") from None
        if error is not None:
            raise call_error(error)
        return result

    async def fetch(self, tenant_id: str, receipt_ids: Iterable[str]) -> list[sinks.Filed]:
        """Return an empty list: this ledger cannot return a gate's receipts."""
        return []

    async def page(self, tenant_id: str, of: queries.EntryFilter) -> sinks.LedgerPage:
        """Return an empty page: this ledger cannot return a gate's receipts."""
        return sinks.LedgerPage([])

    async def token(self, tenant_id: str, who: wire.Principal, until: float) -> str | None:
        """Return None: this ledger issues no keys."""
        return None

    async def close(self) -> None:
        """Close the connections."""
        await self.calls.close()


def call_error(error: Any) -> Exception:
    """Turn a JSON-RPC error into an exception: a refusal of the receipt, an outage, or an invalid answer."""
    error = error if isinstance(error, dict) else {"message": str(error)}
    code, more = error.get("code"), error.get("details", error.get("data"))
    message = f"{code}: {error.get('message')}"
    if isinstance(code, int) and code != INVALID_PARAMETERS:
        return sinks.Garbled(message[:calls.MOST_TOLD])
    if isinstance(code, str) and code.upper() in AWAY_CODES:
        return sinks.Outage(message[:calls.MOST_TOLD])
    if isinstance(code, str) and code.upper() in NOT_ABOUT_THE_RECEIPT:
        return sinks.Garbled(message[:calls.MOST_TOLD])
    if code == WITHOUT_ACCEPT:
        return NobodyAccepted(message[:calls.MOST_TOLD])
    whole = message + (json.dumps(more) if more is not None else "")
    return (Invalid if DIFFERENCE in whole.lower() else sinks.Refusal)(message[:calls.MOST_TOLD])


def open_sink(settings: Settings) -> ReceiptGate:
    """Open the ledger that the settings name."""
    return ReceiptGate(settings)


if TYPE_CHECKING:
    _: type[Sink] = ReceiptGate
