"""What goes over the wire to administer the authorization server."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct

from asyncgate.parts.model.errors import TenantNotFound
from asyncgate.parts.model.examples import CLIENT, CLIENT_ID
from asyncgate.parts.model.stored_oauth import ClientAuth
from asyncgate.parts.model.wire import Ask, Name, says
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
