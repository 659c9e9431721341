"""A browser that signs somebody in: it keeps cookies, follows redirects within the gate, and reads pages and forms."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urlencode, urljoin, urlsplit

from tests.conftest import Answer, Served

FORM = ("content-type", "application/x-www-form-urlencoded")
CHALLENGE = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"     # of VERIFIER (RFC 7636 B)
VERIFIER = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"


class Page(HTMLParser):
    """What stands on a page: its text, links and forms, and the names of its elements."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.status, self.headers, self.pairs, self.html = answer.status, answer.headers, answer.pairs, answer.content
        self.text, self.elements = "", list[str]()
        self.links: dict[str, str] = {}
        self.forms: list[dict[str, Any]] = []
        self.opened: tuple[str, str] | None = None
        self.feed(answer.content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append(tag)
        assert not any(name.startswith("on") or name == "style" for name in attributes), "a page has no script"
        if tag == "form":
            self.forms.append({"action": attributes["action"], "fields": {}, "buttons": []})
        if tag == "input":
            self.forms[-1]["fields"][attributes["name"]] = attributes.get("value", "")
        if tag == "button":
            self.forms[-1]["buttons"].append(attributes.get("value", ""))
        if tag == "a":
            self.opened = attributes["href"], ""

    def handle_endtag(self, tag: str) -> None:
        """Note the end of a link."""
        if tag == "a" and self.opened:
            self.links[self.opened[1]] = self.opened[0]
            self.opened = None

    def handle_data(self, data: str) -> None:
        """Note a text."""
        if self.elements and self.elements[-1] == "style":
            return
        self.text += f"{data} "
        if self.opened:
            self.opened = self.opened[0], self.opened[1] + data


class Browser:
    """One browser at a gate; `home` is the gate's public address."""

    def __init__(self, served: Served, home: str = "http://localhost") -> None:
        self.served, self.home, self.cookies = served, home, dict[str, str]()
        self.address = ""       # where the last redirect led that left the gate
        self.visited: list[str] = []

    async def get(self, url: str, **more: Any) -> Page:
        """Open an address, and follow redirects until they leave the gate."""
        return await self._go("GET", url, None, **more)

    async def submit(self, page: Page, answer: str | None = None, **filled: str) -> Page:
        """Send the form of a page."""
        [form] = page.forms
        fields = {**form["fields"], **filled, **({"answer": answer} if answer else {})}
        return await self.post(form["action"], fields)

    async def post(self, url: str, fields: dict[str, str], **more: Any) -> Page:
        """Send a form, as a page of the gate does."""
        return await self._go("POST", url, urlencode(fields).encode(), **more)

    async def _go(self, verb: str, url: str, body: bytes | None, follow: bool = True) -> Page:
        url = urljoin(f"{self.home}/", url)
        while True:
            self.visited.append(url)
            page = Page(await self._send(verb, url.removeprefix(self.home), body))
            if not follow or (target := page.headers.get("location")) is None:
                return page
            verb, body, url = "GET", None, urljoin(url, target)
            if not url.startswith(f"{self.home}/"):
                self.address = url
                return page

    async def _send(self, verb: str, target: str, body: bytes | None) -> Answer:
        parts = urlsplit(self.home)
        headers = [("host", parts.netloc), ("cookie", "; ".join(f"{k}={v}" for k, v in self.cookies.items()))]
        if verb == "POST":
            headers += [FORM, ("origin", self.home)]
        answer = await self.served.send(verb, target, body, headers=headers, scheme=parts.scheme)
        assert answer is not None
        for name, value in answer.pairs:
            if name == "set-cookie":
                self._keep(value)
        return answer

    def _keep(self, line: str) -> None:
        """Keep or drop a cookie, as its line says."""
        name, value = re.match(r"([^=]+)=([^;]*)", line).groups()       # type: ignore[union-attr]
        if "Max-Age=0" in line:
            self.cookies.pop(name, None)
        else:
            self.cookies[name] = value

    @property
    def told(self) -> dict[str, str]:
        """Return what the program was told."""
        return {name: value for name, [value] in parse_qs(urlsplit(self.address).query).items()}


class Program:
    """A program that is registered at a gate, and asks for access."""

    def __init__(self, served: Served, back: str = "https://app.example/cb") -> None:
        self.served, self.back, self.client_id = served, back, ""

    async def register(self, **more: Any) -> Program:
        """Register it."""
        made = await self.served.post("/v1/clients", {"client_name": "Reader", "redirect_uris": [self.back], **more})
        self.client_id = made["client_id"]
        return self

    def url(self, **changed: str | None) -> str:
        """Return where it sends a browser."""
        parameters: dict[str, str | None] = {
            "response_type": "code", "client_id": self.client_id, "redirect_uri": self.back, "state": "its-state",
            "code_challenge": CHALLENGE, "code_challenge_method": "S256", "scope": "tasks:read", **changed}
        return "/oauth/authorize?" + urlencode({name: value for name, value in parameters.items() if value is not None})


async def make_code(served: Served, id: str = "ada", **more: Any) -> str:
    """Make a sign-in link; return its code."""
    made = await served.post("/v1/sign-in-links", {"principal_id": id, **more})
    code: str = made["sign_in_code"]
    return code


async def sign_in(browser: Browser, program: Program, id: str = "ada", link: dict[str, Any] | None = None,
                  **asked: str | None) -> Page:
    """Let a program ask, and sign in with the code of a link; return the page that follows."""
    page = await browser.get(program.url(**asked))
    return await browser.submit(page, code=await make_code(browser.served, id, **(link or {})))
