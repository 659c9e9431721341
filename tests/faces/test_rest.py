"""The REST façade: every operation by its path, the headers of every answer, who may come in, and long polls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from asyncgate import Operation
from asyncgate.parts.faces.http import run_while_connected
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.model.errors import DatabaseUnavailable, TaskNotFound
from asyncgate.parts.model.settings import ArchiveSettings
from asyncgate.parts.model.wire import Complete, CreateTask, ScheduleState
from asyncgate.parts.operations import OPERATIONS
from tests.support.each import each
from tests.support.kept_rows import keep_sign_ins
from tests.support.patience import PATIENCE_SECONDS
from tests.support.unretrieved import cancel_failing

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
TENANT = "00000000-0000-0000-0000-000000000000"
OTHER = "11111111-1111-4111-8111-111111111111"
URL = "https://hooks.invalid/"        # nobody has it
CLIENT = {"client_name": "App", "redirect_uris": ["https://app.example/cb"]}
SAFETY = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
WAYS = [(op, verb, path) for op in OPERATIONS.values() for verb, path in op.rest]
IDS = [f"{verb} {path}" for _, verb, path in WAYS]
# Of what is good at once; what comes back from an archive must have been there: test_archive_command.py.
GOOD = [way for way in WAYS if way[0].name != "restore_archive"]
GOOD_IDS = [f"{verb} {path}" for _, verb, path in GOOD]


def refused(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Expect a refusal and return its body."""
    body: dict[str, Any] = answer.json()
    assert (answer.status, body["error"]) == (status, code), answer
    assert body["message"] == body["detail"]
    assert body["message"]
    return body


