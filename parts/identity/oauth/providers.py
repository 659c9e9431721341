"""Identity providers: OpenID Connect by discovery, and GitHub, which is not OpenID Connect (OpenID Connect Core 1.0).

Security: the issuer that the operator's discovery URL belongs to is the only one whose word counts.  It must be in the
discovery document, in the ID token, and in the answer if the provider says that it sends it (RFC 9207).  All fetches go
through the guard of outgoing calls.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec import Meta, Struct

from asyncgate.parts.identity.jwt import (
    UNFIT,
    Flaw,
    KeyRing,
    decode_strictly,
    make_fetcher,
    reason_of,
    verify_signature,
)
from asyncgate.parts.identity.oauth.admission import Person, SignInRefused
from asyncgate.parts.identity.oauth.parked import Parked
from asyncgate.parts.identity.oauth.user_rows import read_email
from asyncgate.parts.model.errors import IssuerUnavailable, StartupError
from asyncgate.parts.model.settings import IdentityProvider, Settings
from joserfc.util import urlsafe_b64decode

if TYPE_CHECKING:
    import httpx2
