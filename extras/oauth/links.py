"""Sign-in links: they sign somebody in where there is no identity provider."""

from __future__ import annotations

import re
import secrets
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from msgspec.structs import replace

from asyncgate import Caller, Engine, Operation, Work
from asyncgate.extras.oauth import wire_oauth
from asyncgate.extras.oauth.user_rows import check_rights, id_of_principal
from asyncgate.parts.identity.admin import audit_change, take_room, tenant_to_issue_for
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.identity.keys_stored import encode_names
from asyncgate.parts.model import errors, stored_oauth
from asyncgate.parts.model.views import to_utc

if TYPE_CHECKING:
    from asyncgate.extras.oauth.server import AuthorizationServer

LINK_SECONDS = 600
# 32 letters and digits that nobody mistakes for each other: 20 of them have 100 random bits.
ALPHABET, CODE_LENGTH, GROUP = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789", 20, 5


def make_code() -> str:
    """Return a new code, in groups that a person can type."""
    letters = "".join([secrets.choice(ALPHABET) for _ in range(CODE_LENGTH)])
    return "-".join([letters[at:at + GROUP] for at in range(0, CODE_LENGTH, GROUP)])


def hash_code(code: str) -> str:
    """Return the hash of a code as somebody typed it: case, blanks and dashes do not matter."""
    return sha256(re.sub(r"[\s-]", "", code).upper().encode()).hexdigest()


async def make_sign_in_link(engine: Engine, caller: Caller,
                            ask: wire_oauth.MakeSignInLink) -> wire_oauth.MadeSignInLink:
    """Make a link that signs somebody in once, within ten minutes; only this answer shows it.

    For teams without an identity provider.  The person opens it in the browser where a client has asked for access,
    or types its code there.  Refused above security.oauth.open_login_links.  Spec 21.2.1.
    """
    if not engine.settings.security.oauth.login_links:
        raise errors.InvalidRequest("sign-in links are off; the setting security.oauth.login_links turns them on")
    tenant = await tenant_to_issue_for(engine, caller, ask.tenant)
    code, now = make_code(), engine.backend.now()
    link = stored_oauth.SignInLink(hash_code(code), tenant, ask.principal_kind, ask.principal_id, ask.role,
                                   encode_names(ask.scopes), now, now + LINK_SECONDS)
    check_rights(caller, link)
    directory = Directory(engine)
    old = [row.link_hash for row in await directory.page(stored_oauth.SignInLink) if row.ends_at < now]

    def keep(work: Work) -> None:
        for hash in old:        # here, because there are as many as were made, and no more
            work.drop_record(stored_oauth.SignInLink, hash)
        work.keep_record(link)
        audit_change(engine, work, "sign_in_link_made", "warning", caller, tenant=tenant, link_for=link.principal_id,
                     link_role=link.role)
    async with take_room(engine, tenant, "open_login_links", engine.settings.security.oauth.open_login_links,
                         partial(count_open_links, directory, tenant, now),
                         "sign-in links that nobody has used yet", "each of them ends after ten minutes",
                         LINK_SECONDS):
        await directory.change(keep, *((stored_oauth.SignInLink, (hash,)) for hash in (*old, link.link_hash)))
    url = f"{engine.settings.public_url.rstrip('/')}/oauth/link?code={code}"
    return wire_oauth.MadeSignInLink(code, url if engine.settings.security.oauth.enabled else None,
                                     to_utc(link.ends_at), tenant, link.principal_kind, link.principal_id, link.role)


async def count_open_links(directory: Directory, tenant: str, now: float) -> int:
    """Return how many links of a tenant may still sign somebody in."""
    return len([1 async for link in directory.read(stored_oauth.SignInLink)
                if link.tenant == tenant and link.used_at is None and link.ends_at > now])


async def use_link(server: AuthorizationServer, code: str) -> stored_oauth.User:
    """Return the user whom a code signs in, and spend it; raises SignInRefused.

    One transaction: of two calls with one code only one succeeds.
    """
    from asyncgate.extras.oauth.admission import SignInRefused, note_sign_in, take_user

    unknown = "This code is not good: it was used, is older than ten minutes, or was mistyped. Ask for a new one."
    link = await server.directory.find(stored_oauth.SignInLink, hash := hash_code(code))
    if link is None or not server.oauth.login_links:
        raise SignInRefused(unknown, "no such sign-in link")
    user_id = id_of_principal(link.tenant, link.principal_kind, link.principal_id)

    def use(work: Work) -> stored_oauth.User | SignInRefused:
        link, known = work.find_record(stored_oauth.SignInLink, hash), work.find_record(stored_oauth.User, user_id)
        if link is None or link.used_at is not None or work.now >= link.ends_at:
            return SignInRefused(unknown, "the sign-in link was used or has expired")
        if known is not None and known.disabled_at is not None:
            return SignInRefused("An administrator has disabled your account.", f"user {user_id} is disabled")
        work.keep_record(replace(link, used_at=work.now))
        user = admit_by_link(link, known, user_id, work.now)
        note_sign_in(server, work, user, "link")
        return user
    done = await server.directory.change(use, (stored_oauth.SignInLink, (hash,)), (stored_oauth.User, (user_id,)))
    return take_user(server, done, "link")


def admit_by_link(link: stored_oauth.SignInLink, known: stored_oauth.User | None, user_id: str,
                  now: float) -> stored_oauth.User:
    """Return the user of a link, with the rights that the link says."""
    if known is not None:
        return replace(known, role=link.role, scopes=link.scopes, last_seen_at=now)
    subject = f"{link.tenant} {link.principal_kind} {link.principal_id}"
    return stored_oauth.User(user_id, "", subject, "", link.principal_id, link.tenant, link.principal_kind,
                             link.principal_id,
                             link.role, link.scopes, None, "sign-in link", now, now)


OPERATIONS = [
    Operation(make_sign_in_link, "POST /v1/sign-in-links", "A", "admin:write", "W"),
]
