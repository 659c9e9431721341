"""How clients prove at the token endpoint that they are themselves: one way, theirs, and once."""

from __future__ import annotations

import base64
import json
import time
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from joserfc import jws, jwt
from joserfc.jwk import ECKey, OctKey, RSAKey

from asyncgate.extras.oauth.clients import ASSERTION_TYPE, authenticate_client, find_client, note_sign_in
from asyncgate.extras.oauth.documents import read_document
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.extras.oauth.wire import OAuthError, Request
from asyncgate.parts.model.stored_oauth import OAuthClient
from tests.conftest import Served

pytestmark = pytest.mark.anyio

URL = "https://app.example/oauth/client.json"
ISSUER = "http://localhost"
KEY = RSAKey.import_key(rsa.generate_private_key(public_exponent=65537, key_size=2048), {"kid": "k1"})
OTHER = RSAKey.import_key(rsa.generate_private_key(public_exponent=65537, key_size=2048), {"kid": "k1"})
CURVE = ECKey.import_key(ec.generate_private_key(ec.SECP256R1()), {"kid": "k2"})
JWKS = {"keys": [KEY.as_dict(private=False), CURVE.as_dict(private=False), {
    "kty": "oct", "k": "c2VjcmV0", "kid": "k3"}]}


def basic(id: str, secret: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Basic " + base64.b64encode(f"{id}:{secret}".encode())


class Token:
    """The token endpoint, as far as it asks who comes."""

    def __init__(self, gate: Served) -> None:
        self.gate = gate
        self.server: AuthorizationServer = gate.gate.joined["oauth"]

    async def register(self, **more: Any) -> dict[str, Any]:
        made: dict[str, Any] = await self.gate.post("/v1/clients", {
            "client_name": "App", "redirect_uris": ["http://localhost/cb"], **more})
        return made

    async def keep(self, **fields: Any) -> str:
        """Keep a client with a metadata document that was read a moment ago."""
        whole = {"client_id": URL, "redirect_uris": ["http://localhost/cb"], "jwks": JWKS,
                 "token_endpoint_auth_method": "private_key_jwt", **fields}
        client = assertions_client(whole, self.server.engine.backend.now())
        await self.server.directory.change(lambda work: note_sign_in(work, client), (OAuthClient, (URL,)))
        return URL

    async def ask(self, *headers: tuple[bytes, bytes], query: bytes = b"", **form: str) -> str:
        """Ask for a token; return whose client_id was accepted."""
        scope: Any = {"method": "POST", "path": "/oauth/token", "query_string": query, "headers": list(headers)}
        return (await authenticate_client(self.server, Request(scope, b"", "127.0.0.1"), form)).client_id

    async def refusal(self, *headers: tuple[bytes, bytes], query: bytes = b"", **form: str) -> OAuthError:
        with pytest.raises(OAuthError) as refused:
            await self.ask(*headers, query=query, **form)
        return refused.value

    async def signed(self, key: Any = KEY, alg: str = "RS256", header: dict[str, Any] | None = None,
                     **claims: Any) -> str:
        """Ask with an assertion; what is `...` is left out."""
        return await self.ask(client_assertion=assertion(key, alg, header, **claims),
                              client_assertion_type=ASSERTION_TYPE)


def assertions_client(document: dict[str, Any], now: float) -> OAuthClient:
    return read_document(URL, json.dumps(document).encode(), now)


def assertion(key: Any = KEY, alg: str = "RS256", header: dict[str, Any] | None = None, **claims: Any) -> str:
    now = int(time.time())
    payload = {"iss": URL, "sub": URL, "aud": ISSUER, "iat": now, "exp": now + 60, "jti": "1", **claims}
    heads = {"alg": alg, "kid": key.kid, **(header or {})}
    times = {k: int(now + v.total_seconds()) for k, v in payload.items() if isinstance(v, timedelta)}      # from now
    return jwt.encode({k: v for k, v in heads.items() if v is not ...},
                      {k: v for k, v in (payload | times).items() if v is not ...}, key, algorithms=[alg])


@pytest.fixture
async def token(oauth_gate: Served) -> Token:
    return Token(oauth_gate)


async def test_a_program_without_a_secret_says_its_id(token: Token) -> None:
    made = await token.register()

    assert await token.ask(client_id=made["client_id"]) == made["client_id"]
    assert await token.ask(client_id=made["client_id"], client_secret="", client_assertion="") == made["client_id"]


@pytest.mark.one_store
async def test_a_program_with_a_secret_sends_it_in_the_header_or_in_the_body(token: Token) -> None:
    made = await token.register(with_secret=True)
    id, secret = made["client_id"], made["client_secret"]

    assert await token.ask(basic(id, secret)) == id
    assert await token.ask(basic(id, secret), client_id=id) == id
    assert await token.ask((b"authorization", basic(id, secret)[1].replace(b"Basic", b"basic"))) == id
    assert await token.ask(client_id=id, client_secret=secret) == id
    encoded = "".join(f"%{ord(letter):02X}" for letter in secret)       # RFC 6749 2.3.1
    assert await token.ask(basic(quote(id), encoded)) == id


@pytest.mark.one_store
async def test_whoever_does_not_prove_it_is_refused_alike(token: Token) -> None:
    """One refusal for all: nobody learns which ids there are, or what was wrong; the audit log does."""
    public, secret = await token.register(), await token.register(with_secret=True)
    disabled = await token.register()
    await token.gate.post(f"/v1/clients/{disabled['client_id']}", {"disabled": True})
    id, right = secret["client_id"], secret["client_secret"]
    nobody = "8d1f6f0a-5b7c-4f6e-9a53-2f0c7e4b9d11"
    refusals = [
        await token.refusal(client_id=nobody), await token.refusal(client_id=disabled["client_id"]),
        await token.refusal(client_id=id), await token.refusal(client_id=id, client_secret="wrong"),
        await token.refusal(client_id=id, client_secret=right + " "),
        await token.refusal(client_id=public["client_id"], client_secret=right),
        await token.refusal(basic(id, "wrong")), await token.refusal(basic(public["client_id"], "")),
        await token.refusal(basic(nobody, right)), await token.refusal(basic("a%00b", "x")),
        await token.refusal(client_assertion=assertion(), client_assertion_type=ASSERTION_TYPE, client_id=id),
        await token.refusal(client_id="é"), await token.refusal(client_id="x" * 5000)]

    assert {(refusal.code, refusal.status, str(refusal)) for refusal in refusals} == {(
        "invalid_client", 401, "the client is unknown here, was removed, or did not prove that it is itself; "
        "register it again")}
    assert len({refusal.because for refusal in refusals}) > 5
    assert [bool(refusal.headers) for refusal in refusals] == [False] * 6 + [True] * 4 + [False] * 3
    assert right not in repr([refusal.because for refusal in refusals])


@pytest.mark.one_store
async def test_no_client_and_no_readable_header_are_invalid_client_too(token: Token) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        ((), {}), (((b"authorization", b"Basic !"),), {}), (((b"authorization", b"Bearer x"),), {}),
        (((b"authorization", b"Basic"),), {}), ((basic("", "x"),), {}), ((basic("a", "b"),), {"client_id": "c"}),
        (((b"authorization", b"Basic YQ=="),), {})]
    for headers, form in cases:
        refusal = await token.refusal(*headers, **form)
        assert (refusal.code, refusal.status, [name for name, _ in refusal.headers]) == (
            "invalid_client", 401, [b"www-authenticate"] if headers else [])


