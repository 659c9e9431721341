"""Bad input gets its exact refusal on every operation and field, never a 5xx, and nothing of it is written."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
from collections.abc import Iterator
from typing import Any, get_args
from urllib.parse import quote

import msgspec
import pytest

from asyncgate import Operation
from asyncgate.parts.model.wire import Kind, SummaryPrefix
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.logs import JsonLines, Lines
from tests.support.each import each

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
WAYS = {f"{verb} {path}": (op, verb, path) for op in OPERATIONS.values() for verb, path in op.rest}
POSTS = [way for way in WAYS if way.startswith("POST")]
WIDEST = 2**53 - 1


@pytest.fixture
def url(backend_url: str) -> str:
    """Run each test on every kind of store."""
    return backend_url


def refused(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Expect a refusal and return its body."""
    body: dict[str, Any] = answer.json()
    assert (answer.status, body["error"]) == (status, code), answer
    assert body["message"] == body["detail"]
    assert "Traceback" not in body["message"]
    return body


@pytest.fixture
async def known(served: Any) -> dict[str, str]:
    """Make one task of each kind, so that bad input could hurt something; return ids that exist."""
    order = await served.leased("clock-1", type="schedule.create")
    await served.post("/v1/receipts", {
        "receipt_type": "schedule.created", "schedule_id": "nightly", "worker_id": "clock-1",
        "task_id": order["task_id"], "lease_id": order["lease_id"]})
    queued = await served.post("/v1/tasks", {"type": "queued", "payload": None, "agent_id": "ada",
                                             "idempotency_key": "first"})
    held = await served.post("/v1/tasks", {"type": "held", "payload": None, "agent_id": "ada", "priority": 9})
    (offer,) = (await served.post("/v1/leases/claim", {"worker_id": "w1"}))["tasks"]
    assert offer["task_id"] == held["task_id"]
    room = await served.post("/v1/tenants", {"name": "Acme"})
    issued = await served.post("/v1/keys", {"name": "a key", "principal_id": "reader-1"})
    program = await served.post("/v1/clients", {"client_name": "App", "redirect_uris": ["https://app.example/cb"]})
    person = await served.post("/v1/users", {"email": "ada@example.com"})
    hook = await served.post("/v1/webhooks", {"endpoint": "https://hooks.invalid/", "types": ["system.anomaly"]})
    await served.post(f"/v1/tasks/{offer['task_id']}/webhooks", {"endpoint": "https://hooks.invalid/"})
    await served.post("/v1/task-limits", {"name": "openai", "concurrency_total": 10})
    (queue, *_) = (await served.get("/v1/queues"))["queues"]
    preview = await served.post("/v1/bulks/preview", {"action": "cancel", "type": "nothing"})
    bulk = await served.post("/v1/bulks", {"confirmation": preview["confirmation"]})
    return {"schedule_id": "nightly", "part": offer["task_id"][-12:], "task_id": offer["task_id"],
            "lease_id": offer["lease_id"], "worker_id": "w1", "queued": queued["task_id"],
            "client_id": program["client_id"], "user_id": person["user_id"], "bulk_id": bulk["bulk_id"],
            "confirmation": preview["confirmation"], "webhook_id": hook["webhook"]["webhook_id"],
            "queue_id": queue["queue_id"], "name": "openai", "type": "demo",
            "tenant": room["tenant"], "key_id": issued["key"]["key_id"],
            "receipt_id": offer["obligation_receipt_id"], "parent_receipt_id": offer["obligation_receipt_id"]}


# Requests that are good but for one field.


def filled(op: Operation, known: dict[str, str]) -> dict[str, Any]:
    """The least that a good request of this operation says; a path that needs more takes it from here."""
    fields: dict[str, Any] = {name: known[name] for name in op.takes.needed}
    if {"worker_id", "lease_id"} <= set(op.takes.__struct_fields__) or op.name == "lease_next":
        fields["worker_id"] = known["worker_id"]
    least: dict[str, dict[str, Any]] = {
        "create_task": {"type": "demo", "payload": None}, "run_task": {"type": "demo", "payload": None,
                                                                       "wait_seconds": 0},
        "create_tasks": {"tasks": [{"type": "demo", "payload": None}]},
        "emit_receipt": {"receipt_type": "schedule.created"},
        "complete_tasks": {"tasks": [{"task_id": known["task_id"], "lease_id": known["lease_id"]}]},
        "report_schedule": {"schedules": [{"schedule_id": "s"}]},
        **{name: {"worker": "nobody"} for name in ("pause_work", "drain_work", "resume_work")},
        "preview_bulk": {"action": "cancel"}, "run_bulk": {"confirmation": known["confirmation"]},
        "create_tenant": {"name": "Acme"}, "issue_key": {"name": "a key", "principal_id": "reader-1"},
        "invite_user": {"email": "ada@example.com"}, "make_sign_in_link": {"principal_id": "ada"},
        "revoke_token": {"token_id": "t1"}, "set_budget": {"quantity": "tasks"},
        "create_webhook": {"endpoint": "https://hooks.invalid/"},
        "create_task_webhook": {"endpoint": "https://hooks.invalid/"},
        "remove_task_webhook": {"webhook_id": f"{known['task_id']}.0"},
        "erase_principal": {"principal_id": "x", "plan": True}, "erase_tenant": {"plan": True},
        "register_client": {"client_name": "App", "redirect_uris": ["https://app.example/cb"]}}
    return fields | least.get(op.name, {})


