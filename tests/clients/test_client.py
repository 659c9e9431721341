"""The Python client: its methods are the table's, and what it was asked for comes, whatever happens on the way."""

from __future__ import annotations

import ast
import inspect
import re
import time
from email.utils import formatdate
from itertools import pairwise
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgate.clients import AsyncGate, NotAGate, Refusal, SyncGate, Unreachable
from asyncgate.clients import operations as made
from asyncgate.clients.client import Attempts
from asyncgate.clients.http import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    SHORT_PAUSES,
    AsyncHttp,
    longest_after,
    read_retry_after,
)
from asyncgate.clients.operations import CALLS, AsyncOperations, SyncOperations
from asyncgate.commands.declare import FILE, WIDE, holds_json, render_file
from asyncgate.conformance.harness import are_here
from asyncgate.parts.operations import OPERATIONS
from tests.support.each import each

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("kind", [AsyncOperations, SyncOperations])
every = each("name", sorted(OPERATIONS))


# The methods.


def test_the_methods_are_those_of_the_table() -> None:
    """Git ignores the file: a checkout whose table has changed since its installation has an old one."""
    assert FILE.read_text() == render_file(), "run: python -m asyncgate.commands.declare"


def test_the_generated_client_imports_what_it_uses_and_nothing_else() -> None:
    nodes = [*ast.walk(ast.parse(render_file()))]
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}

    assert imported - {node.id for node in nodes if isinstance(node, ast.Name)} == {"annotations"}


def test_a_line_of_a_docstring_ends_where_the_next_word_does_not_fit() -> None:
    paragraphs = [paragraph.splitlines() for name in OPERATIONS
                  for paragraph in (inspect.getdoc(getattr(AsyncOperations, name)) or "").split("\n\n")]

    assert [line for lines in paragraphs for line, after in pairwise(lines)
            if len(f"{' ' * 8}{line} {after.split()[0]}") <= WIDE] == []


@every
@both
def test_a_method_takes_the_fields_of_its_request_and_gives_its_reply(kind: type[Any], name: str) -> None:
    method, op = getattr(kind, name), OPERATIONS[name]

    assert inspect.signature(method).parameters.keys() - {"self"} == {*op.takes.__struct_fields__}
    assert get_type_hints(method)["return"].__name__ == op.gives.__name__


def test_no_operation_hides_behind_what_the_clients_add() -> None:
    for kind, base in ((AsyncGate, AsyncOperations), (SyncGate, SyncOperations)):
        assert {name for name in OPERATIONS if getattr(kind, name) is not getattr(base, name)} == set()


@every
def test_a_reply_says_what_the_gate_says(name: str) -> None:
    op = OPERATIONS[name]
    shown = getattr(made, op.gives.__name__)

    assert (shown is op.gives) != holds_json(op.gives)
    _, reply = op.takes.example
    again = msgspec.to_builtins(msgspec.convert(reply, shown, strict=False))
    assert {field: again[field] for field in reply}.keys() == reply.keys()


# Which calls are repeated, and when.

LOST, UNSENT = Unreachable("lost"), Unreachable("nobody there", sent=False)
NOT_KNOWN_AGAIN = {"append_output", "change_client", "change_user", "create_task_webhook", "create_tenant",
                   "create_webhook", "import_receipts", "invite_user", "issue_key", "make_sign_in_link",
                   "pause_schedule", "register_client", "release_hold", "remove_client", "remove_task_webhook",
                   "remove_type", "remove_user", "remove_webhook", "replay_deliveries", "report_progress",
                   "restore_archive", "resume_schedule", "revoke_key", "rotate_credentials", "rotate_key",
                   "rotate_webhook_secret", "run_archive", "run_schedule", "seal_receipts", "set_limits",
                   "suspend_tenant", "test_webhook"}


def refused(status: int, code: str, retry_after: float | None = None) -> Refusal:
    return Refusal(status, {"error": code, "message": "no"}, retry_after)


def again(name: str, error: Refusal | Unreachable) -> bool:
    """Whether a call that failed so is tried again."""
    try:
        return Attempts(CALLS[name], {}, 1000.0).pause(error) >= 0
    except (Refusal, Unreachable):
        return False


@pytest.mark.parametrize("error", [LOST, refused(503, "database_unavailable"), refused(502, "unexpected_answer")])
def test_a_call_that_may_have_been_carried_out_is_repeated_only_where_the_gate_knows_it_again(error: Any) -> None:
    assert {name for name in OPERATIONS if not again(name, error)} == {*are_here(NOT_KNOWN_AGAIN)}


@every
def test_a_call_that_was_not_carried_out_is_repeated(name: str) -> None:
    for error in (UNSENT, refused(429, "rate_limit_exceeded", 1), refused(503, "overloaded", 1),
                  refused(503, "rate_limiter_unavailable"), refused(408, "request_timeout")):
        assert again(name, error)


