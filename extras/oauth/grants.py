"""Sessions of people with clients: the authorization code, the refresh tokens, and what either gives.

    agc_ grant id . secret                  a code: good once, for a minute
    agr_ grant id . secret . mark           a refresh token: good once; each gives its successor

The grant's id is not secret.  The secret has 256 bits; of the whole text the database has only the SHA-256.  The mark
is a MAC of what stands before it, so the gate knows its own old tokens without a list of them: whoever sends one again
shows that a token is in two hands, and whoever invents one ends nobody's session.

The rules are pure: they read and change `Work`, and return a `Denial` where a transaction has to be kept although the
client is refused.
"""

from __future__ import annotations

import base64
import re
import secrets
import uuid
from hashlib import sha256
from hmac import compare_digest, digest

from msgspec import Struct
from msgspec.structs import replace

from asyncgate import SCOPES, Caller, Work
from asyncgate.extras.oauth.clients import SHORTEST_DAYS, note_sign_in
from asyncgate.extras.oauth.requests import AuthorizationRequest
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.extras.oauth.user_rows import scopes_of
from asyncgate.extras.oauth.wire import OAuthError
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.keys_stored import decode_names, encode_names
from asyncgate.parts.identity.session_rows import describe_grant, end_grant
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.model.durations import DAY_SECONDS

CODE_SECONDS = 60.0
LONGEST_DAYS = 90       # the life of an access token (spec 21.2.1)
ID, SECRET, MARK = r"([0-9a-f-]{36})", r"[A-Za-z0-9_-]{43}", r"[A-Za-z0-9_-]{22}"
CODE = re.compile(rf"agc_{ID}\.{SECRET}\Z")
REFRESH = re.compile(rf"agr_{ID}\.{SECRET}\.{MARK}\Z")
VERIFIER = re.compile(r"[A-Za-z0-9._~-]{43,128}\Z")     # RFC 7636 4.1


class Denial(Struct, frozen=True):
    """Why a client gets no token; the transaction that found it out is kept."""

    code: str
    description: str
    because: str | None = None      # the real reason, for the audit log
    event: str = ""                 # what the person's tenant is told

    def error(self) -> OAuthError:
        """Return the error that the client is told."""
        return OAuthError(self.code, self.description, because=self.because)


class Exchange(Struct, frozen=True):
    """What a client sends to exchange a code, and the first refresh token if it may."""

    code: str
    client_id: str
    redirect_uri: str
    verifier: str
    resource: str | None    # as list_resources writes it; None: not named
    place: str              # the network it comes from
    first: str

    def __repr__(self) -> str:
        return f"<Exchange by {self.client_id}>"    # code and token stay out of logs and tracebacks


class Renewal(Struct, frozen=True):
    """What a client sends with a refresh token, and the seed of the successor if it may have one."""

    token: str
    client_id: str
    scopes: frozenset[str] | None   # None: all of the session
    resource: str | None
    place: str
    seed: str

    def __repr__(self) -> str:
        return f"<Renewal by {self.client_id}>"     # the token stays out of logs and tracebacks


class Allowed(Struct, frozen=True):
    """What a client gets: an access token of this session with these scopes, and a refresh token."""

    grant: stored_oauth.Grant
    scopes: frozenset[str]
    refresh_token: str
    moved: bool = False             # whether the session was last used from another network

    def __repr__(self) -> str:
        return f"<Allowed {self.grant.grant_id}>"   # the token stays out of logs and tracebacks


# The texts.


def read_grant_id(form: re.Pattern[str], text: str) -> str | None:
    """Return the id of the grant that a code or a token names; None for another text."""
    return match[1] if (match := form.match(text)) else None


def encode_bytes(text: bytes) -> str:
    """Encode bytes as base64url without padding."""
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def hash_text(text: str) -> str:
    """Return what is stored of a code or a token: it has 256 random bits, so a fast hash is right."""
    return sha256(text.encode()).hexdigest()


def is_text_of(text: str, hash: str | None) -> bool:
    """Whether a stored hash belongs to a text."""
    return hash is not None and compare_digest(hash_text(text), hash)