async def until(done: Any) -> None:
    """Let the gate work until something holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not done():  # noqa: ASYNC110  # what is awaited belongs to the gate, which has no event for tests
            await asyncio.sleep(0)


# Every operation by its method and path.


@pytest.fixture
async def served(serve: Any, tmp_path: Path) -> Any:
    """Return a gate with a token and an archive."""
    return await serve(archive=ArchiveSettings(directory=str(tmp_path)))


class Walk:
    """What a walk through all operations knows; each step returns method, path and body."""

    def __init__(self, served: Any) -> None:
        self.served = served

    async def held(self, **task: Any) -> dict[str, str]:
        offer = await self.served.leased(**task)
        return {"worker_id": "w1", "lease_id": offer["lease_id"], "task_id": offer["task_id"]}

    async def created(self) -> str:
        made = await self.served.post("/v1/tasks", {"type": "other", "payload": None, "agent_id": "ada"})
        return str(made["task_id"])

    async def finished(self, **end: Any) -> str:
        held = await self.held()
        task_id = held.pop("task_id")
        await self.served.post(f"/v1/tasks/{task_id}/complete", held | end)
        return task_id

    async def duty(self) -> str:
        task = await self.served.get(f"/v1/tasks/{await self.created()}")
        return str(task["obligation_receipt_id"])

    async def issued(self) -> str:
        made = await self.served.post("/v1/keys", {"name": "a key", "principal_id": "reader-1"})
        return str(made["key"]["key_id"])

    async def body(self, op: Operation, path: str) -> dict[str, Any]:
        """Make what this operation needs and return a good request, path fields included."""
        if op.name in ("renew_lease", "release_lease", "start_task", "report_progress", "record_step", "complete",
                       "fail", "append_output"):
            needed: dict[str, dict[str, Any]] = {"report_progress": {"progress": 1}, "fail": {"error": "no"},
                                                 "append_output": {"chunks": ["a"]},
                                                 "record_step": {"seq": 1, "name": "fetch", "value": 1}}
            return await self.held() | needed.get(op.name, {})
        if op.name in ("declare_type", "set_type_policy"):
            return dict(op.takes.example[0])
        if op.name == "remove_type":
            await self.served.post("/v1/types", {"type": "ocr", "worker_id": "w1", "description": "Read."})
            return {"type": "ocr"}
        if op.name == "wait_tasks":
            return {"ids": [await self.created()], "agent_id": "ada"}
        if op.name == "request_input":
            return await self.held() | {"key": "deploy", "message": "Deploy?"}
        if op.name == "answer_input":
            held = await self.held()
            await self.served.post(f"/v1/tasks/{held['task_id']}/inputs", {
                "worker_id": "w1", "lease_id": held["lease_id"], "key": "deploy", "message": "Deploy?"})
            return {"task_id": held["task_id"], "key": "deploy", "action": "accept", "agent_id": "ada"}
        if op.name == "rerun_task":
            return {"task_id": await self.finished(), "agent_id": "ada"}
        if op.name == "attach_artifacts":
            return {"task_id": await self.finished(), "artifacts": [{"uri": "file:///x"}], "agent_id": "ada"}
        if op.name == "export_principal":
            return {"principal_id": "ada"}
        if "receipt_id" in op.takes.needed:
            return {"receipt_id": await self.duty()}
        if "parent_receipt_id" in op.takes.needed:
            return {"parent_receipt_id": await self.duty()}
        if "task_id" in op.takes.needed:
            return {"task_id": await self.created(), **({"endpoint": URL} if op.name == "create_task_webhook" else {})}
        if "schedule_id" in op.takes.needed:
            held = await self.held(type="schedule.create")
            made = {"receipt_type": "schedule.created", "schedule_id": "nightly"}
            await self.served.post("/v1/receipts", held | made)
            return {"schedule_id": "nightly", "agent_id": "ada"}
        if "part" in op.takes.needed:
            return {"part": (await self.created())[-12:]}
        if "queue_id" in op.takes.needed:
            await self.created()
            return {"queue_id": (await self.served.get("/v1/queues"))["queues"][0]["queue_id"]}
        if "key_id" in op.takes.needed:
            return {"key_id": await self.issued()}
        if "webhook_id" in op.takes.needed:
            return await self.hook("task" in op.name)
        if "user_id" in op.takes.needed:
            return {"user_id": (await self.served.post("/v1/users", {"email": "ada@example.com"}))["user_id"]}
        if "client_id" in op.takes.needed:
            return {"client_id": (await self.served.post("/v1/clients", CLIENT))["client_id"]}
        if op.name in ("end_session", "sign_out_everywhere", "withdraw_consent"):
            return await self.session(op)
        if op.name == "get_limit":
            await self.served.post("/v1/task-limits", {"name": "openai", "concurrency_total": 3})
            return {"name": "openai"}
        if op.name in ("preview_bulk", "run_bulk", "get_bulk"):
            return await self.bulk(op)
        return await self.rest(op)

    async def hook(self, of_task: bool) -> dict[str, Any]:
        path = f"/v1/tasks/{await self.created()}/webhooks" if of_task else "/v1/webhooks"
        return {"webhook_id": (await self.served.post(path, {"endpoint": URL}))["webhook"]["webhook_id"]}

    async def session(self, op: Operation) -> dict[str, Any]:
        await Directory(self.served.engine).change(partial(keep_sign_ins, mark="x"))
        return {"end_session": {"session_id": "grant"}, "sign_out_everywhere": {"user_id": "user"},
                "withdraw_consent": {"user_id": "user", "client_id": "client"}}[op.name]

    async def bulk(self, op: Operation) -> dict[str, Any]:
        if op.name == "preview_bulk":
            return {"action": "cancel"}
        preview = await self.served.post("/v1/bulks/preview", {"action": "cancel", "type": "nothing"})
        confirmed = {"confirmation": preview["confirmation"]}
        if op.name == "run_bulk":
            return confirmed
        return {"bulk_id": (await self.served.post("/v1/bulks", confirmed))["bulk_id"]}

    async def rest(self, op: Operation) -> dict[str, Any]:
        if op.name == "emit_receipt":
            held = await self.held(type="schedule.create")
            return held | {"receipt_type": "schedule.created", "schedule_id": "nightly"}
        known: dict[str, dict[str, Any]] = {
            "create_task": {"type": "demo", "payload": None},
            "create_tasks": {"tasks": [{"type": "demo", "payload": None}]},
            "run_task": {"type": "demo", "payload": None, "wait_seconds": 0}, "lease_next": {"worker_id": "w1"},
            "list_leases": {"worker_id": "w1"}, "bootstrap": {"agent_id": "ada"},
            "list_open_obligations": {"agent_id": "ada"},
            "report_schedule": {"schedules": [{"schedule_id": "unknown"}]},
            "create_tenant": {"name": "Acme"}, "suspend_tenant": {"tenant": OTHER},
            "set_limits": {"tenant": OTHER, "tier": "paid"}, "issue_key": {"name": "a key", "principal_id": "reader-1"},
            "invite_user": {"email": "bob@example.com"}, "make_sign_in_link": {"principal_id": "ada"},
            "create_webhook": {"endpoint": URL}, "set_budget": {"quantity": "tasks", "monthly": 9},
            "erase_principal": {"principal_id": "x", "plan": True}, "erase_tenant": {"tenant": OTHER, "plan": True},
            "set_limit": {"name": "openai"}, "remove_limit": {"name": "openai"}, "revoke_token": {"token_id": "t1"},
            "register_client": CLIENT, "import_receipts": {"receipts": []}, **{
                name: {"type": "demo"} for name in ("pause_work", "drain_work", "resume_work")},
            "complete_tasks": {"tasks": [await self.held()] if op.name == "complete_tasks" else []}}
        return known.get(op.name, {})

    async def request(self, op: Operation, verb: str, path: str) -> tuple[str, dict[str, Any] | None]:
        fields = await self.body(op, path)
        for name in re.findall(r"{(\w+)}", path):
            path = path.replace(f"{{{name}}}", fields.pop(name))
        if verb == "GET":
            return path + "?" + "&".join(f"{name}={value}" for name, value in fields.items()), None
        return path, fields


@pytest.mark.parametrize(("op", "verb", "path"), GOOD, ids=GOOD_IDS)
async def test_every_operation_answers_its_reply_by_its_method_and_path(
    served: Any, op: Operation, verb: str, path: str
) -> None:
    target, body = await Walk(served).request(op, verb, path)

    answer = await served.call(verb, target, body)

    assert answer.status == 200, answer
    msgspec.json.decode(answer.content, type=op.gives)
    assert answer.headers["content-type"] == "application/json"
    assert {name: answer.headers[name] for name in SAFETY} == SAFETY
    assert "server" not in answer.headers


@pytest.mark.parametrize(("op", "verb", "path"), WAYS, ids=IDS)
async def test_every_operation_but_health_needs_a_credential(served: Any, op: Operation, verb: str, path: str) -> None:
    target, body = await Walk(served).request(op, verb, path)

    async with served.unchanged():
        answer = await served.call(verb, target, body, token=None)

    if op.open:
        assert answer.status == 200
    else:
        refused(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("op", "verb", "path"), GOOD, ids=GOOD_IDS)
async def test_unknown_fields_are_named_and_refused_by_lists_and_administration(
        served: Any, op: Operation, verb: str, path: str) -> None:
    target, body = await Walk(served).request(op, verb, path)
    strange = {"trace_id": "abc", "tenants": {"id": OTHER}, "receipt_id_": None, "__proto__": [1]}

    if body is None:
        answer = await served.call(verb, target + "&trace_id=abc&__proto__=1")
    else:
        answer = await served.call(verb, target, body | strange)

    assert "unknown member trace_id" in answer.content.decode()
    assert answer.status == (400 if op.reader.refuses else 200), answer


ITEMS: dict[str, type[msgspec.Struct]] = {
    "create_tasks": CreateTask, "complete_tasks": Complete, "report_schedule": ScheduleState}


def nulls_of(kind: type[msgspec.Struct]) -> dict[str, None]:
    """A null in every field that may be left out."""
    return {field.name: None for field in msgspec.structs.fields(kind) if not field.required}


@pytest.mark.parametrize(
    ("op", "verb", "path"), [way for way in GOOD if way[1] == "POST"],
    ids=[way for way in GOOD_IDS if way[:4] == "POST"]
)
async def test_an_explicit_null_in_every_optional_field_means_that_it_is_absent(
    served: Any, op: Operation, verb: str, path: str
) -> None:
    target, body = await Walk(served).request(op, verb, path)
    assert body is not None

    if item := ITEMS.get(op.name):
        ((name, items),) = body.items()
        body = {name: [nulls_of(item) | entry for entry in items]}
    answer = await served.call(verb, target, nulls_of(op.takes) | body)

    assert answer.status == 200, answer
    assert "invalid_request" not in answer.content.decode(), answer


@pytest.mark.parametrize("name", ["task_id", "lease_id"])
async def test_a_null_in_an_item_of_a_batch_means_that_it_is_absent(served: Any, name: str) -> None:
    item = {"task_id": "a", "lease_id": "b"}
    rest = {key: value for key, value in item.items() if key != name}

    absent = await served.post("/v1/tasks/complete-batch", {"worker_id": "w", "tasks": [rest]})
    null = await served.call("POST", "/v1/tasks/complete-batch", {"worker_id": "w", "tasks": [item | {name: None}]})

    assert absent["results"][0]["error"]["error"] == "invalid_request"
    assert null.status == 200, null
    assert null.json()["results"][0]["error"] == absent["results"][0]["error"]


async def test_a_null_in_the_query_is_the_text_null(served: Any) -> None:
    await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "null"})
    await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})

    page = await served.get("/v1/tasks?created_by=null")

    assert [task["created_by"]["id"] for task in page["tasks"]] == ["null"]


# Paths, bodies, queries.


async def test_the_path_has_the_last_word_over_the_body(served: Any) -> None:
    first, second = await served.leased(), await served.leased()

    await served.post(f"/v1/tasks/{first['task_id']}/complete",
                      {"task_id": second["task_id"], "lease_id": first["lease_id"], "worker_id": "w1"})

    assert (await served.get(f"/v1/tasks/{first['task_id']}"))["status"] == "succeeded"
    assert (await served.get(f"/v1/tasks/{second['task_id']}"))["status"] == "leased"


async def test_the_path_has_the_last_word_over_the_query(served: Any) -> None:
    first, second = await served.leased(), await served.leased()

    task = await served.get(f"/v1/tasks/{first['task_id']}?task_id={second['task_id']}")

    assert task["task_id"] == first["task_id"]


async def test_the_query_says_who_creates_when_the_body_does_not(served: Any) -> None:
    made = await served.post("/v1/tasks?principal_kind=service&principal_id=billing", {"type": "x", "payload": None})

    record = await served.get(f"/v1/tasks/{made['task_id']}")

    assert record["created_by"] == {"kind": "service", "id": "billing", "principal_kind": "service",
                                    "principal_id": "billing"}


async def test_the_last_of_a_name_given_twice_counts_in_query_and_body(served: Any) -> None:
    made = await served.post("/v1/tasks?tenant_id=x&tenant_id=default", b'{"type":"first","payload":0,"type":"second"}')

    assert (await served.get(f"/v1/tasks/{made['task_id']}"))["type"] == "second"


@pytest.mark.parametrize(("target", "more"), [
    ("/v1/tasks?principal_id=eve", {"principal_id": "ada"}), ("/v1/tasks?principal_id=eve&principal_id=bob", {}),
    ("/v1/tasks?principal_kind=human", {"agent_id": "ada"}), ("/v1/tasks?principal_instance_id=a", {
        "agent_id": "ada", "agent_instance_id": "b"})])
async def test_a_query_that_names_another_principal_than_the_body_is_refused(
        served: Any, target: str, more: dict[str, str]) -> None:
    async with served.unchanged():
        answer = await served.call("POST", target, {"type": "x", "payload": None, **more})

    assert (answer.status, answer.json()["error"]) == (400, "invalid_request")


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/tasks/TASK/complete", {"worker_id": "w", "principal_id": "bo"}), ("/v1/leases/renew", {
        "lease_id": "x", "agent_id": "al", "principal_id": "bo"}), ("/v1/receipts/check-terminator", {
            "parent_receipt_id": "x", "agent_id": "al", "principal_id": "bo"})])
async def test_names_that_an_operation_does_not_know_may_not_contradict_either(
        served: Any, path: str, body: dict[str, str]) -> None:
    answer = await served.call("POST", path, body)

    assert (answer.status, answer.json()["error"]) == (400, "invalid_request")
    assert "one principal" in answer.json()["message"]


async def test_an_empty_body_is_an_empty_request(served: Any) -> None:
    offer = await served.leased()

    answer = await served.call("POST", f"/v1/leases/{offer['lease_id']}/extend", b"")

    assert answer.status == 200
    assert answer.json()["ok"] is True


@pytest.mark.parametrize("path", ["/v1/health", "/health", "/v1/config", "/v1/tasks", "/v1/bootstrap?agent_id=ada",
                                  "/openapi.json"])
async def test_head_answers_the_headers_of_get_and_no_body(served: Any, path: str) -> None:
    got, headed = await served.call("GET", path), await served.call("HEAD", path)

    assert headed.content == b""
    assert (headed.status, [name for name, _ in headed.pairs]) == (200, [name for name, _ in got.pairs])
    assert int(headed.headers["content-length"]) > 0


async def test_head_of_nothing_has_no_body_either(served: Any) -> None:
    for path in ("/nothing", "/v1/tasks/unknown"):
        answer = await served.call("HEAD", path)
        assert (answer.status, answer.content) == (404, b"")


# Refusals.


async def test_a_browser_at_the_root_is_led_to_the_page(served: Any) -> None:
    browser = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8")]

    led = await served.call("GET", "/", headers=browser, token=None)

    assert (led.status, dict(led.headers)["location"]) == (302, "docs")
    assert (await served.call("GET", "/v1", headers=browser, token=None)).status == 404


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/nothing", "/v1/tasks//", "/v1/tasks/a/b", "/V1/tasks",
                                  "/v2"])
async def test_a_path_that_is_none_is_404(served: Any, path: str) -> None:
    for method in ("GET", "POST"):
        answer = await served.call(method, path)
        body = refused(answer, 404, "not_found")
        assert set(body) == {"error", "message", "detail"}
        assert {name: answer.headers[name] for name in SAFETY} == SAFETY


@each("path", sorted({path for _, _, path in WAYS}))
async def test_another_method_is_405_and_allow_names_all_that_are_served(served: Any, path: str) -> None:
    verbs = {verb for _, verb, way in WAYS if way == path}
    allow = sorted(verbs | ({"HEAD"} if "GET" in verbs else set()))

    for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"} - set(allow):
        answer = await served.call(method, re.sub("{.*?}", "an-id", path))
        assert (answer.status, answer.headers["allow"]) == (405, ", ".join(allow))
        if method != "HEAD":
            assert refused(answer, 405, "method_not_allowed")["allow"] == allow


@pytest.mark.parametrize(
    "headers",
    [
        [("content-type", "text/plain")],
        [("content-type", "application/x-www-form-urlencoded")],
        [("content-type", "multipart/form-data; boundary=a")],
        [("content-type", "application/jsonp")],
        [("content-type", "application/json; charset=utf-16")],
        [("content-type", 'application/json; a=b; CHARSET = "ISO-8859-1"')],
        [("content-type", "text/plain, application/json")],
        [("content-type", "application/json"), ("content-encoding", "gzip")],
        [("content-encoding", "deflate")],
        [("content-encoding", "br, identity")],
    ],
    ids=str,
)
async def test_what_is_not_plain_json_is_415(served: Any, headers: list[tuple[str, str]]) -> None:
    async with served.unchanged():
        answer = await served.call("POST", "/v1/tasks", b'{"type":"demo","payload":0}', headers=headers)

    refused(answer, 415, "unsupported_media_type")


async def test_a_body_of_no_type_is_415_and_no_body_needs_none(served: Any) -> None:
    async with served.unchanged():
        for path, body in (("/v1/tasks", b'{"type":"demo"}'), ("/mcp", b'{"method":"tools/list"}')):
            refused(await served.call("POST", path, body, typed=False), 415, "unsupported_media_type")
    assert (await served.call("POST", "/v1/leases/none/extend", b"", typed=False)).status == 409


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON",
                                  "application/problem+json", "*/*"])
async def test_every_name_of_json_is_taken(served: Any, kind: str | None) -> None:
    headers = [("content-type", kind)] if kind else []

    assert (await served.call("POST", "/v1/tasks", b'{"type":"demo","payload":0}', headers=headers)).status == 200


@pytest.mark.parametrize(("name", "place"), [("open/ai", "open%2Fai"), ("open/ai", "open%2fai"),
                                             ("open%2Fai", "open%252Fai"), ("5 %", "5%20%25")])
async def test_a_name_in_a_path_is_the_name_as_it_was_given(serve: Any, name: str, place: str) -> None:
    served = await serve()
    await served.post("/v1/task-limits", {"name": name, "concurrency_total": 3})

    shown = await served.get(f"/v1/task-limits/{place}")
    removed = await served.post(f"/v1/task-limits/{place}/remove", {})

    assert (shown["name"], removed["removed"]) == (name, True)


async def test_a_body_over_the_limit_is_413_with_and_without_its_length(serve: Any) -> None:
    served = await serve(max_request_bytes=1000)
    body = b'{"type":"demo","payload":"' + b"a" * 1000 + b'"}'

    async with served.unchanged():
        told = await served.call("POST", "/v1/tasks", b"", headers=[("content-length", str(len(body)))])
        chunked = await served.call("POST", "/v1/tasks", [body[:600], body[600:]])

    assert "1000" in refused(told, 413, "payload_too_large")["message"]
    assert "1000" in refused(chunked, 413, "payload_too_large")["message"]


async def test_a_body_that_does_not_come_is_408(serve: Any) -> None:
    served = await serve(body_timeout_seconds=0.05)

    async with served.unchanged():
        sent = await cut(served, b'{"type":"demo"', goes=False)

    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"] == "request_timeout"


async def test_a_client_that_goes_in_the_middle_of_its_body_leaves_nothing(served: Any) -> None:
    async with served.unchanged():
        answer = await cut(served, b'{"type":"demo"')

    assert answer == []


async def cut(served: Any, start: bytes, *, goes: bool = True) -> list[Any]:
    """Send the beginning of a body and go, or stay silent; return what was answered."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": start, "more_body": True}]
    messages += [{"type": "http.disconnect"}] if goes else []
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
    await served.gate({"type": "http", "method": "POST", "path": "/v1/tasks", "query_string": b"", "headers": headers,
                       "root_path": "", "scheme": "http"}, receive, send)
    return sent


