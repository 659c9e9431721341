"""Erasure of a running gate: over REST, with keys, an audit log, and other processes beside."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate, settings_for_tests
from asyncgate.conformance.verify import verify
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.database import Around
from asyncgate.parts.model.news import News
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.stored import TABLES, Erasure
from asyncgate.parts.upkeep import Upkeep
from tests.conftest import Serve
from tests.support.identity_tools import OTHER, House

pytestmark = pytest.mark.anyio
ADA = "zq-marked"


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path}/gate.db"


async def text_of(served: Any) -> str:
    """Return all rows of the tenant as text."""
    rows = []
    for kind in TABLES:
        rows += await served.backend.page(served.tenant_id, Rows(kind))
    return encode_json(rows).decode()


async def test_the_keys_of_who_is_erased_are_refused_and_the_log_names_nobody(serve: Serve) -> None:
    served = await serve()
    house = House(served)
    given = {"name": "ada's", "principal_kind": "agent", "principal_id": ADA, "role": "admin"}
    key = (await house.good("issue_key", given))["api_key"]
    headers = [("user-agent", f"{ADA}/1.0")]
    task = await house.good("create_task", {"type": "demo", "payload": ADA}, token=key, headers=headers)
    await house.good("cancel_task", {"task_id": task["task_id"], "reason": ADA}, token=key, headers=headers)
    await house.good("list_audit", token=key, headers=headers)
    await house.ask("get_task", {"task_id": f"none-{ADA}"}, token=key, headers=headers)
    assert (await house.ask("erase_principal", {"principal_id": ADA, "confirm": ADA}, token=key)).code == "forbidden"

    report = await house.good("erase_principal", {"principal_id": ADA, "confirm": ADA})

    assert report["state"] == "erased"
    assert (await house.ask("list_tasks", token=key)).code == "unauthenticated"
    served.gate.guard.auditor.count()
    await served.gate.guard.auditor.flush()
    await served.gate.upkeep.once("presence")
    assert ADA not in await text_of(served)
    assert (await verify(served.backend)).problems == []
    lines = (await house.good("list_audit", {"limit": 200}))["lines"]
    assert {"erasure_begun", "erasure_ended", "erasure_confirmed"} <= {line["event"] for line in lines}
    [shown] = (await house.good("list_erasures"))["erasures"]
    assert [line["principal_id"] for line in lines if line["principal_id"] == shown["pseudonym"]]


@pytest.mark.parametrize("name", ["127.0.0.1", "acme", "admin"])
async def test_a_name_that_a_tenant_has_chosen_takes_nothing_of_others_from_the_operators_log(
        serve: Serve, name: str) -> None:
    house = House(await serve())
    boss, email = await house.admin_of(OTHER), "x@evil.example"
    await house.good("invite_user", {"email": "ada@acme.example", "name": "Ada of acme"})
    before = await house.audit()
    await house.good("invite_user", {"email": email, "name": name}, token=boss)

    report = await house.good("erase_principal", {
        "principal_kind": "human", "principal_id": email, "confirm": email}, token=boss)

    after = await house.audit()
    assert report["state"] == "erased"
    assert [line["details"] for line in after[:len(before)]] == [line["details"] for line in before]
    [theirs] = [line["details"] for line in after if "erased" in line["details"]]
    assert (theirs["tenant"], theirs["ip"], theirs["principal_id"]) == (OTHER, "127.0.0.1", "root")
    assert email not in str(after)


@pytest.mark.parametrize("name", ["127.0.0.1", "list_keys", "admin"])
async def test_a_principal_called_like_a_word_of_the_log_takes_it_from_no_line_by_others(
        serve: Serve, name: str) -> None:
    house = House(await serve())
    boss, other = await house.key("admin", "boss"), await house.key("admin", "other")
    await house.good("list_keys", token=other)
    await house.key("worker", name, by=boss)
    before = {line["audit_id"]: line["details"] for line in await house.audit()}

    await house.good("erase_principal", {"principal_kind": "worker", "principal_id": name, "confirm": name}, token=boss)

    words = ("ip", "role", "operation", "key_id")
    for line in await house.audit():
        if was := before.get(line["audit_id"]):
            assert [line["details"].get(word) for word in words] == [was.get(word) for word in words], line


async def test_an_export_tells_a_tenant_neither_ids_nor_numbers_of_others(serve: Serve) -> None:
    house = House(await serve())
    boss = await house.admin_of(OTHER)
    users = [await house.good("invite_user", {"email": f"ada{at}@acme.example"}) for at in range(4)]
    mine = await house.good("invite_user", {"email": "bob@other.example"}, token=boss)

    for name in ("export_tenant", "export_principal"):
        ask: dict[str, Any] = {"limit": 1, **({"principal_id": "bob@other.example", "principal_kind": "human"}
                                              if name == "export_principal" else {})}
        pages = [await house.good(name, ask, token=boss)]
        while cursor := pages[-1]["next_cursor"]:
            pages.append(await house.good(name, {**ask, "cursor": cursor}, token=boss))
        told = [base64.urlsafe_b64decode(f"{page['next_cursor'] or ''}==") for page in pages]
        of_users = [page for page in pages if page["kind"] == "oauth_users"]

        assert [row["user_id"] for page in of_users for row in page["rows"]] == [mine["user_id"]]
        assert sum(page["looked_at"] for page in of_users) == 1
        assert not any(user["user_id"].encode() in text for user in users for text in told)


class Beside(Around):
    """A backend that another process serves, too."""

    def is_alone(self) -> bool:
        """Say that the other one is there."""
        return False

    def tell(self, news: News) -> None:
        """Tell nobody."""

    async def lead(self, job: str) -> bool:
        """Let this one do everything."""
        return True


async def test_it_ends_when_no_other_process_can_still_write_what_it_noted(url: str) -> None:
    backend = await open_backend(url)
    gate = Gate(Engine(backend, settings_for_tests()), "00000000-0000-4000-8000-00000000000a")
    await gate.create(by=ADA)
    gate.engine.shared = Beside(backend)    # type: ignore[assignment]
    ask = {"principal_kind": "agent", "principal_id": ADA, "confirm": ADA}

    first = await gate.as_admin().erase_principal(**ask)
    await gate.create(by=ADA)       # what another process let in before it knew
    gate.skip(331)
    await Upkeep(gate.engine).once("erasures")

    assert first.state == "erasing"
    assert (await gate.as_admin().erase_principal(**ask)).changes == []
    assert ADA not in encode_json(await gate.everything()).decode()
    [erasure] = await backend.page(gate.tenant_id, Rows(Erasure))
    assert (erasure.erasure_id, erasure.key, erasure.step) == (first.erasure_id, "", "ended")
    await backend.close()
