"""Administration of the programs that may ask for access (spec 21.8.2).

These operations read and change rows.  They are there while the authorization server is off, too.
"""

from __future__ import annotations

import secrets
import uuid
from hashlib import sha256

import msgspec

from asyncgate import SCOPES, Caller, Engine, Operation, Work, forbid
from asyncgate.parts.identity.admin import audit_change, operates, target_tenant
from asyncgate.parts.identity.keys_stored import default_scopes, encode_names
from asyncgate.parts.identity.oauth.directory import Directory, audit_in_tenant
from asyncgate.parts.identity.oauth.redirects import check_redirects
from asyncgate.parts.model.errors import InvalidRequest
from asyncgate.parts.model.stored_oauth import OAuthClient
from asyncgate.parts.model.views import to_utc, to_utc_or_none
from asyncgate.parts.model.wire_oauth import ClientRecord, RegisterClient, RegisteredClient

SECRET_BYTES = 32       # 256 random bits


async def register_client(engine: Engine, caller: Caller, ask: RegisterClient) -> RegisteredClient:
    """Register a program that may ask people for access; a program on a server may get a secret, shown only now.

    An admin of a tenant registers it for the people of that tenant, the operator for everybody.  Spec 21.8.2.
    """
    tenant = await tenant_of_client(engine, caller, ask.tenant)
    if why := check_redirects(ask.redirect_uris):
        raise InvalidRequest(f"register_client: {why}")
    if unknown := (ask.scopes or frozenset()) - SCOPES:
        raise InvalidRequest(f"no scope {min(unknown)}; there are {', '.join(sorted(SCOPES))}")
    secret = secrets.token_urlsafe(SECRET_BYTES) if ask.with_secret else None
    now = engine.backend.now()
    client = OAuthClient(
        str(uuid.uuid4()), "registered", ask.client_name, encode_list(ask.redirect_uris), encode_names(ask.scopes),
        "client_secret_basic" if secret else "none", hash_client_secret(secret) if secret else None,
        document=None, tenant=tenant, trusted=ask.trusted, pinned=False, access_days=ask.access_days, created_at=now,
        created_by=str(caller.principal), updated_at=now)
    require_right_to_trust(caller, client)
    said = {"about_client": client.client_id, "client_name": client.name, "tenant": tenant, "trusted": ask.trusted}

    def register(work: Work) -> None:
        work.keep_record(client)
        audit_change(engine, work, "client_registered", "warning", caller, **said)
    await Directory(engine).change(register, (OAuthClient, (client.client_id,)))
    await audit_in_tenant(engine, caller, tenant, "client_registered", "warning", **said)
    return RegisteredClient(client.client_id, as_client_record(client), secret)


def require_right_to_trust(caller: Caller, client: OAuthClient) -> None:
    """Refuse a trusted program that could get more than the caller has: people are not asked."""
    most = default_scopes("admin") if client.scopes is None else decode_names(client.scopes)
    if client.trusted and (beyond := most - caller.scopes):
        raise forbid(caller, f"this credential has no scope {', '.join(sorted(beyond))}, so it cannot trust a program "
                             "that may get it; name only scopes that it has")


async def tenant_of_client(engine: Engine, caller: Caller, named: str | None) -> str | None:
    """Return the tenant whose people a program is for; None is everybody, which only the operator may choose."""
    if caller.capabilities is not None or caller.task_types is not None:
        raise forbid(caller, "a key that is limited to capabilities or task types cannot administer programs")
    if named is None and operates(engine, caller):
        return None
    return await target_tenant(engine, caller, named)


def hash_client_secret(secret: str) -> str:
    """Return what is stored of a secret; a fast hash is right for 256 random bits."""
    return sha256(secret.encode()).hexdigest()


def decode_names(text: str) -> frozenset[str]:
    """Read a stored list of names."""
    return msgspec.json.decode(text, type=frozenset[str])


def encode_list(names: list[str]) -> str:
    """Store a list in its order."""
    return msgspec.json.encode(names).decode()


def as_client_record(client: OAuthClient) -> ClientRecord:
    """Show a program without the hash of its secret."""
    return ClientRecord(
        client.client_id, client.origin, client.name, msgspec.json.decode(client.redirect_uris, type=list[str]),
        client.auth_method, to_utc(client.created_at), client.created_by, to_utc(client.updated_at),
        None if client.scopes is None else sorted(decode_names(client.scopes)), client.tenant,
        client.trusted, client.pinned, client.access_days, to_utc_or_none(client.last_used_at),
        to_utc_or_none(client.disabled_at))


OPERATIONS = [
    Operation(register_client, "POST /v1/clients, POST /admin/oauth/clients", "A", "admin:write", "W"),
]
