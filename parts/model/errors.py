"""The refusals as one tree; REST, MCP and the command line show the same codes."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("asyncgate")


class GateError(Exception):
    """A refusal; `code` is the same on every façade, `status` is what HTTP calls it.

    The first line of a subclass's docstring says what its code means: the reference's table of errors shows it.
    """

    code, status = "internal_error", 500
    noted = False       # whether it is already in the audit log
    counted = False     # whether it is already in the metrics
    because: tuple[str, str] | None = None      # the real reason, as a code and in words: logged, never sent
    whose: tuple[str, dict[str, Any]] | None = None     # the tenant of a refused credential, and what it says: as well

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message)
        self.more = more

    def body(self) -> dict[str, Any]:
        """Return the body of the answer on every façade; peers read `detail`, so it repeats the message."""
        return {"error": self.code, "message": str(self), "detail": str(self), **self.more}


class InvalidRequest(GateError):
    """The request breaks a rule of its fields; the message names the field and the rule."""
    code, status = "invalid_request", 400


class PayloadTooDeep(GateError):
    """The JSON has more levels than the gate reads."""
    code, status = "payload_too_deep", 400


class InvalidCursor(GateError):
    """The cursor belongs to another list; start again without a cursor."""
    code, status = "invalid_cursor", 400


class InvalidConfirmation(GateError):
    """The confirmation is not this caller's of `preview_bulk`, has expired, or does not name what is erased."""
    code, status = "invalid_confirmation", 400


class InvalidWorkerId(GateError):
    """On the lease protocol `worker_id` must be `{type}.{instance}`."""
    code, status = "invalid_worker_id", 400


class NotLocatable(GateError):
    """A success must locate its result: send `artifacts` with a pointer, or a `delivery_proof` that says succeeded."""
    code, status = "not_locatable", 400


class ReceiptTooLarge(GateError):
    """The receipt's body would be larger than `receipts.max_body_size_bytes`."""
    code, status = "receipt_too_large", 400


class TooManyParents(GateError):
    """The receipt names more parents than `receipts.max_parents`."""
    code, status = "too_many_parents", 400


class TooManyArtifacts(GateError):
    """More artifacts than `receipts.max_artifacts`."""
    code, status = "too_many_artifacts", 400


class ParentsRequired(GateError):
    """A receipt that discharges an obligation must name it among its parents."""
    code, status = "parents_required", 400


class ParentNotFound(GateError):
    """A parent that the receipt names does not exist."""
    code, status = "parent_not_found", 400


class AnswerInvalid(GateError):
    """The content of an answer does not match the question's schema; `path` says where."""
    code, status = "answer_invalid", 400


class PayloadInvalid(GateError):
    """The payload does not fit what is declared of its type; `path` says where."""
    code, status = "payload_invalid", 400


class ResultInvalid(GateError):
    """The result does not fit what is declared of its task's type; `path` says where."""
    code, status = "result_invalid", 400


class Unauthenticated(GateError):
    """The credential is missing, unknown, revoked or expired, or two were sent; WWW-Authenticate says which."""
    code, status, challenge = "unauthenticated", 401, "Bearer"    # no credential was sent


class InvalidToken(Unauthenticated): challenge = 'Bearer error="invalid_token"'    # sent, but invalid (RFC 6750 3.1)


class TwoCredentials(Unauthenticated): challenge = 'Bearer error="invalid_request"'     # or its form is unknown


class Forbidden(GateError):
    """The role, scopes or limits of the credential do not allow this, or a task or receipt is another principal's."""
    code, status = "forbidden", 403
    scopes: frozenset[str] = frozenset()        # of which one would do, if that is all that is missing


class TenantMismatch(GateError):
    """The request names a tenant that is not the credential's."""
    code, status = "tenant_mismatch", 403


class NotAddressed(GateError):
    """The question is addressed to another principal."""
    code, status = "not_addressed", 403


class SelfAnswer(GateError):
    """The worker that asks cannot be the one that answers."""
    code, status = "self_answer", 403


class NotFound(GateError):
    """No such path, or nothing has that name."""
    code, status = "not_found", 404


class TaskNotFound(GateError):
    """No such task in the credential's tenant."""
    code, status = "task_not_found", 404


