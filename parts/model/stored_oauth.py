"""The rows of the authorization server: who may sign in, which clients may ask, what was granted, what was revoked.

They stand in the default tenant, the operator's: a client, a person and a session are known to the gate before it
knows their tenant.  The tenant that a session is for is a field.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from asyncgate.parts.model import wire
from asyncgate.parts.model.cards import (
    HOURLY,
    OF_TENANT,
    Actor,
    Content,
    IdText,
    Json,
    Location,
    Person,
    Plain,
    Proof,
    stored,
)

ClientAuth = Literal["none", "client_secret_basic", "client_secret_post", "private_key_jwt"]
RevocationKind = Literal["token", "session", "client", "user", "principal", "console"]


@stored("oauth_clients", "clients that may ask people for access",
        "until an admin removes it; one that registered itself, `security.oauth.client_retention_days` if nobody signs "
        "in with it, and 100 days after the last sign-in",
        "that admin, or upkeep, hourly", of_operator=True, rowid=True)
class OAuthClient(Struct, frozen=True):
    """A client that may ask people for access."""

    client_id: IdText                   # a UUID, or the URL of its metadata document
    origin: Literal["registered", "dynamic", "document"]  # by an admin, by itself (RFC 7591), by its document
    name: Person[str]                   # as people see it
    redirect_uris: Content[Json]        # JSON array
    scopes: Plain[Json | None]          # JSON array, the most it may get; None is any
    auth_method: ClientAuth             # how it proves itself at the token endpoint
    secret_hash: Proof[str | None]      # SHA-256 of its secret, which has 256 random bits
    document: Content[Json | None]      # its metadata document as it was last read
    tenant: Plain[str | None]           # whose people may use it; None is everybody
    trusted: bool                       # true: people are not asked for consent
    pinned: bool                        # whether its document is never read again
    access_days: int | None             # life of its access tokens; None: the setting
    created_at: float                   # when
    created_by: Actor[str]              # the principal that registered it
    updated_at: float                   # of a document: when it was last read
    last_used_at: float | None = None   # when somebody last signed in with it
    disabled_at: float | None = None    # since when nobody may use it

    def __repr__(self) -> str:
        return f"<OAuthClient {self.client_id}>"    # the hash stays out of logs and tracebacks


@stored("oauth_users", "people who may sign in", "until an admin removes them", "that admin", of_operator=True,
        rowid=True)
class User(Struct, frozen=True):
    """A person who may sign in, or is invited to."""

    user_id: Person[IdText]             # derived from issuer and subject; of an invitation, from its e-mail address
    issuer: Person[str]                 # the identity provider; empty: invited, or signed in with a link
    subject: Person[str]                # its name for the person
    email: Person[str]                  # verified, in lower case; empty: unknown
    name: Person[str]                   # shown to people, proves nothing
    tenant: Plain[str]                  # that the person belongs to
    principal_kind: Actor[wire.Kind]    # the person acts as this principal
    principal_id: Actor[str]            # its id
    role: wire.Role                     # of the access tokens
    scopes: Plain[Json | None]          # JSON array; None: by the role
    access_days: int | None             # life of access tokens; None: the setting
    admitted_by: Actor[str]             # who or which rule let the person in
    created_at: float                   # when
    last_seen_at: float | None = None   # when the person last signed in
    disabled_at: float | None = None    # since when the person may not sign in
    accepted_as: Person[str | None] = None  # of an invitation: the user who accepted it

    @property
    def principal(self) -> wire.Principal:
        """Return the principal that the person acts as."""
        return wire.Principal(self.principal_kind, self.principal_id)


@stored("oauth_consents", "what people let clients do",
        "until it is withdrawn; `security.oauth.session_retention_days`, or as long as its last session is kept",
        "the person, an admin, or upkeep, hourly", key="user_id client_id", of_operator=True, rowid=True)
class Consent(Struct, frozen=True):
    """What a person lets a client do."""

    user_id: Person[IdText]             # the person
    client_id: IdText                   # the client
    scopes: Plain[Json]                 # JSON array
    redirect_uri: Content[str]          # where the client got its answer; another place needs consent again
    given_at: float                     # when


@stored("oauth_grants", "sessions of people with clients", "`security.oauth.session_retention_days` after its end",
        HOURLY, of_operator=True, rowid=True)
class Grant(Struct, frozen=True):
    """A session of a person with a client: its authorization code, then its family of refresh tokens."""

    grant_id: IdText                    # the sid of its access tokens
    user_id: Person[IdText]             # the person
    client_id: IdText                   # the client
    tenant: Plain[str]                  # that its access tokens are for
    principal_kind: Actor[wire.Kind]    # its access tokens are this principal's
    principal_id: Actor[str]            # its id
    role: wire.Role                     # of its access tokens
    scopes: Plain[Json]                 # JSON array
    resource: Content[str]              # the URL that its tokens are for
    redirect_uri: Content[str]          # of the authorization request; the exchange must repeat it
    challenge: Proof[str]               # S256, base64url
    code_hash: Proof[str]               # SHA-256 of the code
    code_until: float                   # when the code expires
    access_seconds: int                 # life of its access tokens
    created_at: float                   # when the person allowed it
    ends_at: float                      # no token of it is valid after that
    code_used_at: float | None = None   # when the code was exchanged
    refresh_hash: Proof[str | None] = None  # SHA-256 of the refresh token in force
    previous_hash: Proof[str | None] = None  # of the one before, which for a moment gives the same successor again
    seed: Proof[str | None] = None      # what the one in force was derived with from the one before
    rotated_at: float | None = None     # when that was
    rotations: int = 0                  # how often
    place: Location[str] = ""           # network of the last rotation
    last_used_at: float | None = None   # when it last gave an access token
    ended_at: float | None = None       # when it was ended before its time
    ended_why: Plain[str | None] = None  # by whom, or why

    @property
    def principal(self) -> wire.Principal:
        """Return the principal that its tokens stand for."""
        return wire.Principal(self.principal_kind, self.principal_id)

    def __repr__(self) -> str:
        return f"<Grant {self.grant_id}>"   # the hashes stay out of logs and tracebacks


@stored("oauth_links", "one-time links that sign somebody in",
        "`security.oauth.session_retention_days` after it was used or ended", HOURLY, of_operator=True, rowid=True)
class SignInLink(Struct, frozen=True):
    """A one-time link that signs somebody in where there is no identity provider."""

    link_hash: Proof[IdText]            # SHA-256 of its secret
    tenant: Plain[str]                  # that its user belongs to
    principal_kind: Actor[wire.Kind]    # its user acts as this principal
    principal_id: Actor[str]            # its id
    role: wire.Role                     # of the access tokens
    scopes: Plain[Json | None]          # JSON array; None: by the role
    created_at: float                   # when
    ends_at: float                      # until when it signs somebody in
    used_at: float | None = None        # when it did

    def __repr__(self) -> str:
        return "<SignInLink>"           # the hash stays out of logs and tracebacks


@stored("revocations", "access tokens that are refused before they expire",
        "until all tokens that it refuses have expired", HOURLY, append_only=True, of_operator=True,
        left_alone="refuses access tokens until they have expired, and goes then", rowid=True)
class Revocation(Struct, frozen=True):
    """Access tokens that are refused although they have not expired; append-only, numbered without a gap."""

    revocation_id: IdText               # the number, written so that it sorts
    number: int                         # 1, 2, 3, …
    kind: RevocationKind                # token, session, client, user, principal or console
    subject: Person[str]                # the jti, sid, client_id or sub; of a principal its tenant, kind and id; of the
                                        # console a session, or the credential of several
    since: float                        # tokens that were issued before then
    expires_at: float                   # when the last of them has expired anyway
    revoked_at: float                   # when
    revoked_by: Actor[str]              # the principal that did it
    reason: Content[str | None]         # why


@stored("revocation_heads", "where the revocations end", OF_TENANT, "nobody: no number is given twice", single=True,
        of_operator=True, left_alone="a number")
class RevocationHead(Struct, frozen=True):
    """The number of the last revocation."""

    number: int = 0                     # of the last one
