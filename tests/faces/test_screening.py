"""A body is judged as bytes, a bounded piece in one turn, before anything is made of it (threat E3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgate.bench.bodies import BODY_BYTES, NAMES_PER_BODY, make_worst
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.screening import MAX_DEPTH, SLICE, BodyScreen, cut_slices, screen_body
from asyncgate.parts.model.stored import Audit

pytestmark = pytest.mark.anyio

VALUES = 100_000
TEXTS = st.text(st.sampled_from('a"\\[]{},:é😀\u0000'), max_size=12)
TREES = st.recursive(st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=4)
                     | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=30)


def judged(body: bytes, size: int, most_values: int = VALUES, most_depth: int = MAX_DEPTH) -> str:
    """Judge a body in slices of a size; return the code of the refusal."""
    judge = BodyScreen(most_values, most_depth)
    try:
        for piece in cut_slices(body, size):
            judge.look(piece)
        judge.end()
    except GateError as refusal:
        return refusal.code
    return ""


def nodes(tree: Any, depth: int = 1) -> Iterator[tuple[int, Any]]:
    """Yield all values of a tree, and how deep they are."""
    yield depth, tree
    inner = [*tree, *tree.values()] if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    for part in inner:
        yield from nodes(part, depth + 1)


@given(tree=TREES, size=st.integers(2, 40), ascii=st.booleans())
def test_slices_of_any_size_find_what_a_decoder_finds(tree: Any, size: int, ascii: bool) -> None:
    body = json.dumps(tree, ensure_ascii=ascii).encode()
    pairs = list(nodes(tree))
    held = [(depth, node) for depth, node in pairs if isinstance(node, dict | list)]
    count = sum(1 + max(len(node) - 1, 0) for _, node in held)
    deepest = max([depth for depth, _ in held], default=0)
    nul = any(isinstance(node, str) and "\0" in node for _, node in pairs)

    assert judged(body, size, count, max(deepest, 1)) == ("invalid_request" if nul else "")
    if not nul and held:
        assert judged(body, size, count - 1, deepest) == "payload_too_large"
        assert judged(body, size, count, deepest - 1) == "payload_too_deep"


@given(body=st.binary(max_size=200), size=st.integers(1, 9))
def test_slices_are_the_body_and_none_is_larger_than_asked(body: bytes, size: int) -> None:
    pieces = list(cut_slices(body, size + 1))

    assert b"".join(pieces) == body
    assert all(0 < len(piece) <= size + 1 for piece in pieces)


@pytest.mark.parametrize("size", [5, 64, SLICE])
@pytest.mark.parametrize(("body", "code"), [
    (b"]", "invalid_request"), (b'"[[[[["', ""), (b'"\\\\u0000"', ""), (b'"\\\\\\u0000"', "invalid_request"),
    (b'"\\"[,,,,"', ""), (b"[" * (MAX_DEPTH + 1), "payload_too_deep"), (b"[1" + b",1" * VALUES, "payload_too_large")])
def test_only_structure_counts_and_only_real_escapes(body: bytes, code: str, size: int) -> None:
    assert judged(body, size) == code


@pytest.mark.parametrize("body", [b'"\xff"', b'"' + b"a" * SLICE + b'\xc3"', "é".encode()[:1]])
async def test_what_is_no_utf_8_is_refused_also_where_nothing_is_decoded(body: bytes) -> None:
    with pytest.raises(UnicodeDecodeError):
        await screen_body(body, VALUES)


async def test_a_large_body_is_judged_in_many_turns() -> None:
    body, turns, done = b'"' + b"a" * (BODY_BYTES - 2) + b'"', 0, False

    async def judge() -> None:
        nonlocal done
        await screen_body(body, VALUES)
        done = True

    task = asyncio.create_task(judge())
    while not done:
        await asyncio.sleep(0)
        turns += 1
    await task
    assert turns >= BODY_BYTES // SLICE


@pytest.mark.parametrize(("path", "body"), make_worst(), ids=[body[:60].decode("latin-1") for _, body in make_worst()])
async def test_each_of_the_worst_bodies_is_refused_and_breaks_nothing(served: Any, path: bytes, body: bytes) -> None:
    assert len(body) <= BODY_BYTES

    async with served.unchanged():
        answer = await served.call("POST", path.decode(), [body[at:at + SLICE] for at in range(0, len(body), SLICE)])

    told = answer.json()["error"]
    code = told if isinstance(told, str) else told["data"]["code"]
    assert code in ("payload_too_large", "payload_too_deep", "invalid_request", "receipt_too_large", "too_many_parents")


async def test_a_body_in_very_many_pieces_is_gathered_once(served: Any) -> None:
    body = b'{"type":"demo","payload":"' + b"a" * 1_000_000 + b'"}'

    made = await served.post("/v1/tasks", [body[at:at + 5] for at in range(0, len(body), 5)])

    assert (await served.get(f"/v1/tasks/{made['task_id']}"))["payload"] == "a" * 1_000_000


async def test_who_may_not_ask_is_refused_before_the_body_is_read(served: Any) -> None:
    issued = await served.post("/v1/keys", {"name": "w", "principal_kind": "worker", "principal_id": "w1"})
    given = [(b"host", b"localhost"), (b"authorization", f"Bearer {issued['api_key']}".encode())]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/tasks",
             "raw_path": b"/v1/tasks", "query_string": b"", "headers": given, "client": ("127.0.0.1", 1),
             "server": ("127.0.0.1", 80), "root_path": ""}
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    await served.gate(scope, receive, send)

    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]) == (403, "forbidden")


@pytest.mark.parametrize("arguments", ['{"type":1}', '{"payload":' + "[" * 100 + "]" * 100 + "}"])
async def test_who_may_not_call_a_tool_is_refused_before_its_arguments_are_decoded(served: Any, arguments: str) -> None:
    issued = await served.post("/v1/keys", {"name": "w", "principal_kind": "worker", "principal_id": "w1"})
    body = f'{{"method":"tools/call","params":{{"name":"asyncgate.create_task","arguments":{arguments}}}}}'

    answer = await served.call("POST", "/mcp", body.encode(), token=issued["api_key"])

    assert answer.json()["error"]["data"]["code"] == "forbidden"


async def test_a_message_that_the_sdk_reads_is_small_and_else_refused_in_json_rpc(served: Any) -> None:
    params = {"_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "x": "a" * 70_000}}

    for method in ("tools/list", "tools/call"):
        answer = await served.call("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params},
                                   headers=[("mcp-protocol-version", "2026-07-28")])
        assert (answer.status, answer.json()["error"]["data"]["code"]) == (200, "payload_too_large")


async def test_a_batch_of_too_many_and_a_request_of_too_many_members_are_refused_unread(served: Any) -> None:
    batch = b'{"tasks":[' + b",".join([b'{"type":null}'] * 501) + b"]}"
    wide = b'{"type":"demo",' + b",".join([b'"k%d":null' % number for number in range(1001)]) + b"}"

    items = b'{"tasks":[' + wide + b"]}"
    for path, body, code in (("/v1/tasks/batch", batch, "invalid_request"), ("/v1/tasks", wide, "payload_too_large"),
                             ("/v1/tasks", wide.replace(b"null", b"1"), "payload_too_large"),
                             ("/v1/tasks/batch", items, "payload_too_large")):
        answer = await served.call("POST", path, body)
        assert answer.json()["error"] == code
        assert " at most" in answer.json()["message"]


async def test_an_item_of_a_batch_with_too_many_members_is_refused_alone(served: Any) -> None:
    wide = b'{"type":"demo",' + b",".join([b'"k%d":"%b"' % (number, b"a" * 40) for number in range(1001)]) + b"}"

    made = await served.call("POST", "/v1/tasks/batch", b'{"tasks":[{"type":"demo","payload":1},%b]}' % wide)

    good, bad = made.json()["results"]
    assert good["task_id"]
    assert "at most 1000 members" in bad["error"]["message"]


async def test_a_very_long_list_of_names_is_refused_before_its_names_are_read(served: Any) -> None:
    names = {"receipt_type": "schedule.deleted", "parents": ["a b"] * NAMES_PER_BODY}

    answer = await served.call("POST", "/v1/receipts", names)

    assert (answer.status, answer.json()["error"]) == (413, "payload_too_large")
    assert answer.json()["message"].startswith("parents is ")


@given(tree=st.dictionaries(TEXTS, TREES, max_size=6), size=st.integers(2, 40), around=st.integers(0, 2))
def test_members_are_counted_in_the_request_and_not_in_its_values(tree: Any, size: int, around: int) -> None:
    nested = tree
    for _ in range(around):
        nested = {"a": nested}
    judge = BodyScreen(VALUES, around=around)
    with suppress(GateError):
        for piece in cut_slices(json.dumps(nested).encode(), size):
            judge.look(piece)
        assert judge.members == max(len(tree) - 1, 0)


async def test_white_space_is_bounded_between_values_and_not_inside_them(served: Any) -> None:
    blank = b'{"type":"demo",' + b" " * (2**20 + 1) + b'"payload":1}'
    text = b'{"type":"demo","payload":"' + b" " * 900_000 + b'"}'

    refused, taken = [await served.call("POST", "/v1/tasks", body) for body in (blank, text)]

    assert (refused.status, refused.json()["error"], taken.status) == (413, "payload_too_large", 200)


async def test_of_very_many_unknown_members_a_few_are_looked_into(served: Any) -> None:
    wide = b'{"type":"demo","payload":1,' + b",".join([b'"k%d":1' % number for number in range(900)]) + b"}"

    made = await served.post("/v1/tasks", wide)

    assert len(made["warnings"]) == 10


async def test_too_many_parents_are_neither_looked_up_nor_reported_one_by_one(served: Any) -> None:
    body = {"receipt_type": "schedule.deleted", "schedule_id": "s", "parents": [f"r{at}" for at in range(5000)]}

    answer = await served.call("POST", "/v1/receipts", body)

    assert answer.json()["error"] == "too_many_parents"
    await served.gate.guard.auditor.flush()
    assert not [line for line in await served.backend.page(served.tenant_id, Rows(Audit)) if "unknown" in line.body]


async def test_the_most_values_of_a_request_are_a_setting(serve: Any) -> None:
    served = await serve(max_request_values=10)

    taken = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": list(range(8))})
    refused = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": list(range(10))})

    assert (taken.status, refused.status, refused.json()["error"]) == (200, 413, "payload_too_large")
