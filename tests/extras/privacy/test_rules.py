"""No personal field is forgotten: a mark in each field that a card calls personal is gone, or is said to stay."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Raw, Struct
from msgspec.structs import asdict, fields, replace

from asyncgate.extras.privacy.rules import ERASE_RULES, WITH_TASK, judge
from asyncgate.extras.privacy.whom import Whom
from asyncgate.parts.identity.audit import add_salt
from asyncgate.parts.model.cards import CARDS, PERSONAL, is_personal, list_fields
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.stored import (
    Account,
    Audit,
    Bulk,
    Event,
    Key,
    Outgoing,
    Pauses,
    Progress,
    Question,
    Receipt,
    Schedule,
    Task,
)
from asyncgate.parts.model.stored_limits import Limit
from asyncgate.parts.model.stored_oauth import OAuthClient
from asyncgate.parts.model.stored_webhooks import Webhook, WebhookDelivery
from asyncgate.parts.model.wire import Principal
from tests.support.each import each

TENANT, MARK = "00000000-0000-4000-8000-000000000007", "zq-marked"
ADA = Principal("agent", MARK)
KEY = b"k" * 32
ABOUT_PERSONS = [kind for kind in CARDS if is_personal(kind)]
# Fields that hold JSON, or the text "kind id": a mark alone is not what they hold.
FORMS: dict[type[Struct], dict[str, str]] = {
    Progress: {"inputs": to_canonical([Question(
        "k", "r-1", "l-1", ADA, ADA, 0.0, "", f"May {MARK} go on?", content=Raw(f'"{MARK}"'.encode()), answered_by=ADA,
        state="accept")]).decode()},
    Task: {"lost_to": f'["{MARK}"]'}, Event: {"payload": f'{{"worker_id":"{MARK}"}}'},
    Receipt: {"body": f'{{"text":"{MARK}"}}'}, Outgoing: {"content": f'{{"to_id":"{MARK}"}}'},
    Webhook: {"principals": f'["{MARK}"]', "created_by": str(ADA)},
    Bulk: {"asked": f'{{"created_by":"{MARK}"}}'}, OAuthClient: {"created_by": str(ADA), "redirect_uris": f'["https://{MARK}.example.com","https://example.com"]'},
    Schedule: {"details": f'{{"name":"{MARK}"}}'},
    Limit: {"rules": f'{{"overrides":{{"{MARK}":{{"weight":2}}}}}}'},
    Pauses: {"listed": f'[{{"since":1.0,"by_kind":"agent","by_id":"{MARK}","reason":"{MARK}"}}]'},
    Audit: {"body": f'{{"ip":"{MARK}","message":"{MARK} was here","principal_id":"{MARK}","principal_kind":"agent",'
                    f'"reason":"{MARK}"}}'}}
# What a rule leaves of a row of the principal, because it is somebody else's or goes otherwise.
STAYS: dict[type[Struct], set[str]] = {
    Webhook: {"secret_id", "previous_id"},
    Progress: {"progress"},
    OAuthClient: {"document", "secret_hash"}}      # what the program itself publishes


def whom(principal: Principal | None) -> Whom:
    names = frozenset({MARK, str(ADA)})
    return Whom("01a20add-87a8-7516-a6a3-0d634d5bca70", TENANT, principal, names, frozenset({MARK}), KEY)


def row_of(kind: type[Struct]) -> Any:
    """Make a row about ada with the mark in all personal fields."""
    marked, hints = list_fields(kind, *PERSONAL), get_type_hints(kind)
    given: dict[str, Any] = {}
    for field in fields(kind):
        hint, name = hints[field.name], field.name
        if name.endswith("_kind") or name == "kind":
            given[name] = "agent"
        elif name in marked:
            given[name] = FORMS.get(kind, {}).get(name, MARK)
        elif name in ("tenant", "of_tenant"):
            given[name] = TENANT
        else:
            given[name] = plain(hint)
    return kind(**given)


def plain(hint: Any) -> Any:
    if type(None) in get_args(hint):
        return None
    origin = {bool: False, int: 0, float: 0.0, str: "x"}
    return origin.get(hint, () if "tuple" in str(hint) else (get_args(hint) or ("x",))[0])


@each("kind", CARDS)
def test_every_kind_of_row_has_a_rule_or_a_reason_to_stay(kind: type[Struct]) -> None:
    assert (kind in ERASE_RULES) != bool(CARDS[kind].left_alone), (
        f"say in extras/privacy/rules.py what is done to {kind}, or on its card why nothing is")


@each("kind", [kind for kind in ABOUT_PERSONS if kind in ERASE_RULES])
@pytest.mark.parametrize("scope", ["principal", "tenant"])
def test_no_mark_is_left_in_a_row_of_whom_is_erased(kind: type[Struct], scope: str) -> None:
    if scope == "tenant" and kind in WITH_TASK:
        return      # the task takes it along
    row = row_of(kind)
    who = whom(ADA if scope == "principal" else None)
    stays = STAYS.get(kind, set())
    if scope == "principal" and kind.__name__ == "Account":
        return      # a tenant's name is not its principals'

    after = judge(who, row, set())

    left = {name for name, value in asdict(after).items() if MARK in str(value)} if after is not None else set()
    assert left <= (stays if scope == "principal" else set())
    if after is not None:
        assert judge(who, after, set()) == after, "a row whose turn has come already stays as it is"


@each("kind", ERASE_RULES)
def test_a_row_of_others_stays_as_it_is(kind: type[Struct]) -> None:
    row = row_of(kind)
    other = Whom("01a20add-87a8-7516-a6a3-0d634d5bca70", TENANT, Principal("agent", "bob"), frozenset({"bob"}),
                 frozenset({"bob"}), KEY)

    assert judge(other, row, set()) == row


@pytest.mark.parametrize("who", ["agent", "worker"])
def test_an_audit_line_loses_its_salt_with_anything_else_and_not_alone(who: str) -> None:
    row = replace(row_of(Audit), body=f'{{"principal_id":"{MARK}","principal_kind":"{who}","reason":"{MARK}"}}')
    salted = replace(row, body=add_salt(row.body.encode()))
    assert salted.body != replace(row, body=add_salt(row.body.encode())).body

    erased = judge(whom(ADA), salted, set())

    assert erased == judge(whom(ADA), row, set()) != salted
    later = replace(erased, body=add_salt(erased.body.encode()))    # type: ignore[union-attr, type-var]
    assert judge(whom(ADA), later, set()) == later


def test_the_principal_of_another_kind_is_another_one() -> None:
    row = row_of(Receipt)
    other = Whom("01a20add-87a8-7516-a6a3-0d634d5bca70", TENANT, Principal("worker", MARK), frozenset(), frozenset(),
                 KEY)

    assert judge(other, row, set()) == row


def test_equal_names_get_equal_pseudonyms_and_another_key_another_one() -> None:
    person = whom(ADA)

    assert person.pseudonym("agent", "ada") == whom(ADA).pseudonym("agent", "ada") != person.pseudonym("worker", "ada")
    assert Whom(person.erasure_id, TENANT, ADA, person.names, person.users, b"l" * 32).pseudonym("agent", "ada") != (
        person.pseudonym("agent", "ada"))


@pytest.mark.parametrize("text", [f"asked by {MARK}.", f"{MARK}-laptop", f"the key of ({MARK}): new", f"for_{MARK}",
                                  f"{MARK}'s"])
def test_what_others_have_written_for_people_does_not_name_who_is_erased(text: str) -> None:
    rows = [
        Audit("1", 1, 1.0, "key_issued", "info", f'{{"issued_to":"{MARK}","name":"{text}","principal_id":"bob",'
              f'"principal_kind":"agent","reason":"{text}"}}', ""),
        row_of(Webhook), row_of(Key), row_of(Account), row_of(Pauses), row_of(Bulk), row_of(Schedule),
        row_of(OAuthClient), row_of(WebhookDelivery)]
    rows[1:] = [
        replace(rows[1], description=text, principals="[]"), replace(rows[2], name=text, principal_id="bob"),
        replace(rows[3], exempt_why=text, stricter_why=text, name="a tenant"),
        Pauses(f'[{{"since":1.0,"by_kind":"agent","by_id":"bob","type":"x","reason":"{text}"}}]'),
        replace(rows[5], by_id="bob", asked=f'{{"action":"cancel","reason":"{text}"}}', problem=None),
        Schedule("s", "agent", "bob", "worker", "cron", "r", details=f'{{"name":"{text}","last_status":"{text}"}}'),
        replace(rows[7], name=text, redirect_uris=f'["https://example.com/{text}"]', created_by="agent bob"),
        replace(rows[8], reason=text)]
    personal: dict[type[Struct], tuple[str, ...]] = {
        Webhook: ("description",), Key: ("name",), Account: ("exempt_why", "stricter_why"),
        Schedule: ("details",), OAuthClient: ("name", "redirect_uris", "created_by"), WebhookDelivery: ("reason",)}

    for row in rows:
        left = judge(whom(ADA), row, set())
        assert left is not None
        told = asdict(left)
        kept = [told[name] for name in personal.get(type(row), tuple(told))]
        assert not [value for value in kept if MARK in str(value)], type(row)


@pytest.mark.parametrize("url", [
    f"https://example.com/of/{MARK}.json?who=x", f"https://example.com/?who={MARK}", f"https://{MARK}.example.com/",
    "https://example.com/ada%40example.com"])
def test_an_endpoint_that_names_who_is_erased_is_disabled_and_says_why(url: str) -> None:
    row = replace(row_of(Webhook), url=url, state="active", reason=None)
    who = replace(whom(ADA), names=frozenset({MARK, "ada@example.com"}))

    left = judge(who, row, set())

    assert isinstance(left, Webhook)
    assert (MARK in left.url, "ada%40" in left.url, left.state) == (False, False, "disabled")
    assert "change_webhook" in str(left.reason)


def test_a_program_keeps_the_addresses_that_name_nobody_and_those_of_other_tenants_keep_all() -> None:
    row = row_of(OAuthClient)
    foreign = replace(row, tenant="another", created_by="agent bob")

    left = judge(whom(ADA), row, set())

    assert isinstance(left, OAuthClient)
    assert left.redirect_uris == '["https://example.com"]'
    assert judge(replace(whom(ADA), here=False), foreign, set()) == foreign


def test_the_name_of_another_that_only_begins_alike_stays() -> None:
    row = replace(row_of(Webhook), description=f"for {MARK}10 and x{MARK}", principals="[]", created_by="agent bob",
                  url=f"https://example.com/{MARK}10", reason=None)

    assert judge(whom(ADA), row, set()) == row
