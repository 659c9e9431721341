"""A gate with its authorization server, on both databases, for the tests of OAuth."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from asyncgate.conformance.plugin import database_of
from asyncgate.parts.model.settings import Jwt, OAuth, SecuritySettings
from tests.conftest import Serve, Served

PUBLIC_URL = "http://localhost"


def write_signing_key(path: Path) -> Path:
    """Write a new private key that only its owner can read."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                             serialization.NoEncryption())
    path.write_bytes(text)
    os.chmod(path, 0o600)
    return path


@pytest.fixture(scope="session")
def signing_key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a signing key, which no test may change."""
    return write_signing_key(tmp_path_factory.mktemp("signing") / "signing.pem")


@pytest.fixture(params=["sqlite:", "postgres:"], ids=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Run each test on both databases."""
    return database_of(request.param, request.config, tmp_path)


@pytest.fixture
def serve_oauth(serve: Serve, signing_key_path: Path) -> Callable[..., Any]:
    """Return what starts a gate with OAuth on; `oauth` and `jwt` are settings of these groups."""
    async def serve_oauth(oauth: dict[str, Any] | None = None, jwt: dict[str, Any] | None = None,
                          **settings: Any) -> Served:
        security = SecuritySettings(oauth=OAuth(enabled=True, **(oauth or {})),
                                    jwt=Jwt(**{"private_key_path": str(signing_key_path), **(jwt or {})}))
        running: Served = await serve(**{"public_url": PUBLIC_URL, "security": security, **settings})
        return running

    return serve_oauth


@pytest.fixture
async def oauth_gate(serve_oauth: Callable[..., Any]) -> Served:
    """Return a running gate with OAuth on."""
    running: Served = await serve_oauth()
    return running
