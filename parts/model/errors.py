"""The refusals: one tree, whose codes are the same over REST, MCP and the command line."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("asyncgate")


class GateError(Exception):
    """A refusal; `code` is the same on every façade, `status` is what HTTP calls it.

    The first line of a subclass's docstring says what its code means: the reference's table of errors shows it.
    """

    code, status = "internal_error", 500
    noted = False       # in the audit log
    because: tuple[str, str] | None = None      # the real reason, as a code and in words: for the log, never told

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message)
        self.more = more

    def body(self) -> dict[str, Any]:
        """Return the answer that every façade gives; peers read `detail`, so it repeats the message."""
        return {"error": self.code, "message": str(self), "detail": str(self), **self.more}


class InvalidRequest(GateError):
    """The request breaks a rule of its fields; the message names the field and the rule."""
    code, status = "invalid_request", 400


class PayloadTooDeep(GateError):
    """The JSON has more levels than the gate reads."""
    code, status = "payload_too_deep", 400


class InvalidCursor(GateError):
    """The cursor was not given for this list; begin again without one."""
    code, status = "invalid_cursor", 400


class InvalidWorkerId(GateError):
    """On the lease protocol `worker_id` must be `{type}.{instance}`."""
    code, status = "invalid_worker_id", 400


class NotLocatable(GateError):
    """A success must say where its result lies: `artifacts`, or a `delivery_proof` that does not say failed."""
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
    """A parent that the receipt names is not there."""
    code, status = "parent_not_found", 400


class Unauthenticated(GateError):
    """The credential is missing, unknown, revoked or expired, or two were sent; WWW-Authenticate says which."""
    code, status, challenge = "unauthenticated", 401, "Bearer"    # nothing was shown


class InvalidToken(Unauthenticated): challenge = 'Bearer error="invalid_token"'    # shown, and no good (RFC 6750 3.1)


class TwoCredentials(Unauthenticated): challenge = 'Bearer error="invalid_request"'     # or one in no known form


class Forbidden(GateError):
    """The credential's role, scopes, capabilities or task types do not allow this."""
    code, status = "forbidden", 403


class TenantMismatch(GateError):
    """The request names another tenant than the credential."""
    code, status = "tenant_mismatch", 403


class NotFound(GateError):
    """No such path, or nothing of that name."""
    code, status = "not_found", 404


class TaskNotFound(GateError):
    """No such task, or it belongs to somebody else."""
    code, status = "task_not_found", 404


class ReceiptNotFound(GateError):
    """No such receipt, or it belongs to somebody else."""
    code, status = "receipt_not_found", 404


class TenantNotFound(GateError):
    """No such tenant."""
    code, status = "tenant_not_found", 404


class KeyNotFound(GateError):
    """No such key in this tenant."""
    code, status = "key_not_found", 404


class MethodNotAllowed(GateError):
    """The path has no such method."""
    code, status = "method_not_allowed", 405


class RequestTimeout(GateError):
    """The body did not come within `body_timeout_seconds`."""
    code, status = "request_timeout", 408


class LeaseInvalid(GateError):
    """The lease is not, or no longer, this worker's: drop the work. `reason` says why."""
    code, status = "lease_invalid_or_expired", 409


class InvalidTransition(GateError):
    """The task's status does not allow this step; `status` tells it."""
    code, status = "invalid_state_transition", 409


class IdempotencyConflict(GateError):
    """The idempotency key made a task from another body (`idempotency_mismatch: refuse`)."""
    code, status = "idempotency_conflict", 409


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
    """The body is not JSON, or is encoded."""
    code, status = "unsupported_media_type", 415


class Misdirected(GateError):
    """The gate does not answer for this Host; see `allowed_hosts`."""
    code, status = "misdirected_request", 421


class TooManyWaiting(GateError):
    """As many calls wait as may; repeat without `wait_seconds`."""
    code, status = "rate_limit_exceeded", 429


class RateLimitExceeded(GateError):
    """More calls than the limit, or too many wrong keys; come back after `Retry-After`."""
    code, status = "rate_limit_exceeded", 429


class QuotaExceeded(GateError):
    """The tenant has as much as it may have; `quota` and `limit` say of what."""
    code, status = "quota_exceeded", 429


class Overloaded(GateError):
    """The gate has no place for more connections or more keys to check."""
    code, status = "overloaded", 503


class DatabaseUnavailable(GateError):
    """The database does not answer; nothing was kept, unless `outcome` is `unknown`."""
    code, status = "database_unavailable", 503


class LedgerUnavailable(GateError):
    """The gate is strict and its ledger does not answer; nothing was changed."""
    code, status = "receipt_ledger_unavailable", 503


class ReceiptIdCollision(GateError):
    """The ledger has another receipt under this id; receipts never change."""
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
    """Raised by a backend when the database refused a batch of which nothing was kept."""


class StartupError(Exception):
    """The gate cannot start; the text is the one line that says why and what to do."""

    exit_status = 2         # the settings are wrong

    @property
    def startup_message(self) -> str:
        """Return the line for the terminal."""
        return str(self)


class NotNow(StartupError):
    """The gate cannot start although its settings may be right: what they name does not answer, or somebody has it."""

    exit_status = 1


def log_fault(where: str, error: BaseException) -> GateError:
    """Tell the log what went wrong, and the caller only that it did."""
    log.error("%s failed", where, exc_info=error)
    return GateError(f"{where} failed inside the gate; the log says why")


def outcome_unknown() -> DatabaseUnavailable:
    """Return the answer to a write of which nobody knows whether it was kept, with the way to find out."""
    return DatabaseUnavailable(
        "the database did not say whether it has kept this, so it may have: repeat the call with the idempotency_key, "
        "claim_id or lease_id that it had, which does nothing twice; without one look first (list_tasks, get_task, "
        "list_leases)", retry_after=1, outcome="unknown")


def no_task(task_id: str) -> TaskNotFound:
    """Return what tells a reader that a task is not here, or not for it: both sound the same."""
    return TaskNotFound(f"no task {task_id}; list_tasks shows the tasks there are, and list_archived_receipts what the "
                        "archive has of one that has gone")
