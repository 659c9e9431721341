"""Administration of access tokens and of the keys that sign them (spec 21.9.1).

The rows are there while the authorization server is off, too: tokens of other issuers can be revoked as well.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode
from collections.abc import Callable

import msgspec
from msgspec import Struct

from asyncgate import Caller, Engine, Extension, Operation, Work, forbid
from asyncgate.extras.oauth import wire_oauth
from asyncgate.parts.identity import revocations
from asyncgate.parts.identity.admin import audit_change, target_tenant
from asyncgate.parts.identity.directory import Directory, audit_in_tenant
from asyncgate.parts.identity.keys_stored import KEY_PREFIX
from asyncgate.parts.identity.notices import write_notice
from asyncgate.parts.model import errors
from asyncgate.parts.model.views import to_utc


class SaidByToken(Struct):
    """What the text of a token says of itself."""

    tenant_id: str = ""
    jti: str = ""


async def revoke_token(engine: Engine, caller: Caller, ask: wire_oauth.RevokeToken) -> wire_oauth.RevokedToken:
    """Revoke one access token, of the gate or of another issuer, by its id (jti) or its text.

    This process refuses it at once, others within five seconds.  To end a session or all that a person has, see
    list_sessions and change_user; for all tokens of a tenant call rotate_credentials.  Spec 21.9.1.
    """
    if caller.capabilities is not None or caller.task_types is not None:
        raise forbid(caller, "a key that is limited to capabilities or task types cannot revoke tokens")
    token_id, named = ask.token_id, ask.tenant
    if (token_id is None) == (ask.access_token is None):
        raise errors.InvalidRequest("send either token_id or access_token")
    if ask.access_token is not None:
        claims = read_token_text(ask.access_token)
        token_id, named = claims.jti, claims.tenant_id
    tenant, until = await target_tenant(engine, caller, named), engine.backend.now() + revocations.LONGEST_VALID_SECONDS
    assert token_id is not None
    about = {"about_token": token_id, "of_tenant": tenant, "reason": ask.reason}

    def take_back(work: Work) -> None:
        revocations.revoke(work, "token", revocations.name_token(tenant, token_id), until, str(caller.principal),
                           ask.reason)
        audit_change(engine, work, "token_revoked", "warning", caller, **about)
    await Directory(engine).change(take_back, *revocations.REVOCATION_KEYS)
    await audit_in_tenant(engine, caller, tenant, "token_revoked", "warning", **about)
    await write_notice(engine, tenant, "token_revoked", token_id=token_id, reason=ask.reason, by=str(caller.principal))
    return wire_oauth.RevokedToken(token_id, tenant, to_utc(until))


def read_token_text(token: str) -> SaidByToken:
    """Read which token a text is; its signature does not matter, because a false text revokes no good token.

    The error does not repeat the text, which is a secret.
    """
    if token.startswith(KEY_PREFIX):
        raise errors.InvalidRequest("that is an issued key, not an access token; call revoke_key")
    try:
        payload = token.split(".")[1]
        claims = msgspec.json.decode(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), type=SaidByToken)
    except (ValueError, IndexError):
        raise errors.InvalidRequest("access_token is not the text of an access token (a JWT)") from None
    if not claims.jti or not claims.tenant_id:
        raise errors.InvalidRequest(
            "the token has no id (jti) by which it could be revoked; rotate_credentials refuses all "
            "tokens of its tenant that were issued before")
    return claims


class PublishedKeys(Extension):
    """Which keys sign and verify in this process."""

    def __init__(self, find: Callable[[], list[wire_oauth.SigningKeyRecord]]) -> None:
        self.find = find


async def list_signing_keys(engine: Engine, caller: Caller,
                            ask: wire_oauth.ListSigningKeys) -> wire_oauth.SigningKeyRecords:
    """List the keys that sign access tokens, as the process that answers has them: the current one first.

    Retired keys verify until their time.  Without an authorization server there are none.  `asyncgate keys signing`
    makes and rotates them.
    """
    published = engine.find_extension(PublishedKeys)
    return wire_oauth.SigningKeyRecords([] if published is None else published.find())


OPERATIONS = [
    Operation(revoke_token, "POST /v1/access-tokens/revoke", "A", "admin:write", "W", idempotent=True),
    Operation(list_signing_keys, "GET /v1/signing-keys", "A", "admin:read", "R"),
]
