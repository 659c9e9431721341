"""What goes over the wire to administer the authorization server."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from asyncgate.parts.model.errors import (
    ClientNotFound,
    InvalidTransition,
    QuotaExceeded,
    SessionNotFound,
    TenantNotFound,
    UserNotFound,
)
from asyncgate.parts.model.examples import (
    CLIENT,
    CLIENT_ID,
    JTI,
    KID,
    LATER,
    NOW,
    PERSON,
    SESSION,
    SESSION_ID,
    TENANT_ID,
    USER_ID,
)
from asyncgate.parts.model.stored_oauth import ClientAuth
from asyncgate.parts.model.wire import Ask, GivenKind, GivenRole, Name, PageAsk, Text, says
from asyncgate.parts.model.wire_admin import Scopes, Whose

# Programs.

ClientId = Annotated[str, Meta(min_length=1, max_length=500, pattern="^[!-~]+$(?!\\n)")]
RedirectUris = Annotated[list[Annotated[str, Meta(max_length=2048)]], Meta(min_length=1, max_length=20)]
AccessDays = Annotated[int, Meta(ge=5, le=90)]      # spec 21.2.1
AnyDays = Annotated[int, Meta(ge=0, le=90)]
TokenText = Annotated[str, Meta(min_length=1, max_length=8192)]


class RegisterClient(Ask, kw_only=True):
    """Register a program."""

    example = ({"client_name": "My Agent", "redirect_uris": ["https://myapp.com/oauth/callback"], "scopes": [
        "tasks:read", "tasks:write", "receipts:read"]}, {"client_id": CLIENT_ID, "client": CLIENT})
    refusals = (TenantNotFound,)
    tenant: Annotated[Name | None, says("whose people may use it; the operator's default is everybody")] = None
    client_id: Annotated[ClientId | None, says("the URL of its metadata document, to pin what you say here instead of "
                                               "reading the document; default: a new UUID")] = None
    client_name: Annotated[Name, says("its name, which people see when they allow it in")]
    redirect_uris: Annotated[RedirectUris, says("where it gets its answer: https, or http on loopback with any port, "
                                                "or the scheme of an app")]
    scopes: Annotated[Scopes | None, says("the most it may get; default any")] = None
    trusted: Annotated[bool, says("whether people are not asked for consent")] = False
    access_days: Annotated[AccessDays | None, says("life of its access tokens; default by the settings")] = None
    with_secret: Annotated[bool, says("for a program on a server: make a secret, shown once")] = False


class ListClients(PageAsk, kw_only=True):
    """List programs."""

    example = ({"limit": 20}, {"clients": [CLIENT]})
    refusals = (TenantNotFound,)
    tenant: Annotated[Name | None, says("only programs for this tenant; the operator's default is all")] = None


class ClientAsk(Ask, kw_only=True):
    """A request about one program."""

    needed: ClassVar[tuple[str, ...]] = ("client_id",)
    refusals = (ClientNotFound,)
    client_id: Annotated[ClientId, says("its id: a UUID, or the URL of its metadata document")] = ""


class ChangeClient(ClientAsk, kw_only=True):
    """Change a program."""

    example = ({"client_id": CLIENT_ID, "disabled": True, "reason": "its maker is gone"},
               {"client_id": CLIENT_ID, "client": {**CLIENT, "disabled_at": LATER}})
    client_name: Annotated[Name | None, says("the name that people see")] = None
    redirect_uris: Annotated[RedirectUris | None, says("where people are sent back to, instead of the old ones")] = None
    scopes: Annotated[Scopes | None, says("the most it may get; an empty list is any")] = None
    trusted: Annotated[bool | None, says("whether people are not asked for consent")] = None
    pinned: Annotated[bool | None, says("whether its metadata document is not read again")] = None
    disabled: Annotated[bool | None, says("whether nobody may use it; that ends its sessions")] = None
    access_days: Annotated[AnyDays | None, says("life of its access tokens; 0 is that of the settings")] = None
    new_secret: Annotated[bool, says("make a new secret, shown once; the old one is refused at once")] = False
    reason: Annotated[Text | None, says("why; audited")] = None


class RemoveClient(ClientAsk, kw_only=True):
    """Remove a program."""

    example = ({"client_id": CLIENT_ID, "reason": "replaced"}, {"ok": True})
    reason: Annotated[Text | None, says("why; audited")] = None


class ClientRecord(Struct, omit_defaults=True):
    """A program, without its secret."""

    client_id: str
    origin: str                         # registered, dynamic or document
    client_name: str
    redirect_uris: list[str]
    auth_method: ClientAuth
    created_at: datetime
    created_by: str
    updated_at: datetime
    scopes: list[str] | None = None     # the most it may get; absent: any
    tenant: str | None = None           # whose people may use it; absent: everybody
    trusted: bool = False
    pinned: bool = False
    access_days: int | None = None
    last_used_at: datetime | None = None
    disabled_at: datetime | None = None


class RegisteredClient(Struct, omit_defaults=True):
    """A program; a new secret is shown only now and stored nowhere."""

    client_id: str
    client: ClientRecord
    client_secret: str | None = None


class Clients(Struct):
    """A page of programs."""

    columns = "client_id client_name origin auth_method trusted disabled_at last_used_at"
    clients: list[ClientRecord]
    next_cursor: str | None = None
    cursor: str | None = None


# People.

Email = Annotated[str, Meta(min_length=3, max_length=200)]
UserState = Literal["invited", "active", "disabled"]


class ListUsers(PageAsk, kw_only=True):
    """List people."""

    example = ({"limit": 20}, {"users": [PERSON]})
    refusals = (TenantNotFound,)
    tenant: Annotated[Name | None, says("only people of this tenant, by id or name; the operator's default is all")
                      ] = None
    email: Annotated[Email | None, says("only people with this e-mail address")] = None


class InviteUser(Ask, kw_only=True):
    """Invite a person."""

    example = ({"email": "ada@example.com", "role": "agent"}, {
        **{name: PERSON[name] for name in PERSON if name not in ("issuer", "subject", "last_seen_at")},
        "state": "invited"})
    refusals = (TenantNotFound, InvalidTransition, QuotaExceeded)
    tenant: Whose = None
    email: Annotated[Email, says("the e-mail address that an identity provider must have verified")]
    name: Annotated[Name | None, says("a name for people")] = None
    role: Annotated[GivenRole, says("the role that the person gets")] = "agent"
    scopes: Annotated[Scopes | None, says("the scopes that the person may grant; default: those of the role")] = None
    access_days: Annotated[AccessDays | None, says("life of access tokens; default by the settings")] = None


class UserAsk(Ask, kw_only=True):
    """A request about one person."""

    needed: ClassVar[tuple[str, ...]] = ("user_id",)
    refusals = (UserNotFound,)
    user_id: Annotated[Name, says("the user; list_users shows it")] = ""
    reason: Annotated[Text | None, says("why; audited")] = None


class ChangeUser(UserAsk, kw_only=True):
    """Change a person's rights."""

    example = ({"user_id": USER_ID, "disabled": True, "reason": "has left the team"}, {
        **PERSON, "state": "disabled", "disabled_at": LATER})
    role: Annotated[GivenRole | None, says("another role; without scopes the person gets those of the role")] = None
    scopes: Annotated[Scopes | None, says("other scopes")] = None
    access_days: Annotated[AccessDays | None, says("another life of access tokens")] = None
    disabled: Annotated[bool | None, says("whether the person may not sign in")] = None


