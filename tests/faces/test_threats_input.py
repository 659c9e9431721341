"""Bad input (threats E1 to E11) over MCP as over REST, on every backend: the same refusal, and nothing is written.

Over REST most of it is told field by field in test_bad_input.py, which runs on SQLite and on Postgres too.

    E1   test_bad_input.py::test_what_is_not_json_or_not_an_object_is_refused
         test_bad_input.py::test_json_that_nobody_could_read_later_is_refused_in_every_field_that_takes_any
         test_bad_input.py::test_the_nul_character_is_refused_everywhere
         test_bad_input.py::test_json_may_be_nested_64_deep_and_no_deeper
         test_bad_input.py::test_numbers_of_others_are_kept_as_they_came
         test_bad_input.py::test_own_integers_stay_within_what_every_reader_keeps
         test_mcp.py::test_what_is_no_message_is_refused_and_nothing_breaks
         test_threats_input.py::test_e1_what_somebody_could_not_read_is_refused_in_every_argument
         test_threats_input.py::test_e1_an_argument_of_another_type_is_refused_as_it_is_over_rest
    E2   test_bad_input.py::test_the_largest_value_is_taken_and_one_byte_more_is_413
         test_bad_input.py::test_compressed_bodies_are_never_unpacked
         test_rest.py::test_a_body_over_the_limit_is_413_with_and_without_its_length
         test_rest.py::test_over_a_socket_a_body_is_held_to_its_limits
         test_transport.py::test_bytes_beyond_the_content_length_are_refused_and_never_join_the_body
         test_transport.py::test_a_body_shorter_than_its_content_length_ends_as_a_disconnect
         test_threats_input.py::test_e2_the_largest_value_is_taken_over_mcp_too_and_one_byte_more_is_refused
         test_threats_input.py::test_e2_a_message_over_the_limit_or_compressed_is_refused_at_mcp
    E3   test_threats_input.py::test_e3_json_of_many_keys_or_much_white_space_is_read_once
         test_screening.py::test_each_of_the_worst_bodies_is_refused_and_breaks_nothing
         test_screening.py::test_a_large_body_is_judged_in_many_turns
         test_screening.py::test_who_may_not_ask_is_refused_before_the_body_is_read
         (that no turn takes 50 ms is measured by `asyncgate bench --bad-bodies`, not asserted: a time limit in a test
         fails on a busy machine)
    E4   test_bad_input.py::test_what_a_field_cannot_take_is_refused_and_nothing_is_written
         test_bad_input.py::test_who_asks_is_checked_in_the_query_of_a_post_too
         test_threats_input.py::test_e4_a_name_with_what_nobody_sees_is_refused_in_every_tongue
    E5   test_bad_input.py::test_a_filter_matches_literally
         test_threats_input.py::test_e5_a_filter_matches_literally_over_mcp
    E6   test_bad_input.py::test_a_cursor_that_was_not_given_for_this_list_is_refused
         conformance/test_lists.py::test_a_cursor_that_was_tampered_with_is_refused
         conformance/test_lists.py::test_a_cursor_of_another_query_is_refused
         conformance/test_lists.py::test_a_cursor_of_another_inbox_is_refused
         conformance/test_lists.py::test_a_cursor_or_receipt_of_another_tenant_is_refused
         test_threats_input.py::test_e6_a_cursor_that_was_not_given_for_this_list_is_refused_over_mcp
         (a cursor does not expire: it holds a position, no permission, and is checked against who shows it)
    E7   test_bad_input.py::test_a_limit_below_one_or_no_integer_is_refused_and_a_large_one_is_clamped
         conformance/test_lists.py::test_a_limit_below_one_or_not_an_integer_is_refused
         test_threats_input.py::test_e7_a_limit_is_held_to_its_span_over_mcp
    E8   test_bad_input.py::test_a_time_at_the_edge_of_the_calendar_breaks_nothing
         test_threats_input.py::test_e8_a_moment_that_is_none_is_refused_in_every_tongue
    E9   test_limits.py::test_a_name_of_any_letters_makes_a_key_that_a_header_may_carry
         test_threats_input.py::test_e9_no_header_of_an_answer_repeats_what_a_request_says
    E10  test_bad_input.py::test_what_comes_from_outside_never_breaks_out_of_its_log_line
         test_bad_input.py::test_both_formats_escape_what_a_record_carries
         test_threats_input.py::test_e10_what_comes_over_mcp_never_breaks_out_of_its_log_line
    E11  test_bad_input.py::test_an_id_in_a_path_plays_no_tricks
         test_bad_input.py::test_another_spelling_of_a_path_is_another_path
         test_rest.py::test_a_path_that_is_none_is_404
         test_threats_input.py::test_e11_an_id_plays_no_tricks_as_an_argument
         test_threats_input.py::test_e11_over_a_socket_another_spelling_of_a_path_opens_nothing
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import msgspec
import pytest

from asyncgate import Operation
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.logs import JsonLines, Lines, Redaction
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
MODERN = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
JSON_TYPE = ("content-type", "application/json")
TONGUES = ["modern", "bare"]
tongues = pytest.mark.parametrize("tongue", TONGUES)
every_tongue = pytest.mark.parametrize("tongue", ["rest", *TONGUES])
# What is refused while it is read never gets as far as a store; that no store gets it is asserted all the same.
in_memory = pytest.mark.parametrize("url", ["memory:"])
PARSE_ERRORS = {-32700, -32600, -32602}     # of JSON-RPC: no JSON, no message, no arguments
REFUSED = {"invalid_request", "payload_too_deep", "invalid"}      # the last of a receipt that is not imported


@pytest.fixture
def url(backend_url: str) -> str:
    """Run each test on every kind of store."""
    return backend_url


# Each tongue says raw JSON, and what it hears is told as a code: "" for a good answer.


def message(tongue: str, name: str, arguments: bytes) -> tuple[bytes, list[tuple[str, str]]]:
    """Return a call of a tool as it goes over the wire."""
    meta = b',"_meta":' + json.dumps(META).encode() if tongue == "modern" else b""
    body = (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"asyncgate.%b","arguments":%b%b}}'
            % (name.encode(), arguments, meta))
    more = [("accept", "application/json, text/event-stream"), ("mcp-protocol-version", MODERN),
            ("mcp-method", "tools/call"), ("mcp-name", f"asyncgate.{name}")]
    return body, [JSON_TYPE, *(more if tongue == "modern" else [])]


def code_of(answer: Any) -> str:
    """Return the code of a refusal, whatever tongue it is told in, and "" for a good answer."""
    assert answer.status < 500, answer
    told = answer.json()
    if "error" in told and not isinstance(told["error"], dict):
        return str(told["error"])
    if "error" in told:
        code = (told["error"].get("data") or {}).get("code")
        assert code or told["error"]["code"] in PARSE_ERRORS, answer
        return str(code or "invalid_request")
    return str(told["result"].get("_meta", {}).get("asyncgate/error", {}).get("code", "")) if "result" in told else ""


def reply_of(answer: Any) -> Any:
    """Return the reply of a good answer, whatever tongue it is told in."""
    assert code_of(answer) == "", answer
    told = answer.json()
    return told["result"]["structuredContent"] if "jsonrpc" in told else told


def codes_of(answer: Any) -> set[str]:
    """Return the code of a refused call, or those of the items of a batch, which are refused each by itself."""
    if code := code_of(answer):
        return {code}
    reply = reply_of(answer)
    problems = reply["refused"] if "refused" in reply else [item.get("error") for item in reply.get("results", [])]
    return {problem.get("error") or problem["reason"] if problem else "" for problem in problems} or {""}


async def asked(served: Any, tongue: str, name: str, fields: dict[str, Any] | bytes) -> Any:
    """Ask for an operation in a tongue; bytes go as they are."""
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    if tongue != "rest":
        body, headers = message(tongue, name, raw)
        return await served.call("POST", "/mcp", body, headers=headers)
    (verb, path), given = OPERATIONS[name].rest[0], json.loads(raw)
    for carried in re.findall(r"{(\w+)}", path):
        path = path.replace(f"{{{carried}}}", quote(str(given.pop(carried)), safe=""))
    if verb == "POST":
        return await served.call(verb, path, given)
    return await served.call(verb, path + "?" + "&".join(f"{k}={quote(str(v), safe='')}" for k, v in given.items()))


async def reply(served: Any, tongue: str, name: str, /, **fields: Any) -> Any:
    """Return what a good answer holds."""
    return reply_of(await asked(served, tongue, name, fields))


async def code(served: Any, tongue: str, name: str, /, **fields: Any) -> str:
    """Return the code of a refusal, "" for none."""
    return code_of(await asked(served, tongue, name, fields))


def least(op: Operation, known: dict[str, Any]) -> dict[str, Any]:
    """Return the least that a good request says."""
    fields = {name: known[name] for name in op.takes.needed}
    more: dict[str, dict[str, Any]] = {
        "create_task": {"type": "demo", "payload": None}, "run_task": {"type": "demo", "payload": None,
                                                                       "wait_seconds": 0}, "lease_next": {},
        "create_tasks": {"tasks": [{"type": "demo", "payload": None}]},
        "emit_receipt": {"receipt_type": "schedule.created"},
        "complete_tasks": {"tasks": [{"task_id": known["task_id"], "lease_id": known["lease_id"]}]},
        "report_schedule": {"schedules": [{"schedule_id": "s"}]}, "preview_bulk": {"action": "cancel"},
        "run_bulk": {"confirmation": known["confirmation"]}, "erase_principal": {"principal_id": "x", "plan": True},
        "erase_tenant": {"plan": True},
        **{name: {"worker": "nobody"} for name in ("pause_work", "drain_work", "resume_work")}}
    worker = {"worker_id": "w1"} if "worker_id" in op.takes.__struct_fields__ else {}
    return fields | worker | more.get(op.name, {})


@pytest.fixture
async def known(served: Any) -> dict[str, Any]:
    """Make one of everything that has an id, a leased task among it; return the ids."""
    offer = await served.leased()
    duty = offer["obligation_receipt_id"]
    order = await served.leased(type="schedule.create")
    await reply(served, "rest", "emit_receipt", receipt_type="schedule.created", schedule_id="nightly",
                worker_id="w1", task_id=order["task_id"], lease_id=order["lease_id"])
    preview = await reply(served, "rest", "preview_bulk", action="cancel", type="nothing")
    hook = await reply(served, "rest", "create_webhook", endpoint="https://hooks.invalid/")
    program = {"client_name": "x", "redirect_uris": ["https://app.example/cb"]}
    return {
        "task_id": offer["task_id"], "lease_id": offer["lease_id"], "receipt_id": duty, "parent_receipt_id": duty,
        "tenant": str(UUID(int=7)), "principal_id": "x", "part": offer["task_id"][-12:], "schedule_id": "nightly",
        "queue_id": (await reply(served, "rest", "list_queues"))["queues"][0]["queue_id"],
        "name": (await reply(served, "rest", "set_limit", name="openai", concurrency_total=10))["name"], "type": "demo",
        "confirmation": preview["confirmation"],
        "bulk_id": (await reply(served, "rest", "run_bulk", confirmation=preview["confirmation"]))["bulk_id"],
        "client_id": (await reply(served, "rest", "register_client", **program))["client_id"],
        "user_id": (await reply(served, "rest", "invite_user", email="x@example.com"))["user_id"],
        "key_id": (await reply(served, "rest", "issue_key", name="x", principal_id="x"))["key"]["key_id"],
        "webhook_id": hook["webhook"]["webhook_id"]}


def with_raw(fields: dict[str, Any], name: str, value: bytes) -> bytes:
    """Write fields as JSON with one of them as it is given."""
    rest = json.dumps({key: held for key, held in fields.items() if key != name}).encode()[:-1]
    return rest + b'%b"%b":%b}' % (b"," if len(rest) > 1 else b"", name.encode(), value)


# E1: what some reader or database could not take.


UNREADABLE = {
    "a lone surrogate": b'"\\ud800"', "NUL": b'"a\\u0000b"', "NUL in a key": b'{"\\u0000":1}', "bad UTF-8": b'"\xff"',
    "NaN": b"NaN", "Infinity": b"[-Infinity]", "a huge float": b"1e400", "5,000 digits": b"9" * 5000,
    "a comment": b'"a" /* b */', "a comma": b"[1,]", "trailing text": b'"a" x', "a byte order mark": b'\xef\xbb\xbf"a"',
    "a raw control": b'"\x01"', "depth": b"[" * 70 + b"]" * 70, "great depth": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "greater depth": b"[" * 100_000 + b"]" * 100_000}
WHOLE = {"great depth", "greater depth"}        # are judged before anybody knows which field it is
# All fields of a type are read by the same decoder: one of them gets everything, the others what is text and is not.
FIRST_OF_TYPE = {repr(field.type): (name, field.name) for name, op in reversed(OPERATIONS.items())
                 for field in reversed(msgspec.structs.fields(op.takes))}
IN_EVERY_FIELD = {"a lone surrogate", "NUL", "NUL in a key", "bad UTF-8"}


def unreadable(op: Operation) -> Iterator[tuple[str, str, bytes]]:
    """Yield what to put into which field of a request, and what it is called."""
    for at, field in enumerate(msgspec.structs.fields(op.takes)):
        wholly = at == 0 or FIRST_OF_TYPE[repr(field.type)] == (op.name, field.name)
        for what, value in UNREADABLE.items():
            if (wholly or what in IN_EVERY_FIELD) and (at == 0 or what not in WHOLE):
                yield field.name, what, value


@in_memory
@tongues
@each("name", OPERATIONS)
async def test_e1_what_somebody_could_not_read_is_refused_in_every_argument(
    served: Any, known: dict[str, Any], name: str, tongue: str
) -> None:
    fields = least(OPERATIONS[name], known)

    async with served.unchanged():
        for field, what, value in unreadable(OPERATIONS[name]):
            answer = await asked(served, tongue, name, with_raw(fields, field, value))
            assert answer.status in (200, 400), (field, what, answer)
            assert codes_of(answer) <= REFUSED, (field, what, answer)


@in_memory
@each("name", OPERATIONS)
async def test_e1_an_argument_of_another_type_is_refused_as_it_is_over_rest(
    served: Any, known: dict[str, Any], name: str
) -> None:
    op = OPERATIONS[name]
    fields, carried = least(op, known), re.findall(r"{(\w+)}", op.rest[0][1])
    # A query knows text only, where arguments that are numbers must be numbers.
    asked_in = TONGUES if op.rest[0][0] == "GET" else ["rest", *TONGUES]

    async with served.unchanged():
        for field in msgspec.structs.fields(op.takes):
            for value in others(field) if field.name not in carried or "rest" not in asked_in else ():
                codes = [await code(served, tongue, name, **{**fields, field.name: value}) for tongue in asked_in]
                assert codes == ["invalid_request"] * len(codes), (field.name, value)


def others(field: Any) -> Iterator[Any]:
    """Yield values that are of no type which a field takes."""
    schema = msgspec.json.schema(field.type)
    some = json.dumps(schema)
    kinds = {"integer": 5, "number": 1.5, "string": "text", "array": [1], "object": {"a": 1}, "boolean": True}
    if field.name in ("requirements", "artifacts") or not re.search(r'"(type|\$ref|enum)"', some):
        return      # any JSON, or looked at by the rules
    for kind, value in kinds.items():
        taken = {"integer": ("integer", "number"), "string": ("string", "enum")}.get(kind, (kind,))
        if not any(f'"{name}"' in some for name in taken) and not (kind == "object" and "$ref" in some):
            yield value


# E2, E3: sizes.


@tongues
@pytest.mark.parametrize(("name", "field", "limit"), [
    ("create_task", "payload", 2**20), ("complete", "result", 2**20), ("report_progress", "progress", 2**16)])
async def test_e2_the_largest_value_is_taken_over_mcp_too_and_one_byte_more_is_refused(
    served: Any, known: dict[str, Any], name: str, field: str, limit: int, tongue: str
) -> None:
    fields = least(OPERATIONS[name], known)

    async with served.unchanged():
        assert await code(served, tongue, name, **{**fields, field: "a" * (limit - 1)}) == "payload_too_large"
    assert await code(served, tongue, name, **{**fields, field: "a" * (limit - 2)}) == ""


@pytest.mark.one_store
@tongues
async def test_e2_a_message_over_the_limit_or_compressed_is_refused_at_mcp(serve: Any, tongue: str) -> None:
    served = await serve(max_request_bytes=2000)
    body, headers = message(tongue, "create_task", b'{"type":"demo","payload":"%b"}' % (b"a" * 2000))

    async with served.unchanged():
        told = await served.call("POST", "/mcp", b"", headers=[*headers, ("content-length", str(len(body)))])
        chunked = await served.call("POST", "/mcp", [body[:1500], body[1500:]], headers=headers)
        headers.append(("content-encoding", "gzip"))
        packed = await served.call("POST", "/mcp", gzip.compress(body), headers=headers)

    assert [(answer.status, answer.json()["error"]) for answer in (told, chunked, packed)] == [
        (413, "payload_too_large"), (413, "payload_too_large"), (415, "unsupported_media_type")]


@every_tongue
async def test_e3_json_of_many_keys_or_much_white_space_is_read_once(served: Any, tongue: str) -> None:
    many = {str(number): 0 for number in range(80_000)}
    for payload in (json.dumps(many, separators=(",", ":")).encode(), b"[" + b" " * 1_000_000 + b"]", b"[[],{}]"):
        made = reply_of(await asked(served, tongue, "create_task", b'{"type":"demo","payload":%b}' % payload)
                        if tongue != "rest" else
                        await served.call("POST", "/v1/tasks", b'{"type":"demo","payload":%b}' % payload))
        task = await served.get(f"/v1/tasks/{made['task_id']}")
        assert task["payload"] == json.loads(payload)


# E4 to E8: names, filters, cursors, limits, times.


UNSEEN = ["", " ", "   a", "a\n", "a\r\nb", "\ta", "a\x1b[31m", "a\x85", "\x7f", "\u202eadm", "a\u200bb", "\ufeffa",
          "a" * 201]


@pytest.mark.one_store
@every_tongue
async def test_e4_a_name_with_what_nobody_sees_is_refused_in_every_tongue(
        served: Any, known: dict[str, Any], tongue: str) -> None:
    held = {"task_id": known["task_id"], "lease_id": known["lease_id"]}

    async with served.unchanged():
        for text in UNSEEN:
            for name, fields in (("create_task", {"type": text, "payload": None}),
                                 ("create_task", {"type": "a", "payload": None, "principal_id": text}),
                                 ("lease_next", {"worker_id": text}), ("list_tasks", {"principal_id": text}),
                                 ("fail", {**held, "error": "no", "worker_id": text})):
                assert await code(served, tongue, name, **fields) == "invalid_request", (name, fields)


@tongues
@pytest.mark.parametrize("text", ["%", "_", "a%", "\\", "'", '"', "x' OR '1'='1", "x'; --", "a_b", "[a-z]*", "*"])
async def test_e5_a_filter_matches_literally_over_mcp(served: Any, text: str, tongue: str) -> None:
    for type in ("ab", "axb", "a%b", "x", text):
        await reply(served, tongue, "create_task", type=type, payload=None, agent_id=type)

    by_type = await reply(served, tongue, "list_tasks", type=text)
    by_recipient = await reply(served, tongue, "list_receipts", to_id=text)
    claimed = await reply(served, tongue, "lease_next", worker_id="w1", accept_types=[text], max_tasks=9)

    assert [task["type"] for task in by_type["tasks"]] == [text]
    assert {receipt["to"]["id"] for receipt in by_recipient["receipts"]} == {text}
    assert [task["type"] for task in claimed["tasks"]] == [text]


@tongues
@pytest.mark.parametrize("name", ["list_tasks", "list_receipts"])
async def test_e6_a_cursor_that_was_not_given_for_this_list_is_refused_over_mcp(
    served: Any, name: str, tongue: str
) -> None:
    for number in range(3):
        await served.post("/v1/tasks", {"type": f"t{number}", "payload": None, "agent_id": "ada"})
    ada = {"principal_id": "ada", "principal_kind": "agent"}
    page = await reply(served, tongue, name, limit=1, **ada)
    good = page["next_cursor"]
    flipped = good[:9] + ("A" if good[9] != "A" else "B") + good[10:]

    for bad in (good[:-1], good + "A", flipped, good.swapcase(), "x", "....", "0" * 5000, "-1", "1 OR 1=1", "é"):
        assert await code(served, tongue, name, cursor=bad, **ada) == "invalid_cursor", bad
    assert await code(served, tongue, name, cursor=good, principal_id="bob") == "invalid_cursor"
    assert await code(served, tongue, name, cursor=good, **ada) == ""


@pytest.mark.one_store
@tongues
@pytest.mark.parametrize("name", ["list_tasks", "list_receipts", "list_open_obligations", "bootstrap"])
async def test_e7_a_limit_is_held_to_its_span_over_mcp(served: Any, name: str, tongue: str) -> None:
    await served.leased()
    # The inbox and what is owed are somebody's, who is named.
    whose = {"principal_id": "ada"} if name in ("list_open_obligations", "bootstrap") else {}

    for limit in (0, -1, "ten", 1.5, True, "5", [1], 2**53, 10**400):
        assert await code(served, tongue, name, limit=limit, **whose) == "invalid_request", limit
    for limit in (1, 200, 1_000_000_000, 2**53 - 1):
        assert await code(served, tongue, name, limit=limit, **whose) == "", limit


NO_MOMENTS = ["now", "2026-01-01", "2026-01-01T00:00:00", "0000-01-01T00:00:00Z", "10000-01-01T00:00:00Z",
              "2026-13-01T00:00:00Z", "2026-02-30T00:00:00Z", "2026-01-01T00:00:00+99:00", "2026-12-31T23:59:60Z",
              "2026-01-01T00:00:00 PST8PDT", "2026-01-01T24:00:00Z", "1767225600", 1767225600, 1e300, True]


@pytest.mark.one_store
@every_tongue
async def test_e8_a_moment_that_is_none_is_refused_in_every_tongue(served: Any, tongue: str) -> None:
    async with served.unchanged():
        for moment in NO_MOMENTS:
            task = {"type": "demo", "payload": None, "timeouts": {"deadline": moment}}
            assert await code(served, tongue, "create_task", **task) == "invalid_request", moment
            # An item of a batch is refused by itself.
            schedules = [{"schedule_id": "s", "next_run_at": moment}]
            told = await reply(served, tongue, "report_schedule", worker_id="w", schedules=schedules)
            assert [problem["error"] for problem in told["refused"]] == ["invalid_request"], moment


# E9, E10: what is echoed, and what is logged.


EVIL = "evil\r\nset-cookie: a=b\r\n\r\n<script>\x1b[31m"


@every_tongue
async def test_e9_no_header_of_an_answer_repeats_what_a_request_says(served: Any, tongue: str) -> None:
    evil = quote(EVIL, safe="")
    answers = [await served.call("POST", f"/v1/tasks/{evil}/cancel", {}),
               await served.call("BREW", f"/{evil}"), await served.call("BREW", f"/v1/tasks/{evil}"),
               await served.call("GET", f"/v1/bootstrap?principal_kind=agent&principal_id={quote(EVIL)}"),
               await served.call("GET", "/v1/config", headers=[("x-tenant-id", EVIL), ("x-request-id", EVIL)]),
               await served.call("GET", "/v1/config", headers=[("host", EVIL)]),
               await served.call("GET", "/v1/config", token=EVIL)]
    for name in OPERATIONS:
        fields = dict.fromkeys(OPERATIONS[name].takes.__struct_fields__, EVIL)
        answers.append(await asked(served, tongue, name, fields))

    for answer in answers:
        for name, value in answer.pairs:
            assert not re.search(r"[\x00-\x1f\x7f]|evil|script", name + value), (name, value)
        assert "set-cookie" not in answer.headers


@in_memory
@tongues
@pytest.mark.parametrize("form", [JsonLines, Lines], ids=["json", "console"])
async def test_e10_what_comes_over_mcp_never_breaks_out_of_its_log_line(
    served: Any, caplog: pytest.LogCaptureFixture, form: type[logging.Formatter], tongue: str
) -> None:
    caplog.set_level(logging.DEBUG)

    for name in OPERATIONS:
        await asked(served, tongue, name, dict.fromkeys(OPERATIONS[name].takes.__struct_fields__, EVIL))
        await asked(served, tongue, EVIL.encode().hex(), {"a": EVIL})
    body, headers = message(tongue, "no", b"{}")
    await served.call("POST", f"/mcp?{quote(EVIL)}", body, headers=[*headers, ("user-agent", EVIL), ("x-evil", EVIL)])
    await asked(served, tongue, "bootstrap", {"principal_id": "ada", "principal_kind": "agent"})

    lines = [form("%(message)s").format(record) for record in caplog.records if record.name.startswith("asyncgate")]
    assert any("bootstrap" in line for line in lines)
    assert [line for line in lines if re.search(r"[\x00-\x1f\x7f-\x9f]", line)] == []


# E11: ids and paths.


TRICKS = ["..", ".", "../..", "a/b", "%2e%2e", "%00", "a;b=c", "' OR '1", "%", "a\n", "a\r\nb", "\u202e", "a" * 201,
          "a" * 20_000, " ", "null", "~", "-1", "0"]


BY_ID = [name for name, op in OPERATIONS.items() if "{" in op.rest[0][1]]
UNKNOWN = {f"{kind}_not_found" for kind in ("bulk", "client", "key", "limit", "queue", "receipt", "schedule", "task",
                                            "tenant", "type", "user", "webhook")}
NOTHING = {"find_id": '"found":[]', "remove_limit": '"removed":false'}     # what is said of an id that nothing has


@tongues
@each("name", BY_ID)
async def test_e11_an_id_plays_no_tricks_as_an_argument(
        served: Any, known: dict[str, Any], name: str, tongue: str) -> None:
    op = OPERATIONS[name]
    fields, (carried,) = least(op, known), re.findall(r"{(\w+)}", op.rest[0][1])

    async with served.unchanged():
        for trick in TRICKS:
            answer = await asked(served, tongue, name, {**fields, carried: trick})
            if name in NOTHING and not code_of(answer):
                assert NOTHING[name] in answer.content.decode().replace("\\", "").replace(" ", ""), (trick, answer)
                continue
            assert code_of(answer) in {"invalid_request", "lease_invalid_or_expired", *UNKNOWN}, trick


@pytest.mark.parametrize("path", [
    "//v1/tasks", "/v1//tasks", "/v1/tasks//", "/v1/./tasks", "/v1/tasks/%2e%2e/tasks", "/v1/tasks%00", "/v1/tasks%2f",
    "/V1/tasks", "/v1/tasks;a", "/mcp//", "/MCP", "/mcp%00", "//mcp", "/mcp/u//", "/v1/tasks/..%2f..%2fmcp", "/%ff",
    "/../../etc/passwd", "/v1/tasks\\", "http://localhost//v1/tasks", "*", "/" + "a" * 30_000])
def test_e11_over_a_socket_another_spelling_of_a_path_opens_nothing(live_for_all: Any, path: str) -> None:
    with socket.create_connection(("127.0.0.1", live_for_all.port), timeout=PATIENCE_SECONDS) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
                     'Content-Type: application/json\r\nContent-Length: 27\r\nConnection: close\r\n\r\n'
                     '{"type":"demo","payload":0}'.encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))

    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) in (400, 404, 405), answer[:300]
    assert json.loads(body)["error"] in {"invalid_request", "not_found", "method_not_allowed"}
    assert b"etc" not in body


LEAKS = {
    "as JSON": '{"password": "hun ter \\" 2", "next": "kept"}',
    "as a number": '{"password": 22222, "next": "kept"}',
    "as Python": "{'Password': 'hun ter 2', 'next': 'kept'}",
    "in a query": "GET /login?password=hunter2&next=kept",
    "in a message that is JSON again": r'{"message": "got {\"password\": \"hun ter 2\"}", "next": "kept"}'}


@pytest.mark.parametrize("form", [JsonLines, Lines], ids=["json", "console"])
@pytest.mark.parametrize("leak", LEAKS)
def test_the_value_of_a_sensitive_field_is_in_no_log_line(form: type[JsonLines | Lines], leak: str) -> None:
    """Spec 21.10.1, audit_logging.sensitive_fields."""
    formatter = form()
    formatter.redaction = Redaction(["password"])
    record = logging.LogRecord("asyncgate", logging.ERROR, "", 0, "refused %s", (LEAKS[leak],), None)

    line = formatter.format(record)

    assert "kept" in line
    assert not re.search("hun|ter|2222", line), line


def test_what_only_speaks_of_a_sensitive_field_is_logged_as_it_is() -> None:
    text = 'token: expired; the password is long, max_tokens=5, {"kind": "token", "next": "api_key"}'

    assert Redaction(["password", "token", "api_key"]).text(text) == text


@pytest.mark.parametrize("form", [JsonLines, Lines], ids=["json", "console"])
@pytest.mark.parametrize("text", [
    'info user_invited {"email":"ada@example.com","ip":"127.0.0.1"}',
    "no answer from https://gate.example.com to ada@example.com",
    'warning webhook_created {"endpoint":"http://127.0.0.1:9000/","by":"ada@example.com"}',
    "10:15: human ada@example.com signed in"])
def test_an_e_mail_address_hides_nothing_of_its_log_line(form: type[JsonLines | Lines], text: str) -> None:
    formatter = form("%(asctime)s %(levelname)s %(message)s")
    record = logging.LogRecord("asyncgate", logging.WARNING, "", 0, "%s", (text,), None)

    line = formatter.format(record)

    assert "***" not in line
    assert "warning" in line.lower()


@pytest.mark.parametrize(("text", "logged"), [
    ("cannot open 'ann:hun:t'er@2@db/gate' of ada@example.com", "cannot open 'ann:***@db/gate' of ada@example.com"),
    ("no database at postgresql://ann:it's@db/gate, asked by ada@example.com",
     "no database at postgresql://ann:***@db/gate, asked by ada@example.com"),
    ('{"endpoint":"https://ann:hunter2@db/","by":"ada@example.com"}',
     '{"endpoint":"https://***@db/","by":"ada@example.com"}'),
    ("ann:hunter2@db/gate", "ann:***@db/gate")])
def test_a_password_in_a_url_is_in_no_log_line(text: str, logged: str) -> None:
    assert Redaction().text(text) == logged


def test_credentials_are_in_no_log_line_whatever_the_fields_are() -> None:
    text = Redaction().text(
        f"aga_0123456789abcdef agr_{uuid4()}.s3cr-et.ma_rk eyJhbGciOiJ9.eyJzdWIiOiJ9.c2ln postgres://a:pw@db/gate")

    assert text == "*** *** *** postgres://a:***@db/gate"
