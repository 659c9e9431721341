"""A real browser for tests: Debian's Chromium, driven by Playwright, and what it sees of a page.

Playwright keeps the event loop of its thread running, so it has a thread of its own; tests that use it run there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, Request, Response, Route

PROGRAM_GIVEN = "ASYNCGATE_TEST_CHROMIUM"       # the path of another Chromium
PICTURES_GIVEN = "ASYNCGATE_TEST_PICTURES"      # the folder that screenshots are written to
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
AXE = "axe-core@4.14.1"
ENDED_BY_PAGE = "net::ERR_ABORTED"
NOTHING = "about:blank"         # where a page is before it is opened
REBOUND = "rebound.example"     # its name leads to this machine, as that of an attacker does from the second answer on
# Nothing but what a test opens is asked for on the network, and a container needs no second sandbox.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--force-color-profile=srgb", "--hide-scrollbars",
             f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1")
# Runs before every script of a page, and notes what no event of the browser tells.
WITNESS = """
(() => {
  const seen = { violations: [], frames: [], ran: [] };
  Object.defineProperty(window, "__seen", { value: seen });
  for (const name of ["alert", "confirm", "prompt"]) window[name] = said => { seen.ran.push(`${name} ${said}`); };
  document.addEventListener("securitypolicyviolation", event =>
    seen.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
  new PerformanceObserver(list => {
    for (const one of list.getEntries()) seen.frames.push(one.duration);
  }).observe({ type: "long-animation-frame", buffered: true });
})();
"""
AXE_RUN = """
axe.run(document, { iframes: false, resultTypes: ["violations"] }).then(found => JSON.stringify(found.violations.map(
  one => `${one.id} (${one.impact}, ${one.nodes.length} times): ${one.nodes.slice(0, 3).map(node =>
    `${node.target.join(" ")} ${(node.any[0] || node.all[0] || node.none[0] || {}).message || ""}`).join("; ")}`)))
"""
# What reaches past the right edge of the page; a box that scrolls within itself may hold wider things.
WIDER = """
() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth <= width && document.body.scrollWidth <= width) return found;
  const cut = one => one && (getComputedStyle(one).overflowX !== "visible" || cut(one.parentElement));
  for (const one of document.body.querySelectorAll("*")) {
    if (one.getBoundingClientRect().right > width + 1 && !cut(one.parentElement)) found.push(
      `${one.tagName.toLowerCase()}.${one.className} ${Math.round(one.getBoundingClientRect().right)}`);
  }
  return [`the page is ${document.documentElement.scrollWidth} wide, the window ${width}`, ...found.slice(0, 8)];
}
"""
# What has the focus, whether an outline or a shadow shows it, and whether a walk comes there for the first time.
FOCUSED = """
() => {
  const one = document.activeElement, style = getComputedStyle(one), walked = window.__walked || new Set();
  const name = one.getAttribute("aria-label") || one.innerText || one.value || one.name || one.id || "";
  const seen = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1) || style.boxShadow !== "none";
  const fresh = one !== document.body && !walked.has(one);
  walked.add(one);
  return [`${one.tagName.toLowerCase()} ${one.getAttribute("role") || ""} ${name.trim().slice(0, 80)}`, seen, fresh];
}
"""
Returned = TypeVar("Returned")


def find_program() -> str:
    """Return the path of Chromium, or skip the test."""
    program = os.environ.get(PROGRAM_GIVEN) or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no Chromium is installed (Debian's package chromium, or {PROGRAM_GIVEN}): no test of the console "
                    "in a real browser")
    return program


class Chromium:
    """One browser, in a thread of its own; it starts when it is needed first."""

    NAME = "chromium"

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, self.NAME)
        self.playwright: Any = None
        self.started: Browser | None = None

    def run(self, do: Callable[..., Returned], *arguments: Any, **named: Any) -> Returned:
        """Run something in the browser's thread; that may be this one."""
        if threading.current_thread().name.startswith(self.NAME):
            return do(*arguments, **named)
        return self.thread.submit(do, *arguments, **named).result()

    def browser(self) -> Browser:
        """Return the running browser; to be called in its thread."""
        if self.started is None:
            from playwright.sync_api import sync_playwright

            program = find_program()
            self.playwright = sync_playwright().start()
            self.started = self.playwright.chromium.launch(
                executable_path=program, args=list(ARGUMENTS), chromium_sandbox=False)
        return self.started

    def close(self) -> None:
        """End the browser and its thread."""
        self.run(self._end)
        self.thread.shutdown()

    def _end(self) -> None:
        if self.started is not None:
            self.started.close()
            self.playwright.stop()