@pytest.mark.one_store
async def test_nobody_sends_two_credentials_or_one_in_the_url(token: Token) -> None:
    made = await token.register(with_secret=True)
    id, secret = made["client_id"], made["client_secret"]
    other = (await token.register())["client_id"]
    assert (await token.refusal(basic(id, secret), client_id=other)).code == "invalid_client"
    two = [await token.refusal(basic(id, secret), client_id=id, client_secret=secret),
           await token.refusal(basic(id, secret), basic(id, secret)),
           await token.refusal(basic(id, secret), client_assertion="x", client_assertion_type=ASSERTION_TYPE),
           await token.refusal(client_id=id, client_secret=secret, client_assertion="x"),
           await token.refusal(client_id=id, client_secret=secret, query=b"client_secret=" + secret.encode()),
           await token.refusal(client_id=id, query=b"client_secret=" + secret.encode())]

    assert {(refusal.code, refusal.status) for refusal in two} == {("invalid_request", 400)}


# private_key_jwt.


@pytest.mark.one_store
async def test_a_program_proves_itself_by_what_it_signs(token: Token) -> None:
    await token.keep()

    assert await token.signed() == URL
    assert await token.signed(CURVE, "ES256", jti="2") == URL
    assert await token.signed(aud=f"{ISSUER}/oauth/token", jti="3") == URL
    assert await token.signed(aud=[ISSUER], jti="4", header={"typ": "client-authentication+jwt"}) == URL
    assert await token.signed(jti=...) == URL
    assert (await token.refusal(client_id=URL)).because.startswith("the client authenticates by private_key_jwt")


