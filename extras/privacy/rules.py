"""What an erasure does to each kind of row: it stays as it is, it goes, or another one takes its place.

The rules are pure, and say the same of a row whose turn has come already: so an erasure that was interrupted begins its
step again, and one that is repeated changes nothing.  Every kind of row has its rule in `ERASE_RULES`, or
its card says why it is left alone; `tests/extras/privacy` plants a mark in every field that a card calls personal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate.extras.privacy.whom import Whom
from asyncgate.parts.model import (
    erased,
    stored,
    stored_handover,
    stored_limits,
    stored_oauth,
    stored_types,
    stored_webhooks,
    wire,
)
from asyncgate.parts.model.cards import CARDS, OF_TASK
from asyncgate.parts.model.content import encode_json, to_canonical
from asyncgate.parts.model.limiting import decode_rules
from asyncgate.parts.model.pausing import decode_pauses, encode_pauses
from asyncgate.parts.receipts.seals import entry_digest, receipt_digest

EraseRule = Callable[[Whom, Any, set[str]], Struct | None]

# The members of an audit line that stay in a line by somebody who is erased: which kind of credential did what to what.
KEPT_MEMBERS = frozenset({
    "principal_kind", "principal_id", "role", "operation", "key_id", "session_id", "token_id", "issued", "rotated",
    "rotated_to", "revoked", "about_key", "about_session", "about_token", "task_id", "receipt_id", "bulk_id", "times",
    "uses", "operations", "tasks", "more_tasks", "answer", "matches", "at_least", "done", "skipped", "refused", "up_to",
    "hash", "lines", "erasure_id", "counts", "digest", "erased"})
# Those that nobody can write a name into, so a principal who is called like one takes none away from lines by others.
OWN_WORDS = frozenset({"ip", "role", "operation", "principal_kind", "key_id", "erasure_id"})
# In the operator's log also those that tell what was done to what.
FOUND_OUT = KEPT_MEMBERS | OWN_WORDS | {"user_agent", "tenant", "of_tenant"}
# Those that people write, and may write a name into.
FOR_PEOPLE = frozenset({"name", "reason", "message", "description", "client_name", "endpoint"})
RENAMED = "its endpoint named somebody who was erased: change_webhook with another endpoint and active"
decode_list = msgspec.json.Decoder(list[str]).decode


def leave(whom: Whom, row: Struct, owned: set[str]) -> Struct:
    """Leave a row as it is."""
    return row


# Work.


def erase_task(whom: Whom, row: stored.Task, owned: set[str]) -> stored.Task | None:
    """Take the tasks of the principal away, and its name from those that it has lost."""
    if whom.is_everybody or whom.covers(row.owner_kind, row.owner_id):
        return None
    lost = decode_list(row.lost_to)
    if whom.principal is None or not whom.here or whom.principal.id not in lost:
        return row
    who = whom.principal
    named = [whom.pseudonym(who.kind, who.id) if id == who.id else id for id in lost]
    return replace(row, lost_to=to_canonical(named).decode())


def erase_lease(whom: Whom, row: stored.Lease, owned: set[str]) -> stored.Lease:
    """Replace the name of who held a lease."""
    if not whom.covers(row.worker_kind, row.worker_id):
        return row
    return replace(row, worker_id=whom.pseudonym(row.worker_kind, row.worker_id), worker_instance=None, claim_id=None,
                   resumed_by=None)


def erase_progress(whom: Whom, row: stored.Progress, owned: set[str]) -> stored.Progress:
    """Replace the name of whom a task has asked, and take what it has written with its answers away."""
    if row.inputs is None or row.task_id in owned:
        return row
    asked = stored.decode_questions(row.inputs)
    left = [erase_question(whom, question) for question in asked]
    return row if left == asked else replace(row, inputs=encode_json(left).decode())


def erase_question(whom: Whom, question: stored.Question) -> stored.Question:
    """Replace the name of the principal in a question, and its content if the answer is the principal's."""
    mine = question.answered_by is not None and whom.covers(question.answered_by.kind, question.answered_by.id)
    to, asked_by, answered_by = [
        who and replace(who, id=whom.replace_id(who.kind, who.id))
        for who in (question.to, question.asked_by, question.answered_by)]
    assert to is not None
    assert asked_by is not None
    return replace(question, to=to, asked_by=asked_by, answered_by=answered_by, message=whom.blot(question.message),
                   content=wire.JSON_NULL if mine else question.content)