class Watch:
    """What happened in a page since the watch began."""

    def __init__(self) -> None:
        self.console: list[str] = []        # errors and warnings
        self.errors: list[str] = []         # exceptions that no script caught
        self.failed: list[str] = []         # requests without an answer
        self.requests: list[Request] = []
        self.responses: list[Response] = []
        self.ended: set[Request] = set()    # requests that are over, with an answer or without
        self.exchanged: list[str] = []      # requests with their answers, where they are kept
        self.streamed: list[str] = []       # what came by streams
        self.bytes = 0                      # as they were on the wire, with the heads of the answers

    def clear(self) -> None:
        """Forget everything so far."""
        self.__init__()     # type: ignore[misc]

    @property
    def urls(self) -> list[str]:
        """Return where the page sent its requests."""
        return [request.url for request in self.requests]

    def told(self) -> str:
        """Return all that the page sent and was sent, as one text; the screen was opened to `keep` it."""
        return "\n".join([*self.exchanged, *self.streamed])


def describe_exchange(exchange: dict[str, Any], body: str) -> str:
    """Return a request and its answer as one text."""
    request = exchange["request"]
    sent = f"{request['method']} {request['url']}\n{json.dumps(request['headers'])}\n{request.get('postData', '')}"
    return f"{sent}\n{json.dumps(exchange.get('responseHeaders'))}\n{body}"


def playwright_error() -> type[Exception]:
    """Return what Playwright raises; it is imported only where there is a browser."""
    from playwright.sync_api import Error

    return Error


def is_stream(headers: list[dict[str, str]]) -> bool:
    """Whether an answer goes on as long as its page listens."""
    return any(header["name"].lower() == "content-type" and header["value"].startswith("text/event-stream")
               for header in headers)


