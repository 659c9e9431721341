"""Whom an erasure is of: by what they are found, and the pseudonyms that stand in their place.

The pseudonyms are keyed hashes.  The key is stored while the erasure runs, so that an interrupted one goes on with the
same pseudonyms; at the end it is destroyed, and nobody can find out by trial whom a pseudonym stands for.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from functools import cached_property
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.erased import PSEUDONYM

OURS = frozenset({"asyncgate", "system"})       # kinds of principals that are the gate itself
# Members of what the gate writes that hold the id of a principal without its kind.
NAMING = frozenset({"id", "workers", "worker", "by", "principal", "approved_by", "issued_to", "created_by", "email"})

decode_known_names = msgspec.json.Decoder(list[str]).decode


class Whom(Struct, frozen=True, dict=True):
    """Of whom an erasure is: a principal, or everybody of a tenant."""

    erasure_id: str
    tenant_id: str                      # of the principal, or the one that is erased as a whole
    principal: wire.Principal | None         # None: everybody
    names: frozenset[str]               # texts that name the principal: its id, its e-mail address, its user id
    users: frozenset[str]               # user ids of the people who act as the principal
    key: bytes
    here: bool = True                   # False: the rows are another tenant's, the operator's
    chosen: frozenset[str] = frozenset()        # names that its own tenant has chosen, so they may be anything

    @classmethod
    def of(cls, erasure: stored.Erasure, tenant_id: str) -> Whom:
        """Return whom an erasure is of that is under way, as rows of a tenant name them."""
        named = decode_known_names(erasure.names)
        who = wire.Principal(erasure.principal_kind, erasure.principal_id) if erasure.principal_kind else None
        users = frozenset(name.removeprefix("user ") for name in named if name.startswith("user "))
        proven = frozenset(name.removeprefix("name ") for name in named if name.startswith("name ")) | users
        own = frozenset({who.id, str(who)}) if who is not None else frozenset[str]()
        chosen = frozenset(name.removeprefix("chosen ") for name in named if name.startswith("chosen ")) | own
        return cls(erasure.erasure_id, erasure.of_tenant, who, proven | chosen, users, bytes.fromhex(erasure.key),
                   tenant_id == erasure.of_tenant, chosen - proven)

    @property
    def is_everybody(self) -> bool:
        """Whether the rows are those of a tenant that is erased as a whole."""
        return self.here and self.principal is None

    def covers(self, kind: str, id: str) -> bool:
        """Whether a principal that a row names is to be erased."""
        if not self.here or kind in OURS:
            return False
        if self.principal is None:
            return bool(id) and not id.startswith(PSEUDONYM)
        return (kind, id) == (self.principal.kind, self.principal.id)

    def covers_person(self, tenant: str, kind: str, id: str) -> bool:
        """Whether somebody of whom the authorization server knows is to be erased."""
        mine = tenant == self.tenant_id
        return mine and (self.principal is None or (kind, id) == (self.principal.kind, self.principal.id))

    def replace_id(self, kind: str, id: str) -> str:
        """Return the pseudonym of a principal that is to be erased, and the id of any other."""
        return self.pseudonym(kind, id) if self.covers(kind, id) else id

    def pseudonym(self, kind: str, id: str) -> str:
        """Return what stands in place of an id; the same for the same id, within this erasure."""
        return PSEUDONYM + self.keyed(f"{kind}\n{id}")[:32]

    def keyed(self, text: str) -> str:
        """Return a keyed hash of a text, in place of one that anybody can compute."""
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()

    @cached_property
    def proven(self) -> Whom:
        """Return the same by the names alone that others have proven, such as an identity provider."""
        return replace(self, names=self.names - self.chosen)

    @cached_property
    def token(self) -> re.Pattern[str] | None:
        """Return the pattern of a name within a text, as a word of its own."""
        if not self.names:
            return None
        return re.compile(rf"(?<![\w@.:-])(?:{self._spellings})(?![\w@.:-])")

    @cached_property
    def loose(self) -> re.Pattern[str] | None:
        """Return the pattern of a name within a text for people: also where a sign joins it to other words."""
        return re.compile(rf"(?<![^\W_])(?:{self._spellings})(?![^\W_])") if self.names else None

    @cached_property
    def _spellings(self) -> str:
        """Return the pattern of the names, the longest first, also as they stand in an address."""
        spelt = self.names | {quote(name, safe="") for name in self.names}
        return "|".join(re.escape(name) for name in sorted(spelt, key=len, reverse=True))

    def blot(self, text: str) -> str:
        """Replace the names of the principal in a text for people, which somebody else has written."""
        if not self.here or self.principal is None or self.loose is None:
            return text
        return self.loose.sub(self.pseudonym(self.principal.kind, self.principal.id), text)

    def blot_address(self, url: str) -> str:
        """Replace the names of the principal in an address, after its scheme; it leads nowhere then."""
        scheme = url.find("://") + 1
        return url[:scheme] + self.blot(url[scheme:])

    def is_told(self, value: Any) -> bool:
        """Whether the principal is named anywhere in a text for people."""
        return isinstance(value, str) and self.loose is not None and self.loose.search(value) is not None

    def is_mentioned(self, value: Any, member: str = "") -> bool:
        """Whether a value that the gate has written names the principal; an id alone counts where an id is expected."""
        if isinstance(value, dict):
            return any(self.is_mentioned(part, name) for name, part in value.items())
        if isinstance(value, list):
            return any(self.is_mentioned(part, member) for part in value)
        if not isinstance(value, str) or value not in self.names:
            return False
        bare = self.principal is not None and value == self.principal.id
        return not bare or member in NAMING or member.endswith("_id")

    def is_within(self, value: Any) -> bool:
        """Whether the principal is named anywhere in a value, also within a text."""
        if isinstance(value, dict):
            return any(self.is_within(part) for part in (*value, *value.values()))
        if isinstance(value, list):
            return any(map(self.is_within, value))
        return isinstance(value, str) and self.token is not None and self.token.search(value) is not None