def erase_event(whom: Whom, row: stored.Event, owned: set[str]) -> stored.Event:
    """Empty an event of another principal's task that names the principal."""
    if row.task_id in owned or not whom.is_mentioned(msgspec.json.decode(row.payload)):
        return row
    return replace(row, payload=f'{{"erased":"{whom.erasure_id}"}}')


def erase_schedule(whom: Whom, row: stored.Schedule, owned: set[str]) -> stored.Schedule | None:
    """Take a schedule of the principal away, whose end was told before, and its name from what others call theirs."""
    gone = whom.is_everybody or whom.covers(row.owner_kind, row.owner_id) or whom.covers(
        row.scheduler_kind, row.scheduler_id)
    if gone:
        return None
    told = stored.read_details(row.details)
    left = replace(told, name=blot_or_none(whom, told.name), last_status=blot_or_none(whom, told.last_status))
    return row if left == told else replace(row, details=msgspec.json.encode(left).decode())


# Receipts.


def erase_receipt(whom: Whom, row: stored.Receipt, owned: set[str]) -> stored.Receipt:
    """Empty the receipts from and to the principal and those of its tasks, and the gate's own that name it."""
    note, sent = erased.read_note(row.body), whom.covers(row.from_kind, row.from_id)
    if row.receipt_type == "task.assigned" and (sent or is_by_pseudonym(whom, row)):
        owned.add(row.task_id)
    named = sent or whom.covers(row.to_kind, row.to_id)
    if note is not None:
        return rename(whom, row) if named else row
    mine = named or (row.task_id != "" and row.task_id in owned) or (whom.is_everybody and row.body != "")
    if not mine and not (row.from_kind == "asyncgate" and row.body and whom.is_mentioned(
            msgspec.json.decode(row.body))):
        return row
    if not row.body and not named:      # a skeleton that names somebody else; the ledger has its content
        return row
    about = row.schedule_id
    emptied = replace(
        row, receipt_key=whom.keyed(row.receipt_key), hash=whom.keyed(row.hash),
        schedule_id=about if about is None or about.startswith(erased.PSEUDONYM) else whom.pseudonym("schedule", about),
        body=erased.write_note(whom.erasure_id, receipt_digest(row).hex()) if row.body else "", salt="")
    return rename(whom, emptied)


def is_by_pseudonym(whom: Whom, row: stored.Receipt) -> bool:
    """Whether the sender of a receipt is the principal by its pseudonym, because this erasure was here before."""
    who = whom.principal
    return who is not None and row.from_id == whom.pseudonym(who.kind, who.id)


def rename(whom: Whom, row: stored.Receipt) -> stored.Receipt:
    """Replace the names of a receipt's sender and recipient."""
    return replace(row, from_id=whom.replace_id(row.from_kind, row.from_id),
                   to_id=whom.replace_id(row.to_kind, row.to_id))


def erase_outgoing(whom: Whom, row: stored.Outgoing, owned: set[str]) -> stored.Outgoing | None:
    """Do not send what names the principal or belongs to its tasks."""
    gone = whom.is_everybody or row.task_id in owned or whom.is_within(msgspec.json.decode(row.content))
    return None if gone else row


def erase_entry(whom: Whom, row: stored.Entry, owned: set[str]) -> stored.Entry:
    """Empty what the principal has stored in this ledger, and what was stored there for it."""
    ends = ((row.from_kind, row.from_id), (row.to_kind, row.to_id), (row.stated_kind, row.stated_id))
    if not any(whom.covers(*end) for end in ends):
        return row
    note = erased.read_note(row.content)
    named = row.receipt_id.startswith(erased.PSEUDONYM)
    return replace(
        row, receipt_id=row.receipt_id if named else whom.pseudonym("receipt", row.receipt_id),
        from_id=whom.replace_id(*ends[0]), to_id=whom.replace_id(*ends[1]), stated_id=whom.replace_id(*ends[2]),
        digest=row.digest if note else whom.keyed(row.digest),
        content=row.content if note else erased.write_note(whom.erasure_id, entry_digest(row).hex()))


