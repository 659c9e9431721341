"""An identity provider that lies when a test tells it to: an OpenID provider and GitHub, on a port of this machine."""

from __future__ import annotations

import hmac
import json
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

GOOD = {"sub": "24400320", "email": "Ada@Example.com", "email_verified": True, "name": "Ada Lovelace",
        "groups": ["readers"]}


@cache
def make_key(name: str = "one") -> RSAKey:
    """Return a key; one for each name, because making one takes long."""
    return RSAKey.generate_key(2048, {"kid": "one"})


def encode(text: bytes) -> str:
    """Encode bytes as a JWT does."""
    return urlsafe_b64encode(text).rstrip(b"=").decode()


class StandIn:
    """What the provider says; a test changes it before somebody signs in."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key, self.signer = make_key(), make_key()
        self.public_secret = False              # whether it signs with HMAC and what everybody knows
        self.discovery: dict[str, Any] = {}     # what differs from the good document
        self.claims: dict[str, Any] = {}        # what differs from the good ID token; ... leaves one out
        self.header: dict[str, Any] = {}
        self.userinfo: dict[str, Any] | None = None
        self.tokens: dict[str, Any] = {}
        self.published = [self.key]
        self.asked: list[str] = []              # the paths, in order
        self.forms: list[dict[str, str]] = []   # what the token endpoint was sent
        self.headers: list[dict[str, str]] = []
        self.codes: dict[str, dict[str, str]] = {}
        self.user: Any = {"id": 583231, "login": "ada", "name": None}
        self.emails: Any = [{"email": "old@example.com", "primary": False, "verified": True},
                            {"email": "ada@example.com", "primary": True, "verified": True}]
        self.status, self.body = 200, b""       # of every answer, if there is a body

    def authorize(self, url: str, **parameters: str) -> str:
        """Be the person at the provider who signs in; return where the provider sends the browser."""
        asked = {name: value for name, [value] in parse_qs(urlsplit(url).query).items()}
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        told = {"state": asked["state"], **({} if "error" in parameters else {"code": code}), **parameters}
        return asked["redirect_uri"] + "?" + "&".join(f"{name}={value}" for name, value in told.items())

    def answer(self, path: str, form: dict[str, str], headers: dict[str, str]) -> Any:
        """Answer one request."""
        self.asked.append(path)
        self.headers.append(headers)
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "authorization_endpoint": f"{self.url}/authorize",
                    "token_endpoint": f"{self.url}/token", "jwks_uri": f"{self.url}/jwks",
                    "userinfo_endpoint": f"{self.url}/userinfo", **self.discovery}
        if path == "/jwks":
            return {"keys": [key.as_dict(private=False) for key in self.published]}
        if path in ("/token", "/login/oauth/access_token"):
            self.forms.append(form)
            return self.exchange(form)
        return {"/userinfo": self.userinfo, "/api/v3/user": self.user, "/api/v3/user/emails": self.emails}[path]

    def exchange(self, form: dict[str, str]) -> Any:
        """Exchange a code once, for whom the challenge was."""
        if (asked := self.codes.pop(form["code"], None)) is None:
            return {"error": "invalid_grant"}
        assert encode(sha256(form["code_verifier"].encode()).digest()) == asked["code_challenge"]
        assert form["redirect_uri"] == asked["redirect_uri"]
        return {"access_token": "upstream", "token_type": "Bearer", "id_token": self.sign(asked), **self.tokens}

    def sign(self, asked: dict[str, str]) -> str:
        """Sign an ID token."""
        payload = {**GOOD, "iss": self.url, "aud": asked["client_id"], "exp": time.time() + 300, "iat": time.time(),
                   "nonce": asked.get("nonce"), **self.claims}
        claims = {name: value for name, value in payload.items() if value is not ...}
        header = {"alg": "RS256", "kid": self.key.kid, **self.header}
        if header["alg"] == "RS256":
            return jwt.encode(header, claims, self.signer)
        text = ".".join([encode(json.dumps(part).encode()) for part in (header, claims)])
        mac = hmac.digest(self.key.as_pem(private=False), text.encode(), "sha256") if self.public_secret else b""
        return f"{text}.{encode(mac)}"


@contextmanager
def run_stand_in() -> Iterator[StandIn]:
    """Serve a stand-in."""
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers.get("content-length", 0))
            form = {name: value for name, [value] in parse_qs(self.rfile.read(size).decode()).items()}
            answer = there.answer(urlsplit(self.path).path, form, {k.lower(): v for k, v in self.headers.items()})
            body = there.body or json.dumps(answer).encode()
            self.send_response(there.status)
            self.send_header("content-length", str(len(body)))
            if there.status == 302:
                self.send_header("location", "http://169.254.169.254/latest/meta-data")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    there = StandIn(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)     # how soon it notices its end
    thread.start()
    try:
        yield there
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
