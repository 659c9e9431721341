"""What of sessions, links and consents is deleted, and when."""

from __future__ import annotations

import pytest

from asyncgate.parts.identity.oauth.pruning import KEPT_SECONDS, SessionPruner
from asyncgate.parts.model.stored_oauth import Consent, Grant, SignInLink
from tests.conftest import Served
from tests.identity.oauth.granting import REDIRECT, RESOURCE

pytestmark = pytest.mark.anyio


async def test_what_ended_days_ago_goes_and_all_else_stays(oauth_gate: Served) -> None:
    oauth, tenant, now = oauth_gate.gate.oauth, oauth_gate.tenant_id, oauth_gate.backend.now()
    assert oauth is not None
    old, new, later = now - KEPT_SECONDS - 1, now - KEPT_SECONDS + 600, now + 600

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
    await oauth.directory.change(keep)

    done = await SessionPruner(oauth_gate.engine).run()

    left = [row for kind in (Grant, SignInLink, Consent) for row in await oauth.directory.page(kind)]
    assert sorted(map(repr, left)) == sorted(map(repr, rows[6:]))
    assert {one.grant_id for one in left if isinstance(one, Grant)} == {
        "just unused", "just over", "just ended", "running"}
    assert done == 6
    assert "sessions" in oauth_gate.gate.upkeep.duties
