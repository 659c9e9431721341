"""Which people may come in, and as whom (spec 21.2.1).

A person is known by issuer and subject, never by an e-mail address: addresses change hands.  A verified address only
says which invitation or which rule fits, the first time.  After that the person's own row decides.  Where the
operator's rules give an address or its domain to a tenant, no other tenant's invitation counts.

Each address has a row of its own, too: the invitation, or who came in with it first.  That one acts as
`human:<address>`; whoever brings the same address from another provider is somebody else, until an admin says more.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from asyncgate import SCOPES, Caller, Work
from asyncgate.extras.oauth import user_rows
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.keys_stored import encode_names
from asyncgate.parts.model import errors, stored, stored_oauth
from asyncgate.parts.model.settings import AdmissionRule, Settings

MOST_NAME_LENGTH = 200


class Person(Struct, frozen=True):
    """Whom an identity provider names; everything in it is proven."""

    provider: str                   # its name in the settings
    issuer: str
    subject: str
    email: str                      # verified, in lower case; empty: none
    name: str
    groups: frozenset[str] = frozenset()


class SignInRefused(Exception):
    """Somebody may not sign in: the person sees the message; `because` is the real reason, for the audit log."""

    def __init__(self, message: str, because: str | None = None, code: str = "access_denied") -> None:
        super().__init__(message)
        self.because, self.code = because or message, code


def check_rules(settings: Settings) -> None:
    """Refuse rules that fit everybody or nobody; raises StartupError."""
    oauth = settings.security.oauth
    names = {provider.name for provider in oauth.providers}
    for at, rule in enumerate(oauth.admit, 1):
        where = f"security.oauth.admit: rule {at}"
        if not (rule.provider or rule.email or rule.email_domain or rule.group):
            raise errors.StartupError(f"{where} names nobody, so it would admit everybody; name a provider, email, "
                                      "email_domain or group")
        if rule.provider and rule.provider not in names:
            raise errors.StartupError(
                f"{where} names the provider {rule.provider!r}, which security.oauth.providers does not list")
        if unknown := {*rule.scopes} - SCOPES:
            raise errors.StartupError(f"{where}: no scope {min(unknown)}; there are {', '.join(sorted(SCOPES))}")


async def admit(server: AuthorizationServer, who: Person) -> stored_oauth.User:
    """Return the user that a person is here, and note that the person was seen; raises SignInRefused.

    One transaction.  An unknown person needs an invitation or a rule.
    """
    def decide(work: Work) -> stored_oauth.User | SignInRefused:
        outcome = decide_admission(work, server.settings, who)
        if isinstance(outcome, stored_oauth.User):
            note_sign_in(server, work, outcome, who.provider)
        return outcome
    user_id = user_rows.id_of_person(who.issuer, who.subject)
    done = await server.directory.change(decide, (stored_oauth.User, (user_id,)),
                                         (stored_oauth.User, (user_rows.id_of_email(who.email),)))
    return take_user(server, done, who.provider)


def take_user(server: AuthorizationServer, done: stored_oauth.User | SignInRefused, way: str) -> stored_oauth.User:
    """Return the user who was let in, and tell a tenant that is not the operator's; raises SignInRefused."""
    if isinstance(done, SignInRefused):
        raise done
    if done.tenant != server.settings.default_tenant_id:
        server.auditor.note(done.tenant, "user_signed_in", "info", principal_kind=done.principal_kind,
                            principal_id=done.principal_id, user_id=done.user_id, way=way)
    return done


def note_sign_in(server: AuthorizationServer, work: Work, user: stored_oauth.User, way: str) -> None:
    """Keep the row of a user who signs in, with an audit line in the same transaction."""
    work.keep_record(user)
    by = Caller(user.tenant, user.principal, user.role, frozenset())
    audit_change(server.engine, work, "user_signed_in", "info", by, user_id=user.user_id, tenant=user.tenant, way=way)


