"""The rows of people: their scopes, their ids, and which tenants may invite them.

Ids are derived: two first sign-ins at once make one user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from uuid import UUID, uuid5

from asyncgate import SCOPES, Caller
from asyncgate.parts.identity.keys_stored import decode_names, default_scopes
from asyncgate.parts.model import errors, stored_oauth
from asyncgate.parts.model.caller import forbid_giving
from asyncgate.parts.model.settings import AdmissionRule, Settings

USERS = UUID("5b0f2d0e-6d0c-4a53-9a5b-0d0c1f7be1a4")        # the namespace of all ids of users
# ASCII alone: another alphabet's letters look like these, and an address is compared letter for letter.
EMAIL = re.compile(r"[!-?A-~]{1,64}@[A-Za-z0-9.-]+\Z")
MOST_EMAIL_LENGTH = 200


def id_of_person(issuer: str, subject: str) -> str:
    """Return the id of whom an identity provider names."""
    return str(uuid5(USERS, f"person\n{issuer}\n{subject}"))


def id_of_email(email: str) -> str:
    """Return the id of the row that says to whom an e-mail address belongs here: an invitation, or who accepted it."""
    return str(uuid5(USERS, f"email\n{email}"))


def id_of_principal(tenant: str, kind: str, id: str) -> str:
    """Return the id of whom a sign-in link signs in."""
    return str(uuid5(USERS, f"link\n{tenant}\n{kind}\n{id}"))


def read_email(text: object) -> str:
    """Return an e-mail address in lower case; empty for anything else."""
    if not isinstance(text, str) or len(text) > MOST_EMAIL_LENGTH or not EMAIL.match(text):
        return ""
    return text.lower() if all(text.partition("@")[2].split(".")) else ""


def name_owners(settings: Settings, email: str) -> frozenset[str]:
    """Return the tenants to which the operator's rules give an address or its domain; empty: they give it to nobody.

    Security: only these tenants may invite the address.  Else any tenant could invite the employees of a company first,
    and would get them and their work.
    """
    return frozenset(rule.tenant or settings.default_tenant_id
                     for rule in list_rules_for(settings.security.oauth.admit, email))


def list_rules_for(rules: tuple[AdmissionRule, ...], email: str) -> Iterator[AdmissionRule]:
    """Yield the rules that name an address or its domain, up to the one behind which no other can decide."""
    for rule in rules:
        if names_address(rule, email):
            yield rule
            if not rule.provider and not rule.group:
                return


def names_address(rule: AdmissionRule, email: str) -> bool:
    """Whether a rule names an address or its domain, whatever else it wants."""
    named, domain = rule.email.lower(), rule.email_domain.lower()
    return bool(named or domain) and named in ("", email) and domain in ("", email.rpartition("@")[2])


def scopes_of(row: stored_oauth.User | stored_oauth.SignInLink) -> frozenset[str]:
    """Return the scopes that a person may grant: those of the row, else those of its role."""
    return default_scopes(row.role) if row.scopes is None else decode_names(row.scopes)


def check_rights(caller: Caller, row: stored_oauth.User | stored_oauth.SignInLink) -> None:
    """Refuse to give more rights than one has; raises InvalidRequest for an unknown scope, Forbidden for others."""
    scopes = scopes_of(row)
    if unknown := scopes - SCOPES:
        raise errors.InvalidRequest(f"no scope {min(unknown)}; there are {', '.join(sorted(SCOPES))}")
    if beyond := scopes - caller.scopes:
        raise forbid_giving(caller, beyond, "give it to somebody")
