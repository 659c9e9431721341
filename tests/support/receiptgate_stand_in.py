"""A ReceiptGate to test against: a real server that is as strict about schema, sizes and ids as the real one was seen.

It speaks JSON-RPC at POST /mcp, with string codes in errors and HTTP 200 around them.  `dialect` is the revision of the
schema that it holds receipts to; with `notary` it also keeps custody of obligations, as the third generation does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.patience import PATIENCE_SECONDS

Json = dict[str, Any]
KEY, SCOPE, PRINCIPAL = "a-key-for-the-ledger", "default", "asyncgate"
MOST_BYTES, CUSTODY_SECONDS = 262_144, 900.0
MOST = {"inputs": 64 * 1024, "metadata": 16 * 1024, "task_body": 100 * 1024, "outcome_text": 100 * 1024}

TEXTS = (
    "schema_version", "tenant_id", "receipt_id", "task_id", "parent_task_id", "caused_by_receipt_id", "dedupe_key",
    "from_principal", "for_principal", "source_system", "recipient_ai", "trust_domain", "task_type", "task_summary",
    "task_body", "expected_artifact_mime", "outcome_text", "artifact_location", "artifact_pointer", "artifact_checksum",
    "artifact_mime", "escalation_reason", "escalation_to")
CHOICES = {
    "phase": ["accepted", "complete", "escalate"], "status": ["NA", "success", "failure", "canceled"],
    "expected_outcome_kind": ["NA", "none", "response_text", "artifact_pointer", "mixed"],
    "outcome_kind": ["NA", "none", "response_text", "artifact_pointer", "mixed"],
    "escalation_class": ["NA", "owner", "capability", "trust", "policy", "scope", "other"]}
MOMENTS = ("created_at", "stored_at", "started_at", "completed_at", "read_at", "archived_at")
FIELDS: Json = {
    **{name: {"type": "string", "minLength": 1} for name in TEXTS},
    **{name: {"enum": choices} for name, choices in CHOICES.items()},
    **{name: {"type": ["string", "null"], "format": "date-time"} for name in MOMENTS},
    **{name: {"type": "integer", "minimum": 0} for name in ("attempt", "artifact_size_bytes")},
    **{name: {"type": "boolean"} for name in ("realtime", "retry_requested")},
    **{name: {"type": "object"} for name in ("inputs", "body", "metadata")}}
assert len(FIELDS) == 41


def const(value: Any) -> Json:
    return {"const": value}


def when(field: str, values: list[Any], then: Json) -> Json:
    """A rule that holds where a field has one of these values."""
    return {"if": {"properties": {field: {"enum": values}}}, "then": {"properties": then}}


NOT_NA, NA = {"not": const("NA")}, const("NA")
UNSAID = {"outcome_kind": NA, "outcome_text": NA, "artifact_location": NA, "artifact_pointer": NA,
          "artifact_checksum": NA, "artifact_size_bytes": const(0), "artifact_mime": NA}
POINTED = {"artifact_pointer": NOT_NA, "artifact_location": NOT_NA, "artifact_mime": NOT_NA}
RULES = [
    when("phase", ["accepted"], {
        "status": NA, "completed_at": const(None), "task_summary": {"not": const("TBD")}, **UNSAID,
        "escalation_class": NA, "escalation_to": NA, "retry_requested": const(False)}),
    when("phase", ["complete"], {
        "status": {"enum": ["success", "failure", "canceled"]}, "completed_at": {"type": "string"},
        "outcome_kind": NOT_NA}),
    when("outcome_kind", ["artifact_pointer", "mixed"], POINTED),
    when("phase", ["escalate"], {"status": NA, "escalation_class": NOT_NA, "escalation_reason": {"not": const("TBD")}}),
    when("retry_requested", [True], {"attempt": {"minimum": 1}})]
RULES_1_1 = [
    when("outcome_kind", ["artifact_pointer", "mixed"], {"escalation_class": NA}),
    when("phase", ["escalate"], {"escalation_to": NOT_NA})]


def schema(dialect: str) -> Json:
    """The schema of a dialect; both call themselves 1.0."""
    newer = dialect == "1.1"
    fields = {**FIELDS, "schema_version": const("1.0"),
              **({"obligation_id": {"type": "string", "minLength": 1}} if newer else {})}
    refs = {"artifact_refs": {"type": "array", "items": {"type": "object"}}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "required": sorted(fields),
            "properties": {**fields, **refs}, "additionalProperties": False,
            "allOf": [*RULES, *(RULES_1_1 if newer else [])]}


CHECKS = {name: jsonschema_rs.Draft202012Validator(schema(name), validate_formats=True) for name in ("1.0", "1.1")}


def problems(receipt: Any, dialect: str) -> list[str]:
    """What is wrong with a receipt by schema, by size, and by what the application checks."""
    messages = [error.message for error in CHECKS[dialect].iter_errors(receipt)]
    if messages:
        return messages
    faults = [f"{name} is too large" for name, most in MOST.items() if len(json.dumps(receipt[name]).encode()) > most]
    if receipt["phase"] == "escalate" and receipt["recipient_ai"] != receipt["escalation_to"]:
        faults.append("recipient_ai must be escalation_to")
    return faults


class No(Exception):
    """A refusal: its code, and what it says."""

    def __init__(self, code: str | int, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code, self.details = code, details


class Custody:
    """One obligation, as a notary knows it."""

    def __init__(self, custodian: str, deadline: float) -> None:
        self.custodian, self.deadline, self.closed = custodian, deadline, False

    def state(self, now: float) -> str:
        """Whether it is owed, and in time."""
        return "CLOSED" if self.closed else "OVERDUE" if now > self.deadline else "OPEN"


class StandIn:
    """The ledger: what it holds, and how it answers; tests turn its knobs and look inside."""

    def __init__(self, dialect: str = "1.0", *, notary: bool = False, now: Callable[[], float] = time.time) -> None:
        self.turn = asyncio.Lock()
        paths = ("/mcp", "/{test:int}/mcp")
        self.app = Starlette(routes=[Route(path, self.answer, methods=["POST"]) for path in paths])
        self.test = 0       # the test that it serves now: calls that are under way for an earlier one count no more
        self.begin(dialect, notary=notary, now=now)

    def begin(self, dialect: str, *, notary: bool = False, now: Callable[[], float] = time.time) -> None:
        """Forget everything and begin anew."""
        self.dialect, self.notary, self.now = dialect, notary, now
        self.receipts: dict[str, Json] = {}         # in the order in which they were stored
        self.hashes: dict[str, str] = {}
        self.custody: dict[str, Custody] = {}
        self.submitted: list[bytes] = []            # every body that came with a good key
        self.refusals: list[str | int] = []
        self.status = 0                             # answer this instead, and keep nothing
        self.lose_replies = 0                       # so many times store, and then answer 502
        self.code = ""                              # refuse everything with this code
        self.keys = {KEY: PRINCIPAL}                # who a key belongs to; the first is a service, the others work
        self.principal = PRINCIPAL                  # of the call that is being answered
        self.serial_seconds = 0.0                   # carry out one call after another, and take so long for each
        self.under_way, self.most_at_once = 0, 0

    @property
    def denied(self) -> list[Any]:
        """What was refused, but for questions after a receipt that was given up before it came here."""
        return [code for code in self.refusals if code != "not_found"]

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        body = await request.body()
        if self.is_over(request):
            return Response("that test is over", 410)
        shown = {request.headers.get("authorization", "").removeprefix("Bearer "), request.headers.get("x-api-key")}
        known = [self.keys[key] for key in shown if key in self.keys]
        if not known:
            return JSONResponse({"detail": "Invalid or missing API key"}, 401)
        if len(body) > MOST_BYTES:
            return JSONResponse({"error": "request_too_large", "max_body_bytes": MOST_BYTES}, 413)
        self.submitted.append(body)
        self.principal = known[0]
        if self.serial_seconds:
            await self.in_turn()
            if self.is_over(request):
                return Response("that test is over", 410)
        if self.status:
            return Response("not now", self.status)
        try:
            asked = json.loads(body)
            assert isinstance(asked, dict)
            assert isinstance(asked["method"], str)
        except (ValueError, AssertionError, KeyError):
            return JSONResponse({"ok": False, "error": {"code": "VALIDATION_ERROR", "message": "bad request"}}, 422)
        reply = {"jsonrpc": "2.0", "id": asked.get("id"), **self.replied(asked)}
        if self.lose_replies and "result" in reply and SUBMITS in body:     # a look that the gate takes loses nothing
            self.lose_replies -= 1
            return Response("the reply is lost", 502)
        return JSONResponse(reply)

    def is_over(self, request: Request) -> bool:
        """Whether a call is of an earlier test, whose gate has gone; it must not take what is meant for this one."""
        return bool(request.path_params.get("test", self.test) != self.test)

    async def in_turn(self) -> None:
        """Take as long as the real one, also for a caller who has gone meanwhile."""
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        async with self.turn:
            await asyncio.sleep(self.serial_seconds)
        self.under_way -= 1

    def replied(self, asked: Json) -> Json:
        """The result or the error of a call."""
        try:
            return {"result": self.call(asked)}
        except No as refusal:
            self.refusals.append(refusal.code)
            details = {"details": refusal.details} if refusal.details else {}
            return {"error": {"code": refusal.code, "message": str(refusal), **details}}

    def call(self, asked: Json) -> Json:
        """Carry out a call of a tool."""
        if asked["method"] != "tools/call":
            raise No(-32601, f"Method not found: {asked['method']}")
        params = asked.get("params") or {}
        if not isinstance(name := params.get("name"), str):
            raise No(-32602, "tool name is required")
        tool = getattr(self, name.removeprefix("receiptgate."), None)
        if not name.startswith("receiptgate.") or name not in TOOLS or tool is None:
            raise No("unknown_tool", f"Unknown tool: {name}")
        answer: Json = tool(**(params.get("arguments") or {}))
        return answer

    # The tools.

    def health(self) -> Json:
        return {"status": "healthy", "service": "ReceiptGate", "version": "0", "instance_id": "stand-in"}

    def submit_receipt(self, receipt: Any) -> Json:
        """Store a receipt once; the same again is a replay, and another under its id a collision."""
        if self.code:
            raise No(self.code, "refused")
        if faults := problems(receipt, self.dialect):
            raise No("validation_failed", f"Receipt validation failed: {faults[0]}", errors=faults)
        receipt_id, incoming = receipt["receipt_id"], self.hash(receipt)
        existing = self.hashes.get(receipt_id)
        if existing not in (None, incoming):
            raise No("RECEIPT_ID_COLLISION", "Receipt exists with other content", receipt_id=receipt_id,
                     existing_hash=existing, incoming_hash=incoming)
        if existing is None:
            if self.notary:
                self.decide(receipt)
            self.hashes[receipt_id] = incoming
            self.receipts[receipt_id] = {**receipt, "tenant_id": SCOPE}
        return {"receipt_id": receipt_id, "stored_at": receipt["stored_at"], "tenant_id": SCOPE,
                "canonical_hash": f"sha256:{incoming}", "idempotent_replay": existing is not None}

    def hash(self, receipt: Json) -> str:
        """The hash over all but what the ledger itself sets."""
        content = {name: value for name, value in receipt.items() if name not in ("stored_at", "tenant_id")}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def get_receipt(self, receipt_id: str) -> Json:
        if receipt_id not in self.receipts:
            raise No("not_found", "Receipt not found")
        return self.receipts[receipt_id]

    def list_task_receipts(self, task_id: str, sort: str = "asc", include_payload: bool = False,
                           limit: int = 100) -> Json:
        receipts = [receipt for receipt in self.receipts.values() if receipt["task_id"] == task_id]
        rows = [header(receipt) | ({"payload": receipt} if include_payload else {}) for receipt in receipts]
        rows = rows if sort == "asc" else rows[::-1]
        return {"tenant_id": SCOPE, "task_id": task_id, "receipts": rows[:limit]}

    def list_inbox(self, recipient_ai: str, limit: int = 50) -> Json:
        """What somebody has accepted and nobody has ended; of a notary, what somebody has custody of."""
        if self.notary:
            rows = [{"obligation_id": id, "state": custody.state(self.now())} for id, custody in self.custody.items()
                    if custody.custodian == recipient_ai and not custody.closed]
        else:
            ended = {receipt["task_id"] for receipt in self.receipts.values() if receipt["phase"] != "accepted"}
            rows = [header(receipt) for receipt in self.receipts.values()
                    if receipt["phase"] == "accepted" and receipt["task_id"] not in ended and
                    receipt["recipient_ai"] == recipient_ai]
        return {"tenant_id": SCOPE, "recipient_ai": recipient_ai, "count": len(rows), "receipts": rows[:limit]}

    def get_receipt_chain(self, receipt_id: str) -> Json:
        chain = []
        while receipts := self.receipts.get(receipt_id):
            chain.append({name: receipts[name] for name in ("receipt_id", "caused_by_receipt_id", "stored_at")})
            receipt_id = receipts["caused_by_receipt_id"]
        return {"root_receipt_id": chain[-1]["receipt_id"] if chain else None, "chain": chain}

    # The notary.

    def decide(self, receipt: Json) -> None:
        """Move custody as the receipt says, or refuse it."""
        if receipt["source_system"] != self.principal:
            raise No("IDENTITY_MISMATCH", "source_system is not who is authenticated")
        if self.principal not in (PRINCIPAL, receipt["from_principal"]):
            raise No("ACTOR_NOT_PERMITTED", "a worker acts for itself only")
        if receipt["tenant_id"] != SCOPE:
            raise No("TENANT_MISMATCH", "tenant_id is not the scope of the credential")
        known, actor = self.custody.get(receipt["obligation_id"]), receipt["from_principal"]
        state = known.state(self.now()) if known else "NONE"
        if receipt["phase"] == "accepted":
            self.accept(receipt, state)
        elif known is None:
            raise No(f"{receipt['phase'].upper()}_WITHOUT_ACCEPT", "nobody has accepted this obligation")
        elif state == "CLOSED":
            raise No("OBLIGATION_ALREADY_TERMINATED", "this obligation is closed")
        elif receipt["phase"] == "complete":
            if actor != known.custodian:
                raise No("ACTOR_NOT_CUSTODIAN", f"{known.custodian} has custody, not {actor}")
            known.closed = True
        elif actor != known.custodian and state == "OPEN":
            raise No("OBLIGATION_NOT_RECOVERABLE", "only what is overdue can be recovered by others")
        else:
            known.custodian = receipt["escalation_to"]

    def accept(self, receipt: Json, state: str) -> None:
        """Open an obligation, in the custody of whom the receipt is for."""
        if state != "NONE":
            raise No("OBLIGATION_ALREADY_TERMINATED" if state == "CLOSED" else "OBLIGATION_ALREADY_ACCEPTED",
                     f"this obligation is {state}")
        self.custody[receipt["obligation_id"]] = Custody(receipt["for_principal"], self.now() + CUSTODY_SECONDS)


SUBMITS = b'"receiptgate.submit_receipt"'
TOOLS = {f"receiptgate.{name}" for name in (
    "health", "submit_receipt", "get_receipt", "list_task_receipts", "list_inbox", "get_receipt_chain")}


def header(receipt: Json) -> Json:
    """What lists show of a receipt."""
    return {name: receipt[name] for name in ("receipt_id", "task_id", "phase", "stored_at", "recipient_ai")}


@contextlib.contextmanager
def served(ledger: StandIn, port: int = 0) -> Iterator[str]:
    """Serve a ledger from a thread of its own; gives the URL of its host."""
    server = uvicorn.Server(uvicorn.Config(ledger.app, port=port, lifespan="off", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not server.started:
        assert thread.is_alive(), "the ledger did not start"
        assert time.monotonic() < deadline, "the ledger did not start in time"
        thread.join(0.005)
    try:
        host, number = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{number}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