class ReceiptNotFound(GateError):
    """No such receipt in the credential's tenant."""
    code, status = "receipt_not_found", 404


class InputNotFound(GateError):
    """The task has not asked for an input under this key."""
    code, status = "input_not_found", 404


class TypeUnknown(GateError):
    """Nobody has declared this type in the credential's tenant."""
    code, status = "type_not_found", 404


class QueueNotFound(GateError):
    """No such queue now in the credential's tenant."""
    code, status = "queue_not_found", 404


class ScheduleNotFound(GateError):
    """No such schedule in the credential's tenant."""
    code, status = "schedule_not_found", 404


class LimitNotFound(GateError):
    """No such limit in the credential's tenant."""
    code, status = "limit_not_found", 404


class TenantNotFound(GateError):
    """No such tenant."""
    code, status = "tenant_not_found", 404


class KeyNotFound(GateError):
    """No such key in this tenant."""
    code, status = "key_not_found", 404


class WebhookNotFound(GateError):
    """No such endpoint for webhooks in this tenant."""
    code, status = "webhook_not_found", 404


class ClientNotFound(GateError):
    """No such OAuth client that this caller administers."""
    code, status = "client_not_found", 404


class SessionNotFound(GateError):
    """No such session of a person with a client, among those that the caller may see."""
    code, status = "session_not_found", 404


class UserNotFound(GateError):
    """No such user among those that the caller administers."""
    code, status = "user_not_found", 404


class BulkNotFound(GateError):
    """No such bulk in this tenant; it exists from the first call of `run_bulk` on."""
    code, status = "bulk_not_found", 404


class MethodNotAllowed(GateError):
    """The path does not support this method."""
    code, status = "method_not_allowed", 405


class RequestTimeout(GateError):
    """The body did not arrive within `body_timeout_seconds`."""
    code, status = "request_timeout", 408


class LeaseInvalid(GateError):
    """This worker does not, or no longer, hold the lease: drop the work. `reason` says why."""
    code, status = "lease_invalid_or_expired", 409


class Unloaded(BaseException):
    """An operation needs what its batch has not loaded; no rule may catch that, and the next batch loads it."""

    def __init__(self, *task_ids: str, records: frozenset[tuple[type, tuple[str, ...]]] = frozenset()) -> None:
        super().__init__(*task_ids, *records)
        self.tasks, self.records = {*task_ids}, {*records}


class InvalidTransition(GateError):
    """The task's status, shown in `status`, does not allow this step."""
    code, status = "invalid_state_transition", 409


class IdempotencyConflict(GateError):
    """This idempotency key already created a task with another body (`idempotency_mismatch: refuse`)."""
    code, status = "idempotency_conflict", 409


class UniqueConflict(GateError):
    """Another task holds the key of unique work; `task_id` and `status` are that task's."""
    code, status = "unique_conflict", 409


class StepConflict(GateError):
    """The step with this number was recorded under another `name`."""
    code, status = "step_conflict", 409


class JournalFull(GateError):
    """The task has recorded as many steps, or as many bytes, as one task may; `quota` and `limit` say which."""
    code, status = "journal_full", 409


class OutputConflict(GateError):
    """The task has had fewer chunks of output than `position` says; `chunks` is their number."""
    code, status = "output_conflict", 409


class OutputFull(GateError):
    """The task has given as much output as one task may; `quota` and `limit` say what."""
    code, status = "output_full", 409


class KeyConflict(GateError):
    """The task has asked another question under this key; `receipt_id` is its receipt."""
    code, status = "key_conflict", 409


class AlreadyAnswered(GateError):
    """The question has an answer already; `receipt_id` is its receipt."""
    code, status = "already_answered", 409


class InputExpired(GateError):
    """The question was not answered in time, or its task has ended."""
    code, status = "input_expired", 409


class LeaseRenewalLimit(GateError):
    """The lease was renewed as often as `max_lease_renewals` allows."""
    code, status = "lease_renewal_limit", 409


class LeaseLifetimeLimit(GateError):
    """The lease has lived as long as `max_lease_lifetime_seconds` allows."""
    code, status = "lease_lifetime_limit", 409


class PayloadTooLarge(GateError):
    """The body, payload, result or progress report is larger than its limit."""
    code, status = "payload_too_large", 413


