"""Access tokens: A1-A6 of the threats, and the keys that they are checked with.

Good tokens are signed by the library; what no library signs is put together by hand.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from joserfc import jwt
from joserfc.jwk import RSAKey
from msgspec.structs import replace

from asyncgate import SCOPES, Caller
from asyncgate.backends import open_backend
from asyncgate.parts.app import Gate
from asyncgate.parts.identity.jwt import FRESH_SECONDS, REFETCH_SECONDS, AccessTokens, KeyRing, NoRevocations
from asyncgate.parts.model.caller import ShownToken
from asyncgate.parts.model.errors import InvalidToken, IssuerUnavailable, StartupError
from asyncgate.parts.model.settings import Jwt, Outgoing, SecuritySettings, Settings
from asyncgate.parts.model.wire import Principal
from tests.support.each import each
from tests.support.programs import read_address

pytestmark = pytest.mark.anyio

NOW = 1_800_000_000
HOUR, DAY = 3600, 86_400
TENANT, OTHER = "6f1c2b9e-0000-4000-8000-00000000000a", "6f1c2b9e-0000-4000-8000-00000000000b"
ISSUER = "https://issuer.example"
MCP = ("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "asyncgate.get_config", "arguments": {}}})


def made_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


KEY, NEXT, STRANGER = made_key(), made_key(), made_key()      # of the issuer, its next one, and an attacker's
MINE, SOON, THEIRS = (RSAKey.import_key(key) for key in (KEY, NEXT, STRANGER))
KID = MINE.thumbprint()


def pem(key: Any, password: bytes | None = None) -> bytes:
    """Write a key as a PEM file has it."""
    if hasattr(key, "private_bytes"):
        locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        form: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
        return form
    text: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return text


def claims(**changed: Any) -> dict[str, Any]:
    """Return what a good token says, but for what is changed; `...` leaves a claim out."""
    payload = {"iss": ISSUER, "aud": "asyncgate-api", "sub": "user-1", "tenant_id": TENANT, "principal_kind": "agent",
               "principal_id": "ada", "iat": NOW, "exp": NOW + HOUR, "scope": "tasks:read tasks:write", "jti": "t1"}
    return {name: value for name, value in {**payload, **changed}.items() if value is not ...}


def token(key: RSAKey = MINE, header: dict[str, Any] | None = None, **changed: Any) -> str:
    """Let the library sign."""
    fields = {"alg": "RS256", "typ": "at+jwt", "kid": key.thumbprint(), **(header or {})}
    return jwt.encode(fields, claims(**changed), key)


def b64(text: bytes) -> str:
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def by_hand(header: Any, payload: Any, key: rsa.RSAPrivateKey = KEY) -> str:
    """Sign whatever it is; text is taken as it is, anything else becomes JSON."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, payload)]
    begin = ".".join(map(b64, parts))
    return f"{begin}.{b64(key.sign(begin.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def headed(key: rsa.RSAPrivateKey = KEY, **changed: Any) -> str:
    """Sign good claims under a header that is not."""
    header = {"alg": "RS256", "typ": "at+jwt", "kid": KID, **changed}
    return by_hand({name: value for name, value in header.items() if value is not ...}, claims(), key)


def saying(**changed: Any) -> str:
    """Sign claims that are not good under a header that is."""
    return by_hand({"alg": "RS256", "typ": "at+jwt", "kid": KID}, claims(**changed))


def telling(text: bytes) -> str:
    """Sign a text that may be no JSON."""
    return by_hand({"alg": "RS256", "typ": "at+jwt", "kid": KID}, text)


def spelled(old: str, new: bytes) -> str:
    """Sign good claims, of which one piece of text is spelled in another way."""
    text = json.dumps(claims(), separators=(",", ":")).encode()
    assert old.encode() in text
    return telling(text.replace(old.encode(), new))


def with_secret(alg: str = "HS256", **more: Any) -> str:
    """Sign with the public key as if it were a shared secret."""
    header = {"alg": alg, "typ": "at+jwt", "kid": KID, **more}
    begin = ".".join(b64(json.dumps(part).encode()) for part in (header, claims()))
    return f"{begin}.{b64(hmac.digest(pem(KEY.public_key()), begin.encode(), hashlib.sha256))}"


def unsigned(alg: Any) -> str:
    header = {"alg": alg, "typ": "at+jwt", "kid": KID}
    return f"{b64(json.dumps(header).encode())}.{b64(json.dumps(claims()).encode())}."


def cut(at: slice) -> str:
    """Leave out parts of a good token."""
    return ".".join(token().split(".")[at])


def bent(part: int, change: Callable[[str], str]) -> str:
    """Change one part of a good token."""
    parts = token().split(".")
    parts[part] = change(parts[part])
    return ".".join(parts)


PUBLIC_JWK = THEIRS.as_dict(private=False)
HEADER = b'{"alg":"RS256","typ":"at+jwt","kid":"' + KID.encode() + b'"'