class RemoveUser(UserAsk, kw_only=True):
    """Forget a person."""

    example = ({"user_id": USER_ID}, {"ok": True})


class MakeSignInLink(Ask, kw_only=True):
    """Make a sign-in link."""

    example = ({"principal_id": "ada"}, {
        "sign_in_code": "K7QXM-2PZRT-9WEHA-LD4NC", "link": "https://gate.example.com/oauth/link?code=K7QXM-2PZRT-9WEHA-LD4NC",
        "expires_at": LATER, "tenant": TENANT_ID, "principal_kind": "human", "principal_id": "ada", "role": "agent"})
    refusals = (TenantNotFound,)
    tenant: Whose = None
    principal_kind: Annotated[GivenKind, says("kind of whom the link stands for")] = "human"
    principal_id: Annotated[Name, says("the principal as which the person acts")]
    role: Annotated[GivenRole, says("the role that the person gets")] = "agent"
    scopes: Annotated[Scopes | None, says("the scopes that the person may grant; default: those of the role")] = None


class UserRecord(Struct, omit_defaults=True):
    """A person who may sign in, or is invited to."""

    user_id: str
    state: UserState
    tenant: str
    principal_kind: str
    principal_id: str
    role: str
    admitted_by: str                    # who or which rule let the person in
    created_at: datetime
    email: str = ""                     # verified; of an invitation, to be verified
    name: str = ""
    issuer: str = ""                    # the identity provider; empty: invited, or signs in with links
    subject: str = ""                   # its name for the person
    scopes: list[str] | None = None     # that the person may grant; absent: those of the role
    access_days: int | None = None
    last_seen_at: datetime | None = None
    disabled_at: datetime | None = None