# Who was here, and what an admin did.


def erase_presence(whom: Whom, row: stored.Presence, owned: set[str]) -> stored.Presence | None:
    """Forget when the principal was here."""
    return None if whom.is_everybody or whom.covers(row.kind, row.id) else row


def erase_key(whom: Whom, row: stored.Key, owned: set[str]) -> stored.Key | None:
    """Take the keys of the principal away, and its name from those that it has issued."""
    if whom.is_everybody or whom.covers(row.principal_kind, row.principal_id):
        return None
    return replace(row, name=whom.blot(row.name), created_by=rename_text(whom, row.created_by))


def blot_or_none(whom: Whom, text: str | None) -> str | None:
    """Take the names of the principal out of a text for people, if there is one."""
    return None if text is None else whom.blot(text)


def rename_text(whom: Whom, text: str) -> str:
    """Replace the text "kind id" of a principal."""
    kind, _, id = text.partition(" ")
    return f"{kind} {whom.replace_id(kind, id)}" if id else text


def erase_account(whom: Whom, row: stored.Account, owned: set[str]) -> stored.Account:
    """Take the name of a tenant away that is erased as a whole; it stays suspended."""
    if not whom.is_everybody:
        return replace(row, exempt_why=blot_or_none(whom, row.exempt_why),
                       stricter_why=blot_or_none(whom, row.stricter_why))
    name = row.name if row.name.startswith(erased.PSEUDONYM) else whom.pseudonym("tenant", whom.tenant_id)
    return replace(row, name=name, exempt_why=None, stricter_why=None)


def erase_limit(whom: Whom, row: stored_limits.Limit, owned: set[str]) -> stored_limits.Limit | None:
    """Take the name of the principal from what it has set, and what is set for it alone."""
    if whom.is_everybody:
        return None
    rules = decode_rules(row.rules)
    left = {key: of for key, of in rules.overrides.items() if key not in whom.names}
    row = replace(row, rules=encode_json(replace(rules, overrides=left)).decode()) if left != rules.overrides else row
    covered = whom.covers(row.by_kind, row.by_id)
    return replace(row, by_id=whom.pseudonym(row.by_kind, row.by_id)) if covered else row


def erase_pauses(whom: Whom, row: stored.Pauses, owned: set[str]) -> stored.Pauses:
    """Take the name of the principal from what it has paused, and what is paused for it alone."""
    if whom.is_everybody:
        return stored.Pauses("[]")
    left = [replace(pause, by_id=whom.pseudonym(pause.by_kind, pause.by_id), reason=None)
            if whom.covers(pause.by_kind, pause.by_id) else replace(pause, reason=blot_or_none(whom, pause.reason))
            for pause in decode_pauses(row.listed)
            if pause.worker is None or pause.worker not in whom.names]
    return encode_pauses(left)


def erase_bulk(whom: Whom, row: stored.Bulk, owned: set[str]) -> stored.Bulk:
    """Take the principal's name and words from what was done to many tasks."""
    asked = msgspec.json.decode(row.asked)
    told = whom.here and (whom.is_told(asked.get("reason")) or whom.is_told(row.problem))
    if not whom.covers(row.by_kind, row.by_id) and not told and not whom.is_mentioned(asked) and (
            not whom.is_everybody or row.asked == "{}"):
        return row
    return replace(row, by_id=whom.replace_id(row.by_kind, row.by_id), asked="{}", problem=None)