ATTACKS: dict[str, str] = {
    # Signature and algorithm
    "alg none": unsigned("none"),
    "alg NoNe": unsigned("NoNe"),
    "alg null": unsigned(None),
    "alg none with a signature": headed(alg="none"),
    "alg HS256 over the public key": with_secret(),
    "alg RS256 over the public key as a secret": with_secret("RS256"),
    "alg RS384": headed(alg="RS384"),
    "alg PS256": headed(alg="PS256"),
    "alg ES256": headed(alg="ES256"),
    "alg rs256": headed(alg="rs256"),
    "alg a list": headed(alg=["RS256"]),
    "no alg": headed(alg=...),
    "no signature": bent(2, lambda _: ""),
    "half a signature": bent(2, lambda part: part[:171]),
    "a signature and more": bent(2, lambda part: part + "AAAA"),
    "the signature of another token": ".".join([*token(jti="t2").split(".")[:2], token().split(".")[2]]),
    "another key's signature under our kid": headed(STRANGER),
    "another key": token(THEIRS),
    # Headers that would say what to trust
    "the key in the header": headed(STRANGER, jwk=PUBLIC_JWK),
    "the key in the header, and its kid": headed(STRANGER, jwk=PUBLIC_JWK, kid=THEIRS.thumbprint()),
    "our key in the header": headed(jwk=MINE.as_dict(private=False)),
    "jku": headed(jku="https://attacker.example/jwks"),
    "x5u": headed(x5u="https://attacker.example/cert"),
    "x5c": headed(x5c=[b64(b"certificate")]),
    "unknown crit": headed(crit=["exp"]),
    "crit of something": headed(crit=["magic"], magic=1),
    "empty crit": headed(crit=[]),
    "b64 false": headed(b64=False, crit=["b64"]),
    "zip": headed(zip="DEF"),
    "an unknown header": headed(magic=1),
    "kid a path": headed(kid="../../../../dev/null"),
    "kid a query": headed(kid="' UNION SELECT 'secret"),
    "kid unknown": headed(kid="another"),
    "kid empty": headed(kid=""),
    "kid a number": headed(kid=1),
    "kid a list": headed(kid=[KID]),
    # What kind of token
    "an ID token": headed(typ="JWT"),
    "no typ": headed(typ=...),
    "typ null": headed(typ=None),
    "typ a list": headed(typ=["at+jwt"]),
    "a refresh token": headed(typ="rt+jwt"),
    "a logout token": headed(typ="logout+jwt"),
    # Said twice
    "alg twice": by_hand(HEADER + b',"alg":"RS256"}', claims()),
    "kid twice": by_hand(HEADER + b',"kid":"x"}', claims()),
    "exp twice": spelled('"exp":', b'"exp":1,"exp":'),
    "tenant_id twice": spelled('"tenant_id":', b'"tenant_id":"' + OTHER.encode() + b'","tenant_id":'),
    "twice in what nobody reads": spelled('"jti":', b'"x":{"y":1,"y":2},"jti":'),
    "twice by an escape": spelled('"sub":', b'"s\\u0075b":"root","sub":'),
    # Time
    "expired": saying(exp=NOW - 31, iat=NOW - HOUR),
    "just expired": saying(exp=NOW - 30, iat=NOW - HOUR),
    "no exp": saying(exp=...),
    "exp text": saying(exp=str(NOW + HOUR)),
    "exp a list": saying(exp=[NOW + HOUR]),
    "exp null": saying(exp=None),
    "exp true": saying(exp=True),
    "exp negative": saying(exp=-1),
    "exp 10^30": saying(exp=10**30),
    "exp NaN": spelled(f'"exp":{NOW + HOUR}', b'"exp":NaN'),
    "exp Infinity": spelled(f'"exp":{NOW + HOUR}', b'"exp":Infinity'),
    "exp 1e400": spelled(f'"exp":{NOW + HOUR}', b'"exp":1e400'),
    "exp of 5000 digits": spelled(f'"exp":{NOW + HOUR}', b'"exp":' + b"9" * 5000),
    "lives too long": saying(exp=NOW + 90 * DAY + 1),
    "lives too long though it began long ago": saying(iat=0),
    "no iat": saying(iat=...),
    "iat text": saying(iat=str(NOW)),
    "iat to come": saying(iat=NOW + 31),
    "nbf to come": saying(nbf=NOW + 31),
    "nbf text": saying(nbf="0"),
    # Who for, and by whom
    "no iss": saying(iss=...),
    "another iss": saying(iss="https://attacker.example"),
    "iss with a slash": saying(iss=ISSUER + "/"),
    "iss in upper case": saying(iss=ISSUER.upper()),
    "iss a list": saying(iss=[ISSUER]),
    "no aud": saying(aud=...),
    "another aud": saying(aud="another-api"),
    "aud with more": saying(aud="asyncgate-api-staging"),
    "aud with less": saying(aud="asyncgate"),
    "aud several in one text": saying(aud="another-api asyncgate-api"),
    "aud an object": saying(aud={"asyncgate-api": 1}),
    "aud null": saying(aud=None),
    "aud empty": saying(aud=[]),
    "aud numbers": saying(aud=["asyncgate-api", 1]),
    # Whom it stands for
    "no sub": saying(sub=...),
    "sub a number": saying(sub=1),
    "sub an object": saying(sub={}),
    "sub empty": saying(sub=""),
    "no tenant": saying(tenant_id=...),
    "tenant no UUID": saying(tenant_id="default"),
    "tenant a list": saying(tenant_id=[TENANT]),
    "tenant in upper case": saying(tenant_id=TENANT.upper()),
    "tenant with a newline": saying(tenant_id=TENANT + "\n"),
    "tenant in braces": saying(tenant_id="{" + TENANT + "}"),
    "no kind": saying(principal_kind=...),
    "kind system": saying(principal_kind="system"),
    "kind asyncgate": saying(principal_kind="asyncgate"),
    "kind unknown": saying(principal_kind="god"),
    "role system": saying(role="system"),
    "role unknown": saying(role="god"),
    "role a list": saying(role=["admin"]),
    "principal empty": saying(principal_id=""),
    "principal a number": saying(principal_id=1),
    "principal too long": saying(principal_id="x" * 201),
    "principal with a newline": saying(principal_id="ada\nroot"),
    "principal with NUL": saying(principal_id="ada\0"),
    "principal that reads backwards": saying(principal_id="ada\u202e"),
    "principal with half a character": spelled('"ada"', b'"\\ud800"'),
    "instance a number": saying(principal_instance_id=7),
    "scope a list": saying(scope=["admin:write"]),
    "scope a number": saying(scope=1),
    # What is not a token
    "an array": telling(json.dumps([claims()]).encode()),
    "a text": telling(b'"claims"'),
    "null": telling(b"null"),
    "nothing": telling(b""),
    "bad UTF-8": spelled("user-1", b"\xff\xfe"),
    "a byte order mark": telling(b"\xef\xbb\xbf" + json.dumps(claims()).encode()),
    "more behind it": telling(json.dumps(claims()).encode() + b"{}"),
    "too deep": spelled('"jti":"t1"', b'"x":' + b"[" * 2500 + b"]" * 2500),
    "no JSON": telling(b"eyJ"),
    "a header that is an array": by_hand([1], claims()).replace("WzFd", "eyJ"),
    "one part": cut(slice(0, 1)) + ".",
    "two parts": cut(slice(0, 2)),
    "four parts": token() + ".e30",
    "five parts": token() + ".e30.e30",
    "an empty header": by_hand({}, claims()).replace("e30.", "eyJ.", 1),
    "padding": token() + "=",
    "padding inside": bent(1, lambda part: part + "="),
    "a newline inside": bent(1, lambda part: part[:9] + "\n" + part[9:]),
    "a NUL inside": bent(2, lambda part: part[:9] + "\0" + part[9:]),
    "standard base64": bent(2, lambda part: part[:-1].replace("_", "/").replace("-", "+") + "+"),
    "a stranger in base64": bent(2, lambda part: part[:9] + "!" + part[9:]),
    "too long": token(x="y" * 8192),
    "100 KB": token(x="y" * 100_000),
}


