"""What goes over the wire to administer the authorization server."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from asyncgate.parts.model import errors, examples, stored_oauth, wire, wire_admin

# Clients.

ClientId = Annotated[str, Meta(min_length=1, max_length=500, pattern="^[!-~]+$(?!\\n)")]
RedirectUris = Annotated[list[Annotated[str, Meta(max_length=2048)]], Meta(min_length=1, max_length=20)]
AccessDays = Annotated[int, Meta(ge=5, le=90)]      # spec 21.2.1
AnyDays = Annotated[int, Meta(ge=0, le=90)]
TokenText = Annotated[str, Meta(min_length=1, max_length=8192)]


class RegisterClient(wire.Ask, kw_only=True):
    """Register a client."""

    example = ({"client_name": "My Agent", "redirect_uris": ["https://myapp.com/oauth/callback"], "scopes": [
        "tasks:read", "tasks:write", "receipts:read"]}, {"client_id": examples.CLIENT_ID, "client": examples.CLIENT})
    refusals = (errors.TenantNotFound,)
    tenant: Annotated[wire.Name | None,
                      wire.says("whose people may use it; the operator's default is everybody")] = None
    client_id: Annotated[ClientId | None,
                         wire.says("the URL of its metadata document, to pin what you say here instead of "
                                   "reading the document; default: a new UUID")] = None
    client_name: Annotated[wire.Name, wire.says("its name, which people see when they allow it in")]
    redirect_uris: Annotated[RedirectUris,
                             wire.says("where it gets its answer: https, or http on loopback with any port, "
                                       "or the scheme of an app")]
    scopes: Annotated[wire_admin.Scopes | None, wire.says("the most it may get; default any")] = None
    trusted: Annotated[bool, wire.says("true: people are not asked for consent")] = False
    access_days: Annotated[AccessDays | None, wire.says("life of its access tokens; default by the settings")] = None
    with_secret: Annotated[bool, wire.says("for a client on a server: make a secret, shown once")] = False


class ListClients(wire.PageAsk, kw_only=True):
    """List clients."""

    example = ({"limit": 20}, {"clients": [examples.CLIENT]})
    refusals = (errors.TenantNotFound,)
    tenant: Annotated[wire.Name | None,
                      wire.says("only clients for this tenant; the operator's default is all")] = None


class ClientAsk(wire.Ask, kw_only=True):
    """A request about one client."""

    needed: ClassVar[tuple[str, ...]] = ("client_id",)
    refusals = (errors.ClientNotFound,)
    client_id: Annotated[ClientId, wire.says("its id: a UUID, or the URL of its metadata document")] = ""


class ChangeClient(ClientAsk, kw_only=True):
    """Change a client."""

    example = ({"client_id": examples.CLIENT_ID, "disabled": True, "reason": "its maker is gone"},
               {"client_id": examples.CLIENT_ID, "client": {**examples.CLIENT, "disabled_at": examples.LATER}})
    client_name: Annotated[wire.Name | None, wire.says("the name that people see")] = None
    redirect_uris: Annotated[RedirectUris | None,
                             wire.says("where people are sent back to, instead of the old ones")] = None
    scopes: Annotated[wire_admin.Scopes | None, wire.says("the most it may get; an empty list is any")] = None
    trusted: Annotated[bool | None, wire.says("true: people are not asked for consent")] = None
    pinned: Annotated[bool | None, wire.says("true: its metadata document is not read again")] = None
    disabled: Annotated[bool | None, wire.says("true: nobody may use it, and its sessions end")] = None
    access_days: Annotated[AnyDays | None, wire.says("life of its access tokens; 0 is that of the settings")] = None
    new_secret: Annotated[bool, wire.says("make a new secret, shown once; the old one is refused at once")] = False
    reason: Annotated[wire.Text | None, wire.says("why; audited")] = None


class RemoveClient(ClientAsk, kw_only=True):
    """Remove a client."""

    example = ({"client_id": examples.CLIENT_ID, "reason": "replaced"}, {"ok": True})
    reason: Annotated[wire.Text | None, wire.says("why; audited")] = None


class ClientRecord(Struct, omit_defaults=True):
    """A client, without its secret."""

    client_id: str
    origin: str                         # registered, dynamic or document
    client_name: str
    redirect_uris: list[str]
    auth_method: stored_oauth.ClientAuth
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
    """A client; a new secret is shown only now and stored nowhere."""

    client_id: str
    client: ClientRecord
    client_secret: str | None = None


class Clients(Struct):
    """A page of clients."""

    columns = "client_id client_name origin auth_method trusted disabled_at last_used_at"
    clients: list[ClientRecord]
    next_cursor: str | None = None
    cursor: str | None = None


# People.

Email = Annotated[str, Meta(min_length=3, max_length=200)]
UserState = Literal["invited", "active", "disabled"]


class ListUsers(wire.PageAsk, kw_only=True):
    """List people."""

    example = ({"limit": 20}, {"users": [examples.PERSON]})
    refusals = (errors.TenantNotFound,)
    tenant: Annotated[wire.Name | None,
                      wire.says("only people of this tenant, by id or name; the operator's default is all")
                      ] = None
    email: Annotated[Email | None, wire.says("only people with this e-mail address")] = None


class InviteUser(wire.Ask, kw_only=True):
    """Invite a person."""

    example = ({"email": "ada@example.com", "role": "agent"}, {
        **{name: examples.PERSON[name] for name in examples.PERSON
           if name not in ("issuer", "subject", "last_seen_at")},
        "state": "invited"})
    refusals = (errors.TenantNotFound, errors.InvalidTransition, errors.QuotaExceeded)
    tenant: wire_admin.Whose = None
    email: Annotated[Email, wire.says("the e-mail address that an identity provider must have verified")]
    name: Annotated[wire.Name | None, wire.says("a name for people")] = None
    role: Annotated[wire.GivenRole, wire.says("the role that the person gets")] = "agent"
    scopes: Annotated[wire_admin.Scopes | None,
                      wire.says("the scopes that the person may grant; default: those of the role")] = None
    access_days: Annotated[AccessDays | None, wire.says("life of access tokens; default by the settings")] = None


class UserAsk(wire.Ask, kw_only=True):
    """A request about one person."""

    needed: ClassVar[tuple[str, ...]] = ("user_id",)
    refusals = (errors.UserNotFound,)
    user_id: Annotated[wire.Name, wire.says("the user; list_users shows it")] = ""
    reason: Annotated[wire.Text | None, wire.says("why; audited")] = None


class ChangeUser(UserAsk, kw_only=True):
    """Change a person's rights."""

    example = ({"user_id": examples.USER_ID, "disabled": True, "reason": "has left the team"}, {
        **examples.PERSON, "state": "disabled", "disabled_at": examples.LATER})
    role: Annotated[wire.GivenRole | None,
                    wire.says("another role; without scopes the person gets those of the role")] = None
    scopes: Annotated[wire_admin.Scopes | None, wire.says("other scopes")] = None
    access_days: Annotated[AccessDays | None, wire.says("another life of access tokens")] = None
    disabled: Annotated[bool | None, wire.says("true: the person may not sign in")] = None


