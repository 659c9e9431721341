"""What a page of somebody else's can do to the console, from another port and by rebinding: nothing.

The gate is the least guarded one: callers of this machine need no credential, so that only its walls against other
pages' requests are left.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.console.conftest import OpenConsole, Show
from tests.support.chromium import REBOUND, Chromium, Screen
from tests.support.elsewhere import Elsewhere
from tests.support.filled_gate import Filled

TASK = '{"type": "planted", "payload": null, "agent_id": "mallory"}'
# What an attacker's page tries; each returns what it has learnt, and an exception is nothing learnt.
READS = {
    "a call": "fetch(gate + '/v1/tasks', {credentials: 'include'}).then(got => got.text())",
    "a call without CORS":
        "fetch(gate + '/v1/tasks', {mode: 'no-cors', credentials: 'include'}).then(got => got.text())",
    "the page itself": "fetch(gate + '/console/', {mode: 'no-cors'}).then(got => got.text())",
    "a stream": """new Promise((done, no) => { const stream = new EventSource(gate + '/v1/receipts/stream');
        stream.onopen = () => done('it is open'); stream.onerror = no; })""",
    "a socket": """new Promise((done, no) => { const socket = new WebSocket(gate.replace('http', 'ws') + '/v1/tasks');
        socket.onopen = () => done('it is open'); socket.onerror = no; })""",
    "a script": """new Promise((done, no) => { const one = document.createElement('script');
        one.src = gate + '/console/console.js'; one.type = 'module'; one.onload = () => done('it ran');
        one.onerror = no; document.head.append(one); })""",
    "a picture": """new Promise((done, no) => { const one = new Image();
        one.onload = () => done(`it is ${one.width} wide`); one.onerror = no;
        one.src = gate + '/console/icon.svg'; })""",
    "a frame": """new Promise(done => { const one = document.createElement('iframe'); one.src = gate + '/console/';
        one.onload = () => { try { done(one.contentDocument.body.innerText + one.contentWindow.length); }
          catch { done(''); } };
        document.body.append(one); })""",
    "a window": """(async () => { const one = window.open(gate + '/console/');
        while (one && !one.closed) { await new Promise(requestAnimationFrame);
          try { if (one.location.href !== 'about:blank') return one.document.body.innerText; } catch { return ''; } }
        return ''; })()""",
}
WRITES = {
    "a call": f"fetch(gate + '/v1/tasks', {{method: 'POST', credentials: 'include', body: {TASK!r}, "
    "headers: {'content-type': 'application/json'}})",
    "a simple call":
        f"fetch(gate + '/v1/tasks', {{method: 'POST', mode: 'no-cors', credentials: 'include', body: {TASK!r}}})",
    "a beacon": f"Promise.resolve(navigator.sendBeacon(gate + '/v1/tasks', new Blob([{TASK!r}])))",
    "a form": """new Promise(done => {
        const form = document.createElement('form'), field = document.createElement('input');
        form.action = gate + '/v1/tasks'; form.method = 'POST'; form.enctype = 'text/plain'; form.target = 'sink';
        field.name = '{"type": "planted", "payload": null, "agent_id": "mallory", "task_summary": "';
        field.value = '"}';
        const sink = document.createElement('iframe'); sink.name = 'sink'; form.append(field);
        document.body.append(sink, form); sink.onload = done; form.submit(); })""",
    "a sign-in": """fetch(gate + '/console/sign-in', {method: 'POST', mode: 'no-cors', credentials: 'include',
        body: '{"credential": "a-token-for-tests"}'})""",
}


@pytest.fixture
def mallory(chromium: Chromium, show: Show, elsewhere: Elsewhere) -> Screen:
    """Return a window with a page of somebody else's."""
    screen = chromium.run(show, elsewhere.add("/", "<!doctype html><title>Mallory</title><body>"))
    chromium.run(screen.open)
    return screen


def attempt(screen: Screen, gate: str, attack: str) -> Any:
    """Let the attacker's page try something; return what it has learnt."""
    return screen.page.evaluate(f"gate => ({attack}).catch(() => null)", gate)


@pytest.mark.parametrize("attack", READS)
def test_a_page_on_another_port_reads_nothing(
        attack: str, chromium: Chromium, mallory: Screen, gate_to_read: Filled) -> None:
    assert attempt(mallory, gate_to_read.url, READS[attack]) in (None, "", "0")


@pytest.mark.parametrize("attack", WRITES)
def test_a_page_on_another_port_changes_nothing(
        attack: str, chromium: Chromium, mallory: Screen, gate_to_read: Filled) -> None:
    attempt(mallory, gate_to_read.url, WRITES[attack])

    assert gate_to_read.call("list_tasks", type="planted")["tasks"] == []
    assert mallory.context.cookies(gate_to_read.url) == []


def test_a_window_that_another_page_opens_does_not_know_its_opener(
        chromium: Chromium, mallory: Screen, gate_to_read: Filled) -> None:
    with mallory.context.expect_page() as opened:
        mallory.page.evaluate("gate => { window.victim = window.open(gate + '/console/'); }", gate_to_read.url)
    opened.value.wait_for_selector("#main .view")

    assert opened.value.evaluate("() => window.opener") is None
    assert mallory.page.evaluate("() => window.victim.closed"), "the opener still holds the console"


def test_a_name_that_is_bound_to_this_machine_later_gets_nothing(
        chromium: Chromium, show: Show, gate_to_read: Filled) -> None:
    # Such a page came from the attacker's own server: no policy of the gate's holds it, and its calls are same-origin.
    screen = show(f"http://{REBOUND}:{gate_to_read.live.port}", bypass_csp=True)
    screen.open("/nowhere")

    got = [screen.page.evaluate("path => fetch(path).then(got => got.status)", path)
           for path in ("/v1/tasks", "/console/", "/console/about", "/console/api.js")]
    got.append(screen.page.evaluate(f"""() => fetch('/v1/tasks', {{method: 'POST', body: {TASK!r},
        headers: {{'content-type': 'application/json'}}}}).then(got => got.status)"""))

    assert {status // 100 for status in [*got, *(answer.status for answer in screen.watch.responses)]} == {4}
    assert gate_to_read.call("list_tasks", type="planted")["tasks"] == []


def test_the_console_itself_sends_nothing_to_anybody_else(
        chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> None:
    console = open_console(gate_to_read)

    console.visit("inbox")

    assert {url[:len(gate_to_read.url)] for url in console.watch.urls} == {gate_to_read.url}