async def test_strict_transport_is_demanded_over_https_only(served: Any) -> None:
    plain = await served.call("GET", "/health")
    paths = ("/health", "/nothing", "/v1/config", "/docs")
    answers = [await served.call("GET", path, scheme="https") for path in paths]
    answers.append(await served.call("GET", "/health", scheme="https", headers=[("host", "evil.example")]))

    assert "strict-transport-security" not in plain.headers
    assert {a.headers["strict-transport-security"] for a in answers} == {"max-age=31536000; includeSubDomains"}


async def test_every_refusal_carries_the_headers_of_safety(served: Any) -> None:
    answers = [
        await served.call("GET", "/v1/tasks", token=None), await served.call("PUT", "/v1/tasks"),
        await served.call("POST", "/v1/tasks", b"{"), await served.call("GET", "/v1/tasks/unknown"),
        await served.call("GET", "/health", headers=[("host", "evil.example")]),
        await served.call("GET", "/health", headers=[("origin", "https://evil.example")]),
        await served.call("POST", "/v1/tasks", b"{}", headers=[("content-encoding", "gzip")])]

    assert [answer.status for answer in answers] == [401, 405, 400, 404, 421, 403, 415]
    for answer in answers:
        assert {name: answer.headers[name] for name in SAFETY} == SAFETY
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert len({name for name, _ in answer.pairs}) == len(answer.pairs)
        assert "server" not in answer.headers


