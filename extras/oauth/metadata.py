"""The documents from which clients learn where to get an access token (RFC 8414, RFC 9728, OpenID Discovery)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import Route

from asyncgate import SCOPES
from asyncgate.extras.oauth.documents import SIGNING_ALGORITHMS
from asyncgate.extras.oauth.enterprise import ID_JAG_PROFILE, JWT_BEARER, is_vouching_on
from asyncgate.extras.oauth.server import AuthorizationServer, Endpoint
from asyncgate.extras.oauth.wire import Answer, Request, answer_json
from asyncgate.parts.model.challenges import COMMON_SCOPES, MOUNTS, RESOURCE_METADATA

WELL_KNOWN = "/.well-known"
JWKS_PATH = f"{WELL_KNOWN}/jwks.json"
SERVER_METADATA = (f"{WELL_KNOWN}/oauth-authorization-server", f"{WELL_KNOWN}/openid-configuration")
AUTH_METHODS = ["none", "client_secret_basic", "client_secret_post", "private_key_jwt"]

Document = Callable[[AuthorizationServer], dict[str, Any]]


def routes(server: AuthorizationServer) -> list[Route]:
    """Return the paths of all documents; any page may read them."""
    documents: dict[str, Document] = {JWKS_PATH: lambda server: server.keys.jwks()}
    path = urlsplit(server.issuer).path     # stands behind or before the well-known path, or a proxy has cut it off
    documents |= {variant: describe_server for known in SERVER_METADATA
                  for base in (known, known + path, path + known) for variant in (base, f"{base}/")}
    for mount in MOUNTS:
        documents |= {variant: partial(describe_resource, mount=mount)
                      for base in (RESOURCE_METADATA + mount, RESOURCE_METADATA + path + mount)
                      for variant in (base, f"{base}/")}
    return [Route(path, Endpoint(server, {"GET": publish(document)}, open=True))
            for path, document in documents.items()]


def publish(document: Document) -> Callable[[AuthorizationServer, Request], Awaitable[Answer]]:
    """Return a handler that answers with a document."""
    async def answer(server: AuthorizationServer, request: Request) -> Answer:
        return answer_json(document(server))
    return answer


def describe_resource(server: AuthorizationServer, mount: str) -> dict[str, Any]:
    """Return the metadata of one mount as a protected resource (RFC 9728)."""
    return {"resource": server.issuer + mount, "authorization_servers": [server.issuer],
            "bearer_methods_supported": ["header"], "scopes_supported": list(COMMON_SCOPES),
            "resource_name": "AsyncGate", "resource_documentation": f"{server.issuer}/docs"}


def describe_server(server: AuthorizationServer) -> dict[str, Any]:
    """Return the metadata of the authorization server (RFC 8414), with the members that OpenID Discovery demands."""
    issuer, oauth, vouching = server.issuer, server.oauth, is_vouching_on(server)
    return {
        "issuer": issuer,
        "authorization_endpoint": f"{issuer}/oauth/authorize",
        "token_endpoint": f"{issuer}/oauth/token",
        "revocation_endpoint": f"{issuer}/oauth/revoke",
        **({"registration_endpoint": f"{issuer}/oauth/register"} if oauth.dynamic_registration else {}),
        "jwks_uri": issuer + JWKS_PATH,
        "scopes_supported": sorted(SCOPES),
        "response_types_supported": ["code"],
        "response_modes_supported": ["query"],
        "grant_types_supported": ["authorization_code", "refresh_token", *([JWT_BEARER] if vouching else [])],
        **({"authorization_grant_profiles_supported": [ID_JAG_PROFILE]} if vouching else {}),
        "code_challenge_methods_supported": ["S256"],
        "token_endpoint_auth_methods_supported": AUTH_METHODS,
        "token_endpoint_auth_signing_alg_values_supported": SIGNING_ALGORITHMS,
        "revocation_endpoint_auth_methods_supported": AUTH_METHODS,
        "revocation_endpoint_auth_signing_alg_values_supported": SIGNING_ALGORITHMS,
        "authorization_response_iss_parameter_supported": True,
        "client_id_metadata_document_supported": oauth.client_documents,
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": ["RS256"],
        "service_documentation": f"{issuer}/docs",
    }
