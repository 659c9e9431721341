"""Requests and answers of the authorization server: forms, queries, cookies, redirects, the errors of RFC 6749."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from msgspec import Struct

from asyncgate.parts.model import errors
from asyncgate.parts.model.connection import Headers, Scope, list_cookies
from asyncgate.parts.model.content import encode_json

MOST_FORM_BYTES = 64 * 2**10
HTML, JSON, TEXT = b"text/html; charset=utf-8", b"application/json", b"text/plain; charset=utf-8"
FORM = b"application/x-www-form-urlencoded"


class OAuthError(Exception):
    """A refusal in the form of RFC 6749 5.2; `because` is the real reason, for the audit log alone."""

    def __init__(self, code: str, description: str, status: int = 400, because: str | None = None,
                 headers: Headers | None = None) -> None:
        super().__init__(description)
        self.code, self.status, self.because, self.headers = code, status, because or description, headers or []

    def body(self) -> bytes:
        """Return the body of the answer."""
        return encode_json({"error": self.code, "error_description": str(self)})


class Request(Struct):
    """One request to the authorization server."""

    scope: Scope
    body: bytes
    address: str                        # of the client, as trusted proxies report it

    @property
    def method(self) -> str:
        """Return GET or POST; a HEAD is a GET."""
        return "GET" if self.scope["method"] == "HEAD" else str(self.scope["method"])

    @property
    def headers(self) -> Headers:
        """Return the headers."""
        return list(self.scope["headers"])

    def query(self) -> dict[str, str]:
        """Return the parameters of the query; raises OAuthError for a repeated one."""
        return read_parameters(self.scope["query_string"])

    def form(self) -> dict[str, str]:
        """Return the fields of the body; raises OAuthError for a repeated one, or another type of body."""
        types = [value.partition(b";")[0].strip().lower() for name, value in self.headers if name == b"content-type"]
        if types != [FORM]:
            raise OAuthError("invalid_request", f"send the body as {FORM.decode()}")
        return read_parameters(self.body)

    def cookies(self) -> Mapping[str, str]:
        """Return the cookies."""
        return dict(list_cookies(self.headers))


class Answer(Struct):
    """One answer of the authorization server."""

    status: int = 200
    body: bytes = b""
    type: bytes = JSON
    headers: list[tuple[bytes, bytes]] = []


def read_parameters(text: bytes) -> dict[str, str]:
    """Decode a query or a form; raises OAuthError for a repeated name (RFC 6749 3.1) and for invalid text."""
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError:
        raise OAuthError("invalid_request", "the parameters are not valid UTF-8, or too many") from None
    parameters: dict[str, str] = {}
    for name, value in pairs:
        if name in parameters:
            raise OAuthError("invalid_request", f"the parameter {name[:50]!r} is repeated")
        if "\0" in name or "\0" in value:
            raise OAuthError("invalid_request", "a parameter may not contain the NUL character")
        parameters[name] = value
    return parameters


def redirect_to(url: str, *headers: tuple[bytes, bytes]) -> Answer:
    """Send the browser to a URL by GET: 303, so that no form of a person is posted on (RFC 9700 4.12)."""
    return Answer(303, b"", TEXT, [(b"location", url.encode("ascii")), *headers])


def answer_json(value: Any, *headers: tuple[bytes, bytes]) -> Answer:
    """Answer with a JSON document."""
    return Answer(200, encode_json(value), JSON, list(headers))


def as_oauth_error(refusal: errors.GateError) -> OAuthError:
    """Turn a refusal of the gate into one of RFC 6749."""
    code = {429: "temporarily_unavailable", 503: "temporarily_unavailable"}.get(refusal.status, "invalid_request")
    wait = [(b"retry-after", b"%d" % refusal.more["retry_after"])] if "retry_after" in refusal.more else []
    return OAuthError(code, str(refusal), refusal.status, headers=wait)
