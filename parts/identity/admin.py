"""Administration: tenants, issued keys, limits, the audit log (spec 21.2.2, 21.4.5, 21.7.4, 21.9).

An admin administers its own tenant.  The operator is an admin of the default tenant: it creates and suspends tenants,
sets their limits, and may name any of them.  Everybody else gets not found for another tenant's keys and log.
Each change is written to the tenant's audit log in the transaction that makes it.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from asyncgate import SCOPES, Caller, Engine, Extension, Needs, Operation, Work, forbid
from asyncgate.parts.identity import audit, keys_stored
from asyncgate.parts.identity.keys import MOST_HASHING, Hasher, lower_priority
from asyncgate.parts.identity.notices import list_admins, read_rows, tell_admins
from asyncgate.parts.identity.oversight import mark_as_audited
from asyncgate.parts.model import errors, queries, quotas, stored, wire, wire_admin
from asyncgate.parts.model.caller import forbid_beyond, forbid_giving
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.views import to_utc, to_utc_or_none
from asyncgate.parts.model.walking import Pages, walk

T = TypeVar("T")
E = TypeVar("E", bound=Extension)
Load = Callable[[Needs, Caller, Any], None]


def audit_change(engine: Engine, work: Work, event: str, severity: wire_admin.Severity, caller: Caller,
                 **details: Any) -> None:
    """Write an administrator's change into the audit log of the tenant that was changed."""
    mark_as_audited()
    body = audit.body_of_line(engine.settings, {**audit.current_visitor(), **audit.describe_caller(caller), **details})
    audit.log_line(severity, event, work.tenant_id, body)
    if engine.settings.security.audit_logging.enabled:
        audit.add_line(work, event, severity, body)


async def change_record(engine: Engine, caller: Caller, tenant_id: str, kind: type[Struct], key: tuple[str, ...],
                        run: Callable[[Work], T], beside: Iterable[tuple[type[Struct], tuple[str, ...]]] = ()) -> T:
    """Let `run` change one record of a tenant, and others beside it, in the tenant's next batch."""
    def load(needs: Needs, caller: Caller, ask: Any) -> None:
        needs.records |= {(kind, key), *beside}
    return await write_audited(engine, caller, tenant_id, load, run)


async def write_audited(engine: Engine, caller: Caller, tenant_id: str, load: Load, run: Callable[[Work], T]) -> T:
    """Let `run` change what `load` names, and the end of the audit log, in the tenant's next batch."""
    context = copy_context()    # the batch is decided in another task, and the audit log needs the client's address

    def load_all(needs: Needs, caller: Caller, ask: wire.Ask) -> None:
        load(needs, caller, ask)
        audit.load_head(needs, caller, ask)

    def decide(engine: Engine, work: Work, caller: Caller, ask: wire.Ask) -> T:
        return context.run(run, work)
    done: T = await engine.write(decide, load_all, replace(caller, tenant_id=tenant_id), wire.Ask())
    return done


def extend_once(engine: Engine, kind: type[E]) -> E:
    """Return the extension of a kind, which joins the engine at its first use."""
    if (extension := engine.find_extension(kind)) is None:
        engine.extend(extension := kind())
    return extension


class Turns(Extension):
    """Lets what is limited by a count take turns in this process, so that each one counts those before it.

    Several processes may together keep as many more as there are processes, less one.
    """

    def __init__(self) -> None:
        self.locks = defaultdict[tuple[str, str], asyncio.Lock](asyncio.Lock)      # by quota and tenant


@asynccontextmanager
async def take_room(engine: Engine, tenant: str, quota: str, most: int, count: Callable[[], Awaitable[int]],
                    what: str, cure: str, retry_after: int = quotas.RETRY_LATER_SECONDS) -> AsyncIterator[None]:
    """Hold the tenant's turn from the count on until one more is kept; raises QuotaExceeded if there is no room."""
    if most < 0:
        yield
        return
    async with extend_once(engine, Turns).locks[quota, tenant]:
        if (number := await count()) >= most:
            raise errors.QuotaExceeded(f"this tenant has {number} {what}, and the limit is {most}: {cure}", quota=quota,
                                       limit=most, retry_after=retry_after)
        yield