class Users(Struct):
    """A page of people."""

    columns = "user_id state email principal_id role tenant last_seen_at"
    users: list[UserRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class MadeSignInLink(Struct):
    """A sign-in link; it is shown only now, and only its hash is stored."""

    sign_in_code: str
    link: str | None                    # null while the authorization server is off
    expires_at: datetime
    tenant: str
    principal_kind: str
    principal_id: str
    role: str


# Access tokens and the keys that sign them.


class RevokeToken(Ask, kw_only=True):
    """Revoke an access token."""

    example = ({"token_id": JTI, "reason": "found in a log"},
               {"token_id": JTI, "tenant": TENANT_ID, "expires_at": LATER})
    refusals = (TenantNotFound,)
    tenant: Whose = None
    token_id: Annotated[Name | None, says("its id, the claim jti")] = None
    access_token: Annotated[TokenText | None, says("or its text, which says its id and its tenant")] = None
    reason: Annotated[Text | None, says("why; audited")] = None


class RevokedToken(Struct):
    """A revoked access token."""

    token_id: str
    tenant: str
    expires_at: datetime                # until when the gate remembers: by then the token has expired


class ListSigningKeys(Ask, kw_only=True):
    """List the signing keys."""

    example = ({}, {"keys": [{"kid": KID, "since": NOW, "until": None}]})


class SigningKeyRecord(Struct):
    """A key that signs or verifies access tokens of the gate."""

    kid: str
    since: datetime                     # when it began to sign
    until: datetime | None              # of a retired one: when it ceases to verify; null: it signs now


class SigningKeyRecords(Struct):
    """The keys that sign or verify now."""

    columns = "kid since until"
    keys: list[SigningKeyRecord]


# Sessions.

OfUser = Annotated[Name | None, says("for admins")]


class ListSessions(PageAsk, kw_only=True):
    """List sessions."""

    example = ({"limit": 20}, {"sessions": [SESSION]})
    user_id: OfUser = None


class EndSession(Ask, kw_only=True):
    """End a session."""

    example = ({"session_id": SESSION_ID}, {"ok": True})
    refusals = (SessionNotFound,)
    session_id: Annotated[Name, says("the session; list_sessions shows it")]
    reason: Annotated[Text | None, says("why; in the audit log")] = None


class SignOutEverywhere(Ask, kw_only=True):
    """End all sessions of a person."""

    example = ({"reason": "a laptop was stolen"}, {"sessions_ended": 2})
    refusals = (UserNotFound,)
    user_id: OfUser = None
    reason: Annotated[Text | None, says("why; in the audit log")] = None


class ListConsents(PageAsk, kw_only=True):
    """List what people let programs do."""

    example = ({"limit": 20}, {"consents": [{
        "user_id": USER_ID, "client_id": CLIENT_ID, "scopes": ["tasks:read"], "given_at": NOW,
        "client_name": "My Agent", "redirect_uri": "https://myapp.com/oauth/callback"}]})
    user_id: OfUser = None


class WithdrawConsent(Ask, kw_only=True):
    """Withdraw a consent."""

    example = ({"client_id": CLIENT_ID}, {"sessions_ended": 1})
    refusals = (UserNotFound,)
    client_id: Annotated[ClientId, says("the client; list_consents shows it")]
    user_id: OfUser = None
    reason: Annotated[Text | None, says("why; in the audit log")] = None


class SessionRecord(Struct, omit_defaults=True):
    """A session of a person with a program."""

    session_id: str                     # the sid of its access tokens
    user_id: str
    client_id: str
    tenant: str
    principal_kind: str
    principal_id: str
    role: str
    scopes: list[str]
    resource: str
    begun_at: datetime
    ends_at: datetime                   # when the person has to sign in again
    client_name: str | None = None
    last_used_at: datetime | None = None    # when it last gave an access token
    place: str | None = None            # the network of that
    ended_at: datetime | None = None
    ended_why: str | None = None


class Sessions(Struct):
    """A page of sessions."""

    columns = "session_id user_id client_name begun_at last_used_at ends_at ended_at ended_why"
    sessions: list[SessionRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class SignedOut(Struct):
    """How many sessions were ended."""

    sessions_ended: int


class ConsentRecord(Struct, omit_defaults=True):
    """What a person lets a program do."""

    user_id: str
    client_id: str
    scopes: list[str]
    redirect_uri: str
    given_at: datetime
    client_name: str | None = None


class Consents(Struct):
    """A page of consents."""

    columns = "user_id client_id client_name scopes given_at"
    consents: list[ConsentRecord]
    next_cursor: str | None = None
    cursor: str | None = None
