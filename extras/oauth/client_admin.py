"""Administration of the clients that may ask for access (spec 21.8.2).

These operations read and change rows.  They are there while the authorization server is off, too.
"""

from __future__ import annotations

import secrets
from functools import partial
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from asyncgate import SCOPES, Caller, Engine, Operation, Work, forbid
from asyncgate.extras.oauth import wire_oauth
from asyncgate.extras.oauth.redirects import check_redirects, find_document_url_flaw
from asyncgate.parts.identity import admin
from asyncgate.parts.identity.directory import Directory, audit_in_tenant
from asyncgate.parts.identity.keys_stored import decode_names, default_scopes, encode_names
from asyncgate.parts.identity.revocations import LONGEST_VALID_SECONDS, REVOCATION_KEYS, revoke
from asyncgate.parts.model import errors, queries, stored_oauth, wire
from asyncgate.parts.model.caller import forbid_giving
from asyncgate.parts.model.views import to_utc, to_utc_or_none

CLIENT_SECRET_BYTES = 32       # 256 random bits
LEAST_ACCESS_DAYS = 5   # spec 21.2.1


async def register_client(engine: Engine, caller: Caller,
                          ask: wire_oauth.RegisterClient) -> wire_oauth.RegisteredClient:
    """Register a client that may ask people for access; a client on a server may get a secret, shown only now.

    An admin of a tenant registers it for the people of that tenant, the operator for everybody.  A tenant has
    security.oauth.clients_per_tenant at most.  Spec 21.8.2.
    """
    tenant = await tenant_of_client(engine, caller, ask.tenant)
    check_redirects_and_scopes(ask.redirect_uris, ask.scopes)
    check_document_url(engine, caller, ask)
    secret = secrets.token_urlsafe(CLIENT_SECRET_BYTES) if ask.with_secret else None
    client = stored_oauth.OAuthClient(
        ask.client_id or "", "document" if ask.client_id else "registered", ask.client_name,
        encode_list(ask.redirect_uris), encode_names(ask.scopes), "client_secret_basic" if secret else "none",
        hash_client_secret(secret) if secret else None, document=None, tenant=tenant, trusted=ask.trusted,
        pinned=bool(ask.client_id), access_days=ask.access_days, created_at=0.0, created_by=str(caller.principal),
        updated_at=0.0)
    require_right_to_trust(caller, client)
    details = {"client_name": client.name, "tenant": tenant, "trusted": ask.trusted}

    def register(work: Work) -> stored_oauth.OAuthClient:
        if client.client_id and work.find_record(stored_oauth.OAuthClient, client.client_id):
            raise errors.InvalidRequest(f"{client.client_id} is known already; change_client changes it")
        new = replace(client, client_id=client.client_id or work.new_id(), created_at=work.now, updated_at=work.now)
        work.keep_record(new)
        admin.audit_change(engine, work, "client_registered", "warning", caller, about_client=new.client_id, **details)
        return new
    most = -1 if tenant is None else engine.settings.security.oauth.clients_per_tenant      # the operator has no limit
    async with admin.take_room(engine, tenant or "", "clients_per_tenant", most, partial(count_clients, engine, tenant),
                               "clients", "remove_client removes one that is not needed, list_clients shows all"):
        new = await Directory(engine).change(register,
                                             *([(stored_oauth.OAuthClient, (ask.client_id,))] if ask.client_id else []))
    await audit_in_tenant(engine, caller, tenant, "client_registered", "warning", about_client=new.client_id, **details)
    return wire_oauth.RegisteredClient(new.client_id, as_client_record(new), secret)


async def list_clients(engine: Engine, caller: Caller, ask: wire_oauth.ListClients) -> wire_oauth.Clients:
    """List the clients that may ask people for access: registered ones, and those that somebody signed in with."""
    tenant = await tenant_of_client(engine, caller, ask.tenant)
    rows, *ends = await admin.read_page(
        engine, caller, ask, ("clients", tenant), Directory(engine).tenant_id, queries.Rows(stored_oauth.OAuthClient),
        lambda client: tenant in (None, client.tenant))
    return wire_oauth.Clients([as_client_record(client) for client in rows], *ends)


