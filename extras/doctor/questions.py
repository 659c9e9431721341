"""Questions that wait for somebody who may not know of them, or has no way to answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from asyncgate import Engine
from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import findings, queries, stored, stored_oauth
from asyncgate.parts.model.overdue import has_passed
from asyncgate.parts.model.words import say_count, say_first, say_length

PATIENCE_SECONDS = 300.0        # a question that was asked just now needs nobody's look
HELD_AT_ONCE, HELD_LOOKED_AT = 100, 1000       # that are looked at, of each tenant

Who = tuple[str, str]           # kind and id of a principal


async def check_questions(at: Installation) -> AsyncIterator[findings.Finding]:
    """Look for tasks that wait for an answer, and for who is asked: without a credential, or not seen since."""
    if at.running is None:
        return
    waiting, since = await at.running.backend.count_unanswered()
    if since is None:
        return
    now = at.running.backend.now()
    told = f"{say_count(waiting, 'task')} on hold for an answer, the first for {say_length(now - since)}"
    locked_out, away = list[str](), list[str]()
    for tenant_id in await at.running.backend.tenants():
        asked = await find_asked(at.running, tenant_id, now - PATIENCE_SECONDS)
        ways = await find_ways_in(at.running, tenant_id) if asked else {}
        for who, asked_at in asked.items():
            seen = await at.running.backend.record(tenant_id, stored.Presence, *who)
            named = f"{who[0]}:{who[1]} of tenant {tenant_id}, asked {say_length(now - asked_at)} ago"
            if who not in ways and seen is None and not is_shared(at.running):
                locked_out.append(named)
            elif max(ways.get(who) or 0.0, seen.last_seen_at if seen else 0.0) < asked_at:
                away.append(named)
    if locked_out:
        yield findings.warn(f"{told}; nobody can answer as {say_first(locked_out)}",
                            "`asyncgate issue-key` gives a credential (--principal-kind, --principal-id), or an admin "
                            "answers in that place: `asyncgate inbox --as KIND:ID`")
    if away:
        yield findings.note(f"{told}; not seen since: {say_first(away)}",
                            "tell them: a webhook of the type input.requested does; or an admin answers in that place: "
                            "`asyncgate inbox --as KIND:ID`")
    if not locked_out and not away:
        yield findings.all_well(told)


async def find_asked(engine: Engine, tenant_id: str, before: float) -> dict[Who, float]:
    """Return who is asked something by the newest tasks on hold, and since when, if that was before a time."""
    asked, last, looked = dict[Who, float](), None, 0
    while looked < HELD_LOOKED_AT and (page := await engine.backend.page(
            tenant_id, queries.TaskFilter(None, None, None, last, HELD_AT_ONCE, held=True))):
        for _, _, progress in page:
            for question in stored.list_open(stored.read_questions(progress)):
                if question.asked_at < before:
                    who = question.to.kind, question.to.id
                    asked[who] = min(asked.get(who, question.asked_at), question.asked_at)
        last, looked = page[-1][0].task_id, looked + len(page)
    return asked


async def find_ways_in(engine: Engine, tenant_id: str) -> dict[Who, float | None]:
    """Return who has a credential, and when it was used last."""
    now, ways = engine.backend.now(), dict[Who, float | None]()
    async for key in read_rows(engine, tenant_id, stored.Key):
        if key.revoked_at is None and not has_passed(key.expires_at, now):
            ways[key.principal_kind, key.principal_id] = key.last_used_at
    async for user in read_rows(engine, engine.settings.default_tenant_id, stored_oauth.User):
        if user.tenant == tenant_id and user.disabled_at is None:
            ways[user.principal_kind, user.principal_id] = user.last_seen_at
    return ways


def is_shared(engine: Engine) -> bool:
    """Whether somebody else gives out credentials, or one stands for everybody."""
    settings = engine.settings
    jwt = settings.security.jwt
    return bool(settings.api_key or settings.allow_insecure_dev or jwt.public_key_path or jwt.jwks)
