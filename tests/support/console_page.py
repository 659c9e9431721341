"""The page of the console in a browser, as the gate sees it: cookies that its browser keeps, and the page's half."""

from __future__ import annotations

from typing import Any

from tests.conftest import Answer, Served

SAME = [("origin", "http://localhost"), ("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "cors")]


class Browser:
    """One browser: it sends each of its cookies to every port of the host, and drops one that has ended."""

    def __init__(self) -> None:
        self.cookies: dict[str, str] = {}
        self.set: list[str] = []            # the headers that set them, as they came

    def keep(self, answer: Answer) -> Answer:
        """Take over the cookies of an answer."""
        for name, line in answer.pairs:
            if name == "set-cookie":
                self.set.append(line)
                cookie, _, value = line.partition(";")[0].partition("=")
                if "Max-Age=0;" in line:
                    self.cookies.pop(cookie, None)
                else:
                    self.cookies[cookie] = value
        return answer

    def header(self) -> list[tuple[str, str]]:
        """Return the header that a browser sends."""
        return [("cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))]


class ConsolePage:
    """One signed-in page."""

    def __init__(self, served: Served, browser: Browser | None = None, *, scheme: str = "http") -> None:
        self.served, self.browser, self.scheme = served, browser or Browser(), scheme
        self.session, self.ends_at = "", ""

    def at(self, served: Served) -> ConsolePage:
        """Return the same page, talking to another process of the gate."""
        other = ConsolePage(served, self.browser, scheme=self.scheme)
        other.session = self.session
        return other

    async def sign_in(self, credential: Any, **more: Any) -> Answer:
        """Try to sign in; keep the session if that works."""
        headers = more.pop("headers", SAME)
        answer = self.browser.keep(await self.served.call(
            "POST", "/console/sign-in", {"credential": credential}, token=None, scheme=self.scheme,
            headers=[*headers, *self.browser.header()], **more))
        if answer.status == 200:
            self.session, self.ends_at = answer.json()["session"], answer.json()["ends_at"]
        return answer

    async def call(self, method: str, target: str, body: Any = None, *, headers: Any = SAME, session: str | None = None,
                   cookies: Any = None, **more: Any) -> Answer:
        """Call the gate as the page does."""
        own = [("x-asyncgate-session", self.session if session is None else session)]
        jar = self.browser.header() if cookies is None else cookies
        return self.browser.keep(await self.served.call(
            method, target, body, token=None, scheme=self.scheme,
            headers=[*headers, *(own if own[0][1] else []), *jar], **more))

    async def works(self) -> bool:
        """Whether an operation is answered."""
        answer = await self.call("GET", "/v1/whoami")
        assert answer.status in (200, 401), answer
        return answer.status == 200

    async def sign_out(self, everywhere: bool = False) -> Answer:
        """Sign out."""
        return await self.call("POST", "/console/sign-out", {"everywhere": everywhere})