def erase_line(whom: Whom, row: stored.Audit, owned: set[str]) -> stored.Audit:
    """Leave of an audit line what is needed to see what was done, and pseudonyms of who did it."""
    body = msgspec.json.decode(row.body)
    body.pop(erased.SALT, None)        # it goes with anything else, and not alone
    kind, id = str(body.get("principal_kind", "")), str(body.get("principal_id", ""))
    own = whom.is_everybody or whom.covers(kind, id)
    left = {name: value for name, value in body.items() if (not own or name in KEPT_MEMBERS) and (
        name == "principal_id" or name in OWN_WORDS or not names_whom(whom, body, name))}
    if own and "principal_id" in left:
        left["principal_id"] = whom.replace_id(kind, id)
    if left == body:
        return row
    return replace(row, body=to_canonical({**left, "erased": left.get("erased", whom.erasure_id)}).decode())


def names_whom(whom: Whom, body: dict[str, Any], name: str) -> bool:
    """Whether a member of an audit line names the principal.

    Security: a tenant chooses names of its people.  One such as an address, or the name of somebody else, must not
    take evidence from the operator's log, so there it counts only in lines about that tenant, and not in what the gate
    itself found out.
    """
    about = whom.tenant_id in (body.get("tenant"), body.get("of_tenant")) and name not in FOUND_OUT
    named = whom if whom.here or about else whom.proven
    return named.is_within(body[name]) or (name in FOR_PEOPLE and named.is_told(body[name]))


def erase_webhook(whom: Whom, row: stored_webhooks.Webhook, owned: set[str]) -> stored_webhooks.Webhook | None:
    """Take the name of the principal from the endpoints of its tenant."""
    if whom.is_everybody:
        return None
    asked, who = decode_list(row.principals), whom.principal
    # The pseudonym stays in its place: an empty list would mean the receipts of anybody.
    named = [whom.pseudonym("principal", id) if who and whom.here and id == who.id else id for id in asked]
    maker = rename_text(whom, row.created_by)
    is_theirs = row.task_id != "" and (row.task_id in owned or maker != row.created_by)      # it ends with its task
    left = replace(row, description="" if is_theirs else whom.blot(row.description), created_by=maker,
                   headers=None if is_theirs else row.headers,
                   url="" if is_theirs else whom.blot_address(row.url), reason=blot_or_none(whom, row.reason),
                   principals=row.principals if named == asked else msgspec.json.encode(named).decode())
    # Security: nothing is posted to an address that nobody has chosen.
    if left.url == row.url:
        return left
    # It may have ended; then it is still a row that shows why.
    return replace(left, state=row.state if row.state in ("removing", "ended") else "disabled", reason=RENAMED)


def erase_delivery(whom: Whom, row: stored_webhooks.WebhookDelivery,
                   owned: set[str]) -> stored_webhooks.WebhookDelivery | None:
    """Forget deliveries with their endpoint, and the name of the principal in what was answered."""
    return None if whom.is_everybody else replace(row, reason=blot_or_none(whom, row.reason))


def erase_declared_type(whom: Whom, row: stored_types.DeclaredType,
                        owned: set[str]) -> stored_types.DeclaredType | None:
    """Take the name of the principal out of what describes a type."""
    if whom.is_everybody or whom.is_told(row.type):
        return None
    return replace(row, description=whom.blot(row.description),
                   payload_schema=blot_or_none(whom, row.payload_schema),
                   result_schema=blot_or_none(whom, row.result_schema))


def erase_webhook_head(whom: Whom, row: stored_webhooks.WebhookHead, owned: set[str]) -> stored_webhooks.WebhookHead:
    """Count no endpoints where all have gone."""
    return stored_webhooks.WebhookHead(0) if whom.is_everybody else row


def erase_handover(whom: Whom, row: stored_handover.Handover, owned: set[str]) -> stored_handover.Handover | None:
    """Take away what the principal has handed over and is no task yet."""
    return None if whom.is_everybody or whom.covers(row.owner_kind, row.owner_id) else row


# The authorization server.