async def change_client(engine: Engine, caller: Caller, ask: wire_oauth.ChangeClient) -> wire_oauth.RegisteredClient:
    """Change a client; what is absent stays as it is.

    To disable it ends its sessions and refuses its tokens, within five seconds everywhere; they stay ended.
    """
    before = await require_client(engine, caller, ask.client_id)
    check_redirects_and_scopes(ask.redirect_uris or None, ask.scopes)
    secret = secrets.token_urlsafe(CLIENT_SECRET_BYTES) if ask.new_secret else None
    if ask.disabled is False and before.disabled_at is not None:
        await end_sessions(engine, before.client_id, caller)      # those that an interrupted call has left

    def change(work: Work) -> stored_oauth.OAuthClient:
        old = work.find_record(stored_oauth.OAuthClient, before.client_id)
        if old is None:
            raise not_known(before.client_id)
        new = apply_changes(old, ask, secret, work.now)
        if new != old:
            require_right_to_trust(caller, new)
            work.keep_record(new)
            admin.audit_change(engine, work, "client_changed", "warning", caller, about_client=old.client_id,
                               reason=ask.reason, changed=list_changes(old, new))
        if old.disabled_at is None and new.disabled_at is not None:
            revoke_client(work, old.client_id, caller, ask.reason)
        return new
    directory = Directory(engine)
    after = await directory.change(change, (stored_oauth.OAuthClient, (before.client_id,)), *REVOCATION_KEYS)
    if after != before:
        await audit_in_tenant(engine, caller, after.tenant, "client_changed", "warning", about_client=after.client_id,
                              reason=ask.reason, changed=list_changes(before, after))
    if after.disabled_at is not None:
        await end_sessions(engine, after.client_id, caller)
    return wire_oauth.RegisteredClient(after.client_id, as_client_record(after), secret)


async def remove_client(engine: Engine, caller: Caller, ask: wire_oauth.RemoveClient) -> wire.Ok:
    """Remove a client; that ends its sessions and refuses its tokens, within five seconds everywhere.

    One that registered itself may register again; one with a metadata document comes back when it asks again, so
    disable that one instead.
    """
    client = await require_client(engine, caller, ask.client_id)
    directory = Directory(engine)

    def remove(work: Work) -> None:
        work.drop_record(stored_oauth.OAuthClient, client.client_id)
        revoke_client(work, client.client_id, caller, ask.reason)
        admin.audit_change(engine, work, "client_removed", "warning", caller, about_client=client.client_id,
                           client_name=client.name, reason=ask.reason)
    # Order: while its row is there, the call can be repeated; without it no refresh token of it is good.
    await end_sessions(engine, client.client_id, caller)
    await directory.change(remove, (stored_oauth.OAuthClient, (client.client_id,)), *REVOCATION_KEYS)
    await end_sessions(engine, client.client_id, caller)
    await audit_in_tenant(engine, caller, client.tenant, "client_removed", "warning", about_client=client.client_id,
                          client_name=client.name, reason=ask.reason)
    return wire.Ok(True)


# What they share.


async def count_clients(engine: Engine, tenant: str | None) -> int:
    """Return how many clients are registered for the people of a tenant."""
    return len([1 async for client in Directory(engine).read(stored_oauth.OAuthClient) if client.tenant == tenant])


async def require_client(engine: Engine, caller: Caller, client_id: str) -> stored_oauth.OAuthClient:
    """Return a client that the caller administers; raises ClientNotFound."""
    tenant = await tenant_of_client(engine, caller, None)
    client = await Directory(engine).find(stored_oauth.OAuthClient, client_id)
    if client is None or tenant not in (None, client.tenant):
        raise not_known(client_id)
    return client


def not_known(client_id: str) -> errors.ClientNotFound:
    """Return the refusal of an unknown client."""
    return errors.ClientNotFound(f"no client {client_id}; list_clients shows all")


def check_redirects_and_scopes(redirect_uris: list[str] | None, scopes: frozenset[str] | None) -> None:
    """Refuse redirect URIs that could lead elsewhere, and scopes that there are not."""
    if redirect_uris is not None and (why := check_redirects(redirect_uris)):
        raise errors.InvalidRequest(why)
    if unknown := (scopes or frozenset()) - SCOPES:
        raise errors.InvalidRequest(f"no scope {min(unknown)}; there are {', '.join(sorted(SCOPES))}")


def check_document_url(engine: Engine, caller: Caller, ask: wire_oauth.RegisterClient) -> None:
    """Refuse to pin anything but the URL of a document, which clients of all tenants have as their id."""
    if ask.client_id is None:
        return
    if not admin.operates(engine, caller):
        raise forbid(caller, "only the operator, an admin of the default tenant, pins a metadata document")
    if why := find_document_url_flaw(ask.client_id):
        raise errors.InvalidRequest(f"client_id {why}; leave it out, and the gate makes one")
    if ask.with_secret:
        raise errors.InvalidRequest("a client with a metadata document has no secret: its document is public")