class Screen:
    """One page in a context of its own: its own cookies, storage and cache."""

    def __init__(self, chromium: Chromium, axe: Callable[[], str], home: str, width: int = 1280, scheme: str = "light",
                 *, keep: bool = False, **context: Any) -> None:
        self.home, self.axe_source, self.watch = home, axe, Watch()
        given: dict[str, Any] = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "locale": "en-GB",
                                 "timezone_id": "UTC", "reduced_motion": "reduce", **context}
        self.context: BrowserContext = chromium.browser().new_context(**given)
        self.context.add_init_script(WITNESS)
        self.page: Page = self.context.new_page()
        self.cdp: CDPSession = self.context.new_cdp_session(self.page)
        self._look()
        if keep:    # before the page has it: the browser forgets an answer when its page is left
            self.cdp.send("Fetch.enable", {"patterns": [{"requestStage": "Response"}]})
            self.cdp.on("Fetch.requestPaused", self._keep)

    def _look(self) -> None:
        """Note everything that the page does."""
        page = self.page
        page.on("console",
                lambda message: self.watch.console.append(f"{message.type}: {message.text} {message.location}")
                if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.watch.errors.append(f"{error.message}\n{error.stack}"))
        page.on("request", lambda request: self.watch.requests.append(request))
        page.on("response", lambda response: self.watch.responses.append(response))
        page.on("requestfinished", lambda request: self.watch.ended.add(request))
        page.on("requestfailed", lambda request: self.watch.ended.add(request))
        page.on("requestfailed",
                lambda request: self.watch.failed.append(f"{request.method} {request.url}: {request.failure}")
                if request.failure != ENDED_BY_PAGE else None)
        self.cdp.send("Network.enable")
        self.cdp.on("Network.loadingFinished", self._count)
        self.cdp.on("Network.responseReceived", self._follow)
        self.cdp.on("Network.dataReceived", lambda params: self._hear(params.get("data", "")))

    def _follow(self, event: dict[str, Any]) -> None:
        """Listen to a stream: it has no body that ends."""
        if event["response"]["mimeType"] == "text/event-stream":
            with contextlib.suppress(playwright_error()):        # the page is gone already
                ask = {"requestId": event["requestId"]}
                self._hear(self.cdp.send("Network.streamResourceContent", ask)["bufferedData"])

    def _hear(self, encoded: str) -> None:
        if encoded:
            self.watch.streamed.append(b64decode(encoded).decode(errors="replace"))

    def _keep(self, event: dict[str, Any]) -> None:
        """Note an answer and pass it on; a stream has no body that ends, and a redirect none at all."""
        ask = {"requestId": event["requestId"]}
        whole = event.get("responseStatusCode", 0) // 100 in (2, 4, 5) and not is_stream(event["responseHeaders"])
        with contextlib.suppress(playwright_error()):       # the page is gone already, and its answer with it
            got: dict[str, Any] = self.cdp.send("Fetch.getResponseBody", ask) if whole else {}
            body = b64decode(got["body"]).decode(errors="replace") if got.get("base64Encoded") else got.get("body", "")
            self.watch.exchanged.append(describe_exchange(event, body))
            self.cdp.send("Fetch.continueResponse", ask)

    def _count(self, event: dict[str, Any]) -> None:
        self.watch.bytes += int(event["encodedDataLength"])

    def close(self) -> None:
        """Close the page and forget its context."""
        self.context.close()

    # Where it is, and how it looks.

    def open(self, view: str = "", *, width: int | None = None, scheme: str | None = None) -> Page:
        """Open an address below the gate, at a width and in a colour scheme; return the page."""
        self.dress(width, scheme)
        self.page.goto(self.home + view, wait_until="load")
        return self.page

    def dress(self, width: int | None = None, scheme: Any = None) -> None:
        """Give the window a width, and the colours that the user prefers."""
        if width is not None:
            self.page.set_viewport_size({"width": width, "height": 900})
        if scheme is not None:
            self.page.emulate_media(color_scheme=scheme)

    def route(self, pattern: str, answer: Callable[[Route], object]) -> None:
        """Answer what the page asks for in its server's stead; a page that is there already is loaded again.

        Chromium says that it holds requests before a page that is loaded gives it any: the next ones may still go to
        the server, and Playwright, which waits for them to be held, never tells of them.
        """
        self.page.route(pattern, answer)
        if self.page.url != NOTHING:
            self.page.reload()

    def settle(self) -> None:
        """Wait until the page is drawn as it will be: two frames, for what a first one asks."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def rest(self) -> None:
        """Wait until all that the page has asked for is answered and drawn, but for streams; what it asks next, too."""
        known = -1
        while known != len(self.watch.requests):
            known = len(self.watch.requests)
            for request in list(self.watch.requests):
                while request not in self.watch.ended and request.headers.get("accept") != "text/event-stream":
                    self.settle()
            self.settle()

    def picture(self, name: str) -> None:
        """Write a screenshot of the whole page, if somebody wants pictures."""
        if folder := os.environ.get(PICTURES_GIVEN):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    # What is wrong with it.

    def axe(self) -> list[str]:
        """Return what axe finds; it runs in a world of its own, so that it needs no hole in the page's policy."""
        frame = self.cdp.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
        world = self.cdp.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": "axe"})["executionContextId"]
        self._evaluate(self.axe_source() + "\n;0", world)
        violations: list[str] = json.loads(self._evaluate(AXE_RUN, world))
        return violations

    def _evaluate(self, script: str, world: int) -> Any:
        got = self.cdp.send("Runtime.evaluate", {"expression": script, "contextId": world, "awaitPromise": True,
                                                 "returnByValue": True})
        assert "exceptionDetails" not in got, got
        return got["result"]["value"]

    def seen(self, what: str) -> list[Any]:
        """Return what the page has noted: `violations` of its policy, long `frames`, or scripts that `ran`."""
        noted: list[Any] = self.page.evaluate(f"() => window.__seen.{what}")
        return noted

    def wider(self) -> list[str]:
        """Return what makes the page wider than its window."""
        elements: list[str] = self.page.evaluate(WIDER)
        return elements

    def faults(self) -> list[str]:
        """Return everything that a sound page does not do; what axe finds is not among it."""
        watch = self.watch
        return [*watch.console, *watch.errors, *watch.failed,
                *(f"policy: {violation}" for violation in self.seen("violations")),
                *(f"ran: {script}" for script in self.seen("ran")), *self.wider()]

    # Keyboard only.

    def press(self, *keys: str) -> None:
        """Press keys, one after another."""
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self) -> str:
        """Return what has the focus: the name of its element, its role, and what a screen reader calls it."""
        return str(self.page.evaluate(FOCUSED)[0])

    def begin_walk(self) -> None:
        """Put the focus before everything else on the page, as after a load."""
        self.page.evaluate("""() => { window.__walked = new Set(); const body = document.body; body.tabIndex = -1;
            body.focus(); body.removeAttribute("tabindex"); }""")

    def walk(self, limit: int = 400) -> list[str]:
        """Go through the page with Tab until it begins anew; return what had the focus, in order.

        What does not show that it has the focus is marked as unseen.
        """
        self.begin_walk()
        walked: list[str] = []
        while len(walked) < limit:
            self.press("Tab")
            name, seen, new = self.page.evaluate(FOCUSED)
            if not new:
                return walked
            walked.append(name if seen else f"{name} UNSEEN")
        return walked


@functools.lru_cache
def read_axe(folder: Path) -> str:
    """Return the source of axe."""
    return (folder / "node_modules/axe-core/axe.min.js").read_text()