def erase_user(whom: Whom, row: stored_oauth.User, owned: set[str]) -> stored_oauth.User | None:
    """Forget who acts as the principal, and its name at those it has let in."""
    if whom.covers_person(row.tenant, row.principal_kind, row.principal_id) or row.accepted_as in whom.users:
        return None
    return replace(row, admitted_by=rename_author(whom, row.tenant, row.admitted_by))


def rename_author(whom: Whom, tenant: str | None, text: str) -> str:
    """Replace the text "kind id" of a principal in a row that stands in the operator's tenant."""
    who = whom.principal
    if who is None or text != str(who) or not (whom.here or tenant == whom.tenant_id):
        return text
    return f"{who.kind} {whom.pseudonym(who.kind, who.id)}"


def erase_consent(whom: Whom, row: stored_oauth.Consent, owned: set[str]) -> stored_oauth.Consent | None:
    """Forget what the principal has allowed."""
    return None if row.user_id in whom.users else row


def erase_grant(whom: Whom, row: stored_oauth.Grant, owned: set[str]) -> stored_oauth.Grant | None:
    """Forget the sessions of the principal; their tokens were revoked before."""
    gone = whom.covers_person(row.tenant, row.principal_kind, row.principal_id) or row.user_id in whom.users
    return None if gone else row


def erase_link(whom: Whom, row: stored_oauth.SignInLink, owned: set[str]) -> stored_oauth.SignInLink | None:
    """Forget links that sign the principal in."""
    return None if whom.covers_person(row.tenant, row.principal_kind, row.principal_id) else row


def erase_client(whom: Whom, row: stored_oauth.OAuthClient, owned: set[str]) -> stored_oauth.OAuthClient | None:
    """Forget the clients of a tenant that is erased; take the principal's name from others, and addresses with it.

    Security: a tenant chooses names of its people, which change no client of the operator or of another tenant.
    """
    if whom.principal is None and row.tenant == whom.tenant_id:
        return None
    row = replace(row, created_by=rename_author(whom, row.tenant, row.created_by))
    if row.tenant != whom.tenant_id and not (whom.here and row.tenant is None):
        return row
    own, uris = replace(whom, here=True), decode_list(row.redirect_uris)
    left = [uri for uri in uris if own.blot_address(uri) == uri]
    return replace(row, name=own.blot(row.name),
                   redirect_uris=row.redirect_uris if left == uris else msgspec.json.encode(left).decode())


# In this order: a receipt tells whose its task is, before other rows of that task are looked at.
ERASE_RULES: dict[type[Struct], EraseRule] = {
    stored.Receipt: erase_receipt, stored.Outgoing: erase_outgoing, stored.Entry: erase_entry,
    stored.Lease: erase_lease, stored.Progress: erase_progress, stored.Event: erase_event,
    stored_webhooks.Webhook: erase_webhook, stored_webhooks.WebhookDelivery: erase_delivery,
    stored_webhooks.WebhookHead: erase_webhook_head, stored_types.DeclaredType: erase_declared_type,
    stored.Schedule: erase_schedule, stored.Bulk: erase_bulk, stored.Pauses: erase_pauses, stored.Key: erase_key,
    stored_limits.Limit: erase_limit, stored_handover.Handover: erase_handover,
    stored.Task: erase_task,
    stored.Account: erase_account, stored.Presence: erase_presence, stored_oauth.User: erase_user,
    stored_oauth.Consent: erase_consent, stored_oauth.Grant: erase_grant,
    stored_oauth.SignInLink: erase_link, stored_oauth.OAuthClient: erase_client, stored.Audit: erase_line}

# Kinds whose rows go with their tasks, so that nothing else is done to those of the tasks that go.
WITH_TASK = tuple(kind for kind, card in CARDS.items() if card.lifetime.how_long == OF_TASK)
# Which of the rows are not the tenant's own but stand in the operator's tenant.
OF_OPERATOR = tuple(kind for kind in ERASE_RULES if CARDS[kind].of_operator)


def judge(whom: Whom, row: Any, owned: set[str]) -> Struct | None:
    """Return what takes the place of a row: the row itself, another one, or nothing."""
    return ERASE_RULES.get(type(row), leave)(whom, row, owned)