def apply_changes(old: stored_oauth.OAuthClient, ask: wire_oauth.ChangeClient, secret: str | None,
                  now: float) -> stored_oauth.OAuthClient:
    """Return a client with the changes that were asked for."""
    pinned = old.pinned if ask.pinned is None else ask.pinned
    if ask.pinned and old.origin != "document":
        raise errors.InvalidRequest(f"{old.client_id} has no metadata document, so there is nothing to pin")
    if old.origin == "document" and not pinned and (ask.redirect_uris is not None or ask.client_name is not None):
        raise errors.InvalidRequest(
            "its metadata document says its name and its redirect URIs; to say them here, pin it")
    if old.origin == "document" and secret is not None:
        raise errors.InvalidRequest("a client with a metadata document has no secret: its document is public")
    if ask.access_days is not None and 0 < ask.access_days < LEAST_ACCESS_DAYS:
        raise errors.InvalidRequest(f"access_days is {LEAST_ACCESS_DAYS} to 90, or 0 for that of the settings")
    disabled_at = old.disabled_at if ask.disabled is None else (old.disabled_at or now) if ask.disabled else None
    return replace(
        old, name=ask.client_name or old.name, pinned=pinned, disabled_at=disabled_at,
        redirect_uris=encode_list(ask.redirect_uris) if ask.redirect_uris is not None else old.redirect_uris,
        scopes=old.scopes if ask.scopes is None else encode_names(ask.scopes) if ask.scopes else None,
        trusted=old.trusted if ask.trusted is None else ask.trusted,
        access_days=old.access_days if ask.access_days is None else ask.access_days or None,
        secret_hash=hash_client_secret(secret) if secret else old.secret_hash,
        auth_method="client_secret_basic" if secret and old.secret_hash is None else old.auth_method)


def list_changes(old: stored_oauth.OAuthClient, new: stored_oauth.OAuthClient) -> list[str]:
    """Return the names of the fields that have changed; their values may be long, or secret."""
    return [name for name in stored_oauth.OAuthClient.__struct_fields__ if getattr(old, name) != getattr(new, name)]


def revoke_client(work: Work, client_id: str, caller: Caller, reason: str | None) -> None:
    """Refuse all access tokens of a client that were issued before now."""
    revoke(work, "client", client_id, work.now + LONGEST_VALID_SECONDS, str(caller.principal), reason)


async def end_sessions(engine: Engine, client_id: str, caller: Caller) -> None:
    """End the sessions of a client, in small transactions."""
    await Directory(engine).change_all(
        stored_oauth.Grant, lambda grant, now: grant.client_id == client_id and grant.ended_at is None,
        lambda work, grant: work.keep_record(
            replace(grant, ended_at=work.now, ended_why=f"client: {caller.principal}")))


def require_right_to_trust(caller: Caller, client: stored_oauth.OAuthClient) -> None:
    """Refuse a trusted client that could get more than the caller has: people are not asked."""
    most = default_scopes("admin") if client.scopes is None else decode_names(client.scopes)
    if client.trusted and (beyond := most - caller.scopes):
        raise forbid_giving(caller, beyond, "trust a client that may get it")


async def tenant_of_client(engine: Engine, caller: Caller, named: str | None) -> str | None:
    """Return the tenant whose people a client is for; None is everybody, which only the operator may choose."""
    if caller.capabilities is not None or caller.task_types is not None:
        raise forbid(caller, "a key that is limited to capabilities or task types cannot administer clients")
    if named is None and admin.operates(engine, caller):
        return None
    return await admin.target_tenant(engine, caller, named)


def hash_client_secret(secret: str) -> str:
    """Return what is stored of a secret; a fast hash is right for 256 random bits."""
    return sha256(secret.encode()).hexdigest()


def encode_list(names: list[str]) -> str:
    """Store a list in its order."""
    return msgspec.json.encode(names).decode()


def as_client_record(client: stored_oauth.OAuthClient) -> wire_oauth.ClientRecord:
    """Show a client without the hash of its secret."""
    return wire_oauth.ClientRecord(
        client.client_id, client.origin, client.name, msgspec.json.decode(client.redirect_uris, type=list[str]),
        client.auth_method, to_utc(client.created_at), client.created_by, to_utc(client.updated_at),
        None if client.scopes is None else sorted(decode_names(client.scopes)), client.tenant,
        bool(client.trusted), bool(client.pinned), client.access_days, to_utc_or_none(client.last_used_at),
        to_utc_or_none(client.disabled_at))


OPERATIONS = [
    Operation(register_client, "POST /v1/clients, POST /admin/oauth/clients", "A", "admin:write", "W"),
    Operation(list_clients, "GET /v1/clients, GET /admin/oauth/clients", "A", "admin:read", "R"),
    Operation(change_client, "POST /v1/clients/{client_id}", "A", "admin:write", "W"),
    Operation(remove_client, "POST /v1/clients/{client_id}/remove", "A", "admin:write", "W"),
]