class RemoveUser(UserAsk, kw_only=True):
    """Forget a person."""

    example = ({"user_id": examples.USER_ID}, {"ok": True})


class MakeSignInLink(wire.Ask, kw_only=True):
    """Make a sign-in link."""

    example = ({"principal_id": "ada"}, {
        "sign_in_code": "K7QXM-2PZRT-9WEHA-LD4NC",
        "link": "https://gate.example.com/oauth/link?code=K7QXM-2PZRT-9WEHA-LD4NC",
        "expires_at": examples.LATER, "tenant": examples.TENANT_ID, "principal_kind": "human", "principal_id": "ada",
        "role": "agent"})
    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None
    principal_kind: Annotated[wire.GivenKind, wire.says("kind of whom the link stands for")] = "human"
    principal_id: Annotated[wire.Name, wire.says("the principal as which the person acts")]
    role: Annotated[wire.GivenRole, wire.says("the role that the person gets")] = "agent"
    scopes: Annotated[wire_admin.Scopes | None,
                      wire.says("the scopes that the person may grant; default: those of the role")] = None


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


class RevokeToken(wire.Ask, kw_only=True):
    """Revoke an access token."""

    example = ({"token_id": examples.JTI, "reason": "found in a log"},
               {"token_id": examples.JTI, "tenant": examples.TENANT_ID, "expires_at": examples.LATER})
    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None
    token_id: Annotated[wire.Name | None, wire.says("its id, the claim jti")] = None
    access_token: Annotated[TokenText | None, wire.says("or its text, which says its id and its tenant")] = None
    reason: Annotated[wire.Text | None, wire.says("why; audited")] = None


class RevokedToken(Struct):
    """A revoked access token."""

    token_id: str
    tenant: str
    expires_at: datetime                # until when the gate remembers: by then the token has expired


class ListSigningKeys(wire.Ask, kw_only=True):
    """List the signing keys."""

    example = ({}, {"keys": [{"kid": examples.KID, "since": examples.NOW, "until": None}]})


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

OfUser = Annotated[wire.Name | None, wire.says("for admins")]


class ListSessions(wire.PageAsk, kw_only=True):
    """List sessions."""

    example = ({"limit": 20}, {"sessions": [examples.SESSION]})
    user_id: OfUser = None


class EndSession(wire.Ask, kw_only=True):
    """End a session."""

    example = ({"session_id": examples.SESSION_ID}, {"ok": True})
    refusals = (errors.SessionNotFound,)
    session_id: Annotated[wire.Name, wire.says("the session; list_sessions shows it")]
    reason: Annotated[wire.Text | None, wire.says("why; in the audit log")] = None


class SignOutEverywhere(wire.Ask, kw_only=True):
    """End all sessions of a person."""

    example = ({"reason": "a laptop was stolen"}, {"sessions_ended": 2})
    refusals = (errors.UserNotFound,)
    user_id: OfUser = None
    reason: Annotated[wire.Text | None, wire.says("why; in the audit log")] = None


class ListConsents(wire.PageAsk, kw_only=True):
    """List what people let clients do."""

    example = ({"limit": 20}, {"consents": [{
        "user_id": examples.USER_ID, "client_id": examples.CLIENT_ID, "scopes": ["tasks:read"],
        "given_at": examples.NOW,
        "client_name": "My Agent", "redirect_uri": "https://myapp.com/oauth/callback"}]})
    user_id: OfUser = None


class WithdrawConsent(wire.Ask, kw_only=True):
    """Withdraw a consent."""

    example = ({"client_id": examples.CLIENT_ID}, {"sessions_ended": 1})
    refusals = (errors.UserNotFound,)
    client_id: Annotated[ClientId, wire.says("the client; list_consents shows it")]
    user_id: OfUser = None
    reason: Annotated[wire.Text | None, wire.says("why; in the audit log")] = None


class SessionRecord(Struct, omit_defaults=True):
    """A session of a person with a client."""

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
    """What a person lets a client do."""

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