def write_refresh(key: bytes, grant_id: str, secret: str) -> str:
    """Return the refresh token with a secret."""
    start = f"agr_{grant_id}.{secret}"
    return f"{start}.{mark_text(key, start)}"


def mark_text(key: bytes, start: str) -> str:
    """Return the MAC at the end of a refresh token."""
    return encode_bytes(digest(key, b"mark\0" + start.encode(), "sha256")[:16])


def is_our_own(key: bytes, token: str) -> bool:
    """Whether this gate has made a refresh token, under the present signing key."""
    start, _, mark = token.rpartition(".")
    return compare_digest(mark_text(key, start), mark)


def derive_successor(key: bytes, token: str, grant_id: str, seed: str) -> str:
    """Return the successor of a refresh token: the same each time, and only the gate can tell it."""
    secret = encode_bytes(digest(key, f"successor\0{seed}\0{token}".encode(), "sha256"))
    return write_refresh(key, grant_id, secret)


# Making a grant.


async def make_grant(server: AuthorizationServer, client: stored_oauth.OAuthClient, asked: AuthorizationRequest,
                     user: stored_oauth.User,
                     scopes: frozenset[str]) -> str:
    """Begin a session of a person with a client; return its code.  One transaction."""
    if client.tenant not in (None, user.tenant):
        raise OAuthError("access_denied", "this client is for people of another tenant")
    allowed = asked.scopes & scopes & limit_scopes(user, client)
    if not allowed:
        raise OAuthError("invalid_scope", "nothing is left of the scopes that the client asks for: the person or the "
                                          "client may have none of them")
    grant_id, secret = str(uuid.uuid4()), encode_bytes(secrets.token_bytes(32))
    code, jwt = f"agc_{grant_id}.{secret}", server.settings.security.jwt

    def make(work: Work) -> bool:
        if not note_sign_in(work, client):      # it was removed or disabled while the person signed in
            return False
        grant = stored_oauth.Grant(
            grant_id, user.user_id, client.client_id, user.tenant, user.principal_kind, user.principal_id, user.role,
            encode_names(allowed) or "[]", asked.resource, asked.redirect_uri, asked.challenge, hash_text(code),
            work.now + CODE_SECONDS, find_access_seconds(server, client, user), work.now,
            work.now + jwt.refresh_token_ttl_days * DAY_SECONDS)
        work.keep_record(grant)
        audit_change(server.engine, work, "session_allowed", "info", caller_of_grant(server, grant),
                     **describe_grant(grant), scopes=sorted(allowed))
        return True
    if not await server.directory.change(make, (stored_oauth.Grant, (grant_id,)),
                                         (stored_oauth.OAuthClient, (client.client_id,))):
        raise OAuthError("access_denied", "this client was removed or disabled a moment ago")
    return code


def limit_scopes(user: stored_oauth.User, client: stored_oauth.OAuthClient) -> frozenset[str]:
    """Return the most that a client may get of a person's rights."""
    own = scopes_of(user) & SCOPES
    return own if client.scopes is None else own & decode_names(client.scopes)


def find_access_seconds(server: AuthorizationServer, client: stored_oauth.OAuthClient, user: stored_oauth.User) -> int:
    """Return the life of access tokens: the shorter of the client's and the person's own, else the setting."""
    days = [limit for limit in (client.access_days, user.access_days) if limit is not None]
    chosen = min(days, default=server.settings.security.jwt.access_token_ttl_days)
    return int(min(max(chosen, SHORTEST_DAYS), LONGEST_DAYS) * DAY_SECONDS)


def caller_of_grant(server: AuthorizationServer, grant: stored_oauth.Grant) -> Caller:
    """Return the person of a session, as the audit log names who does something."""
    return Caller(server.settings.default_tenant_id, grant.principal, grant.role, frozenset())


# What a code and a refresh token give.