async def test_one_that_lists_none_may_come_without(token: Token) -> None:
    await token.keep(token_endpoint_auth_methods_supported=["none"])

    assert await token.ask(client_id=URL) == URL
    assert await token.signed() == URL


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("iss and sub", {"iss": "https://other.example/c"}), ("iss and sub", {"sub": "https://other.example/c"}),
    ("aud", {"aud": "https://other.example"}), ("aud", {"aud": [ISSUER, "https://other.example"]}),
    ("aud", {"aud": []}),
    ("aud", {"aud": f"{ISSUER}/mcp"}), ("expired", {"exp": 1}), ("too long", {"exp": timedelta(hours=1)}),
    ("not valid yet", {"nbf": timedelta(minutes=5)}), ("not valid yet", {"iat": timedelta(minutes=5)}),
    ("ValidationError", {"exp": ...}), ("ValidationError", {"exp": "soon"}), ("ValidationError", {"jti": 5}),
    ("ValidationError", {"aud": ...}), ("typ", {"header": {"typ": "at+jwt"}}), ("header", {"header": {"jwk": {}}}),
    ("header", {"header": {"jku": "https://evil.example"}}), ("no such key", {"header": {"kid": "k9"}}),
    ("no such key", {"header": {"kid": ...}}), ("BadSignatureError", {"key": OTHER})]


@pytest.mark.one_store
async def test_an_assertion_that_is_not_its_own_for_here_and_now_proves_nothing(token: Token) -> None:
    await token.keep()
    for number, (why, changed) in enumerate(WRONG):
        refusal = await token.refusal(client_id=URL, client_assertion_type=ASSERTION_TYPE,
                                 client_assertion=assertion(**{"jti": f"w{number}", **changed}))
        assert (refusal.code, refusal.status) == ("invalid_client", 401)
        assert why in refusal.because, (changed, refusal.because)


@pytest.mark.one_store
async def test_nor_does_one_without_a_signature_or_by_another_algorithm(token: Token) -> None:
    await token.keep()
    head, claims, signature = assertion().split(".")

    def b64(part: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
    none = [f"{b64({'alg': alg, 'kid': 'k1'})}.{claims}." for alg in ("none", "None", "HS256", "RS384", "PS256")]
    odd = [f"{head}.{claims}.", f"{head}.{claims}", f"{head}.{claims}.{signature}.x",
           f"{head}.{claims}.{signature[:-4]}",
           f"{b64({'alg': 'ES256', 'kid': 'k1'})}.{claims}.{signature}", "x", "a.b.c", "x" * 9000,
           jws.serialize_compact({"alg": "HS256", "kid": "k3"}, b"{}", OctKey.import_key("secret" * 6),
                                 algorithms=["HS256"])]
    for text in [*none, *odd]:
        refusal = await token.refusal(client_id=URL, client_assertion=text, client_assertion_type=ASSERTION_TYPE)
        assert (refusal.code, refusal.status) == ("invalid_client", 401), text[:50]
    for type in ("", "urn:ietf:params:oauth:client-assertion-type:saml2-bearer"):
        refusal = await token.refusal(client_id=URL, client_assertion=assertion(), client_assertion_type=type)
        assert refusal.code == "invalid_client"


@pytest.mark.one_store
async def test_an_assertion_is_good_once(token: Token) -> None:
    await token.keep()
    texts = [assertion(jti="once"), assertion(jti=...), assertion(jti=..., iat=1)]
    for text in texts:
        assert await token.ask(client_assertion=text, client_assertion_type=ASSERTION_TYPE) == URL
        refusal = await token.refusal(client_assertion=text, client_assertion_type=ASSERTION_TYPE)
        assert "used before" in refusal.because
    assert "used before" in (await token.refusal(
        client_assertion=assertion(jti="once", exp=int(time.time()) + 99),
        client_assertion_type=ASSERTION_TYPE)).because


@pytest.mark.one_store
async def test_what_was_used_fills_no_memory(token: Token) -> None:
    await token.keep()
    used = token.server.assertions.used
    used.update({(URL, f"old{number}"): 1.0 for number in range(used.most)})

    assert await token.signed() == URL
    assert len(used) == used.most
    assert (URL, "1") in used


async def test_a_program_that_was_removed_is_told_to_register_again(token: Token) -> None:
    made = await token.register()
    await token.gate.post(f"/v1/clients/{made['client_id']}/remove")

    refusal = await token.refusal(client_id=made["client_id"])
    assert (refusal.code, refusal.status) == ("invalid_client", 401)
    assert await find_client(token.server, made["client_id"]) is None