def settings(folder: Path | None, jwks: str = "", **changed: Any) -> Settings:
    """Trust the issuer's key from a file, or from where it publishes its keys."""
    if folder:
        (folder / "issuer.pem").write_bytes(pem(KEY.public_key()))
    trust = Jwt(**{"public_key_path": str(folder / "issuer.pem") if folder else "", "jwks": jwks, "issuer": ISSUER,
                   **changed})
    return Settings(security=SecuritySettings(jwt=trust, outgoing=Outgoing(allow=("127.0.0.1",))))


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.seconds = float(NOW)

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """Return the time of a test."""
    return Clock()


@pytest.fixture
def way(tmp_path: Path, clock: Clock) -> AccessTokens:
    """Return the way in for tokens of the issuer, with its key in a file."""
    return AccessTokens(settings(tmp_path), now=clock, clock=clock)


def ring(way: AccessTokens) -> KeyRing:
    """Return the keys of the only issuer."""
    [keys] = [issuer.keys for issuer in way.issuers.values()]
    assert isinstance(keys, KeyRing)
    return keys


# Whom a good token stands for.


async def test_a_good_token_stands_for_whom_it_names(way: AccessTokens) -> None:
    caller = await way.caller(token(principal_instance_id="i1", role="admin"))

    scopes = frozenset({"tasks:read", "tasks:write"})
    shown = ShownToken("user-1", "t1", None, None)
    assert caller == Caller(TENANT, Principal("agent", "ada", "i1"), "admin", scopes, issued_at=NOW, token=shown)


@pytest.mark.parametrize(("kind", "role"), [
    ("agent", "agent"), ("human", "agent"), ("service", "agent"), ("worker", "worker")])
async def test_the_role_follows_from_the_kind_unless_it_is_said(way: AccessTokens, kind: str, role: str) -> None:
    by_kind = await way.caller(token(principal_kind=kind))
    caller = await way.caller(token(principal_kind=kind, role="admin"))

    assert by_kind
    assert caller
    assert (by_kind.principal, by_kind.role, caller.role) == (Principal(kind, "ada"), role, "admin")


@pytest.mark.parametrize("absent", [..., None])
async def test_who_is_named_by_no_principal_id_is_named_by_sub(way: AccessTokens, absent: Any) -> None:
    caller = await way.caller(token(principal_id=absent))

    assert caller
    assert caller.principal == Principal("agent", "user-1")


@pytest.mark.parametrize(("scope", "scopes"), [
    ("tasks:read receipts:ack", {"tasks:read", "receipts:ack"}),
    ("tasks:read,receipts:ack", {"tasks:read", "receipts:ack"}),
    ("tasks:read, receipts:ack", {"tasks:read", "receipts:ack"}),
    ("openid email tasks:read tasks:everything", {"tasks:read"}),
    ("TASKS:READ", set()), ("", set()), (" ", set()), (" ".join(sorted(SCOPES)), set(SCOPES))])
async def test_scopes_are_split_by_spaces_or_commas_and_unknown_ones_mean_nothing(
        way: AccessTokens, scope: str, scopes: set[str]) -> None:
    caller = await way.caller(token(scope=scope))

    assert caller
    assert caller.scopes == scopes


@pytest.mark.parametrize(("role", "scopes"), [
    ("agent", {"tasks:read", "tasks:write", "receipts:read", "receipts:ack"}),
    ("worker", {"tasks:lease", "receipts:read"}),
    ("admin", SCOPES - {"metrics:read"})])       # as a key of an admin without scopes
async def test_a_token_without_scopes_has_the_default_ones_of_its_role(
        way: AccessTokens, role: str, scopes: set[str]) -> None:
    caller = await way.caller(token(scope=..., role=role))     # spec 21.8.3

    assert caller
    assert caller.scopes == scopes


GOOD = [
    token(), token(aud=["another", "asyncgate-api"]), token(aud="asyncgate-api"), headed(typ="application/at+jwt"),
    headed(typ="AT+JWT"), headed(kid=...), headed(x5t="abc"), token(exp=NOW - 29, iat=NOW - HOUR), token(iat=NOW + 30),
    token(nbf=NOW + 30), token(nbf=NOW), token(exp=NOW + 90 * DAY), token(exp=NOW + 0.5), token(jti=...),
    token(role=None), token(unknown={"x": [1]}), token(client_id="c", sid="s")]


