"""A person with a browser: opens what a program asks for, signs in with a code, allows it, and comes to the program."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

import httpx2

from tests.conftest import Answer
from tests.support.browser import Page
from tests.support.patience import PATIENCE_SECONDS

MOST_PAGES = 20


def read_page(response: httpx2.Response) -> Page:
    """Return what stands on a page."""
    return Page(Answer([
        {"type": "http.response.start", "status": response.status_code, "headers": response.headers.raw},
        {"type": "http.response.body", "body": response.content}]))


class Person:
    """One person at one browser, who signs in with codes of sign-in links and allows everything."""

    def __init__(self, issuer: str, ask_code: Callable[[], str], answer: str = "allow") -> None:
        self.issuer, self.ask_code, self.answer = issuer, ask_code, answer
        self.browser = httpx2.Client(trust_env=False, timeout=PATIENCE_SECONDS)
        self.seen: list[str] = []               # the pages, as text

    def visit(self, address: str) -> str:
        """Open an address of the gate; return where the browser is sent to in the end."""
        response = self.browser.get(address)
        for _ in range(MOST_PAGES):
            if response.is_redirect:
                address = urljoin(str(response.url), response.headers["location"])
                if not address.startswith(f"{self.issuer}/"):
                    return address
                response = self.browser.get(address)
            else:
                response = self.fill_in(response)
        raise AssertionError(f"no end: {self.seen[-1]}")

    def fill_in(self, page: httpx2.Response) -> httpx2.Response:
        """Send the form of a page."""
        self.seen.append(page.text)
        assert page.status_code == 200, page.text
        [form] = read_page(page).forms
        fields = dict(form["fields"])
        if "code" in fields:
            fields["code"] = self.ask_code()
        if self.answer in form["buttons"]:
            fields["answer"] = self.answer
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(str(page.url)))
        return self.browser.post(urljoin(str(page.url), form["action"]), data=fields, headers={"origin": origin})

    def come_back(self, address: str) -> httpx2.Response:
        """Do the whole way, and open where it ends: the program listens there."""
        return self.browser.get(self.visit(address), follow_redirects=True)