def exchange_code(server: AuthorizationServer, work: Work, sent: Exchange) -> Allowed | Denial:
    """Burn a code: return what the client gets, or why nothing.

    Order: all that binds the code is checked before the code is burnt, so a client that errs may try again, and
    nobody who has only seen the code can spoil it.  A code that was used before ends the session (RFC 6749 4.1.2).
    """
    grant = work.find_record(stored_oauth.Grant, read_grant_id(CODE, sent.code) or "")
    if grant is None or not is_text_of(sent.code, grant.code_hash):
        return refuse_code("no such code")
    if grant.code_used_at is not None:
        ended = end_grant(server.engine, work, grant, caller_of_grant(server, grant), "code_replay", "critical")
        return refuse_code("the code was used before", event="code_replay" if ended else "")
    if why := find_flaw_of_exchange(grant, sent, work.now):
        return refuse_code(why)
    if denial := find_barrier(work, grant, sent.resource):
        return denial
    grant = replace(grant, code_used_at=work.now, refresh_hash=hash_text(sent.first), last_used_at=work.now,
                    place=sent.place)
    work.keep_record(grant)
    audit_change(server.engine, work, "session_begun", "info", caller_of_grant(server, grant), **describe_grant(grant))
    return Allowed(grant, find_scopes(work, grant), sent.first)


def find_flaw_of_exchange(grant: stored_oauth.Grant, sent: Exchange, now: float) -> str | None:
    """Return why a client may not exchange a code; None if it may."""
    if grant.client_id != sent.client_id:
        return "the code is another client's"
    if now >= grant.code_until:
        return "the code has expired"
    if grant.redirect_uri != sent.redirect_uri:
        return "redirect_uri is not that of the authorization request"
    if not grant.challenge:
        return "the authorization request had no code_challenge"
    if not VERIFIER.match(sent.verifier):
        return "code_verifier does not have 43 to 128 characters of A-Z a-z 0-9 - . _ ~"
    if not compare_digest(encode_bytes(sha256(sent.verifier.encode()).digest()), grant.challenge):
        return "code_verifier does not fit the code_challenge"
    return None


def renew(server: AuthorizationServer, work: Work, sent: Renewal) -> Allowed | Denial:
    """Use a refresh token: return what the client gets, or why nothing.

    The transaction has locked the row, so of many who send one token one rotates it; the others find themselves within
    the grace, and get the same successor.  Real clients send one token from several processes at once.
    """
    grant, key = work.find_record(stored_oauth.Grant,
                                  read_grant_id(REFRESH, sent.token) or ""), server.keys.secret("refresh")
    if grant is None:
        return refuse_session("no such session")
    if is_text_of(sent.token, grant.refresh_hash):
        if grant.client_id != sent.client_id:
            return refuse_session("the refresh token is another client's", event="refresh_by_other_client")
        return find_refusal_of_renewal(work, grant, sent) or rotate(work, key, grant, sent)
    if not is_text_of(sent.token, grant.previous_hash):
        return end_family(server, work, grant) if is_our_own(key, sent.token) else refuse_session("no such token")
    if not is_within_grace(server, grant, sent, work.now):
        return end_family(server, work, grant)
    return find_refusal_of_renewal(work, grant, sent) or repeat_successor(work, key, grant, sent)


def rotate(work: Work, key: bytes, grant: stored_oauth.Grant, sent: Renewal) -> Allowed:
    """Replace the refresh token that is in force."""
    token = derive_successor(key, sent.token, grant.grant_id, sent.seed)
    moved = grant.place != sent.place
    grant = replace(grant, refresh_hash=hash_text(token), previous_hash=grant.refresh_hash, seed=sent.seed,
                    rotated_at=work.now, rotations=grant.rotations + 1, place=sent.place, last_used_at=work.now)
    work.keep_record(grant)
    return Allowed(grant, find_scopes(work, grant, sent.scopes), token, moved)


def is_within_grace(server: AuthorizationServer, grant: stored_oauth.Grant, sent: Renewal, now: float) -> bool:
    """Whether a used refresh token still gives its successor: for a moment, to the same client and network."""
    return (now - (grant.rotated_at or 0.0) < server.oauth.refresh_grace_seconds
            and (grant.client_id, grant.place) == (sent.client_id, sent.place))


def repeat_successor(work: Work, key: bytes, grant: stored_oauth.Grant, sent: Renewal) -> Allowed | Denial:
    """Give the successor of a refresh token once more; it is the token in force."""
    successor = derive_successor(key, sent.token, grant.grant_id, grant.seed or "")
    if not is_text_of(successor, grant.refresh_hash):
        return refuse_session("the signing key has changed since the token was used, so its successor is unknown")
    work.keep_record(grant := replace(grant, last_used_at=work.now))
    return Allowed(grant, find_scopes(work, grant, sent.scopes), successor)