@pytest.mark.parametrize("at", range(len(GOOD)))     # a token is another one in each process, and no name for a test
async def test_what_the_standards_leave_open_is_accepted(way: AccessTokens, at: int) -> None:
    caller = await way.caller(GOOD[at])

    assert caller
    assert caller.principal == Principal("agent", "ada")


@pytest.mark.parametrize("other", [None, "", "a-shared-token", "aga_abc", "a.b.c", "{}", "eyJ", "Bearer eyJ.a.b"])
async def test_what_does_not_look_like_a_jwt_is_left_to_other_ways_in(way: AccessTokens, other: str | None) -> None:
    assert await way.caller(other) is None


# The attacks.


@each("name", ATTACKS)
async def test_a_token_with_a_flaw_stands_for_nobody(
        way: AccessTokens, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    with pytest.raises(InvalidToken) as refused:
        await way.caller(ATTACKS[name])

    told = f"{refused.value}{refused.value.body()}{caplog.text}"
    assert [part for part in ATTACKS[name].split(".") if len(part) > 20 and part in told] == []
    assert not way.proven


@pytest.fixture
async def served(serve: Any, tmp_path: Path) -> Any:
    """Return a gate that takes the issuer's tokens, and a shared one."""
    running = await serve(security=settings(tmp_path).security)
    running.gate.identity.tokens.now = lambda: NOW
    for tenant in (TENANT, OTHER):
        await running.post("/v1/tenants", {"tenant": tenant, "name": f"of {tenant[-1]}"})
    running.gate.guard.auditor.noted.clear()
    return running


@pytest.mark.parametrize("target", [("GET", "/v1/tasks", None), ("POST", *MCP)], ids=["REST", "MCP"])
@each("name", [name for name in ATTACKS if not {"\n", "\0"} & {*ATTACKS[name]}])
async def test_over_both_facades_a_flaw_is_a_401_that_says_invalid_token(
        served: Any, target: tuple[str, str, Any], name: str) -> None:
    method, path, body = target
    served.gate.guard.keys.failures.counted.clear()     # whoever guesses again and again has to wait

    async with served.unchanged():
        answer = await served.call(method, path, body, token=ATTACKS[name])

    assert (answer.status, answer.headers["www-authenticate"]) == (401, 'Bearer error="invalid_token"')
    told = answer.json()["error"]
    assert (told if isinstance(told, str) else told["data"]["code"]) == "unauthenticated"


REASONS = {
    "token_expired": saying(exp=NOW - HOUR, iat=NOW - 2 * HOUR), "token_issuer": saying(iss="https://other.example"),
    "token_audience": saying(aud=["others"]), "token_type": headed(typ="JWT"), "token_tenant": saying(tenant_id="acme"),
    "token_lifetime": saying(exp=NOW + 91 * DAY), "token_not_yet_valid": saying(nbf=NOW + HOUR),
    "token_signature": headed(STRANGER), "token_algorithm": headed(alg="RS384"), "token_header": headed(jku="https://x"),
    "token_claims": saying(sub=7), "token_malformed": "eyJ.nothing.good"}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("target", [("GET", "/v1/tasks", None), ("POST", *MCP)], ids=["REST", "MCP"])
async def test_the_audit_log_says_why_a_token_was_refused_and_the_caller_is_not_told(
        served: Any, target: tuple[str, str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Spec 21.7.4, "Authentication attempts (success/failure)"."""
    method, path, body = target

    answer = await served.call(method, path, body, token=REASONS[reason])

    ((event, severity, details),) = served.gate.guard.auditor.noted[served.gate.settings.default_tenant_id]
    assert (event, severity, json.loads(details)["reason"]) == ("auth_failure", "warning", reason)
    assert f'"reason":"{reason}"' in caplog.text
    assert reason.encode() not in answer.content


@pytest.mark.parametrize(("limits", "good", "bad", "code"), [
    ({"tenants": (OTHER,)}, {"tenant_id": OTHER}, {}, "token_tenant"),
    ({"roles": ("agent", "worker")}, {"role": None}, {"role": "admin"}, "token_role"),
    ({"roles": ("worker",)}, {"role": None, "principal_kind": "worker"}, {"role": None}, "token_role")])
async def test_an_issuer_may_be_limited_to_tenants_and_roles(
        tmp_path: Path, limits: dict[str, Any], good: dict[str, Any], bad: dict[str, Any], code: str) -> None:
    made = settings(tmp_path)
    jwt = replace(made.security.jwt, **limits)
    way = AccessTokens(replace(made, security=replace(made.security, jwt=jwt)), now=lambda: NOW)

    assert await way.caller(token(**good))
    with pytest.raises(InvalidToken) as refused:
        await way.caller(token(**bad))
    assert refused.value.because
    assert refused.value.because[0] == code


async def test_a_token_works_as_its_owner_and_no_further(served: Any) -> None:
    ada, eve, bob = token(scope=...), token(scope=..., tenant_id=OTHER), token(scope=..., principal_kind="worker")

    made = await served.post("/v1/tasks", {"type": "demo", "payload": None}, token=ada)
    task = await served.get(f"/v1/tasks/{made['task_id']}", token=ada)
    foreign = await served.call("GET", f"/v1/tasks/{made['task_id']}", token=eve)
    unsuited = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None}, token=bob)

    assert (task["created_by"]["kind"], task["created_by"]["id"], task["tenant_id"]) == ("agent", "ada", TENANT)
    assert (foreign.status, unsuited.status) == (404, 403)


async def test_the_shared_token_still_works_beside_access_tokens(served: Any) -> None:
    assert (await served.call("GET", "/v1/tasks")).status == 200
    wrong = await served.call("GET", "/v1/tasks", token="wrong")
    assert wrong.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert (await served.call("GET", "/v1/tasks", token=None)).status == 401


async def test_a_token_counts_also_where_nobody_needs_one(serve: Any, tmp_path: Path) -> None:
    gate = await serve(api_key="", allow_insecure_dev=True, security=settings(tmp_path).security)

    assert (await gate.call("GET", "/v1/tasks", token=None)).status == 200
    assert (await gate.call("GET", "/v1/tasks", token=ATTACKS["alg none"])).status == 401


@pytest.mark.parametrize("header", [("authorization", "Bearer "), ("authorization", "Bearer"), ("x-api-key", "")])
async def test_an_empty_token_is_none_so_a_gate_that_wants_none_answers(
    serve: Any, header: tuple[str, str]
) -> None:
    """As from a variable that is not set; where a credential is needed, the answer says so."""
    open_to_all, closed = await serve(api_key="", allow_insecure_dev=True), await serve(api_key="a-shared-token")

    refused = await closed.call("GET", "/v1/tasks", headers=[header], token=None)

    assert (await open_to_all.call("GET", "/v1/tasks", headers=[header], token=None)).status == 200
    assert refused.status == 401
    assert "a credential is needed" in refused.json()["message"]


@pytest.mark.parametrize(("headers", "status"), [
    ([("authorization", "bearer {}")], 200), ([("authorization", "BEARER {}")], 200), ([("x-api-key", "{}")], 200),
    ([("authorization", "Bearer {}"), ("authorization", "Bearer {}")], 401), ([("authorization", "Basic {}")], 401),
    ([("authorization", "Bearer {}"), ("x-api-key", "another")], 401), ([("authorization", "Bearer ")], 401),
    ([("authorization", "{}")], 401), ([("cookie", "access_token={}")], 401)])
async def test_a_token_comes_once_and_in_a_header(served: Any, headers: list[tuple[str, str]], status: int) -> None:
    shown = [(name, value.format(token())) for name, value in headers]

    answer = await served.call("GET", "/v1/tasks", headers=shown, token=None)

    assert answer.status == status


@pytest.mark.parametrize("name", ["access_token", "token", "api_key", "authorization"])
async def test_a_token_in_the_query_is_no_credential(served: Any, name: str) -> None:
    answer = await served.call("GET", f"/v1/tasks?{name}={token()}", token=None)

    assert answer.status == 401


# What is remembered.


async def test_a_token_is_proven_once_and_remembered_without_being_kept(way: AccessTokens) -> None:
    shown = token()

    first, second = await way.caller(shown), await way.caller(shown)

    assert first is second
    assert [*way.proven] == [hashlib.sha256(shown.encode()).digest()]


async def test_a_remembered_token_expires_to_the_second(way: AccessTokens, clock: Clock) -> None:
    shown = token(exp=NOW + HOUR)
    await way.caller(shown)

    clock.seconds = NOW + HOUR + 29.9
    assert await way.caller(shown)
    clock.seconds = NOW + HOUR + 30
    with pytest.raises(InvalidToken):
        await way.caller(shown)
    assert not way.proven


async def test_the_leeway_is_a_setting(tmp_path: Path, clock: Clock) -> None:
    strict = AccessTokens(settings(tmp_path, leeway_seconds=0), now=clock)
    shown = token(exp=NOW + 1)
    assert await strict.caller(shown)

    clock.seconds = NOW + 1
    with pytest.raises(InvalidToken):
        await strict.caller(shown)


async def test_the_longest_life_is_a_setting(tmp_path: Path, clock: Clock) -> None:
    short = AccessTokens(settings(tmp_path, max_lifetime_days=1), now=clock)

    assert await short.caller(token(exp=NOW + DAY))
    with pytest.raises(InvalidToken):
        await short.caller(token(exp=NOW + DAY + 1))


async def test_no_more_tokens_are_remembered_than_there_is_room_for(
        way: AccessTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    way.proven.most = 3
    first, *others = [token(jti=f"t{number}") for number in range(5)]

    seen = []
    for credential in others:
        seen.append(await way.caller(first))
        await way.caller(credential)

    assert [*way.proven] == [hashlib.sha256(credential.encode()).digest()
                             for credential in (others[-2], first, others[-1])]
    assert all(caller is seen[0] for caller in seen)      # what is used is kept


class TakenBack(NoRevocations):
    """Revocations by one claim."""

    def __init__(self) -> None:
        self.jtis: set[str | None] = set()

    def find(self, caller: Caller) -> str | None:
        """Say so if the id of the token is on the list."""
        assert caller.token is not None
        return "token" if caller.token.token_id in self.jtis else None


async def test_a_token_that_is_taken_back_is_refused_at_once_also_when_remembered(way: AccessTokens) -> None:
    way.revocations = taken = TakenBack()
    first, second = token(jti="one"), token(jti="other")
    await way.caller(first)

    taken.jtis |= {"one", "other"}
    taken.version += 1

    for shown in (first, second):
        with pytest.raises(InvalidToken):
            await way.caller(shown)
    assert await way.caller(token(jti="third"))


# Keys in files.


def write(path: Path, text: bytes, mode: int = 0o644) -> str:
    path.write_bytes(text)
    path.chmod(mode)
    return str(path)


def key_set(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def published(key: RSAKey = MINE, **changed: Any) -> dict[str, Any]:
    """Return the public half of a key as issuers publish it."""
    return {**key.as_dict(private=False, kid=key.thumbprint(), use="sig", alg="RS256"), **changed}


@pytest.mark.parametrize(("name", "text", "mode"), [
    ("public_key_path", pem(KEY.public_key()), 0o644), ("private_key_path", pem(KEY), 0o600),
    ("private_key_path", pem(KEY), 0o400), ("public_key_path", pem(KEY), 0o600), ("jwks", key_set(published()), 0o644),
    ("jwks", key_set(MINE.as_dict(private=True)), 0o600),
    ("jwks", key_set({"kty": "RSA", "use": "enc"}, published()), 0o644)])
async def test_keys_are_taken_from_a_pem_or_a_key_set(
        tmp_path: Path, clock: Clock, name: str, text: bytes, mode: int) -> None:
    trust = {"public_key_path": "", name: write(tmp_path / "key", text, mode)}

    way = AccessTokens(settings(None, **trust), now=clock)

    assert await way.caller(token())
    assert [key.is_private for key in ring(way).known] == [False]      # what only checks has no use for more
    with pytest.raises(InvalidToken):
        await way.caller(token(THEIRS))


async def test_the_keys_of_all_settings_count_together(tmp_path: Path, clock: Clock) -> None:
    old = write(tmp_path / "old.pem", pem(KEY.public_key()))
    new = write(tmp_path / "new.pem", pem(NEXT), 0o600)
    further = write(tmp_path / "further.json", key_set(published(THEIRS, kid="their-own-id")))

    way = AccessTokens(settings(None, public_key_path=old, private_key_path=new, jwks=further), now=clock)

    for good in (token(MINE), token(SOON), token(THEIRS, {"kid": "their-own-id"})):
        assert await way.caller(good)
    for bad in (token(THEIRS), headed(kid=...)):     # a kid of its own replaces the thumbprint; of several one is named
        with pytest.raises(InvalidToken):
            await way.caller(bad)


WEAK, CURVE = made_key(1024), ec.generate_private_key(ec.SECP256R1())
WEAK_JWK = {"kty": "RSA", "n": b64(WEAK.public_key().public_numbers().n.to_bytes(128, "big")), "e": "AQAB", "kid": "x"}
SECRET = {"kty": "oct", "k": b64(b"a secret that is shared by everybody")}


@pytest.mark.parametrize(("name", "text", "mode", "why"), [
    ("private_key_path", pem(KEY), 0o640, "chmod 600"),
    ("private_key_path", pem(KEY), 0o604, "chmod 600"),
    ("private_key_path", pem(KEY), 0o620, "chmod 600"),
    ("public_key_path", pem(KEY), 0o644, "chmod 600"),
    ("jwks", key_set(MINE.as_dict(private=True)), 0o644, "chmod 600"),
    ("private_key_path", pem(KEY.public_key()), 0o600, "no private key"),
    ("private_key_path", pem(WEAK), 0o600, "not 1024"),
    ("public_key_path", pem(WEAK.public_key()), 0o644, "not 1024"),
    ("jwks", key_set(published(), WEAK_JWK), 0o644, "not 1024"),
    ("public_key_path", pem(CURVE.public_key()), 0o644, "is invalid"),
    ("private_key_path", pem(CURVE), 0o600, "is invalid"),
    ("jwks", key_set(published(), {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}), 0o644, "not for RS256"),
    ("jwks", key_set(SECRET), 0o600, "not for RS256"),
    ("jwks", key_set(published(alg="RS512")), 0o644, "not for RS256"),
    ("jwks", key_set(published(alg="HS256")), 0o644, "not for RS256"),
    ("jwks", key_set({"kty": "RSA"}), 0o644, "is invalid"),
    ("jwks", key_set(published(e="AQ")), 0o644, "is invalid"),
    ("jwks", key_set(published(n="!")), 0o644, "is invalid"),
    ("jwks", key_set(published(kid=7)), 0o644, "is invalid"),
    ("jwks", key_set(), 0o644, "no RS256 key"),
    ("jwks", key_set(published(use="enc")), 0o644, "no RS256 key"),
    ("jwks", b"[]", 0o644, "is invalid"),
    ("jwks", b'{"keys":[],"keys":[]}', 0o644, "is repeated"),
    ("jwks", pem(KEY.public_key()), 0o644, "is invalid"),
    ("public_key_path", b"", 0o644, "is invalid"),
    ("public_key_path", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", 0o644, "is invalid"),
    ("private_key_path", pem(KEY, b"password"), 0o600, "is invalid")])
def test_a_key_that_nobody_should_trust_stops_the_start(
        tmp_path: Path, name: str, text: bytes, mode: int, why: str) -> None:
    trust = {"public_key_path": "", name: write(tmp_path / "key", text, mode)}

    with pytest.raises(StartupError, match=rf"^security\.jwt\.{name}: .*{why}") as refused:
        Gate(settings(None, **trust))

    assert "PRIVATE" not in str(refused.value)


@pytest.mark.parametrize("name", ["private_key_path", "public_key_path", "jwks"])
def test_a_key_file_that_is_not_there_stops_the_start(tmp_path: Path, name: str) -> None:
    trust = {"public_key_path": "", name: str(tmp_path / "absent")}

    with pytest.raises(StartupError, match=rf"^security\.jwt\.{name}: .* cannot be read: No such file"):
        Gate(settings(None, **trust))


def test_a_key_in_place_of_its_path_is_not_repeated() -> None:
    pasted = pem(KEY).decode()

    with pytest.raises(StartupError) as refused:
        Gate(settings(None, private_key_path=pasted))

    assert pasted.split("\n")[1] not in str(refused.value)


def test_an_audience_of_nobody_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"security\.jwt\.audience"):
        Gate(settings(tmp_path, audience=()))


async def test_keys_are_a_way_in_and_without_them_there_is_none(tmp_path: Path) -> None:
    async def start(of: Settings) -> None:
        gate = Gate(of, await open_backend("memory:"))
        async with gate.app.router.lifespan_context(gate.app):
            pass

    await start(settings(tmp_path))
    with pytest.raises(StartupError, match="no credential could be valid"):
        await start(settings(None))
    assert [way for way in Gate(settings(None)).identity.ways if isinstance(way, AccessTokens)] == []


# Keys from the issuer's URL.


class Issuer:
    """A server that publishes keys, and counts who looks."""

    def __init__(self) -> None:
        self.looks, self.body, self.head, self.port = 0, key_set(published()), "200 OK", 0
        self.asked, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()

    @property
    def url(self) -> str:
        """Where it publishes them."""
        return f"http://127.0.0.1:{self.port}/jwks"

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            self.looks += 1
            self.asked.set()
            await self.open.wait()
            writer.write(f"HTTP/1.1 {self.head}\r\ncontent-length: {len(self.body)}\r\n\r\n".encode() + self.body)
            await writer.drain()
        writer.close()


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    """Return an issuer on loopback, which the gates of this page allow."""
    issuer = Issuer()
    running = await asyncio.start_server(issuer.hear, "127.0.0.1", 0)
    issuer.port = running.sockets[0].getsockname()[1]
    yield issuer
    running.close()


@pytest.fixture
def far(issuer: Issuer, clock: Clock) -> AccessTokens:
    """Return the way in for tokens of that issuer."""
    return AccessTokens(settings(None, issuer.url), now=clock, clock=clock)


async def looked(way: AccessTokens) -> None:
    """Wait until a look that has begun has ended."""
    if fetching := ring(way).source.fetching:
        await fetching


async def fates(way: AccessTokens, *tokens: str) -> list[str]:
    """Show tokens all at once; return what became of each."""
    outcomes = await asyncio.gather(*(way.caller(credential) for credential in tokens), return_exceptions=True)
    return [type(outcome).__name__ for outcome in outcomes]


async def test_the_issuers_keys_are_fetched_once_for_all_who_wait_for_them(far: AccessTokens, issuer: Issuer) -> None:
    assert await fates(far, *(token(jti=f"t{number}") for number in range(20))) == ["Caller"] * 20

    assert issuer.looks == 1


async def test_an_unknown_kid_is_worth_one_look_a_minute(far: AccessTokens, issuer: Issuer, clock: Clock) -> None:
    strangers = [headed(STRANGER, kid=f"k{number}") for number in range(20)]
    await fates(far, token())

    for minute in range(3):
        clock.seconds = NOW + minute * REFETCH_SECONDS
        assert await fates(far, *strangers) == ["InvalidToken"] * 20
        clock.seconds += REFETCH_SECONDS - 1
        assert await fates(far, *strangers) == ["InvalidToken"] * 20

    assert issuer.looks == 3


async def test_a_token_whose_own_header_is_wrong_makes_nobody_look(
        far: AccessTokens, issuer: Issuer, clock: Clock) -> None:
    await fates(far, token())
    clock.seconds += REFETCH_SECONDS

    await fates(far, headed(kid="x", alg="none"), headed(kid="x", typ="JWT"), headed(kid="x", jku="x"), headed(kid=7))

    assert issuer.looks == 1


async def test_the_next_key_of_the_issuer_is_learnt_and_the_withdrawn_one_forgotten(
        far: AccessTokens, issuer: Issuer, clock: Clock) -> None:
    old, new = token(MINE), token(SOON)
    assert await fates(far, old) == ["Caller"]

    issuer.body = key_set(published(SOON))
    clock.seconds += REFETCH_SECONDS

    assert await fates(far, new) == ["Caller"]
    assert await fates(far, old) == ["InvalidToken"]      # though it was remembered


async def test_a_withdrawn_key_is_noticed_though_nobody_shows_a_new_one(
        far: AccessTokens, issuer: Issuer, clock: Clock) -> None:
    old = token()
    await far.caller(old)
    issuer.body = key_set(published(SOON))

    clock.seconds += FRESH_SECONDS
    assert await far.caller(old)      # nobody waits for this look
    await looked(far)

    assert await fates(far, old) == ["InvalidToken"]
    assert issuer.looks == 2


async def test_a_look_that_brings_nothing_new_forgets_nothing(far: AccessTokens, issuer: Issuer, clock: Clock) -> None:
    await far.caller(token())

    clock.seconds += FRESH_SECONDS
    await far.caller(token(jti="t2"))
    await looked(far)

    assert (issuer.looks, len(far.proven)) == (2, 2)


BROKEN = [("500 Broken", b""), ("404 Not Found", b"{}"), ("200 OK", b"<html>"), ("200 OK", b'{"keys":[]}'),
          ("200 OK", b"[]"),
          ("200 OK", b'{"keys":[{"kty":"RSA"}]}'), ("200 OK", b'{"keys":' + b"[" * 5000 + b"]" * 5000 + b"}"),
          ("200 OK", b'{"keys":[],"x":"' + b"x" * 2**20 + b'"}'), ("200 OK", b"\xff\xfe"),
          ("302 Found\r\nlocation: http://169.254.169.254/", b""), ("garbage", b"")]


@pytest.mark.parametrize(("head", "body"), BROKEN)
async def test_while_the_issuer_is_broken_its_last_keys_stay(
        far: AccessTokens, issuer: Issuer, clock: Clock, head: str, body: bytes) -> None:
    good = token()
    await far.caller(good)
    issuer.head, issuer.body = head, body

    clock.seconds += FRESH_SECONDS
    await far.caller(good)
    await looked(far)

    assert (await fates(far, good, token(jti="t2"), token(SOON)), issuer.looks) == (
        ["Caller", "Caller", "IssuerUnavailable"], 2)


@pytest.mark.parametrize(("head", "body"), BROKEN)
async def test_tokens_that_cannot_be_checked_for_want_of_keys_are_neither_good_nor_bad(
        far: AccessTokens, issuer: Issuer, clock: Clock, head: str, body: bytes) -> None:
    issuer.head, issuer.body, good = head, body, issuer.body

    with pytest.raises(IssuerUnavailable) as refused:
        await far.caller(token())
    clock.seconds += 10
    with pytest.raises(IssuerUnavailable) as again:
        await far.caller(token())

    assert (refused.value.more, again.value.more, issuer.looks) == ({"retry_after": 60}, {"retry_after": 50}, 1)
    issuer.head, issuer.body = "200 OK", good
    clock.seconds += 50
    assert await far.caller(token())


@pytest.mark.parametrize("where", ["http://169.254.169.254/jwks", "http://[::1]:9/", "file:///etc/passwd",
                                   "https://10.0.0.1/", "https://user@127.0.0.1/", "ftp://127.0.0.1/jwks"])
async def test_the_keys_are_fetched_through_the_guard(
        serve: Any, where: str, caplog: pytest.LogCaptureFixture) -> None:
    gate = await serve(security=settings(None, where).security)

    answer = await gate.call("GET", "/v1/tasks", token=token())

    assert (answer.status, answer.json()["error"], answer.headers["retry-after"]) == (503, "issuer_unavailable", "60")
    assert "Barred" in caplog.text


def test_a_wrong_list_of_exceptions_stops_the_start() -> None:
    security = SecuritySettings(jwt=Jwt(jwks="https://issuer.example/jwks"), outgoing=Outgoing(allow=("10.0.0.0/99",)))

    with pytest.raises(StartupError, match=r"security\.outgoing\.allow"):
        Gate(Settings(security=security))


@pytest.mark.parametrize("unfit", [
    {}, {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "x"}, {**SECRET, "kid": "x"}, WEAK_JWK,
    {"kty": "RSA", "kid": "x"}, {"kty": "AKP", "kid": "x"}, published(SOON, kid="x", alg="PS256"),
    published(SOON, kid="x", use="enc"), published(SOON, kid="x", use=7), published(SOON, kid="x", key_ops=["encrypt"]),
    published(SOON, kid="x", key_ops=7), published(SOON, kid="x", n="!"), published(SOON, kid="x", e="AQ"),
    published(SOON, kid=["x"]), SOON.as_dict(private=True, kid="x")])
async def test_what_is_no_key_for_us_is_left_out_of_the_issuers_set(
        far: AccessTokens, issuer: Issuer, unfit: dict[str, Any]) -> None:
    issuer.body = key_set(unfit, published())

    assert await fates(far, token(), headed(NEXT, kid="x")) == ["Caller", "InvalidToken"]
    assert len(ring(far).known.keys) == 1


async def test_a_key_too_small_is_left_out_of_the_issuers_set(far: AccessTokens, issuer: Issuer) -> None:
    issuer.body = key_set(WEAK_JWK, published())

    assert await fates(far, token(), headed(WEAK, kid="x")) == ["Caller", "InvalidToken"]


async def test_while_one_look_goes_on_there_is_no_other(far: AccessTokens, issuer: Issuer, clock: Clock) -> None:
    issuer.open.clear()
    first = asyncio.create_task(far.caller(token()))
    await issuer.asked.wait()

    clock.seconds += FRESH_SECONDS
    second = asyncio.create_task(far.caller(token(jti="t2")))
    await asyncio.wait([second], timeout=0)     # it has begun, and waits
    issuer.open.set()

    assert [(await job).principal.id for job in (first, second)] == ["ada", "ada"]     # type: ignore[union-attr]
    assert issuer.looks == 1


async def test_a_client_that_goes_does_not_end_the_look_for_the_others(far: AccessTokens, issuer: Issuer) -> None:
    issuer.open.clear()
    gone, stays = (asyncio.create_task(far.caller(token(jti=name))) for name in ("gone", "stays"))
    await issuer.asked.wait()

    gone.cancel()
    await asyncio.wait([gone])
    issuer.open.set()

    assert await stays
    assert (gone.cancelled(), issuer.looks) == (True, 1)


async def test_keys_of_a_file_work_while_the_issuer_cannot_be_reached(tmp_path: Path, clock: Clock) -> None:
    way = AccessTokens(settings(tmp_path, "http://127.0.0.1:1/jwks"), now=clock, clock=clock)

    assert await fates(way, token(), token(SOON)) == ["Caller", "IssuerUnavailable"]


# An independent issuer.


@pytest.fixture
def provider() -> Iterator[str]:
    """Run an OpenID provider that others wrote, in a process of its own; return its address."""
    program = [sys.executable, "-m", "oidc_provider_mock", "--port", "0"]
    surroundings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=surroundings)
    assert running.stdout
    yield read_address(running, running.stdout)
    running.kill()
    running.communicate()


async def id_token(provider: str) -> str:
    """Sign in as somebody, as a browser and a web application would together."""
    back = "http://localhost:1/back"
    query = {"client_id": "gate", "redirect_uri": back, "response_type": "code", "scope": "openid", "state": "s"}
    async with httpx2.AsyncClient(base_url=provider, trust_env=False) as http:
        sent = await http.post("/oauth2/authorize", params=query, data={"sub": "ada@example.com"})
        code = parse_qs(urlsplit(sent.headers["location"]).query)["code"][0]
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": back}
        answer = await http.post("/oauth2/token", data=form, auth=("gate", "secret"))
    text: str = answer.json()["id_token"]
    return text


async def test_the_id_token_of_an_independent_provider_is_no_access_token(provider: str) -> None:
    shown = await id_token(provider)
    way = AccessTokens(settings(None, f"{provider}/jwks", issuer=provider, audience=("gate",)))

    with pytest.raises(InvalidToken):      # A4
        await way.caller(shown)
    await looked(way)

    (key,) = ring(way).known      # fetched all the same, and it did sign the token
    assert jwt.decode(shown, key, algorithms=["RS256"]).claims["sub"] == "ada@example.com"
