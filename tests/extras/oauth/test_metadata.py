"""The documents of the authorization server, and who may read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Served

pytestmark = pytest.mark.anyio

FOREIGN = [("origin", "https://elsewhere.example")]


@pytest.fixture
def url(sqlite_url: str) -> str:
    """Run on SQLite alone: these tests are about documents that are made from settings alone."""
    return sqlite_url


async def test_the_public_keys_are_published_and_no_private_member(oauth_gate: Served) -> None:
    published = await oauth_gate.get("/.well-known/jwks.json", token=None)

    assert [key["kid"] for key in published["keys"]] == [oauth_gate.gate.joined["oauth"].keys.current.key.kid]
    assert {"kty", "n", "e", "kid", "use", "alg"} == published["keys"][0].keys()


async def test_the_server_describes_itself(oauth_gate: Served) -> None:
    for path in ("/.well-known/oauth-authorization-server", "/.well-known/openid-configuration"):
        told = await oauth_gate.get(path, token=None)

        assert told["issuer"] == "http://localhost"
        assert told["code_challenge_methods_supported"] == ["S256"]
        assert "none" in told["token_endpoint_auth_methods_supported"]
        assert told["client_id_metadata_document_supported"] is True
        assert told["authorization_response_iss_parameter_supported"] is True
        assert "registration_endpoint" not in told
        assert "offline_access" not in told["scopes_supported"]


async def test_what_is_off_is_not_offered_and_what_is_on_is(serve_oauth: Callable[..., Any]) -> None:
    gate = await serve_oauth({"client_documents": False, "dynamic_registration": True})

    told = await gate.get("/.well-known/oauth-authorization-server", token=None)

    assert told["client_id_metadata_document_supported"] is False
    assert told["registration_endpoint"] == "http://localhost/oauth/register"


@pytest.mark.parametrize("mount", ["", "/mcp", "/mcp/u"])
async def test_each_mount_is_a_resource_of_its_own_with_and_without_a_slash(oauth_gate: Served, mount: str) -> None:
    for path in (mount, f"{mount}/"):
        told = await oauth_gate.get(f"/.well-known/oauth-protected-resource{path}", token=None)

        assert told["resource"] == f"http://localhost{mount}"
        assert told["authorization_servers"] == ["http://localhost"]
        assert "offline_access" not in told["scopes_supported"]


async def test_an_issuer_with_a_path_is_found_in_all_places_where_clients_look(serve_oauth: Callable[..., Any]) -> None:
    gate = await serve_oauth(public_url="http://localhost/gates/one/")

    for path in ("/.well-known/oauth-authorization-server/gates/one", "/.well-known/openid-configuration/gates/one",
                 "/gates/one/.well-known/openid-configuration", "/.well-known/openid-configuration"):
        assert (await gate.get(path, token=None))["issuer"] == "http://localhost/gates/one"
    told = await gate.get("/.well-known/oauth-protected-resource/gates/one/mcp", token=None)
    assert told["resource"] == "http://localhost/gates/one/mcp"


async def test_pages_of_any_site_may_read_the_documents_and_nothing_else(oauth_gate: Served) -> None:
    for path in ("/.well-known/jwks.json", "/.well-known/oauth-authorization-server",
                 "/.well-known/oauth-protected-resource/mcp"):
        read = await oauth_gate.call("GET", path, token=None, headers=FOREIGN)
        asked = await oauth_gate.call("OPTIONS", path, token=None, headers=FOREIGN)

        assert (read.status, read.headers["access-control-allow-origin"]) == (200, "*")
        assert (asked.status, asked.headers["access-control-allow-methods"]) == (204, "GET")
    closed = await oauth_gate.call("GET", "/v1/tasks", headers=FOREIGN)
    assert (closed.status, "access-control-allow-origin" in closed.headers) == (403, False)


async def test_the_host_is_checked_for_the_documents_too(oauth_gate: Served) -> None:
    answer = await oauth_gate.call("GET", "/.well-known/jwks.json", token=None, headers=[("host", "rebound.example")])

    assert answer.status == 421


@pytest.mark.parametrize("path", ["/.well-known/oauth-authorization-server", "/.well-known/oauth-protected-resource",
                                  "/.well-known/oauth-protected-resource/mcp"])
async def test_a_slash_at_the_end_of_the_address_of_metadata_makes_no_difference(oauth_gate: Served, path: str) -> None:
    plain, slash = [await oauth_gate.call("GET", path + end, token=None) for end in ("", "/")]

    assert (slash.status, slash.content) == (plain.status, plain.content)
    assert plain.status == 200
