"""A gate with its authorization server, on both databases, for the tests of OAuth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc._rfc7517 import pem

from asyncgate.conformance.plugin import database_of
from asyncgate.parts.identity.signing import SigningKeys
from asyncgate.parts.model.settings import Jwt, OAuth, SecuritySettings
from tests.conftest import Serve, Served
from tests.identity.conftest import house as house
from tests.support.identity_tools import HOME

PUBLIC_URL = "http://localhost"
# OpenSSL looks whether the factors of an RSA key are prime each time that it reads one: half of what such a gate costs.
pem.load_pem_private_key = cache(pem.load_pem_private_key)      # type: ignore[assignment, attr-defined]


def write_signing_key(path: Path) -> Path:
    """Write a new private key that only its owner can read."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                             serialization.NoEncryption())
    path.write_bytes(text)
    os.chmod(path, 0o600)
    return path


def mint(served: Served, keys: SigningKeys | None = None, **changed: Any) -> str:
    """Sign a good access token of the gate, by its keys or by those of another gate."""
    server, now = served.gate.joined["oauth"], time.time()
    assert server is not None
    claims = {"iss": server.issuer, "aud": ["asyncgate-api", f"{server.issuer}/mcp"], "sub": "user-1",
              "sid": "session-1", "jti": "token-1", "client_id": "client-1", "scope": "tasks:read tasks:write",
              "tenant_id": HOME, "principal_kind": "human", "principal_id": "ada", "role": "agent", "iat": now,
              "nbf": now, "exp": now + 86_400, **changed}
    return (keys or server.keys).sign({name: value for name, value in claims.items() if value is not None})


def oauth_settings(key: Path, oauth: dict[str, Any] | None = None, jwt: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a gate with OAuth on."""
    security = SecuritySettings(oauth=OAuth(enabled=True, **(oauth or {})),
                                jwt=Jwt(**{"private_key_path": str(key), **(jwt or {})}))
    return {"public_url": PUBLIC_URL, "security": security}


@pytest.fixture(scope="session")
def signing_key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a signing key, which no test may change."""
    return write_signing_key(tmp_path_factory.mktemp("signing") / "signing.pem")


@pytest.fixture
def url(backend_url: str) -> str:
    """Run each test on both databases, unless its module or its mark says why not."""
    return backend_url


@pytest.fixture
def sqlite_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name an empty SQLite database; a module whose `url` it is says why the database cannot matter."""
    return database_of("sqlite:", request.config, tmp_path)


@pytest.fixture
def serve_oauth(serve: Serve, signing_key_path: Path) -> Callable[..., Any]:
    """Return what starts a gate with OAuth on; `oauth` and `jwt` are settings of these groups."""
    async def serve_oauth(oauth: dict[str, Any] | None = None, jwt: dict[str, Any] | None = None,
                          **settings: Any) -> Served:
        running: Served = await serve(**{**oauth_settings(signing_key_path, oauth, jwt), **settings})
        return running

    return serve_oauth


@pytest.fixture
async def oauth_gate(serve_oauth: Callable[..., Any]) -> Served:
    """Return a running gate with OAuth on."""
    running: Served = await serve_oauth()
    return running
