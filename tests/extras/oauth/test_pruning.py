"""What of sessions, links and consents is deleted, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.extras.oauth.pruning import prune_sessions
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored_oauth import Consent, Grant, SignInLink
from tests.conftest import Served
from tests.extras.oauth.granting import REDIRECT, RESOURCE

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine(url: str) -> AsyncIterator[Engine]:
    """Return an engine without upkeep, which would delete too."""
    backend = await open_backend(url, serving=True)
    yield Engine(backend, Settings())
    await backend.close()


async def test_upkeep_of_a_gate_with_oauth_looks_for_them(oauth_gate: Served) -> None:
    assert "sessions" in oauth_gate.gate.upkeep.duties


async def test_what_ended_days_ago_goes_and_all_else_stays(engine: Engine) -> None:
    directory, tenant, now = Directory(engine), engine.settings.default_tenant_id, engine.backend.now()
    kept = engine.settings.security.oauth.session_retention_days * DAY_SECONDS
    old, new, later = now - kept - 1, now - kept + 600, now + 600

    def grant(id: str, client: str, *, code_until: float = old, used: float | None = old, ends: float = later,
              ended: float | None = None) -> Grant:
        return Grant(id, "ada", client, tenant, "human", "ada", "agent", "[]", RESOURCE, REDIRECT, "", "", code_until,
                     60, old, ends, used, ended_at=ended)

    def link(name: str, ends: float, used: float | None = None) -> SignInLink:
        return SignInLink(name, tenant, "human", "ada", "agent", None, old, ends, used)
    rows = [
        grant("unused", "a", used=None), grant("over", "b", ends=old), grant("ended", "c", ended=old),
        link("expired", old), link("used", later, old), Consent("ada", "a", "[]", REDIRECT, old),
        grant("just unused", "d", code_until=new, used=None), grant("just over", "e", ends=new),
        grant("just ended", "f", ended=new), grant("running", "g"), link("just used", later, new), link("good", later),
        Consent("ada", "g", "[]", REDIRECT, old), Consent("ada", "z", "[]", REDIRECT, new)]

    def keep(work: object) -> None:
        for row in rows:
            work.keep_record(row)       # type: ignore[attr-defined]
    await directory.change(keep)

    done = await prune_sessions(engine)

    left = [row for kind in (Grant, SignInLink, Consent) for row in await directory.page(kind)]
    assert sorted(map(repr, left)) == sorted(map(repr, rows[6:]))
    assert {struct.grant_id for struct in left if isinstance(struct, Grant)} == {
        "just unused", "just over", "just ended", "running"}
    assert done == 6
