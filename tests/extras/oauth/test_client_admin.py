"""Operations on clients: D8 of the threats, who may, what ends with a client, and that all of it is audited."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncgate.extras.oauth.client_admin import hash_client_secret
from asyncgate.parts.identity.directory import ROWS_CHANGED, Directory
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.stored_oauth import Grant, OAuthClient, Revocation
from tests.support.identity_tools import FACADES, HOME, OTHER, THIRD, House, security

pytestmark = pytest.mark.anyio

APP: dict[str, Any] = {"client_name": "My Agent", "redirect_uris": ["https://myapp.com/oauth/callback"]}
DOCUMENT = "https://app.example/oauth/client.json"


class Programs:
    """A gate whose authorization server is off, and its directory: administration works all the same."""

    def __init__(self, house: House) -> None:
        self.house, self.engine = house, house.served.engine
        self.directory = Directory(self.engine)

    async def register(self, **more: Any) -> dict[str, Any]:
        made: dict[str, Any] = await self.house.good("register_client", {**APP, **more})
        return made

    async def change(self, client_id: str, **more: Any) -> dict[str, Any]:
        made: dict[str, Any] = await self.house.good("change_client", {"client_id": client_id, **more})
        return made

    async def row(self, client_id: str) -> OAuthClient | None:
        return await self.directory.find(OAuthClient, client_id)

    async def grant(self, client_id: str, *ids: str) -> None:
        """Let people have sessions with a client."""
        rows = [Grant(id, "u1", client_id, HOME, "agent", "ada", "agent", "[]", "http://localhost/mcp", "https://x/cb",
                      "c" * 43, "h" * 64, 1.0, 60, 1.0, 2.0) for id in ids]

        def store(work: Any) -> None:
            for row in rows:
                work.keep_record(row)
        await self.directory.change(store)

    async def revocations(self) -> list[tuple[str, str]]:
        return [(row.kind, row.subject) for row in await self.directory.page(Revocation)]


@pytest.fixture
async def programs(house: House) -> Programs:
    return Programs(house)


@pytest.mark.parametrize("facade", FACADES)
async def test_a_tenant_has_so_many_programs_and_the_operator_any_number(serve: Any, facade: str) -> None:
    given = security()
    house = House(await serve(security=replace(given, oauth=replace(given.oauth, clients_per_tenant=2))))
    root = await house.admin_of(OTHER)

    async def register(token: str | None = root, **more: Any) -> Any:
        return await house.ask("register_client", {**APP, **more}, token=token, facade=facade)

    told = await asyncio.gather(*(register() for _ in range(4)))
    [kept, *_] = [answer.body["client_id"] for answer in told if not answer.code]
    [refused, *_] = [answer for answer in told if answer.code]
    others = [await register(token=None) for _ in range(3)]
    for_them = await register(token=None, tenant=OTHER)
    await house.good("remove_client", {"client_id": kept}, token=root)
    room = await register()

    assert sorted(answer.code for answer in told) == ["", "", "quota_exceeded", "quota_exceeded"]
    assert (refused.body["quota"], refused.body["limit"]) == ("clients_per_tenant", 2)
    assert [answer.code for answer in (*others, for_them, room)] == ["", "", "", "quota_exceeded", ""]


@pytest.mark.parametrize("facade", FACADES)
async def test_a_program_is_registered_listed_changed_and_removed(programs: Programs, facade: str) -> None:
    ask: dict[str, Any] = {"facade": facade}
    house = programs.house
    made = await house.good("register_client", {**APP, "scopes": ["tasks:write", "tasks:read"]}, **ask)
    shown = made["client"]

    assert (shown["origin"], shown["auth_method"], shown["scopes"]) == ("registered", "none", [
        "tasks:read", "tasks:write"])
    assert "client_secret" not in made
    assert (await house.good("list_clients", {}, **ask))["clients"] == [shown]
    changed = await house.good("change_client", {
        "client_id": made["client_id"], "client_name": "Other", "scopes": [], "trusted": True, "access_days": 5},
        **ask)
    assert changed["client"] == {name: value for name, value in shown.items() if name != "scopes"} | {
        "client_name": "Other", "trusted": True, "access_days": 5}
    reset = {"client_id": made["client_id"], "access_days": 0, "trusted": False}
    back = await house.good("change_client", reset, **ask)
    assert "access_days" not in back["client"]
    assert await house.good("remove_client", {"client_id": made["client_id"]}, **ask) == {"ok": True}
    assert (await house.good("list_clients", {}, **ask))["clients"] == []
    assert (await house.ask("remove_client", {"client_id": made["client_id"]}, **ask)).code == "client_not_found"


@pytest.mark.one_store
async def test_the_path_of_the_specification_works(programs: Programs) -> None:
    served = programs.house.served
    made = await served.post("/admin/oauth/clients", {**APP, "scopes": ["tasks:read", "tasks:write", "receipts:read"]})

    assert len(made["client_id"]) == 36
    assert [row["client_id"] for row in (await served.get("/admin/oauth/clients"))["clients"]] == [made["client_id"]]
    anybody = await served.call("POST", "/admin/oauth/clients", APP, token=None)
    assert (anybody.status, anybody.json()["error"]) == (401, "unauthenticated")


async def test_a_secret_is_shown_once_and_stored_as_a_hash(programs: Programs) -> None:
    made = await programs.register(with_secret=True)
    row = await programs.row(made["client_id"])

    assert row is not None
    assert row.secret_hash == hash_client_secret(made["client_secret"])
    assert len(made["client_secret"]) == 43
    again = await programs.change(made["client_id"], new_secret=True)
    listed = await programs.house.ask("list_clients", {})
    assert again["client_secret"] != made["client_secret"]
    assert not any(secret.encode() in listed.content for secret in (made["client_secret"], again["client_secret"]))
    assert row.secret_hash.encode() not in listed.content
    assert (await programs.row(made["client_id"])).secret_hash == hash_client_secret(again["client_secret"])  # type: ignore[union-attr]
    log = msgspec.json.encode(await programs.house.audit())
    assert again["client_secret"].encode() not in log
    assert row.secret_hash[:20].encode() not in log
    assert row.secret_hash not in repr(row)


REFUSED: list[dict[str, Any]] = [
    {"redirect_uris": [uri]} for uri in (
        "http://myapp.com/cb", "https://myapp.com/cb#f", "https://*.myapp.com/cb", "javascript:alert(1)",
        "data:text/html,x", "myapp:/cb", "https://u:p@myapp.com/cb", "https://myapp.com/" + "a" * 2048)] + [
    {"redirect_uris": []}, {"redirect_uris": [f"https://myapp.com/{n}" for n in range(21)]},
    {"redirect_uris": [*APP["redirect_uris"], "http://myapp.com/cb"]}, {"scopes": ["tasks:fly"]},
    {"scopes": ["openid"]}, {"access_days": 4}, {"access_days": 91}, {"client_name": ""}, {"client_name": "a\x00b"},
    {"client_name": "a\u202eb"}, {"client_id": "8d1f6f0a-5b7c-4f6e-9a53-2f0c7e4b9d11"}, {"client_id": "https://a.example"},
    {"client_id": "https://a.example/"}, {"client_id": "http://localhost/c.json"}, {"client_id": "https://a.example/x?y"},
    {"client_id": "https://a.example/a/../c.json"}, {"client_id": "https://a.example/a%2Fc.json"},
    {"client_id": "https://u@a.example/c.json"}, {"client_id": "https://a.example/c.json#f"},
    {"client_id": DOCUMENT, "with_secret": True}]


@pytest.mark.one_store
async def test_what_could_lead_people_elsewhere_is_not_registered(programs: Programs) -> None:
    for wrong in REFUSED:
        assert (await programs.house.ask("register_client", {**APP, **wrong})).code == "invalid_request", wrong
    made = (await programs.register())["client_id"]
    for wrong in REFUSED:
        if wrong.keys() & {"redirect_uris", "scopes", "access_days"}:
            told = await programs.house.ask("change_client", {"client_id": made, **wrong})
            assert told.code == "invalid_request", wrong

    assert [row.client_id for row in await programs.directory.page(OAuthClient)] == [made]


@pytest.mark.one_store
async def test_html_in_a_name_is_kept_for_the_pages_to_escape(programs: Programs) -> None:
    made = await programs.register(client_name="<b onload=x>&\"'")

    assert made["client"]["client_name"] == "<b onload=x>&\"'"


async def test_only_admins_administer_programs_and_only_those_of_their_tenant(programs: Programs) -> None:
    house = programs.house
    root, stranger = await house.admin_of(OTHER), await house.admin_of(THIRD, "third")
    agent, limited = await house.key(), await house.key("admin", "lim", task_types=["draw"])
    everybodys = (await programs.register())["client_id"]
    theirs = (await house.good("register_client", APP, token=root))["client_id"]

    assert (await programs.row(theirs)).tenant == OTHER    # type: ignore[union-attr]
    for name, fields in (("register_client", APP), ("list_clients", {}), ("change_client", {"client_id": everybodys}),
                         ("remove_client", {"client_id": everybodys})):
        assert (await house.ask(name, fields, token=agent)).code == "forbidden"
        assert (await house.ask(name, fields, token=limited)).code == "forbidden"
    for token, known in ((root, [theirs]), (stranger, [])):
        assert [row["client_id"] for row in (await house.good("list_clients", {}, token=token))["clients"]] == known
    for token, client_id in ((root, everybodys), (stranger, everybodys), (stranger, theirs)):
        for name in ("change_client", "remove_client"):
            assert (await house.ask(name, {"client_id": client_id}, token=token)).code == "client_not_found"
    assert (await house.ask("register_client", {**APP, "tenant": OTHER}, token=stranger)).code == "tenant_not_found"
    assert (await house.ask("register_client", {**APP, "client_id": DOCUMENT}, token=root)).code == "forbidden"
    assert len((await house.good("list_clients", {}))["clients"]) == 2
    assert [row["client_id"] for row in (await house.good("list_clients", {"tenant": OTHER}))["clients"]] == [theirs]


@pytest.mark.one_store
async def test_a_program_is_trusted_with_no_more_than_its_admin_has(programs: Programs) -> None:
    clerk = await programs.house.key("admin", "clerk", scopes=["admin:write", "tasks:read"])

    for more in ({}, {"scopes": ["tasks:read", "admin:read"]}):
        told = await programs.house.ask("register_client", {**APP, "trusted": True, **more}, token=clerk)
        assert told.code == "forbidden"
    made = await programs.house.good("register_client", {**APP, "trusted": True, "scopes": ["tasks:read"]}, token=clerk)
    more = {"client_id": made["client_id"], "scopes": ["tasks:read", "tasks:write"]}
    assert (await programs.house.ask("change_client", more, token=clerk)).code == "forbidden"


@pytest.mark.parametrize("how", ["disable", "remove"])
async def test_sessions_and_tokens_end_with_their_program_and_stay_ended(programs: Programs, how: str) -> None:
    gone, other = [(await programs.register())["client_id"] for _ in range(2)]
    many = [f"g{number:04d}" for number in range(ROWS_CHANGED + 1)]
    await programs.grant(gone, *many)
    await programs.grant(other, "other")
    if how == "disable":
        assert (await programs.change(gone, disabled=True, reason="stolen"))["client"]["disabled_at"]
        assert (await programs.change(gone, disabled=True))["client"]["disabled_at"]
        await programs.change(gone, disabled=False)
    else:
        await programs.house.good("remove_client", {"client_id": gone})

    grants = {row.grant_id: row for row in await programs.directory.page(Grant)}
    assert await programs.revocations() == [("client", gone)]
    assert all(grants[id].ended_at and grants[id].ended_why for id in many)
    assert grants["other"].ended_at is None
    row = await programs.row(gone)
    assert (row is not None and row.disabled_at is None) if how == "disable" else row is None


async def test_a_program_stays_refused_for_as_long_as_any_token_of_it_may_be_valid(programs: Programs) -> None:
    await programs.change((await programs.register())["client_id"], disabled=True)

    [row] = await programs.directory.page(Revocation)
    assert row.expires_at - row.revoked_at >= 90 * DAY_SECONDS + 300      # the longest life, and the longest leeway


async def test_what_an_interrupted_call_has_left_ends_before_the_program_is_let_in_again(programs: Programs) -> None:
    made = (await programs.register())["client_id"]
    await programs.change(made, disabled=True)
    await programs.grant(made, "left")
    await programs.change(made, disabled=False)

    (grant,) = await programs.directory.page(Grant)
    assert grant.ended_at is not None


async def test_a_metadata_document_is_pinned_and_named_in_a_path(programs: Programs) -> None:
    made = await programs.register(client_id=DOCUMENT)

    assert (made["client_id"], made["client"]["origin"], made["client"]["pinned"]) == (DOCUMENT, "document", True)
    assert (await programs.house.ask("register_client", {**APP, "client_id": DOCUMENT})).code == "invalid_request"
    for path in (DOCUMENT.replace(":", "%3A").replace("/", "%2F"), DOCUMENT.replace(":", "%3a").replace("/", "%2f")):
        changed = await programs.house.served.post(f"/v1/clients/{path}", {"client_name": "Mine"})
        assert changed["client"]["client_name"] == "Mine"
    assert (await programs.house.ask("change_client", {
        "client_id": DOCUMENT, "pinned": False, "client_name": "Yours"})).code == "invalid_request"
    assert "pinned" not in (await programs.change(DOCUMENT, pinned=False))["client"]
    assert (await programs.house.ask("change_client", {"client_id": DOCUMENT, "new_secret": True})).code == (
        "invalid_request")
    plain = (await programs.register())["client_id"]
    assert (await programs.house.ask("change_client", {"client_id": plain, "pinned": True})).code == "invalid_request"


async def test_each_change_is_audited_for_the_operator_and_for_the_tenant(programs: Programs) -> None:
    house = programs.house
    await house.admin_of(OTHER)
    made = (await programs.register(tenant=OTHER))["client_id"]
    await programs.change(made, trusted=True, reason="ours")
    await programs.change(made, trusted=True)
    await house.good("remove_client", {"client_id": made, "reason": "old"})

    for tenant in (HOME, OTHER):
        lines = [line for line in await house.audit(tenant) if line["event"].startswith("client_")]
        assert [(line["event"], line["severity"], line["reason"]) for line in lines] == [
            ("client_registered", "warning", None), ("client_changed", "warning", "ours"),
            ("client_removed", "warning", "old")]
        assert lines[1]["details"]["changed"] == ["trusted"]
        assert {line["details"]["about_client"] for line in lines} == {made}


async def test_nobody_sees_the_hash_of_a_secret_by_accident() -> None:
    row = OAuthClient("c", "registered", "n", "[]", None, "none", "hash", None, None, False, False, None, 1.0, "a", 1.0)

    assert "hash" not in repr(replace(row, name="other"))