def operates(engine: Engine, caller: Caller) -> bool:
    """Whether a caller is the operator, who administers all tenants."""
    return caller.role == "admin" and caller.tenant_id == engine.settings.default_tenant_id


def require_operator(engine: Engine, caller: Caller) -> None:
    """Refuse everybody but the operator."""
    if not operates(engine, caller):
        raise forbid(caller, "only the operator, an admin of the default tenant, administers tenants")


async def target_tenant(engine: Engine, caller: Caller, named: str | None) -> str:
    """Return the tenant that a request names; only the operator may name another than its own."""
    if named is None or named == caller.tenant_id:
        return caller.tenant_id
    if operates(engine, caller):
        return await tenant_of(engine, named)
    account = None if UUID_TEXT.match(named) else await engine.backend.record(caller.tenant_id, stored.Account)
    if account is None or account.name != named:
        raise errors.TenantNotFound(f"no tenant {named}")
    return caller.tenant_id


# Tenants.


UUID_TEXT = re.compile(r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\Z")
# The namespace of the ids of tenants that were made by name.
TENANT_NAMES = uuid.UUID("0a6f7a52-6cf8-4f0e-9a0c-5d1e2b7c9f31")
DEFAULT_TENANT = "default"


async def tenant_of(engine: Engine, named: str) -> str:
    """Return the id of a tenant, given its id or its name."""
    if UUID_TEXT.match(named):
        return named.lower()
    if (tenant_id := await find_tenant_named(engine, named)) is None:
        raise errors.TenantNotFound(f"no tenant {named}; list_tenants shows all tenants, create_tenant makes one")
    return tenant_id


async def find_tenants(engine: Engine, named: Iterable[str]) -> tuple[str, ...]:
    """Return the ids of stored tenants, given their ids or names; raises TenantNotFound, also for an unknown id."""
    tenant_ids = [await tenant_of(engine, name) for name in named]
    known = {engine.settings.default_tenant_id, *(await engine.backend.tenants() if tenant_ids else ())}
    for name, tenant_id in zip(named, tenant_ids, strict=True):
        if tenant_id not in known:
            raise errors.TenantNotFound(f"no tenant {name} in this database; list_tenants shows all tenants")
    return tuple(tenant_ids)


async def find_tenant_named(engine: Engine, name: str) -> str | None:
    """Return the id of the tenant that has a name."""
    if name == DEFAULT_TENANT:
        return engine.settings.default_tenant_id
    if (account := await engine.backend.record(likely := id_of_name(name), stored.Account)) and account.name == name:
        return likely
    ids = [id for id in await engine.backend.tenants()
           if (account := await engine.backend.record(id, stored.Account)) and account.name == name]
    if len(ids) > 1:      # from before names were unique
        raise errors.InvalidRequest(f"{len(ids)} tenants have the name {name}: use an id, {' or '.join(ids)}")
    return ids[0] if ids else None


def derive_tenant(settings: Settings, named: str) -> str:
    """Return the id of a tenant where no database knows its name, because an id is made from the name."""
    if UUID_TEXT.match(named):
        return named.lower()
    return settings.default_tenant_id if named == DEFAULT_TENANT else id_of_name(named)


def id_of_name(name: str) -> str:
    """Derive a tenant's id from its name, so that two concurrent calls create the same tenant."""
    return str(uuid.uuid5(TENANT_NAMES, name))


async def create_tenant(engine: Engine, caller: Caller, ask: wire_admin.CreateTenant) -> wire_admin.TenantRecord:
    """Create a tenant with a unique name and a tier; a repeated call returns the tenant unchanged.

    For the operator.  Then issue_key makes its first key.  One transaction.  Spec 21.3.1.
    """
    require_operator(engine, caller)
    if UUID_TEXT.match(ask.name):
        raise errors.InvalidRequest("a tenant's name cannot look like an id, because requests accept either one")
    named = await find_tenant_named(engine, ask.name)
    tenant_id = ask.tenant or named or id_of_name(ask.name)
    if named not in (None, tenant_id) and await engine.backend.record(tenant_id, stored.Account) is None:
        raise errors.InvalidRequest(f"tenant {named} already has the name {ask.name}; names are unique")

    def make(work: Work) -> wire_admin.TenantRecord:
        account = work.find_record(stored.Account)
        if account is None:
            work.keep_record(account := stored.Account(ask.name, work.now, ask.tier or ""))
            audit_change(engine, work, "tenant_created", "info", caller, name=ask.name, tier=ask.tier)
        return as_tenant_record(engine.settings, tenant_id, account)
    return await change_record(engine, caller, tenant_id, stored.Account, (), make)


async def list_tenants(engine: Engine, caller: Caller, ask: wire_admin.ListTenants) -> wire_admin.Tenants:
    """List all tenants, with their names and tiers.

    For the operator.
    """
    require_operator(engine, caller)
    accounts = [(id, await engine.backend.record(id, stored.Account)) for id in await engine.backend.tenants()]
    return wire_admin.Tenants([as_tenant_record(engine.settings, id, account) for id, account in accounts])


async def suspend_tenant(engine: Engine, caller: Caller, ask: wire_admin.SuspendTenant) -> wire_admin.TenantRecord:
    """Suspend a tenant, or end its suspension; within five seconds its credentials are refused or accepted again.

    For the operator.  Its tasks stay as they are; its leases run out.  Spec 21.9.
    """
    require_operator(engine, caller)
    tenant_id = await tenant_of(engine, ask.tenant or "")
    if tenant_id == engine.settings.default_tenant_id:
        raise errors.Forbidden("the default tenant is the operator's own and cannot be suspended")

    def suspend(work: Work) -> wire_admin.TenantRecord:
        account = work.find_record(stored.Account) or stored.Account("", work.now)
        if ask.suspended != (account.suspended_at is not None):
            work.keep_record(account := replace(account, suspended_at=work.now if ask.suspended else None))
            event = "tenant_suspended" if ask.suspended else "tenant_resumed"
            audit_change(engine, work, event, "critical", caller, reason=ask.reason)
        return as_tenant_record(engine.settings, tenant_id, account)
    return await change_record(engine, caller, tenant_id, stored.Account, (), suspend)


def as_tenant_record(settings: Settings, tenant_id: str, account: stored.Account | None) -> wire_admin.TenantRecord:
    """Show a tenant."""
    if account is None:
        return wire_admin.TenantRecord(tenant_id, "", settings.security.rate_limiting.default_tier)
    return wire_admin.TenantRecord(tenant_id, account.name,
                                   account.tier or settings.security.rate_limiting.default_tier,
                                   to_utc(account.created_at), to_utc_or_none(account.suspended_at),
                                   to_utc_or_none(account.exempt_until),
                                   account.exempt_why)


# Limits.


OWN_LIMITS = ("max_payload_bytes", "max_lease_ttl_seconds")     # so called in the settings, in an account, in a request


async def get_limits(engine: Engine, caller: Caller, ask: wire_admin.GetLimits) -> wire_admin.Limits:
    """Return a tenant's limits, its usage, and whether the limits are enforced; -1 is unlimited.

    Spec 21.4.2.
    """
    tenant_id = await target_tenant(engine, caller, ask.tenant)

    def count(engine: Engine, work: Work, caller: Caller, ask: wire.Ask) -> wire_admin.Limits:
        limits = as_limits_record(engine.settings, tenant_id, work.find_record(stored.Account), work.now)
        usage = work.find_record(stored.Usage)
        assert usage is not None
        limits.used = wire_admin.Used(usage.active, usage.leases, usage.receipt_bytes, usage.terminal,
                                      usage.step_bytes)
        return limits
    limits: wire_admin.Limits = await engine.write(count, load_usage, replace(caller, tenant_id=tenant_id), wire.Ask())
    return limits


def load_usage(needs: Needs, caller: Caller, ask: Any) -> None:
    """Load a tenant's usage, counted again from its rows."""
    needs.records |= {(stored.Account, ()), (stored.Usage, ())}
    needs.recount = True


async def set_limits(engine: Engine, caller: Caller, ask: wire_admin.SetLimits) -> wire_admin.Limits:
    """Set a tenant's tier or own limits, exempt it from all for a time (21.4.5), or set stricter ones (21.9.2).

    For the operator.  An exemption and stricter limits need a reason.  Stricter limits, and a tenant's own ones of
    payloads and leases (21.6), are enforced even where other limits are not.  Other processes apply the change within
    five seconds; leases that are longer already go on to their end.
    """
    require_operator(engine, caller)
    tenant_id = await tenant_of(engine, ask.tenant or "")
    until, strict = instant(ask.exempt_until), instant(ask.stricter_until)
    whom, own = await list_admins(engine, tenant_id), read_own_limits(engine.settings, ask)
    asked_calls, asked_tasks = ask.stricter_calls_per_hour, ask.stricter_tasks_per_hour
    if (until is not None or strict is not None) and not ask.reason:
        raise errors.InvalidRequest(
            "exempt_until and stricter_until need a reason; the audit log keeps it (spec 21.4.5)")
    if (strict is None) != (asked_calls is None and asked_tasks is None) and (
            strict is None or strict > engine.backend.now()):
        raise errors.InvalidRequest("stricter limits need stricter_until, and stricter_calls_per_hour or "
                                    "stricter_tasks_per_hour, or both")

    def agree(work: Work) -> wire_admin.Limits:
        account = work.find_record(stored.Account) or stored.Account("", work.now)
        if ask.tier is not None:
            account = replace(account, tier=ask.tier)
            audit_change(engine, work, "tier_changed", "warning", caller, tier=ask.tier, reason=ask.reason)
        if own:
            account = replace(account, **own)
            audit_change(engine, work, "own_limits_changed", "warning", caller, reason=ask.reason, **own)
        if until is not None:
            account = replace(account, exempt_until=until, exempt_why=ask.reason)
            granted = "rate_limit_bypass_granted" if until > work.now else "rate_limit_bypass_ended"
            audit_change(engine, work, granted, "warning", caller, reason=ask.reason, approved_by=caller.principal.id,
                         expires_at=to_utc(until))
        if strict is not None:
            account = replace(account, stricter_until=strict, stricter_why=ask.reason, stricter_calls=asked_calls,
                              stricter_tasks=asked_tasks)
            event = "rate_limit_tightened" if strict > work.now else "rate_limit_tightening_ended"
            audit_change(engine, work, event, "critical", caller, reason=ask.reason, calls_per_hour=asked_calls,
                         tasks_per_hour=asked_tasks, expires_at=to_utc(strict))
            if strict > work.now:
                tell_admins(engine, work, whom, "rate_limit_tightened", reason=ask.reason, calls_per_hour=asked_calls,
                            tasks_per_hour=asked_tasks, until=to_utc(strict).isoformat())
        work.keep_record(account)
        return as_limits_record(engine.settings, tenant_id, account, work.now)
    return await change_record(engine, caller, tenant_id, stored.Account, (), agree)


def read_own_limits(settings: Settings, ask: wire_admin.SetLimits) -> dict[str, int | None]:
    """Return a tenant's own limits that a request changes; None: as the settings say."""
    asked = {name: wished for name in OWN_LIMITS if (wished := getattr(ask, name)) is not None}
    for name, wished in asked.items():
        if wished == 0 or wished > getattr(settings, name):
            raise errors.InvalidRequest(
                f"{name} is from 1 to {getattr(settings, name)}, which is this gate's limit for all "
                "tenants; -1 brings that limit back")
    return {name: None if wished == -1 else wished for name, wished in asked.items()}


def as_limits_record(settings: Settings, tenant_id: str, account: stored.Account | None,
                     now: float) -> wire_admin.Limits:
    """Show a tenant's limits, and until when it is exempt from them."""
    exempt = account.exempt_until if account else None
    account = replace(account or stored.Account("", 0.0), exempt_until=None)
    may = quotas.apply_stricter_limits(quotas.find_allowance(settings, account, now), account, now)
    strict = quotas.is_throttled(account, now)
    enforced = bool(settings.security.rate_limiting.enabled)
    return wire_admin.Limits(tenant_id, quotas.tier_of(settings, account), enforced, may.tasks_per_hour,
                             may.api_calls_per_hour,
                             may.active_tasks, may.concurrent_leases, may.receipt_storage_gb,
                             may.step_storage_gb, may.terminal_tasks,
                             may.receipts_per_task, quotas.find_largest_payload(settings, account, now),
                             quotas.find_longest_lease(settings, account, now), to_utc_or_none(exempt),
                             to_utc_or_none(account.stricter_until) if strict else None,
                             account.stricter_why if strict else None)


# Issued keys.


async def tenant_to_issue_for(engine: Engine, caller: Caller, named: str | None) -> str:
    """Return the tenant that a caller may issue keys for; a limited key may not, for it could drop its own limits."""
    if caller.capabilities is not None or caller.task_types is not None:
        raise forbid(caller, "a key that is limited to capabilities or task types cannot issue keys")
    return await target_tenant(engine, caller, named)


async def issue_key(engine: Engine, caller: Caller, ask: wire_admin.IssueKey) -> wire_admin.IssuedKey:
    """Issue a key for a worker, an agent or a service; only this answer shows its text.

    The key identifies one principal of one tenant, with a role and scopes.  It can be limited to some capabilities and
    task types.  Refused above security.api_keys.keys_per_tenant.  Spec 21.2.2.
    """
    tenant_id = await tenant_to_issue_for(engine, caller, ask.tenant)
    text, key = await make_requested_key(engine, ask, caller, engine.backend.now())
    require_own_rights(caller, key)

    def issue(work: Work) -> None:
        work.keep_record(key)
        audit_change(engine, work, "key_issued", "info", caller, issued=key.key_id, name=key.name,
                     issued_to=key.principal_id, issued_role=key.role)
    async with take_room(engine, tenant_id, "keys_per_tenant", engine.settings.security.api_keys.keys_per_tenant,
                         partial(count_good_keys, engine, tenant_id),
                         "valid keys", "revoke_key ends one that is not needed, list_keys shows all"):
        await change_record(engine, caller, tenant_id, stored.Key, (key.key_id,), issue)
    return wire_admin.IssuedKey(text, as_key_record(tenant_id, key))


async def count_good_keys(engine: Engine, tenant_id: str) -> int:
    """Return how many keys of a tenant are good, or will be."""
    now = engine.backend.now()
    return len([1 async for key in read_rows(engine, tenant_id, stored.Key) if keys_stored.is_good(key, now)])


def require_own_rights(caller: Caller, key: stored.Key) -> None:
    """Refuse to issue a key with more rights than its issuer has."""
    if beyond := find_scopes_beyond(caller, key):
        raise forbid_giving(caller, beyond, "issue a key that has")


def find_scopes_beyond(caller: Caller, key: stored.Key) -> frozenset[str]:
    """Return the scopes that a key has and a caller lacks."""
    return msgspec.json.decode(key.scopes, type=frozenset[str]) - caller.scopes


async def make_requested_key(engine: Engine, ask: wire_admin.IssueKey, caller: Caller, now: float) -> tuple[str,
                                                                                                            stored.Key]:
    """Make a new key; return its text and its row."""
    role = ask.role or keys_stored.default_role(ask.principal_kind)
    if unknown := (ask.scopes or frozenset()) - SCOPES:
        raise errors.InvalidRequest(f"no scope {min(unknown)}; there are {', '.join(sorted(SCOPES))}")
    begins, ends = instant(ask.not_before), instant(ask.expires_at)
    if ends is not None and ends <= max(now, begins or 0.0):
        raise errors.InvalidRequest("expires_at is before not_before, so the key would never be valid")
    text, hash, key_id = await make_key(engine)
    key = stored.Key(
        key_id=key_id, hash=hash, name=ask.name, principal_kind=ask.principal_kind, principal_id=ask.principal_id,
        principal_instance_id=ask.principal_instance_id, role=role,
        scopes=keys_stored.encode_names(keys_stored.default_scopes(role) if ask.scopes is None else ask.scopes) or "[]",
        capabilities=keys_stored.encode_names(ask.capabilities), task_types=keys_stored.encode_names(ask.task_types),
        not_before=now if begins is None else begins, expires_at=ends, revoked_at=None, rotated_to=None, version=1,
        created_at=now, created_by=str(caller.principal))
    return text, key


class NewKeys(Extension):
    """Hashes the secrets of new keys: apart from the checks of keys, and bounded like them.

    So an admin who issues key after key leaves the event loop its CPU, the machine its memory, and others their checks
    (threat A10).
    """

    def __init__(self) -> None:
        self.hasher = Hasher(ThreadPoolExecutor(MOST_HASHING, "asyncgate-new-keys", lower_priority))


async def make_key(engine: Engine) -> tuple[str, str, str]:
    """Return the text of a new key, the hash of its secret, and its id; raises Overloaded if too many wait."""
    text = keys_stored.generate()
    parts = keys_stored.parse(text)
    assert parts is not None
    work = partial(keys_stored.hash_secret, parts[1], engine.settings.security.api_keys)
    return text, await extend_once(engine, NewKeys).hasher.run(work), parts[0]


async def make_keys(engine: Engine, number: int) -> list[tuple[str, str, str]]:
    """Make several keys, as many at a time as are hashed at a time, so that one call does not fill the queue."""
    made = list[tuple[str, str, str]]()
    for at in range(0, number, MOST_HASHING):
        made += await asyncio.gather(*(make_key(engine) for _ in range(min(MOST_HASHING, number - at))))
    return made


async def list_keys(engine: Engine, caller: Caller, ask: wire_admin.ListKeys) -> wire_admin.Keys:
    """List the tenant's keys, also revoked ones, without their secret texts."""
    tenant_id = await target_tenant(engine, caller, ask.tenant)
    rows, *ends = await read_page(engine, caller, ask, ("keys", tenant_id), tenant_id, queries.Rows(stored.Key))
    return wire_admin.Keys([as_key_record(tenant_id, key) for key in rows], *ends)


async def rotate_key(engine: Engine, caller: Caller, ask: wire_admin.RotateKey) -> wire_admin.IssuedKey:
    """Replace a key by a new one with the same rights; the old one stays valid for overlap_seconds.

    Only this answer shows the new text.
    """
    tenant_id = await tenant_to_issue_for(engine, caller, ask.tenant)
    text, hash, key_id = await make_key(engine)

    def rotate(work: Work) -> stored.Key:
        old = require_key(work.find_record(stored.Key, ask.key_id), ask.key_id)
        if old.revoked_at is not None or old.rotated_to is not None:
            raise errors.InvalidTransition(f"key {old.key_id} is already revoked or rotated; issue_key makes a new one")
        require_own_rights(caller, old)
        new = replace(old, key_id=key_id, hash=hash, not_before=work.now, created_at=work.now, last_used_at=None,
                      created_by=str(caller.principal))
        work.keep_record(keys_stored.retire_key(old, key_id, work.now, ask.overlap_seconds))
        work.keep_record(new)
        audit_change(engine, work, "key_rotated", "info", caller, rotated=old.key_id, rotated_to=key_id)
        return new
    new = await change_record(engine, caller, tenant_id, stored.Key, (ask.key_id,), rotate)
    return wire_admin.IssuedKey(text, as_key_record(tenant_id, new))


async def revoke_key(engine: Engine, caller: Caller, ask: wire_admin.RevokeKey) -> wire.Ok:
    """Revoke a key: this process refuses it at once, others within five seconds; a repeated call is a no-op.

    A credential revokes only keys that it could issue: those without scopes that it lacks.  Spec 21.9.1.
    """
    tenant_id = await target_tenant(engine, caller, ask.tenant)
    whom = await list_admins(engine, tenant_id)

    def revoke(work: Work) -> wire.Ok:
        key = require_key(work.find_record(stored.Key, ask.key_id), ask.key_id)
        if key.revoked_at is None:
            if beyond := find_scopes_beyond(caller, key):       # no limited key may lock the others out
                raise forbid_beyond(caller, beyond, f"revoke key {key.key_id}, which has",
                                    "an admin whose credential has all of them can")
            work.keep_record(replace(key, revoked_at=work.now))
            audit_change(engine, work, "key_revoked", "warning", caller, revoked=key.key_id, reason=ask.reason)
            tell_admins(engine, work, whom, "key_revoked", key_id=key.key_id, name=key.name, reason=ask.reason,
                        by=str(caller.principal))
        return wire.Ok(True)
    return await change_record(engine, caller, tenant_id, stored.Key, (ask.key_id,), revoke)


def require_key(key: stored.Key | None, key_id: str) -> stored.Key:
    """Return a key; raises KeyNotFound for None."""
    if key is None:
        raise errors.KeyNotFound(f"no key {key_id}; list_keys shows all keys")
    return key


def as_key_record(tenant_id: str, key: stored.Key) -> wire_admin.KeyRecord:
    """Show a key without its secret and without the hash of the secret."""
    def names(text: str | None) -> list[str] | None:
        return None if text is None else msgspec.json.decode(text, type=list[str])

    return wire_admin.KeyRecord(
        key.key_id, tenant_id, key.name, key.principal_kind, key.principal_id, key.role, names(key.scopes) or [],
        to_utc(key.created_at), key.created_by, to_utc(key.not_before), key.principal_instance_id,
        names(key.capabilities), names(key.task_types), to_utc_or_none(key.expires_at),
        to_utc_or_none(key.revoked_at), key.rotated_to,
        to_utc_or_none(key.last_used_at))


# The audit log.


async def list_audit(engine: Engine, caller: Caller, ask: wire_admin.ListAudit) -> wire_admin.AuditLines:
    """List the tenant's audit log, oldest first; its lines never change.

    Lines are kept for security.audit_logging.retention_days, 90 at least.  Spec 21.7.4.
    """
    tenant_id = await target_tenant(engine, caller, ask.tenant)

    def wanted(line: stored.Audit) -> bool:
        return (ask.event in (None, line.event) and ask.severity in (None, line.severity)
                and (ask.key_id is None or concerns(line, KEYS_OF_LINE, ask.key_id))
                and (ask.session_id is None or concerns(line, SESSIONS_OF_LINE, ask.session_id))
                and (ask.token_id is None or concerns(line, TOKENS_OF_LINE, ask.token_id)))
    filters = ("audit", tenant_id, ask.event, ask.severity, ask.key_id, ask.session_id, ask.token_id, ask.last)
    head = None if ask.last is None else await engine.backend.record(tenant_id, stored.AuditHead)
    before = f"{max(0, head.number - ask.last):012d}" if head and ask.last is not None else ""     # the last so many
    lines = queries.Rows(stored.Audit, before)
    log = ChainedPages(engine)
    rows, following, cursor = await read_page(engine, caller, ask, filters, tenant_id, lines, wanted, log)
    return wire_admin.AuditLines([as_audit_line(tenant_id, line) for line in rows], following, cursor, log.broken)


class ChainedPages:
    """Reads pages of an audit log, and notes where the chain of its hashes breaks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # the last line that was read; the first one has nothing to be held to
        self.head: stored.AuditHead | None = None
        self.broken: str | None = None

    async def page(self, tenant_id: str, query: Any) -> list[Any]:
        """Return the next lines."""
        lines: list[stored.Audit] = await self.engine.backend.page(tenant_id, query)
        if lines:
            first, rest = (stored.AuditHead(lines[0].number, lines[0].hash), lines[1:]) if self.head is None else (
                self.head, lines)
            self.broken = self.broken or audit.find_break(rest, first)
            self.head = stored.AuditHead(lines[-1].number, lines[-1].hash)
        return lines


# The members of a line that name a key, a session, a token: of who did something, and of what was done to it.
KEYS_OF_LINE = ("key_id", "issued", "rotated", "rotated_to", "revoked")
SESSIONS_OF_LINE = ("session_id", "about_session", "console_session", "console_began")
TOKENS_OF_LINE = ("token_id", "about_token")


def concerns(line: stored.Audit, names: tuple[str, ...], id: str) -> bool:
    """Whether one of these members of a line is an id."""
    body = msgspec.json.decode(line.body)
    return id in [body.get(name) for name in names]


def as_audit_line(tenant_id: str, line: stored.Audit) -> wire_admin.AuditLine:
    """Show a line of the audit log, with the fields that spec 21.7.4 wants at the top level."""
    body = msgspec.json.decode(line.body)
    return wire_admin.AuditLine(
        line.audit_id, line.number, tenant_id, to_utc(line.at), line.event, line.severity, body.get("principal_id"),
        body.get("ip"), body.get("user_agent"), body.get("reason"), Raw(line.body.encode()), line.hash)


async def read_page(engine: Engine, caller: Caller, ask: Any, filters: tuple[Any, ...], tenant_id: str,
                    of: queries.Rows[Any], wanted: Callable[[Any], bool] | None = None,
                    side: Pages | None = None) -> tuple[list[Any], str | None, str | None]:
    """Return the wanted rows of one page of a table, its next_cursor and its cursor."""
    limit, after = engine.limit_page(ask.limit), engine.open_cursor(caller, ask.cursor, *filters)
    rows: list[Any] = []
    async for page in walk(side or engine.backend, tenant_id, replace(of, after=after or of.after)):
        rows += filter(wanted, page)
        if len(rows) > limit:
            break
    return rows[:limit], *engine.seal_cursors(caller, list(map(stored.export_key, rows)), limit, ask.cursor, *filters)


OPERATIONS = [
    Operation(create_tenant, "POST /v1/tenants", "A", "admin:write", "W"),
    Operation(list_tenants, "GET /v1/tenants", "A", "admin:read", "R"),
    Operation(suspend_tenant, "POST /v1/tenants/{tenant}/suspend", "A", "admin:write", "W"),
    Operation(get_limits, "GET /v1/limits", "A", "admin:read", "R"),
    Operation(set_limits, "POST /v1/tenants/{tenant}/limits", "A", "admin:write", "W"),
    Operation(issue_key, "POST /v1/keys", "A", "admin:write", "W"),
    Operation(list_keys, "GET /v1/keys", "A", "admin:read", "R"),
    Operation(rotate_key, "POST /v1/keys/{key_id}/rotate", "A", "admin:write", "W"),
    Operation(revoke_key, "POST /v1/keys/{key_id}/revoke", "A", "admin:write", "W"),
    Operation(list_audit, "GET /v1/audit", "A", "admin:read", "R"),
]


async def issue_first_key(engine: Engine, ask: wire_admin.IssueKey) -> wire_admin.IssuedKey:
    """Issue a key as the operator, without a running gate: nobody has a key yet who could issue the first one."""
    tenant_id = engine.settings.default_tenant_id
    return await issue_key(engine, Caller(tenant_id, wire.Principal("system", "cli"), "admin", SCOPES), ask)