# Who may come in.


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {TOKEN}x")],
        [("authorization", f"Bearer {TOKEN[:-1]}")],
        [("authorization", f"Bearer {TOKEN.upper()}")],
        [("authorization", f"Bearer {TOKEN}, Bearer {TOKEN}")],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", f"Token {TOKEN}")],
        [("authorization", TOKEN)],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
        [("authorization", f"Basic {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
        [("authorization", f"Bearer {TOKEN}"), ("x-api-key", "wrong")],
        [("authorization", f"Bearer {TOKEN}"), ("x-api-key", "")],
        [("x-api-key", "wrong")],
        [("x-api-key", "")],
        [("x-api-key", f"Bearer {TOKEN}")],
        [("cookie", f"token={TOKEN}")],
        [("authorization", "Bearer " + "a" * 100_000)],
        [("authorization", "Bearer \xff\xfe")],
    ],
    ids=lambda headers: str(headers)[:80],
)
async def test_no_other_credential_is_known(served: Any, headers: list[tuple[str, str]]) -> None:
    async with served.unchanged():
        answer = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None}, token=None, headers=headers)

    refused(answer, 401, "unauthenticated")
    assert TOKEN not in answer.content.decode()


@pytest.mark.parametrize("query", ["token", "access_token", "api_key", "x-api-key", "authorization", "auth_token"])
async def test_a_token_in_the_query_opens_nothing(served: Any, query: str) -> None:
    refused(await served.call("GET", f"/v1/tasks?{query}={TOKEN}", token=None), 401, "unauthenticated")
    refused(await served.call("GET", f"/v1/tasks?{query}=Bearer%20{TOKEN}", token=None), 401, "unauthenticated")