def decide_admission(work: Work, settings: Settings, who: Person) -> stored_oauth.User | SignInRefused:
    """Decide who a person is here, or why nobody; pure but for the rows that it keeps."""
    known = work.find_record(stored_oauth.User, user_rows.id_of_person(who.issuer, who.subject))
    claim = work.find_record(stored_oauth.User, user_rows.id_of_email(who.email)) if who.email else None
    if claim is not None and is_overruled(settings, claim, who):
        claim = None        # nor can its tenant keep the person out by disabling it
    if disabled := next((row for row in (known, claim) if row and row.disabled_at is not None), None):
        return SignInRefused("An administrator has disabled your account.", f"user {disabled.user_id} is disabled")
    if known is not None:
        return replace(known, email=who.email or known.email, name=who.name or known.name, last_seen_at=work.now)
    if claim is not None and claim.accepted_as is None:
        user = replace(claim, user_id=user_rows.id_of_person(who.issuer, who.subject), issuer=who.issuer,
                       subject=who.subject, name=who.name or claim.name, created_at=work.now, last_seen_at=work.now)
    elif (rule := find_rule(settings.security.oauth.admit, who)) is not None:
        user = apply_rule(rule, who, claim, work.now, settings.default_tenant_id)
    else:
        because = f"no invitation and no rule fits {who.email or 'a person without a verified e-mail address'}"
        if not who.email:
            return SignInRefused(f"You are not known here, and {who.provider} has not verified an e-mail address of "
                                 "yours. Verify one there, or ask an administrator for a sign-in link.", because)
        return SignInRefused(f"{who.email} is not known here. An administrator can invite you with `asyncgate "
                             f"invite-user --email {who.email}`, or add a rule to security.oauth.admit.", because)
    if who.email and (claim is None or claim.accepted_as is None):
        work.keep_record(replace(claim or user, user_id=user_rows.id_of_email(who.email), issuer="", subject="",
                                 accepted_as=user.user_id))
    return user


def is_overruled(settings: Settings, claim: stored_oauth.User, who: Person) -> bool:
    """Whether an invitation is of another tenant than the operator's rules give the person's address or its domain to.

    Of these rules the first one that fits the person decides; if none does, none of their tenants is preferred.
    """
    if claim.accepted_as is not None:
        return False
    rules = tuple(user_rows.list_rules_for(settings.security.oauth.admit, who.email))
    if (rule := find_rule(rules, who)) is not None:
        return claim.tenant != (rule.tenant or settings.default_tenant_id)
    return bool(rules) and claim.tenant not in user_rows.name_owners(settings, who.email)


def find_rule(rules: tuple[AdmissionRule, ...], who: Person) -> AdmissionRule | None:
    """Return the first rule that fits a person."""
    return next((rule for rule in rules if fits_person(rule, who)), None)


def fits_person(rule: AdmissionRule, who: Person) -> bool:
    """Whether a rule is about a person: all that it names must be so."""
    return (rule.provider in ("", who.provider) and (not rule.group or rule.group in who.groups)
            and (user_rows.names_address(rule, who.email) or not (rule.email or rule.email_domain)))


def apply_rule(rule: AdmissionRule, who: Person, claim: stored_oauth.User | None, now: float,
               home: str) -> stored_oauth.User:
    """Make a person a user by a rule."""
    user_id = user_rows.id_of_person(who.issuer, who.subject)
    own = f"{who.provider}:{who.subject}"
    principal_id = who.email if who.email and claim is None else own if len(own) <= MOST_NAME_LENGTH else user_id
    admitted_by = "rule " + ", ".join(f"{name} {value}" for name in ("provider", "email", "email_domain", "group")
                                      if (value := getattr(rule, name)))
    return stored_oauth.User(user_id, who.issuer, who.subject, who.email, who.name, rule.tenant or home, "human",
                             principal_id, rule.role, encode_names(rule.scopes or None), None, admitted_by, now, now)


async def check_tenant(server: AuthorizationServer, user: stored_oauth.User, client: stored_oauth.OAuthClient) -> str:
    """Return the name of a user's tenant; raises SignInRefused if nobody of it may use the client."""
    home = server.settings.default_tenant_id
    account = await server.engine.backend.record(user.tenant, stored.Account)
    if account is None and user.tenant != home:
        raise SignInRefused("Your tenant does not exist. Ask the operator of this gate.", f"no tenant {user.tenant}")
    if account is not None and account.suspended_at is not None:
        raise SignInRefused("Your tenant is suspended. Ask the operator of this gate.", "the tenant is suspended")
    if client.tenant not in (None, user.tenant):
        raise SignInRefused(f"{client.name} is for people of another tenant.", "the client is for another tenant")
    return account.name if account and account.name else "default" if user.tenant == home else user.tenant


def choose_scopes(user: stored_oauth.User, asked: frozenset[str]) -> frozenset[str]:
    """Return the scopes that a person can grant of those that a client asks for; raises SignInRefused for none."""
    if not (scopes := asked & user_rows.scopes_of(user)):
        raise SignInRefused("You have none of the rights that the client asks for. Ask an administrator for a role or "
                            "scopes that have them.", "the user has none of the scopes", "invalid_scope")
    return scopes
