"""What goes over the wire to administer the authorization server."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from asyncgate.parts.model.errors import SessionNotFound, TenantNotFound
from asyncgate.parts.model.examples import CLIENT, CLIENT_ID, NOW, SESSION, SESSION_ID, USER_ID
from asyncgate.parts.model.stored_oauth import ClientAuth
from asyncgate.parts.model.wire import Ask, Name, PageAsk, Text, says
from asyncgate.parts.model.wire_admin import Scopes

# Programs.

ClientId = Annotated[str, Meta(min_length=1, max_length=500, pattern="^[!-~]+$(?!\\n)")]
RedirectUris = Annotated[list[Annotated[str, Meta(max_length=2048)]], Meta(min_length=1, max_length=20)]
AccessDays = Annotated[int, Meta(ge=5, le=90)]      # spec 21.2.1


class RegisterClient(Ask, kw_only=True):
    """Register a program."""

    example = ({"client_name": "My Agent", "redirect_uris": ["https://myapp.com/oauth/callback"], "scopes": [
        "tasks:read", "tasks:write", "receipts:read"]}, {"client_id": CLIENT_ID, "client": CLIENT})
    refusals = (TenantNotFound,)
    tenant: Annotated[Name | None, says("whose people may use it; the operator's default is everybody")] = None
    client_name: Annotated[Name, says("its name, which people see when they allow it in")]
    redirect_uris: Annotated[RedirectUris, says("where it gets its answer: https, or http on loopback with any port, "
                                                "or the scheme of an app")]
    scopes: Annotated[Scopes | None, says("the most it may get; default any")] = None
    trusted: Annotated[bool, says("whether people are not asked for consent")] = False
    access_days: Annotated[AccessDays | None, says("life of its access tokens; default by the settings")] = None
    with_secret: Annotated[bool, says("for a program on a server: make a secret, shown once")] = False


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
    """A registered program; its secret is shown only now and stored nowhere."""

    client_id: str
    client: ClientRecord
    client_secret: str | None = None


# Sessions.

OfUser = Annotated[Name | None, says("for admins")]


class ListSessions(PageAsk, kw_only=True):
    """List sessions."""

    example = ({"limit": 20}, {"sessions": [SESSION]})
    user_id: OfUser = None


class EndSession(Ask, kw_only=True):
    """End a session."""

    needed: ClassVar[tuple[str, ...]] = ("session_id",)
    example = ({"session_id": SESSION_ID}, {"ok": True})
    refusals = (SessionNotFound,)
    session_id: Name = ""
    reason: Text | None = None


class SignOutEverywhere(Ask, kw_only=True):
    """End all sessions of a person."""

    example = ({"reason": "a laptop was stolen"}, {"sessions_ended": 2})
    refusals = (SessionNotFound,)
    user_id: OfUser = None
    reason: Text | None = None


class ListConsents(PageAsk, kw_only=True):
    """List what people let programs do."""

    example = ({"limit": 20}, {"consents": [{
        "user_id": USER_ID, "client_id": CLIENT_ID, "scopes": ["tasks:read"], "given_at": NOW,
        "client_name": "My Agent", "redirect_uri": "https://myapp.com/oauth/callback"}]})
    user_id: OfUser = None


class WithdrawConsent(Ask, kw_only=True):
    """Withdraw a consent."""

    example = ({"client_id": CLIENT_ID}, {"sessions_ended": 1})
    refusals = (SessionNotFound,)
    client_id: ClientId
    user_id: OfUser = None
    reason: Text | None = None


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