@pytest.mark.parametrize("headers", [[("authorization", f"Bearer {TOKEN}")], [("authorization", f"bearer {TOKEN}")],
                                     [("authorization", f"BEARER   {TOKEN}")], [("x-api-key", TOKEN)],
                                     [("authorization", f"Bearer {TOKEN}"), ("x-api-key", TOKEN)]], ids=str)
async def test_the_shared_token_is_known_in_either_header(served: Any, headers: list[tuple[str, str]]) -> None:
    assert (await served.call("GET", "/v1/tasks", token=None, headers=headers)).status == 200


async def test_insecure_dev_lets_everybody_in_and_marks_every_answer(serve: Any) -> None:
    served = await serve(api_key="", allow_insecure_dev=True)

    answers = [await served.call("GET", path, token=None) for path in ("/v1/tasks", "/nothing", "/health", "/docs")]
    answers.append(await served.call("GET", "/health", token=None, headers=[("host", "evil.example")]))
    answers.append(await served.call("GET", "/v1/tasks", token="a token of no meaning"))

    assert [answer.status for answer in answers] == [200, 404, 200, 200, 421, 200]
    assert {answer.headers["x-asyncgate-insecure"] for answer in answers} == {"true"}


async def test_insecure_dev_beside_a_token_refuses_a_wrong_one(serve: Any) -> None:
    served = await serve(allow_insecure_dev=True)

    answers = [await served.call("GET", "/v1/tasks", token=None), await served.call("GET", "/v1/tasks")]
    wrong = await served.call("GET", "/v1/tasks", token="wrong")

    assert [answer.status for answer in answers] == [200, 200]
    refused(wrong, 401, "unauthenticated")
    assert wrong.headers["x-asyncgate-insecure"] == "true"


async def test_a_gate_with_a_token_does_not_mark_its_answers(served: Any) -> None:
    assert "x-asyncgate-insecure" not in (await served.call("GET", "/health")).headers


# Tenants.


@pytest.mark.parametrize("path", ["/v1/tasks", "/health", "/v1/config"])
@pytest.mark.parametrize("tenant", [TENANT, "default"])
async def test_the_own_tenant_is_tolerated_wherever_it_is_named(served: Any, path: str, tenant: str) -> None:
    assert (await served.call("GET", path, headers=[("x-tenant-id", tenant)])).status == 200
    assert (await served.call("GET", f"{path}?tenant_id={tenant}")).status == 200


async def test_two_names_of_the_own_tenant_are_no_contradiction(served: Any) -> None:
    answer = await served.call("POST", f"/v1/tasks?tenant_id={TENANT}", {"type": "demo", "payload": None,
                                                                         "tenant_id": "default"},
                               headers=[("x-tenant-id", TENANT)])

    assert answer.status == 200


@pytest.mark.parametrize("tenant", [OTHER, "other", TENANT + "0", "%", " "])
async def test_another_tenant_is_refused_wherever_it_is_named(served: Any, tenant: str) -> None:
    async with served.unchanged():
        answers = [
            await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None}, headers=[("x-tenant-id",
                                                                                                tenant)]),
            await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None, "tenant_id": tenant}),
            await served.call("POST", "/v1/tasks", {"type":"x", "payload": None, "tenant_id": TENANT},
                              headers=[("x-tenant-id", OTHER)]),
            await served.call("GET", "/v1/tasks", headers=[("x-tenant-id", TENANT), ("x-tenant-id", tenant)])]
        answers += [await served.call("GET", f"/v1/tasks?tenant_id={OTHER}"),
                    await served.call("POST", f"/v1/tasks?tenant_id={OTHER}", {"type": "demo", "payload": None,
                                                                               "tenant_id": TENANT}),
                    await served.call("POST", "/v1/tasks/batch", {"tasks": [{"type": "demo", "payload": None}],
                                                                  "tenant_id": tenant})]

    for answer in answers:
        refused(answer, 403, "tenant_mismatch")