def split(path: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Put into the path what it carries; the rest is the body or the query."""
    carried = re.findall(r"{(\w+)}", path)
    for name in carried:
        path = path.replace(f"{{{name}}}", quote(str(fields[name]), safe=""))
    return path, {name: value for name, value in fields.items() if name not in carried}


async def ask(served: Any, verb: str, path: str, fields: dict[str, Any]) -> Any:
    """Send a request in the form of its method."""
    target, rest = split(path, fields)
    if verb == "POST":
        return await served.call(verb, target, rest)
    return await served.call(verb, target + "?" + "&".join(f"{name}={quote(str(value), safe='')}"
                                                           for name, value in rest.items()))


# What is wrong for a field, read from its type.


ANY_BUT_NUL = msgspec.json.schema(SummaryPrefix)["pattern"]     # of a text; other patterns are those of names


class Field:
    """One field of a request: what it takes, with its limits."""

    def __init__(self, field: Any) -> None:
        self.name, self.schema = field.name, msgspec.json.schema(field.type)
        some = [choice for choice in self.schema.get("anyOf", [self.schema]) if choice.get("type") != "null"]
        self.inner: dict[str, Any] = {**self.schema, **(some[0] if len(some) == 1 else {})}
        if "$ref" in self.inner:
            self.inner["type"] = "object"
        self.kind = self.inner.get("type", "string" if "enum" in self.inner else None)

    def wrong(self, verb: str, carried: bool) -> Iterator[Any]:
        """Yield values that this field cannot take, over its way of travelling."""
        yield from self.bad_text() if self.kind == "string" else ()
        yield from self.bad_number() if self.kind in ("integer", "number") else ()
        if verb == "GET" or carried:
            yield from ("ten", "true", "1_0", "0x10", "٣", " 5", "5 ", "") if self.kind == "integer" else ()
            yield from ("ten", "nan", "inf", "-inf", "1e400", "1,5", "") if self.kind == "number" else ()
            return
        yield from self.bad_type()

    def bad_text(self) -> Iterator[str]:
        if self.inner.get("minLength"):
            yield ""
        if most := self.inner.get("maxLength"):
            yield "a" * (most + 1)
        if self.inner.get("pattern") == ANY_BUT_NUL:
            yield "a\0"
        elif "pattern" in self.inner:
            yield from (" ", "   a", "a\n", "a\r\nb", "\ta", "a\x1b[31m", "a\x85", "\x7f")
            yield from ("\u202eadm", "a\u200bb", "\ufeffa")
        if "enum" in self.inner:
            yield from (self.inner["enum"][0].upper(), "nobody", "")
        if self.inner.get("format") == "date-time":
            yield from ("now", "2026-01-01", "2026-01-01T00:00:00", "0000-01-01T00:00:00Z", "10000-01-01T00:00:00Z",
                        "2026-13-01T00:00:00Z", "2026-01-01T00:00:00+99:00", "2026-01-01T00:00:60Z", "1767225600")

    def bad_number(self) -> Iterator[float]:
        if (least := self.inner.get("minimum")) is not None:
            yield from (least - 1, -WIDEST - 1)
        if (most := self.inner.get("maximum")) is not None:
            yield from (most * 2, 10**400 if self.kind == "integer" else 1e300)

    def bad_type(self) -> Iterator[Any]:
        good: dict[Any, tuple[type, ...]] = {
            "integer": (int,), "number": (int, float), "string": (str,), "array": (list,), "object": (dict,),
            "boolean": (bool,)}
        kinds = self.kind if isinstance(self.kind, list) else [self.kind]
        taken = tuple(kind for name in kinds for kind in good.get(name, ()))
        for value in ("text", 5, 1.5, True, [1], {"a": 1}) if self.kind else ():
            if not isinstance(value, taken) or (isinstance(value, bool) and bool not in taken):
                yield value
        if self.kind == "integer":
            yield "5"


def fields_of(kind: type[msgspec.Struct]) -> list[Field]:
    return [Field(field) for field in msgspec.structs.fields(kind)]


@pytest.mark.one_store
@each("way", WAYS)
async def test_what_a_field_cannot_take_is_refused_and_nothing_is_written(
        served: Any, known: dict[str, str], way: str) -> None:
    op, verb, path = WAYS[way]
    carried = re.findall(r"{(\w+)}", path)
    tried = 0

    async with served.unchanged():
        for field in fields_of(op.takes):
            for value in field.wrong(verb, field.name in carried):
                if field.name in carried and value == "":
                    continue    # an empty piece of a path makes another path
                if (op.name, field.name) == ("attach_artifacts", "artifacts"):
                    continue    # the state of the task is told first
                answer = await ask(served, verb, path, filled(op, known) | {field.name: value})
                assert answer.status == 400, (field.name, value, answer)
                refused(answer, 400, "invalid_request")
                tried += 1

    assert tried >= (3 if op.takes.__struct_fields__ != ("tenant_id",) else 0)


NO_ITEMS: list[Any] = [{}, "x", [], [{}] * 501]
ITEMS = {"create_tasks": "tasks", "complete_tasks": "tasks", "report_schedule": "schedules"}


OWN_CHECKS = ("requirements", "artifacts")     # looked at item by item, so that only the item is refused


@pytest.mark.one_store
@pytest.mark.parametrize("name", ITEMS)
async def test_what_a_field_of_an_item_cannot_take_refuses_that_item_alone(
        served: Any, known: dict[str, str], name: str) -> None:
    op = OPERATIONS[name]
    (kind,) = get_args(get_args(next(f.type for f in msgspec.structs.fields(op.takes) if f.name == ITEMS[name]))[0])
    (path,) = (path for _, path in op.rest)

    for field in fields_of(kind):
        for value in field.wrong("POST", carried=False) if field.name not in OWN_CHECKS else ():
            good = filled(op, known)
            bad = {**good[ITEMS[name]][0], field.name: value}
            answer = await served.post(path, good | {ITEMS[name]: [bad, *good[ITEMS[name]]]})
            refusals = answer["refused"] if "refused" in answer else [
                item["error"] for item in answer["results"] if "error" in item]
            assert [refusal["error"] for refusal in refusals
                    if f"{ITEMS[name]}[0]" in refusal["message"]] == ["invalid_request"]
            assert not [refusal for refusal in refusals if f"{ITEMS[name]}[1]" in refusal["message"]]


@pytest.mark.one_store
@each("way", WAYS)
async def test_the_nul_character_is_refused_everywhere(served: Any, known: dict[str, str], way: str) -> None:
    op, verb, path = WAYS[way]
    carried = re.findall(r"{(\w+)}", path)
    texts = [field for field in fields_of(op.takes) if verb == "POST" or field.kind in ("string", "integer", "number")]

    async with served.unchanged():
        for field in texts:
            answer = await ask(served, verb, path, filled(op, known) | {field.name: "a\0b"})
            refused(answer, 400, "invalid_request")
            if verb == "POST" and field.name not in carried:
                for value in ({"a\0": 1}, ["\0"], {"a": {"b": ["\0"]}}):
                    if isinstance(value, list) and field.name in (ITEMS.get(op.name), op.takes.items):
                        continue        # test_spoilt_items: the item is refused, and not the batch
                    answer = await ask(served, verb, path, filled(op, known) | {field.name: value})
                    refused(answer, 400, "invalid_request")
        refused(await served.call(verb, split(path, filled(op, known))[0] + "?%00=1", {}), 400, "invalid_request")


@pytest.mark.one_store
@pytest.mark.parametrize("name", ITEMS)
async def test_a_batch_that_is_empty_or_too_long_is_refused(served: Any, known: dict[str, str], name: str) -> None:
    op = OPERATIONS[name]
    (path,) = (path for _, path in op.rest)
    good = filled(op, known)

    async with served.unchanged():
        lists: list[list[Any]] = [[], good[ITEMS[name]] * 501]
        for items in lists:
            refused(await served.call("POST", path, good | {ITEMS[name]: items}), 400, "invalid_request")


@pytest.mark.one_store
@each("name, items", [(name, items) for name in ITEMS for items in NO_ITEMS])
async def test_a_batch_whose_items_are_refused_names_the_member_that_holds_them(
        served: Any, name: str, items: Any) -> None:
    (path,) = (path for _, path in OPERATIONS[name].rest)

    answer = await served.call("POST", path, {ITEMS[name]: items})

    assert f"at `$.{ITEMS[name]}`" in answer.json()["message"]


@pytest.mark.one_store
async def test_what_the_gate_reads_itself_refuses_only_its_item(served: Any, known: dict[str, str]) -> None:
    held: dict[str, Any] = {"task_id": known["task_id"], "lease_id": known["lease_id"]}

    async with served.unchanged():
        created = await served.post("/v1/tasks/batch", {"tasks": [
            {"type": "demo", "payload": None, "requirements": bad} for bad in ("web", 5, [1],
                                                                               {"capabilities": "web"})]})
        ended = await served.post("/v1/tasks/complete-batch", {"worker_id": "w1", "tasks": [
            held | {"artifacts": bad} for bad in ("text", 5, 1.5, True)] + [{}, {"task_id": known["task_id"]}]})

    assert {item["error"]["error"] for item in created["results"] + ended["results"]} == {"invalid_request"}


# JSON that is none.

BROKEN = {
    "nothing but space": b"   ", "a cut object": b'{"type":"demo"', "a cut text": b'{"type":"de', "a list": b"[]",
    "null": b"null", "a text": b'"demo"', "a number": b"5", "two objects": b'{"type":"demo"}{}',
    "trailing text": b'{"type":"demo"} x',
    "utf-16": '{"type":"demo"}'.encode("utf-16"), "bad utf-8": b'{"type":"\xff\xfe"}',
    "overlong utf-8": b'{"type":"\xc0\x80"}', "bad utf-8 in a key": b'{"\xff":1,"type":"demo"}',
    "a surrogate": b'{"type":"\\ud800"}', "a low surrogate": b'{"type":"\\udc00x"}',
    "NaN": b'{"type":"demo","payload":NaN}', "Infinity": b'{"type":"demo","payload":[-Infinity]}',
    "a huge float": b'{"type":"demo","payload":1e400}',
    "a huge float within": b'{"type":"demo","success_criteria":{"a":[1e400]}}', "a comment": b'{"type":"demo"/* a */}',
    "a trailing comma": b'{"type":"demo",}', "single quotes": b"{'type':'demo'}", "a raw newline": b'{"type":"de\nmo"}',
    "a raw NUL": b'{"type":"de\x00mo"}', "a leading zero": b'{"type":"demo","priority":01}',
    "a plus": b'{"type":"demo","priority":+1}', "a key of no text": b'{1:2,"type":"demo"}',
    "a surrogate in a payload": b'{"type":"demo","payload":{"a":"\\ud800"}}',
    "bad utf-8 in a payload": b'{"type":"demo","payload":{"a":"\xff"}}',
    "5,000 digits": b'{"type":"demo","payload":' + b"9" * 5000 + b"}",
    "requirements with a surrogate": b'{"type":"demo","requirements":{"x":"\\udfff"}}',
}


@pytest.mark.one_store
@each("broken", BROKEN)
async def test_what_is_not_json_or_not_an_object_is_refused(served: Any, broken: str) -> None:
    async with served.unchanged():
        refused(await served.call("POST", "/v1/tasks", BROKEN[broken]), 400, "invalid_request")


@pytest.mark.one_store
@pytest.mark.parametrize("value", [b"NaN", b'{"loss":[0.5,NaN]}', b"[-Infinity]"])
async def test_a_number_that_json_does_not_have_is_named(served: Any, value: bytes) -> None:
    word = b"Infinity" if b"Infinity" in value else b"NaN"
    tool = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"asyncgate.create_task","arguments":%b}}'
    for path, body in (("/v1/tasks", b'{"type":"demo","payload":%b}'),
                       ("/v1/tasks/batch", b'{"tasks":[{"payload":%b}]}'),
                       ("/v1/tasks/t1/complete", b'{"artifacts":%b}'), ("/v1/tasks/t1/progress", b'{"progress":%b}'),
                       ("/mcp", tool.replace(b"%b", b'{"type":"demo","payload":%b}'))):
        text = body % value
        answer = await served.call("POST", path, text)

        assert f"{word.decode()} at byte {text.index(word)}: JSON has no such number" in answer.content.decode(), answer
        assert path == "/mcp" or answer.status == 400


@pytest.mark.one_store
@each("way", POSTS)
async def test_every_operation_refuses_broken_json(served: Any, known: dict[str, str], way: str) -> None:
    op, verb, path = WAYS[way]
    target, _ = split(path, filled(op, known))

    async with served.unchanged():
        for body in (b"{", b"[]", b"null", b'{"a":"\xff\\ud800"', b"{} {}", b'{"tenant_id":"\xff"}'):
            refused(await served.call(verb, target, body), 400, "invalid_request")


RAW = [("/v1/tasks", "payload", {"type": "demo", "payload": None}), ("/v1/tasks/{task_id}/progress", "progress", {}),
       ("/v1/tasks/{task_id}/complete", "result", {}), ("/v1/tasks/{task_id}/fail", "error", {}),
       ("/v1/tasks", "requirements", {"type": "demo", "payload": None}), ("/v1/tasks", "success_criteria",
                                                                          {"type": "demo", "payload": None}),
       ("/v1/tasks/{task_id}/complete", "delivery_proof", {}), ("/v1/tasks/{task_id}/complete", "artifacts", {})]


async def inside(served: Any, known: dict[str, str], path: str, name: str, fields: dict[str, Any], value: bytes) -> Any:
    """Send JSON as it is in one field."""
    target, _ = split(path, known)
    given = json.dumps({"worker_id": "w1", "lease_id": known["lease_id"], **fields}).encode()
    return await served.call("POST", target, given[:-1] + b',"%b":%b}' % (name.encode(), value))


@pytest.mark.one_store
@pytest.mark.parametrize(("path", "name", "fields"), RAW, ids=[name for _, name, _ in RAW])
async def test_json_that_nobody_could_read_later_is_refused_in_every_field_that_takes_any(
        served: Any, known: dict[str, str], path: str, name: str, fields: dict[str, Any]) -> None:
    target, _ = split(path, known)
    start = json.dumps({"worker_id": "w1", "lease_id": known["lease_id"], **fields}).encode()[:-1]

    async with served.unchanged():
        for value in (b'{"a":"\\ud800"}', b'{"a":"\xff"}', b'{"a":NaN}', b'{"a":1e400}', b'{"a":"\\u0000"}',
                      b'{"\\u0000":1}', b'{"a":' + b"9" * 5000 + b"}", b'{"a":[1,]}', b'{"a":"\x01"}'):
            answer = await served.call("POST", target, start + b',"%b":%b}' % (name.encode(), value))
            refused(answer, 400, "invalid_request")


@pytest.mark.parametrize(("path", "name", "fields"), RAW, ids=[name for _, name, _ in RAW])
async def test_json_may_be_nested_64_deep_and_no_deeper(
        served: Any, known: dict[str, str], path: str, name: str, fields: dict[str, Any]) -> None:
    target, _ = split(path, known)
    start = json.dumps({"worker_id": "w1", "lease_id": known["lease_id"], **fields}).encode()[:-1]

    def nested(depth: int, leaf: bytes) -> bytes:
        return start + b',"%b":' % name.encode() + b'{"a":' * depth + leaf + b"}" * depth + b"}"

    async with served.unchanged():
        for leaf in (b"1", b"[]", b'[[],"x"]'):
            refused(await served.call("POST", target, nested(64, leaf)), 400, "payload_too_deep")
        for depth in (1_000, 5_000, 100_000):
            refused(await served.call("POST", target, nested(depth, b"1")), 400, "payload_too_deep")
    # The request itself is the first of the 64; many brackets beside each other are not depth.
    answer = await served.call("POST", target, nested(63, b"1")[:-1] + b',"more":[' + b"[],{}," * 99 + b"[]]}")
    assert answer.status == 200, answer


@pytest.mark.parametrize(("path", "name", "fields"), RAW[:4], ids=[name for _, name, _ in RAW[:4]])
async def test_numbers_of_others_are_kept_as_they_came(
    served: Any, known: dict[str, str], path: str, name: str, fields: dict[str, Any]
) -> None:
    number = b"9" * 400

    answer = await inside(served, known, path, name, fields, b'{"a":%b,"b":-0.0,"c":1E5}' % number)

    assert answer.status == 200, answer
    assert number in (await served.call("GET", "/v1/tasks?limit=200")).content


async def test_own_integers_stay_within_what_every_reader_keeps(served: Any) -> None:
    for number in (WIDEST, -WIDEST):
        made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "priority": number})
        assert (await served.get(f"/v1/tasks/{made['task_id']}"))["priority"] == number

    async with served.unchanged():
        for number in (WIDEST + 1, -WIDEST - 1, 2**63, 2**64, 10**400):
            answer = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None, "priority": number})
            refused(answer, 400, "invalid_request")


# Lists, texts, times, pages.


@pytest.mark.one_store
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("path", "field", "most"), [
    ("/v1/leases/claim", "capabilities", 64), ("/v1/leases/claim", "accept_types", 64),
    ("/v1/leases/claim", "preferred_kinds", 64)])
async def test_a_list_of_names_is_held_to_its_limits(served: Any, path: str, field: str, most: int) -> None:
    good = {"worker_id": "w9", "accept_types": ["none"]}

    assert (await served.call("POST", path, good | {field: [str(n) for n in range(most)]})).status == 200
    async with served.unchanged():
        for value in ([str(n) for n in range(most + 1)], ["a" * 201], [""], [5], [None], [["a"]], "a", {"a": 1},
                      [str(n) for n in range(9_000)]):
            refused(await served.call("POST", path, good | {field: value}), 400, "invalid_request")
        for number in (30_000, 100_000):        # a longer list than is read, and more values than any request may have
            more = await served.call("POST", path, good | {field: [str(n) for n in range(number)]})
            refused(more, 413, "payload_too_large")


@pytest.mark.one_store
async def test_required_capabilities_are_held_to_their_limits(served: Any) -> None:
    async with served.unchanged():
        for value in ([str(n) for n in range(65)], ["a" * 101], [""], [5], "web", {"a": 1}, [None]):
            body = {"type": "demo", "payload": None, "requirements": {"capabilities": value}}
            refused(await served.call("POST", "/v1/tasks", body), 400, "invalid_request")
        no_objects: list[Any] = [[], "web", 5, True]
        for no_object in no_objects:
            answer = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None,
                                                             "requirements": no_object})
            refused(answer, 400, "invalid_request")


PAGES = ["/v1/tasks", "/v1/receipts", "/v1/obligations/open", "/v1/bootstrap"]


@pytest.mark.one_store
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("path", PAGES)
async def test_a_limit_below_one_or_no_integer_is_refused_and_a_large_one_is_clamped(served: Any, path: str) -> None:

    for value in ("0", "-1", "ten", "1.5", "true", "1e400", "", "%201", str(2**53), "null%00"):
        refused(await served.call("GET", f"{path}?agent_id=ada&limit={value}"), 400, "invalid_request")
    for value in ("1", "200", "1000000000", str(WIDEST)):
        assert (await served.call("GET", f"{path}?agent_id=ada&limit={value}")).status == 200


@pytest.mark.parametrize("path", PAGES[:3])
async def test_a_cursor_that_was_not_given_for_this_list_is_refused(served: Any, path: str) -> None:
    for number in range(3):
        await served.post("/v1/tasks", {"type": f"t{number}", "payload": None, "agent_id": "ada"})
    ada = "principal_id=ada&principal_kind=agent"
    page = await served.get(f"{path}?limit=1&{ada}")
    name = "since_receipt_id" if "obligations" in path else "cursor"
    if name == "since_receipt_id":
        good = page["cursor"]
    else:
        good = page["next_cursor"]
        assert good == page["cursor"]
        middle = len(good) // 2
        flipped = good[:middle] + ("A" if good[middle] != "A" else "B") + good[middle + 1:]
        for bad in (good[:-1], good + "A", flipped, good.swapcase()):
            refused(await served.call("GET", f"{path}?{name}={bad}&{ada}"), 400, "invalid_cursor")
        refused(await served.call("GET", f"{path}?{name}={good}&principal_id=bob"), 400, "invalid_cursor")

    for bad in ("x", "%F0%9F%8E%88", "....", "AAAA", "0" * 5000, "-1", "1%20OR%201=1"):
        refused(await served.call("GET", f"{path}?{ada}&{name}={bad}"), 400, "invalid_cursor")
    assert (await served.call("GET", f"{path}?{name}={good}&{ada}")).status == 200


@pytest.mark.parametrize("text", ["%", "_", "a%", "\\", "'", '"', "x' OR '1'='1", "x'; --", "a_b", "[a-z]*", "名", "*"])
async def test_a_filter_matches_literally(served: Any, text: str) -> None:
    for type in ("ab", "axb", "a%b", "x", text):
        await served.post("/v1/tasks", {"type": type, "agent_id": type, "payload": None})

    by_type = await served.get(f"/v1/tasks?type={quote(text, safe='')}")
    by_creator = await served.get(f"/v1/tasks?created_by={quote(text, safe='')}")
    by_recipient = await served.get(f"/v1/receipts?to_id={quote(text, safe='')}")
    claimed = await served.post("/v1/leases/claim", {"worker_id": "w1", "accept_types": [text], "max_tasks": 9})

    assert [task["type"] for task in by_type["tasks"]] == [text]
    assert [task["created_by"]["id"] for task in by_creator["tasks"]] == [text]
    assert {receipt["to"]["id"] for receipt in by_recipient["receipts"]} == {text}
    assert [task["type"] for task in claimed["tasks"]] == [text]


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "1969-12-31T23:59:59Z",
                                    "9999-12-31T23:59:59Z", "9999-12-31T23:59:59-23:59", "2026-02-28T23:59:59.9+14:00"])
async def test_a_time_at_the_edge_of_the_calendar_breaks_nothing(served: Any, moment: str) -> None:
    offer = await served.leased("clock", type="schedule.create")
    await served.post("/v1/receipts", {
        "receipt_type": "schedule.created", "worker_id": "clock", "task_id": offer["task_id"],
        "lease_id": offer["lease_id"], "schedule_id": "s"})

    made = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None, "timeouts": {"deadline": moment}})
    told = await served.call("POST", "/v1/schedules/report", {"worker_id": "clock", "schedules": [
        {"schedule_id": "s", "next_run_at": moment, "interval_seconds": 315_360_000}]})
    await served.gate.upkeep.once("sweep")

    assert {made.status, told.status} <= {200, 400}
    assert served.gate.upkeep.duties["sweep"].failures == 0
    assert (await served.call("GET", "/v1/tasks")).status == 200


@pytest.mark.one_store
async def test_the_refusal_of_a_late_time_names_the_latest_one(served: Any) -> None:
    answers = [await served.call("POST", "/v1/pauses", {"type": "demo", "until": f"9999-12-{day}T23:59:59Z"})
               for day in (30, 31)]

    assert [answer.status for answer in answers] == [200, 400]
    assert answers[1].json()["message"].endswith("between 1970 and 9999-12-31T00:00:00Z")


# Sizes.


@pytest.mark.parametrize(("path", "name", "limit"), [
    ("/v1/tasks", "payload", 2**20), ("/v1/tasks/{task_id}/complete", "result", 2**20),
    ("/v1/tasks/{task_id}/fail", "error", 2**20), ("/v1/tasks/{task_id}/progress", "progress", 2**16)])
async def test_the_largest_value_is_taken_and_one_byte_more_is_413(
        served: Any, known: dict[str, str], path: str, name: str, limit: int) -> None:
    target, _ = split(path, known)
    body = {"type": "demo", "payload": None, "worker_id": "w1", "lease_id": known["lease_id"]}

    async with served.unchanged():
        refused(await served.call("POST", target, body | {name: "a" * (limit - 1)}), 413, "payload_too_large")
    assert (await served.call("POST", target, body | {name: "a" * (limit - 2)})).status == 200


@pytest.mark.one_store
async def test_one_large_item_of_a_batch_is_refused_by_itself(served: Any) -> None:
    answer = await served.post("/v1/tasks/batch", {"tasks": [
        {"type": "demo", "payload": None}, {"type": "demo", "payload": "a" * 2**20}, {"type": "demo",
                                                                                      "payload": None}]})

    assert [item.get("status") or item["error"]["error"] for item in answer["results"]] == [
        "queued", "payload_too_large", "queued"]


async def test_a_refused_item_does_not_hide_the_keys_of_the_others(served: Any, known: dict[str, str]) -> None:

    async with served.unchanged():
        answer = await served.post("/v1/tasks/batch", {"tasks": [
            {"type": "demo", "payload": None, "principal_kind": "system", "principal_id": "root",
             "idempotency_key": "k"},
            {"type": "queued", "payload": None, "agent_id": "ada", "idempotency_key": "first"}]})

    assert answer["results"][0]["error"]["error"] == "forbidden"
    assert answer["results"][1]["task_id"] == known["queued"]


async def test_a_receipt_that_would_be_too_large_is_refused_and_the_lease_lives_on(
        served: Any, known: dict[str, str]) -> None:
    body = {"worker_id": "w1", "lease_id": known["lease_id"]}
    target = f"/v1/tasks/{known['task_id']}/complete"

    async with served.unchanged():
        large, many = {"completion_metadata": {"a": "b" * 2**16}}, {"artifacts": [{"uri": "x"}] * 101}
        refused(await served.call("POST", target, body | large), 400, "receipt_too_large")
        refused(await served.call("POST", target, body | many), 400, "too_many_artifacts")
        for artifacts in ("file:///x", 5, True):
            refused(await served.call("POST", target, body | {"artifacts": artifacts}), 400, "invalid_request")
    assert (await served.call("POST", target, body | {"artifacts": [{"uri": "x"}] * 100})).status == 200


@pytest.mark.one_store
async def test_parents_of_an_offered_receipt_are_checked(served: Any, known: dict[str, str]) -> None:
    good: dict[str, Any] = {"receipt_type": "schedule.deleted", "worker_id": "w1"}
    known_one = {"parents": [known["receipt_id"]]}

    async with served.unchanged():
        for body, code in ((good, "parents_required"), (good | {"parents": []}, "parents_required"),
                           (good | {"parents": ["unknown"]}, "parent_not_found"),
                           (good | known_one, "invalid_request"),
                           (good | known_one | {"receipt_type": "task.completed"}, "invalid_request")):
            refused(await served.call("POST", "/v1/receipts", body), 400, code)


@pytest.mark.one_store
async def test_compressed_bodies_are_never_unpacked(served: Any) -> None:
    body = gzip.compress(b'{"type":"demo"}')

    async with served.unchanged():
        refused(await served.call("POST", "/v1/tasks", body, headers=[("content-encoding", "gzip")]), 415,
                "unsupported_media_type")
        refused(await served.call("POST", "/v1/tasks", body), 400, "invalid_request")


# Paths.


@pytest.mark.one_store
@each("way", [way for way in WAYS if "{" in way])
async def test_an_id_in_a_path_plays_no_tricks(served: Any, known: dict[str, str], way: str) -> None:
    op, verb, path = WAYS[way]
    body = filled(op, known) if verb == "POST" else None

    async with served.unchanged():
        for trick in ("%2e%2e", "..", "%2e", "%2e%2e%2f%2e%2e", "a%2fb", "%252e%252e", "a;b=c", "'%20OR%20'1", "%25",
                      "%00", "%0a", "a%0d%0ab", "%e2%80%ae", "%ff", "a" * 201, "a" * 20_000, "%20", "null", "~"):
            answer = await served.call(verb, path.replace(re.findall("{.*?}", path)[0], trick), body)
            # Where any text may stand, there is nothing behind it.
            nothing = answer.json() in ({"found": []}, {"removed": False, "limits_left": 1})
            assert nothing or answer.status in (400, 404, 409), (trick, answer)


@pytest.mark.one_store
@each("path", ["//v1/tasks", "/v1//tasks", "/v1/tasks//", "/v1/./tasks", "/v1/tasks/%2e%2e", "/V1/TASKS",
               "/v1/../v1/tasks", "/v1/tasks%20", "/v1/tasks%00", "/" + "a" * 9999])
async def test_another_spelling_of_a_path_is_another_path(served: Any, path: str) -> None:
    async with served.unchanged():
        answer = await served.call("POST", path, {"type": "demo", "payload": None})

    # `/v1/tasks/..` is the task with the id `..`, which a POST does not name.
    assert (answer.status, answer.json()["error"]) in {(404, "not_found"), (405, "method_not_allowed")}


@pytest.mark.one_store
@pytest.mark.parametrize("query", ["%ff", "a=%ff", "principal_id=%ff%fe", "limit=%ff", "\x80", "a=\xff"])
async def test_a_query_that_is_not_utf_8_is_refused(served: Any, query: str) -> None:
    for verb, path in (("GET", "/v1/tasks"), ("POST", "/v1/tasks")):
        async with served.unchanged():
            refused(await served.call(verb, f"{path}?{query}", {"type": "demo", "payload": None}), 400,
                    "invalid_request")


@pytest.mark.one_store
async def test_a_query_of_many_names_is_read_in_no_time_that_matters(served: Any) -> None:
    answer = await served.call("GET", "/v1/tasks?" + "&".join(f"a{n}=1" for n in range(5_000)))

    refused(answer, 400, "invalid_request")


@pytest.mark.one_store
@pytest.mark.parametrize("name", ["principal_kind=root", "principal_id=", "principal_id=a%0ab",
                                  "principal_id=" + "a" * 201, "principal_instance_id=%1b[31m"])
async def test_who_asks_is_checked_in_the_query_of_a_post_too(served: Any, name: str) -> None:
    async with served.unchanged():
        refused(await served.call("POST", f"/v1/tasks?{name}", {"type": "demo", "payload": None}), 400,
                "invalid_request")


@pytest.mark.one_store
@pytest.mark.parametrize(("way", "place"), [
    (f"/v1/tasks/{'a' * 201}/cancel", "$.task_id"), ("/v1/tasks?principal_kind=root", "$.principal_kind"),
    (f"/v1/tasks?principal_id={'a' * 201}", "$.principal_id")])
async def test_a_value_that_a_path_or_a_query_may_not_have_is_named(served: Any, way: str, place: str) -> None:
    answer = await served.call("POST", way, {} if "cancel" in way else {"type": "demo", "payload": None})

    assert answer.status == 400
    assert f" - at `{place}`" in answer.json()["message"], answer.json()


@pytest.mark.one_store
@pytest.mark.parametrize(("name", "way", "given", "place", "words"), [
    ("list_tasks", "GET /v1/tasks?status=done", {"status": "done"}, "status",
     "queued, leased, running, succeeded, failed, canceled"),
    ("preview_bulk", "POST /v1/bulks/preview", {"action": "delete"}, "action", "cancel, release, prioritize, rerun"),
    ("create_task", "POST /v1/tasks", {"type": "demo", "payload": None, "created_by": {"kind": "root", "id": "ada"}},
     "created_by.kind", ", ".join(get_args(Kind))),
    ("create_task", "POST /v1/tasks", {"type": "demo", "payload": None, "unique": {"key": "k", "while": "done"}},
     "unique.while", "unfinished, queued, a number")])
async def test_whoever_says_a_word_that_does_not_exist_is_told_which_do(
        served: Any, name: str, way: str, given: Any, place: str, words: str) -> None:
    method, path = way.split(" ")
    over_rest = (await served.call(method, path, given if method == "POST" else None)).json()
    call = {"name": f"asyncgate.{name}", "arguments": given}
    answer = await served.call("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    over_mcp = answer.json()["error"]["data"]

    assert over_rest["error"] == over_mcp["error"] == "invalid_request"
    for told in over_rest, over_mcp:
        assert told["message"].endswith(f" - at `$.{place}`: one of {words}")


# Who may not be named.


@pytest.mark.one_store
@pytest.mark.parametrize("kind", ["system", "asyncgate"])
async def test_nobody_acts_as_the_system_or_the_gate_from_outside(
        served: Any, known: dict[str, str], kind: str) -> None:

    async with served.unchanged():
        for target, body in (
            ("/v1/tasks", {"type": "demo", "payload": None, "principal_kind": kind, "principal_id": "x"}),
            (f"/v1/tasks?principal_kind={kind}&principal_id=x", {"type": "demo", "payload": None}),
            ("/v1/tasks", {"type": "demo", "payload": None, "created_by": {"kind": kind, "id": "x"}}),
            ("/v1/leases/claim", {"worker_id": "w", "worker_kind": kind}),
            (f"/v1/tasks/{known['queued']}/cancel", {"principal_kind": kind, "principal_id": "x"}),
            (f"/v1/receipts/{known['receipt_id']}/ack", {"principal_kind": kind, "principal_id": "x"}),
        ):
            refused(await served.call("POST", target, body), 403, "forbidden")


@pytest.mark.one_store
async def test_what_only_the_gate_may_say_is_ignored(served: Any) -> None:
    made = await served.post("/v1/tasks", {
        "type": "demo", "payload": None, "task_id": "mine", "status": "succeeded",
        "created_at": "2001-01-01T00:00:00Z", "attempt": 9,
        "fence": 7, "obligation_receipt_id": "r", "hash": "h", "receipt_id": "r", "asyncgate_instance": "evil"})
    record = await served.get(f"/v1/tasks/{made['task_id']}")

    assert record["task_id"] != "mine"
    assert (record["status"], record["attempt"], record["fence"]) == ("queued", 0, 0)
    assert not record["created_at"].startswith("2001")
    assert record["asyncgate_instance"] == served.engine.instance


# Logs.


EVIL = "a\x1b[31mred\r\n2026-01-01 INFO forged\x00\x85\x9b"


@pytest.mark.one_store
@pytest.mark.parametrize("form", [JsonLines, Lines], ids=["json", "console"])
async def test_what_comes_from_outside_never_breaks_out_of_its_log_line(
    served: Any, caplog: pytest.LogCaptureFixture, form: type[logging.Formatter]
) -> None:
    caplog.set_level(logging.DEBUG)
    # With a token in its query a request would be refused before the operation sees it, at last a second later.
    names = {field for op in OPERATIONS.values() for field in op.takes.__struct_fields__} - {"access_token"}
    query = "&".join(f"{name}={quote(EVIL)}" for name in sorted(names))

    for op, verb, path in WAYS.values():
        target = re.sub("{.*?}", quote(EVIL, safe=""), path)
        await served.call(verb, f"{target}?{query}", dict.fromkeys(op.takes.__struct_fields__, EVIL))
        await served.call(verb, quote(f"/{EVIL}"), headers=[("x-evil", EVIL), ("user-agent", EVIL)])
    await served.call("GET", f"/v1/bootstrap?principal_id={quote('ada é')}&principal_kind=agent")

    lines = [form("%(message)s").format(record) for record in caplog.records if record.name.startswith("asyncgate")]
    assert any("bootstrap" in line for line in lines)
    assert [line for line in lines if re.search(r"[\x00-\x1f\x7f-\x9f]", line)] == []


def test_both_formats_escape_what_a_record_carries() -> None:
    record = logging.LogRecord("asyncgate", logging.INFO, "f", 1, "got %s", (EVIL,), None)
    written = JsonLines().format(record)

    assert json.loads(written)["message"] == f"got {EVIL}"
    assert not re.search(r"[\x00-\x1f]", written)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", Lines("%(message)s").format(record))


# Many at once.


async def test_bad_requests_do_not_spoil_the_good_ones_of_their_batch(served: Any) -> None:
    good = [served.call("POST", "/v1/tasks", {"type": "demo", "payload": n}) for n in range(20)]
    bad = [served.call("POST", "/v1/tasks", {"type": "demo", "payload": "a" * 2**20}) for _ in range(5)]
    bad += [served.call("POST", "/v1/tasks/unknown/cancel", {}) for _ in range(5)]

    answers = await asyncio.gather(*good, *bad)

    assert [answer.status for answer in answers] == [200] * 20 + [413] * 5 + [404] * 5
    assert len((await served.stored())["Task"]) == 20
