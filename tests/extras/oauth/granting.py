"""What the tests of tokens share: a client and a person by their rows, a grant, and the requests of a client."""

from __future__ import annotations

import base64
import json
from hashlib import sha256
from typing import Any
from urllib.parse import urlencode

from msgspec.structs import replace

from asyncgate import Work
from asyncgate.extras.oauth.grants import make_grant
from asyncgate.extras.oauth.requests import AuthorizationRequest
from asyncgate.parts.model.stored_oauth import Grant, OAuthClient, User
from tests.conftest import Answer, Served
from tests.extras.oauth.conftest import PUBLIC_URL

REDIRECT = "http://127.0.0.1:33418/callback"
RESOURCE = f"{PUBLIC_URL}/mcp"
VERIFIER = "a-verifier-of-a-client-that-is-long-enough-0123"
SCOPES = frozenset({"tasks:read", "tasks:write"})
FORM = ("content-type", "application/x-www-form-urlencoded")


def challenge_of(verifier: str) -> str:
    """Return the challenge of a verifier by S256."""
    return base64.urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()


CHALLENGE = challenge_of(VERIFIER)


class Program:
    """A client that somebody allows in, and its requests to one gate."""

    def __init__(self, served: Served, client: OAuthClient, user: User) -> None:
        self.served, self.client, self.user = served, client, user

    def at(self, served: Served) -> Program:
        """Return the same client, talking to another gate."""
        return Program(served, self.client, self.user)

    async def keep(self, **changes: Any) -> None:
        """Store the client and the person; `client` and `user` change their rows."""
        self.client = replace(self.client, **changes.get("client", {}))
        self.user = replace(self.user, **changes.get("user", {}))

        def keep(work: Work) -> None:
            work.keep_record(self.client)
            work.keep_record(self.user)
        await self.served.gate.joined["oauth"].directory.change(keep)

    async def code(self, scopes: frozenset[str] = SCOPES, challenge: str = CHALLENGE, resource: str = RESOURCE) -> str:
        """Let the person allow the client in; return the code."""
        asked = AuthorizationRequest(self.client.client_id, REDIRECT, "a-state", scopes, resource, challenge)
        oauth = self.served.gate.joined["oauth"]
        assert oauth is not None
        return await make_grant(oauth, self.client, asked, self.user, scopes)

    async def post(self, path: str, fields: dict[str, Any], **more: Any) -> Answer:
        """Post a form; a field of None is left out."""
        body = urlencode({name: value for name, value in fields.items() if value is not None}).encode()
        return await self.served.call("POST", path, body, token=None, **{"headers": [FORM], **more})

    async def exchange(self, code: str, **fields: Any) -> Answer:
        """Exchange a code."""
        known = {"grant_type": "authorization_code", "code": code, "redirect_uri": REDIRECT, "code_verifier": VERIFIER,
                 "client_id": self.client.client_id}
        return await self.post("/oauth/token", {**known, **fields})

    async def refresh(self, token: str, address: str | None = None, **fields: Any) -> Answer:
        """Refresh; a gate behind a proxy is told of an address."""
        known = {"grant_type": "refresh_token", "refresh_token": token, "client_id": self.client.client_id}
        headers = [FORM, *([("x-forwarded-for", address)] if address else [])]
        return await self.post("/oauth/token", {**known, **fields}, headers=headers)

    async def begin(self, **more: Any) -> dict[str, Any]:
        """Begin a session; return its tokens."""
        return tokens(await self.exchange(await self.code(**more)))

    async def grant(self, token: str) -> Grant:
        """Return the row of a session, by a code or a refresh token."""
        grant = await self.served.backend.record(self.served.tenant_id, Grant, token[4:40])
        assert grant is not None
        return grant

    async def works(self, access_token: str) -> bool:
        """Whether the gate takes an access token."""
        answer = await self.served.call("GET", "/v1/tasks", token=access_token)
        assert answer.status in (200, 401), answer
        return answer.status == 200

    async def audit(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of the operator's log."""
        auditor = self.served.gate.guard.auditor
        await auditor.flush()
        page = await self.served.get(f"/v1/audit?limit=200{f'&event={event}' if event else ''}")
        return list(page["lines"])


def tokens(answer: Answer) -> dict[str, Any]:
    """Return the body of a good answer of the token endpoint."""
    assert answer.status == 200, answer
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["access-control-allow-origin"] == "*"
    body: dict[str, Any] = answer.json()
    return body


def refusal(answer: Answer) -> str:
    """Return the error of a refusal by the token endpoint."""
    assert answer.status == 400, answer
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert body.keys() == {"error", "error_description"}
    return str(body["error"])


def claims_of(token: str) -> dict[str, Any]:
    """Read the claims of an access token."""
    part = token.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims


async def program_of(served: Served, name: str = "app", **changes: Any) -> Program:
    """Store a client and a person who may allow it in."""
    now, tenant = served.backend.now(), served.tenant_id
    client = OAuthClient(name, "registered", "An app", json.dumps([REDIRECT]), None, "none", None, None, None, False,
                         False, None, now, "test", now)
    user = User(f"user-of-{name}", "https://id.example.com", name, "ada@example.com", "Ada", tenant, "human", "ada",
                "agent", None, None, "test", now)
    program = Program(served, client, user)
    await program.keep(**changes)
    return program