async def test_another_tenant_in_one_item_of_a_batch_is_never_written(served: Any) -> None:
    async with served.unchanged():
        answer = await served.call("POST", "/v1/tasks/batch", {"tasks": [{"type": "demo", "payload": None,
                                                                          "tenant_id": OTHER}]})

    assert answer.status == 403 or answer.json()["results"][0]["error"]["error"] == "tenant_mismatch", answer


# Other sites' pages.


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1", "127.0.0.1:1", "[::1]:8080", "LOCALHOST"])
async def test_on_loopback_the_gate_answers_for_its_own_names(served: Any, host: str) -> None:
    assert (await served.call("GET", "/v1/tasks", headers=[("host", host)])).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example",
                                  "evil.example#localhost", "localhost@evil.example", "10.0.0.1", "", "127.0.0.1:1:2"])
async def test_on_loopback_the_gate_answers_for_no_other_name(served: Any, host: str) -> None:
    async with served.unchanged():
        answers = [await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None}, headers=[("host", host)]),
                   await served.call("GET", "/health", headers=[("host", host)]),
                   await served.call("GET", "/docs", headers=[("host", host)])]

    for answer in answers:
        refused(answer, 421, "misdirected_request")


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil.example", "null", "",
                                    "https://evil.example:8080", "http://127.0.0.1.evil.example",
                                    "http://localhost:3000", "http://127.0.0.1:3000", "http://[::1]:3000",
                                    "https://localhost:80x", "http://localhost:80:80", "file://localhost",
                                    "http://localhost/", "http://user@localhost", "http://localhost:99999"])
async def test_on_loopback_no_page_of_another_site_may_call(served: Any, origin: str) -> None:
    async with served.unchanged():
        answer = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None}, headers=[("origin", origin)])
        ahead = await served.call("OPTIONS", "/v1/tasks", headers=[("origin", origin)])

    refused(answer, 403, "forbidden")
    refused(ahead, 403, "forbidden")
    assert not [name for name, _ in [*answer.pairs, *ahead.pairs] if name.startswith("access-control-")]


@pytest.mark.parametrize(("host", "origin"), [
    ("localhost:8080", "http://localhost:8080"), ("localhost", "http://127.0.0.1"), ("localhost:80", "http://localhost"),
    ("[::1]:3000", "http://[::1]:3000"), ("127.0.0.1:8080", "http://localhost:8080"), ("localhost", "HTTP://LOCALHOST")])
async def test_on_loopback_the_own_pages_may_call(served: Any, host: str, origin: str) -> None:
    headers = [("host", host), ("origin", origin)]

    assert (await served.call("GET", "/v1/tasks", headers=headers)).status == 200
    assert (await served.call("POST", "/v1/tasks", {"type": "demo", "payload": 0}, headers=headers)).status == 200


async def test_behind_a_proxy_the_pages_of_the_host_that_was_asked_may_call(serve: Any) -> None:
    served = await serve(allowed_hosts=("gate.example",))

    async def status(origin: str) -> int:
        headers = [("host", "gate.example"), ("origin", origin)]
        return int((await served.call("GET", "/v1/tasks", headers=headers)).status)

    assert await status("https://gate.example") == 200
    assert await status("https://gate.example:444") == 403
    assert await status("https://other.example") == 403


async def test_the_names_that_are_served_can_be_listed(serve: Any) -> None:
    served = await serve(allowed_hosts=("gate.example", "other.example:8443"), allowed_origins=("https://app.example",))

    async def status(**headers: str) -> int:
        given = {"host": "gate.example"} | headers
        return int((await served.call("GET", "/v1/tasks", headers=list(given.items()))).status)

    assert await status() == 200
    assert await status(host="gate.example:1234") == 200
    assert await status(host="other.example:8443") == 200
    assert await status(host="other.example:8444") == 421
    assert await status(host="localhost") == 421
    assert await status(origin="https://app.example") == 200
    assert await status(origin="http://app.example") == 403
    assert await status(origin="https://app.example:444") == 403
    assert await status(origin="http://localhost") == 403


async def test_off_loopback_every_host_is_answered_and_a_star_allows_all(serve: Any) -> None:
    public = await serve(host="0.0.0.0")
    starred = await serve(allowed_hosts=("*",), allowed_origins=("*",))

    assert (await public.call("GET", "/v1/tasks", headers=[("host", "gate.example")])).status == 200
    assert (await starred.call("GET", "/v1/tasks", headers=[("host", "a.b"), ("origin", "https://c.d")])).status == 200


# What is deprecated.


async def test_bootstrap_says_that_it_is_deprecated(served: Any) -> None:
    answer = await served.call("GET", "/v1/bootstrap?principal_id=ada&principal_kind=agent")
    newer = await served.call("GET", "/v1/obligations/open?principal_id=ada&principal_kind=agent")

    assert answer.headers["deprecation"] == "true"
    assert "x-asyncgate-deprecated" in answer.headers
    assert answer.headers["link"] == '</v1/obligations/open>; rel="successor-version"'
    assert not {"deprecation", "link"} & set(newer.headers)


async def test_bootstrap_reads_who_asks_from_its_query_or_its_body(served: Any) -> None:
    """18.5: query/body { principal_kind, principal_id, principal_instance_id?, since_receipt_id?, max_items? }."""
    ada = {"principal_kind": "agent", "principal_id": "ada"}
    await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None, **ada})
    await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None, **ada})

    told = await served.call("GET", "/v1/bootstrap", {**ada, "principal_instance_id": "phone", "max_items": 1})
    mixed = await served.call("GET", "/v1/bootstrap?principal_kind=agent&principal_id=ada", {"max_items": 1})
    nobody = await served.call("GET", "/v1/bootstrap", {"principal_kind": "agent"})

    shown = told.json()
    assert (shown["relationship"]["principal_id"], shown["relationship"]["principal_instance_id"]) == ("ada", "phone")
    assert len(shown["attention"]["inbox_receipts"]) == 1
    assert len(mixed.json()["attention"]["inbox_receipts"]) == 1
    assert (nobody.status, nobody.json()["error"]) == (400, "invalid_request")