@every
def test_a_no_is_a_no(name: str) -> None:
    for error in (refused(400, "invalid_request"), refused(401, "unauthenticated"), refused(404, "task_not_found"),
                  refused(409, "lease_invalid_or_expired"), refused(429, "quota_exceeded"),
                  refused(500, "internal_error"), NotAGate("http://elsewhere", "it is HTML")):
        assert not again(name, error)


@given(count=st.integers(0, 2000), after=st.none() | st.floats(0, 60))
def test_a_pause_is_drawn_from_the_whole_of_what_doubles_up_to_a_limit_and_comes_after_what_was_asked(
    count: int, after: float | None,
) -> None:
    tries = Attempts(CALLS["get_task"], {}, 1000.0)
    tries.count = count

    pause = tries.pause(refused(503, "overloaded", after)) - (after or 0.0)

    assert -1e-9 <= pause <= longest_after(count + 1) + 1e-9


def test_who_is_only_being_restarted_is_asked_often_for_ten_seconds() -> None:
    """Tries begin after 50 ms, stay below half a second for ten seconds, and never wait longer than five."""
    pauses = [longest_after(failures) for failures in range(1, 200)]

    assert pauses[0] == FIRST_PAUSE == 0.05
    assert all(pause <= 0.5 for pause in pauses[:SHORT_PAUSES])
    assert sum(pauses[:SHORT_PAUSES]) / 2 > 10      # half of each is left to chance
    assert sorted(pauses) == pauses
    assert max(pauses) == LONGEST_PAUSE


def test_a_waiting_call_that_was_cut_off_is_asked_again_at_once_and_once_only() -> None:
    tries = Attempts(CALLS["lease_next"], {"wait_seconds": 25}, 1000.0)
    tries.began -= 5

    assert tries.pause(LOST) == 0.0
    assert {tries.pause(LOST) > 0 for _ in range(20)} == {True}


def test_a_call_that_could_not_be_made_is_not_repeated_without_a_pause() -> None:
    assert Attempts(CALLS["get_config"], {}, 1000.0).pause(LOST) > 0


def test_pauses_differ_from_call_to_call() -> None:
    drawn = {Attempts(CALLS["get_task"], {}, 1000.0).pause(LOST) for _ in range(100)}

    assert len(drawn) > 90
    assert min(drawn) < FIRST_PAUSE / 4 < FIRST_PAUSE * 3 / 4 < max(drawn)


def test_there_is_no_time_for_a_pause_that_is_longer_than_what_is_left() -> None:
    error = refused(429, "rate_limit_exceeded", 31)

    with pytest.raises(Refusal) as raised:
        Attempts(CALLS["get_task"], {}, 30.0).pause(error)

    assert raised.value is error


def test_a_repeated_poll_waits_only_for_what_is_left() -> None:
    tries = Attempts(CALLS["get_task"], {"task_id": "t", "wait_seconds": 20.0}, 30.0)
    assert tries.fields()["wait_seconds"] == 20.0
    tries.pause(LOST)
    tries.began -= 15
    assert 0.0 < tries.fields()["wait_seconds"] <= 5.0
    tries.began -= 15
    assert tries.fields()["wait_seconds"] == 0.0


async def test_a_session_of_mcp_is_opened_by_who_uses_it() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await AsyncGate("http://localhost", via="mcp").health()


def test_there_is_no_third_way() -> None:
    with pytest.raises(ValueError, match="'rest' or 'mcp'"):
        AsyncGate(via="pigeon")  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["gate:8080", "http://", "http://[::1", "http://gate:99999", "http://gate:0",
                                 "http://ga te", "http://gate\n", "ftp://gate"])
def test_a_url_that_leads_nowhere_is_refused_before_it_is_called(url: str) -> None:
    with pytest.raises(ValueError, match=r"^a gate.s URL is like http://127\.0\.0\.1:8080, not "):
        AsyncGate(url)


@pytest.mark.parametrize("id", ["", ".", ".."])
def test_an_id_that_leads_to_another_path_is_refused(id: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"task_id is {id!r}, which is not an id")):
        AsyncHttp("http://gate").request("get_task", {"task_id": id})


@pytest.mark.parametrize("token", ["secret\n", " secret", "sec\x00ret", "s\xe9cret"])
def test_a_credential_that_no_header_can_hold_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="credential holds a character that no HTTP header can") as refused:
        AsyncGate("http://gate", token)

    assert "cret" not in str(refused.value)


def test_retry_after_is_seconds_or_a_date() -> None:
    assert read_retry_after("2.5") == 2.5
    assert read_retry_after("soon") is read_retry_after("-1") is read_retry_after("9" * 400) is None
    assert read_retry_after(None) is None
    assert 50 < (read_retry_after(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    assert read_retry_after(formatdate(time.time() - 60, usegmt=True)) == 0.0