class UnsupportedMediaType(GateError):
    """The body is not JSON, or has a content-encoding."""
    code, status = "unsupported_media_type", 415


class Misdirected(GateError):
    """The gate does not answer for this Host; see `allowed_hosts`."""
    code, status = "misdirected_request", 421


class TooManyWaiting(GateError):
    """Too many calls are waiting; repeat without `wait_seconds`."""
    code, status = "rate_limit_exceeded", 429


class RateLimitExceeded(GateError):
    """Too many calls, or too many wrong keys; repeat after `Retry-After`."""
    code, status = "rate_limit_exceeded", 429


class QuotaExceeded(GateError):
    """The tenant has reached a quota; `quota` and `limit` say which."""
    code, status = "quota_exceeded", 429


class Overloaded(GateError):
    """The gate cannot take more connections or check more keys now."""
    code, status = "overloaded", 503


class DatabaseUnavailable(GateError):
    """The database does not answer; nothing was saved, unless `outcome` is `unknown`."""
    code, status = "database_unavailable", 503


class NotReady(GateError):
    """The gate takes no new callers now: a check of `ready` fails, or the gate drains."""
    code, status = "not_ready", 503


class LedgerUnavailable(GateError):
    """The ledger of a strict gate does not answer; nothing was changed."""
    code, status = "receipt_ledger_unavailable", 503


class ReceiptIdCollision(GateError):
    """The ledger has a different receipt with this id; receipts never change."""
    code, status = "receipt_id_collision", 409


class ArchiveUnavailable(GateError):
    """The archive's folder is not set, or cannot be used."""
    code, status = "archive_unavailable", 503


class LimiterUnavailable(GateError):
    """The store of the rate limits does not answer (`on_store_failure: deny`)."""
    code, status = "rate_limiter_unavailable", 503


class IssuerUnavailable(GateError):
    """The issuer's keys cannot be fetched, so the access token cannot be checked."""
    code, status = "issuer_unavailable", 503


class Refused(Exception):
    """Raised by a backend when the database refused a batch; nothing of the batch was saved."""


class Stopped(Exception):
    """A command cannot go on; the text is the one line that says why and what to do."""

    exit_status = 1


class Conflicting(Stopped):
    """What is there already stands against what the command would do."""

    exit_status = 5


class NoAnswer(Stopped):
    """A gate or a ledger does not answer, or a file cannot be read to its end."""

    exit_status = 7


class StartupError(Stopped):
    """The gate cannot start; the text is the one line that says why and what to do."""

    exit_status = 2         # the settings are wrong

    @property
    def startup_message(self) -> str:
        """Return the line for the terminal."""
        return str(self)


class NotNow(StartupError):
    """The gate cannot start, though its settings may be right: a resource that they name is down or in use."""

    exit_status = 1


def refuse_credential(code: str, why: str) -> InvalidToken:
    """Return the refusal of a credential that was valid once; the reason is only for the audit log."""
    refusal = InvalidToken("this credential is no longer valid")
    refusal.because = code, why
    return refusal


def refuse_suspended() -> InvalidToken:
    """Return the refusal of a credential of a suspended tenant, which no other credential of it would mend."""
    return refuse_credential("tenant_suspended", "the tenant is suspended")


def log_fault(where: str, error: BaseException) -> GateError:
    """Log a defect, and return an error that tells the caller no details."""
    log.error("%s failed", where, exc_info=error)
    return GateError(f"{where} failed inside the gate; the gate's log says why")


def outcome_unknown() -> DatabaseUnavailable:
    """Return the answer to a write that may or may not have been saved, with the way to find out."""
    return DatabaseUnavailable(
        "the database did not confirm this write, so it may have been saved: repeat the call with the same "
        "idempotency_key, claim_id or lease_id, which never acts twice; without one, look first (list_tasks, get_task, "
        "list_leases)", retry_after=1, outcome="unknown")


def no_task(task_id: str) -> TaskNotFound:
    """Return the refusal for an unknown task and for a foreign one: both must sound the same."""
    return TaskNotFound(f"no task {task_id}; list_tasks shows the tasks, list_archived_receipts the archived receipts "
                        "of a pruned task")