@pytest.mark.parametrize("tongue", ["rest", "mcp", "bare"])
@pytest.mark.parametrize("name", ["list_open_obligations", "bootstrap", "list_leases"])
async def test_the_shared_token_is_asked_whose_is_meant(served: Any, tongue: str, name: str) -> None:
    """An agent with a typo must not learn that nothing is owed to it; the refusal says what to name."""
    for named in ({}, {"worker_kind": "worker"}, {"worker_instance_id": "i"}):
        if tongue == "rest":
            path = {"list_open_obligations": "obligations/open", "list_leases": "leases"}.get(name, name)
            answer = (await served.call("GET", f"/v1/{path}?{urlencode(named)}")).json()
        else:
            ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                   "params": {"name": f"asyncgate.{name}", "arguments": named}}
            headers = [("mcp-protocol-version", "2025-11-25"), ("accept", "application/json, text/event-stream"),
                       ("content-type", "application/json")]
            told = (await served.call("POST", "/mcp", ask, headers=headers if tongue == "mcp" else [])).json()
            answer = (msgspec.json.decode(told["result"]["content"][0]["text"]) if tongue == "mcp"
                      else {"error": told["error"]["data"]["code"], "message": told["error"]["message"]})
        assert answer["error"] == "invalid_request", (named, answer)
        assert re.search("say|send", answer["message"]), answer


async def test_health_is_the_same_on_both_paths(served: Any) -> None:
    both = [await served.get(path, token=None) for path in ("/health", "/v1/health")]

    assert {(answer["status"], answer["database"], answer["service"])
            for answer in both} == {("healthy", "ok", "AsyncGate")}


# Long polls.


@contextlib.asynccontextmanager
async def polling(served: Any, method: str, target: str, body: Any = None) -> AsyncIterator[tuple[Any, asyncio.Event]]:
    """Begin a call that waits, and wait until it does."""
    gone = asyncio.Event()
    data = None if body is None else json.dumps(body).encode()
    call = asyncio.ensure_future(served.send(method, target, data, gone=gone,
                                             headers=[("authorization", f"Bearer {TOKEN}")]))
    await until(lambda: served.engine.waiting.count or served.engine.readers.count)
    assert not call.done()
    yield call, gone
    call.cancel()


CLAIM = {"worker_id": "w1", "wait_seconds": 30}


async def test_a_waiting_claim_is_answered_when_work_arrives(served: Any) -> None:
    async with polling(served, "POST", "/v1/leases/claim", CLAIM) as (call, _):
        made = await served.post("/v1/tasks", {"type": "demo", "payload": None})

        answer = await asyncio.wait_for(call, PATIENCE_SECONDS)

    assert [task["task_id"] for task in answer.json()["tasks"]] == [made["task_id"]]
    assert served.engine.waiting.count == 0


async def test_a_waiting_claim_whose_client_goes_frees_its_place_and_takes_no_work(served: Any) -> None:
    async with polling(served, "POST", "/v1/leases/claim", CLAIM) as (call, gone):
        assert served.engine.waiting.count == 1
        gone.set()

        assert await asyncio.wait_for(call, PATIENCE_SECONDS) is None

    assert served.engine.waiting.count == 0
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None})
    assert (await served.get(f"/v1/tasks/{made['task_id']}"))["status"] == "queued"


async def test_a_stopping_gate_answers_its_waiting_claims_with_an_empty_list(served: Any) -> None:
    async with polling(served, "POST", "/v1/leases/claim", CLAIM) as (call, _):
        served.gate.drain()

        answer = await asyncio.wait_for(call, PATIENCE_SECONDS)

    assert (answer.status, answer.json()) == (200, {"tasks": []})


@pytest.mark.parametrize("way", ["get", "run"])
async def test_a_reader_waits_for_the_end_of_a_task(served: Any, way: str) -> None:
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "priority": 1})
    target, body = (f"/v1/tasks/{made['task_id']}?wait_seconds=30", None) if way == "get" else (
        "/v1/tasks/run", {"type": "demo", "payload": None, "priority": 2})

    async with polling(served, "GET" if way == "get" else "POST", target, body) as (call, _):
        (offer,) = (await served.post("/v1/leases/claim", {"worker_id": "w1"}))["tasks"]
        await served.post(f"/v1/tasks/{offer['task_id']}/complete",
                          {"worker_id": "w1", "lease_id": offer["lease_id"], "result": {"answer": 42}})

        answer = await asyncio.wait_for(call, PATIENCE_SECONDS)

    assert answer.json()["status"] == "succeeded"
    assert answer.json()["result"]["result"] == {"answer": 42}
    assert not served.engine.readers.count


async def test_a_reader_whose_client_goes_is_forgotten(served: Any) -> None:
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None})

    async with polling(served, "GET", f"/v1/tasks/{made['task_id']}?wait_seconds=30") as (call, gone):
        gone.set()
        assert await asyncio.wait_for(call, PATIENCE_SECONDS) is None

    assert not served.engine.readers.count


async def test_a_stopping_gate_answers_its_waiting_readers_with_what_there_is(served: Any) -> None:
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None})

    async with polling(served, "GET", f"/v1/tasks/{made['task_id']}?wait_seconds=30") as (call, _):
        served.gate.drain()
        answer = await asyncio.wait_for(call, PATIENCE_SECONDS)

    assert answer.json()["status"] == "queued"