def end_family(server: AuthorizationServer, work: Work, grant: stored_oauth.Grant) -> Denial:
    """End the session of a refresh token that was used before: it may be in two hands (RFC 9700 4.14.2)."""
    ended = end_grant(server.engine, work, grant, caller_of_grant(server, grant), "refresh_replay", "critical")
    return refuse_session("the refresh token was used before", "refresh_replay" if ended else "used_after_sign_out")


def end_by_token(server: AuthorizationServer, work: Work, token: str, client_id: str) -> Denial | None:
    """End the session of a refresh token that its client gives back; any that the session ever had is good for it."""
    grant = work.find_record(stored_oauth.Grant, read_grant_id(REFRESH, token) or "")
    if grant is None or not (is_text_of(token, grant.refresh_hash) or is_text_of(token, grant.previous_hash)
                             or is_our_own(server.keys.secret("refresh"), token)):
        return None
    if grant.client_id != client_id:
        return Denial("invalid_grant", "the token is another client's", event="revocation_by_other_client")
    end_grant(server.engine, work, grant, caller_of_grant(server, grant), "session_ended", "info", "by the client")
    return None


# What stands in the way.


def find_refusal_of_renewal(work: Work, grant: stored_oauth.Grant, sent: Renewal) -> Denial | None:
    """Return why a session gives no new token although its refresh token is good; None if it does."""
    if denial := find_barrier(work, grant, sent.resource):
        return denial
    if sent.scopes is not None and not sent.scopes <= decode_names(grant.scopes):
        return Denial("invalid_scope", "a refresh may ask for fewer scopes than the person allowed, never for more")
    if not find_scopes(work, grant, sent.scopes):
        return Denial("invalid_scope", "the person or the client has none of these scopes any more; ask for others")
    return None


def find_barrier(work: Work, grant: stored_oauth.Grant, resource: str | None) -> Denial | None:
    """Return why a session gives no token; None if it does."""
    user, client = work.find_record(stored_oauth.User, grant.user_id), work.find_record(stored_oauth.OAuthClient,
                                                                                        grant.client_id)
    if grant.ended_at is not None:
        return refuse_session(f"the session was ended: {grant.ended_why}", event="used_after_sign_out")
    if work.now >= grant.ends_at:
        return refuse_session("the session has reached its end")
    if user is None or user.disabled_at is not None:
        return refuse_session("the person was disabled or removed")
    if client is None or client.disabled_at is not None or client.tenant not in (None, grant.tenant):
        return refuse_session("the client was disabled or removed")
    if (user.tenant, user.principal, user.role) != (grant.tenant, grant.principal, grant.role):
        return refuse_session("the person acts as somebody else now")
    if not find_scopes(work, grant):
        return refuse_session("the person or the client has none of the scopes any more")
    if resource not in (None, grant.resource):
        return Denial("invalid_target", f"the person allowed access to {grant.resource}, to no other resource")
    return None


def find_scopes(work: Work, grant: stored_oauth.Grant, asked: frozenset[str] | None = None) -> frozenset[str]:
    """Return the scopes of a new access token: those of the session that person and client still have."""
    user, client = work.find_record(stored_oauth.User, grant.user_id), work.find_record(stored_oauth.OAuthClient,
                                                                                        grant.client_id)
    if user is None or client is None:
        return frozenset()
    still = decode_names(grant.scopes) & limit_scopes(user, client)
    return still if asked is None else still & asked


def refuse_code(because: str, event: str = "") -> Denial:
    """Refuse a code; the client is not told why."""
    return Denial("invalid_grant", "the code is unknown, used or expired, or it is not for this client_id, "
                   "redirect_uri and code_verifier; ask for authorization again", because, event)


def refuse_session(because: str, event: str = "") -> Denial:
    """Refuse a refresh token; the client is not told why."""
    return Denial("invalid_grant", "the refresh token is unknown, used, expired or revoked; ask for authorization "
                   "again", because, event)