@pytest.mark.parametrize("path", ["receipts", "obligations/open"])
async def test_a_list_that_waits_is_answered_when_something_comes_and_forgotten_when_its_client_goes(
        served: Any, path: str) -> None:
    target = f"/v1/{path}?agent_id=ada&wait_seconds=30"
    async with polling(served, "GET", target) as (call, gone):
        gone.set()
        assert await asyncio.wait_for(call, PATIENCE_SECONDS) is None
    assert not served.engine.readers.count

    async with polling(served, "GET", target) as (call, _):
        made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
        reply = (await asyncio.wait_for(call, PATIENCE_SECONDS)).json()

    assert [row["task_id"] for row in reply.get("receipts") or reply["open_obligations"]] == [made["task_id"]]


@pytest.mark.parametrize("wait", [0.01, 31, 3600, 9007199254740991])
async def test_asking_to_wait_too_long_is_clamped(serve: Any, wait: float) -> None:
    served = await serve(max_wait_seconds=0.01)
    made = await served.post("/v1/tasks", {"type": "other", "payload": None})

    claimed = await served.post("/v1/leases/claim", {"worker_id": "w1", "accept_types": ["none"], "wait_seconds": wait})
    read = await served.get(f"/v1/tasks/{made['task_id']}?wait_seconds={wait}")
    ran = await served.post("/v1/tasks/run", {"type": "other", "payload": None, "wait_seconds": wait})

    assert (claimed, read["status"], ran["status"]) == ({"tasks": []}, "queued", "queued")


async def test_too_many_waiting_claims_are_429_and_say_when_to_come_back(serve: Any) -> None:
    served = await serve(max_waiting_claims=1)

    async with polling(served, "POST", "/v1/leases/claim", CLAIM):
        answer = await served.call("POST", "/v1/leases/claim", CLAIM)
        unwaiting = await served.call("POST", "/v1/leases/claim", {"worker_id": "w2"})

    assert refused(answer, 429, "rate_limit_exceeded")["retry_after"] == 1
    assert answer.headers["retry-after"] == "1"
    assert unwaiting.status == 200


# Over a real socket.


class Wire:
    """One connection over which requests go as they are."""

    def __init__(self, live: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_SECONDS)
        self.reader = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.socket.close()

    def say(self, method: str, target: str, body: bytes = b"", *headers: str) -> Wire:
        given = (*(headers or (f"Content-Length: {len(body)}",)), "Content-Type: application/json")
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}", *given, "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + body)
        return self

    def answer(self) -> tuple[int, dict[str, str], Any]:
        status = int(self.reader.readline().split()[1])
        headers = {}
        while line := self.reader.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name] = value.strip()
        return status, headers, json.loads(self.reader.read(int(headers["content-length"])))


def test_over_a_socket_answers_are_whole_and_do_not_name_the_server(live: Any) -> None:
    with Wire(live) as wire:
        made = wire.say("POST", "/v1/tasks", b'{"type":"demo","payload":0}').answer()
        read = wire.say("GET", f"/v1/tasks/{made[2]['task_id']}?wait_seconds=0.05").answer()
        lost = wire.say("GET", "/nothing").answer()
        empty = wire.say("POST", "/v1/leases/unknown/extend").answer()

    assert [made[0], read[0], lost[0], empty[0]] == [200, 200, 404, 409]
    for _, headers, _ in (made, read, lost, empty):
        assert {name: headers[name] for name in SAFETY} == SAFETY
        assert "server" not in headers


def test_over_a_socket_a_body_is_held_to_its_limits(live: Any) -> None:
    large = b'{"type":"demo","payload":"' + b"a" * 100_000 + b'"}'
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large)

    with Wire(live) as wire:
        told = wire.say("POST", "/v1/tasks", large).answer()
    with Wire(live) as wire:
        chunked = wire.say("POST", "/v1/tasks", chunk, "Transfer-Encoding: chunked").answer()
    with Wire(live) as wire:
        short = wire.say("POST", "/v1/tasks", b'{"type":"demo"}', "Content-Length: 100").answer()
    with Wire(live) as wire:
        tasks = wire.say("GET", "/v1/tasks").answer()[2]["tasks"]

    assert [(answer[0], answer[2]["error"]) for answer in (told, chunked, short)] == [
        (413, "payload_too_large"), (413, "payload_too_large"), (408, "request_timeout")]
    assert tasks == []


def test_over_a_socket_a_stopping_server_answers_its_waiting_calls(live: Any) -> None:
    with Wire(live) as claim, Wire(live) as read, Wire(live) as wire:
        task_id = wire.say("POST", "/v1/tasks", b'{"type":"demo","payload":0}').answer()[2]["task_id"]
        claim.say("POST", "/v1/leases/claim", b'{"worker_id":"w","accept_types":["none"],"wait_seconds":30}')
        read.say("GET", f"/v1/tasks/{task_id}?wait_seconds=30")
        wire.say("GET", "/health").answer()
        live.process.send_signal(signal.SIGTERM)

        claimed, answer = claim.answer(), read.answer()

    assert (claimed[0], claimed[2]) == (200, {"tasks": []})
    assert (answer[0], answer[2]["status"]) == (200, "queued")
    assert live.process.wait(PATIENCE_SECONDS) == 0


async def test_a_refused_call_leaves_nothing_to_the_garbage_collector(served: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        answer = await served.call("POST", f"/v1/tasks/{OTHER}/complete", {"worker_id": "w1", "lease_id": OTHER})
        await asyncio.sleep(0)      # the event loop itself holds it until its next turn
        kept = [error for error in gc.get_objects() if type(error) is TaskNotFound]
    finally:
        gc.enable()

    refused(answer, 404, "task_not_found")
    assert kept == []


async def test_a_wait_that_is_canceled_leaves_no_error_for_the_log() -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    assert await cancel_failing(lambda work: run_while_connected(work, receive),
                                DatabaseUnavailable("the database is away")) == []
