"""The refusals: one tree, whose codes are the same over REST, MCP and the command line."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("asyncgate")


class GateError(Exception):
    """A refusal; `code` is the same on every façade, `status` is what HTTP calls it."""

    code, status = "internal_error", 500
    noted = False       # in the audit log
    because: tuple[str, str] | None = None      # the real reason, as a code and in words: for the log, never told

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message)
        self.more = more

    def body(self) -> dict[str, Any]:
        """Return the answer that every façade gives; peers read `detail`, so it repeats the message."""
        return {"error": self.code, "message": str(self), "detail": str(self), **self.more}


class InvalidRequest(GateError): code, status = "invalid_request", 400
class PayloadTooDeep(GateError): code, status = "payload_too_deep", 400
class InvalidCursor(GateError): code, status = "invalid_cursor", 400
class InvalidWorkerId(GateError): code, status = "invalid_worker_id", 400
class NotLocatable(GateError): code, status = "not_locatable", 400
class ReceiptTooLarge(GateError): code, status = "receipt_too_large", 400
class TooManyParents(GateError): code, status = "too_many_parents", 400
class TooManyArtifacts(GateError): code, status = "too_many_artifacts", 400
class ParentsRequired(GateError): code, status = "parents_required", 400
class ParentNotFound(GateError): code, status = "parent_not_found", 400
class Unauthenticated(GateError): code, status, challenge = "unauthenticated", 401, "Bearer"    # nothing was shown
class InvalidToken(Unauthenticated): challenge = 'Bearer error="invalid_token"'    # shown, and no good (RFC 6750 3.1)
class TwoCredentials(Unauthenticated): challenge = 'Bearer error="invalid_request"'     # or one in no known form
class Forbidden(GateError): code, status = "forbidden", 403
class TenantMismatch(GateError): code, status = "tenant_mismatch", 403
class NotFound(GateError): code, status = "not_found", 404
class TaskNotFound(GateError): code, status = "task_not_found", 404
class ReceiptNotFound(GateError): code, status = "receipt_not_found", 404
class TenantNotFound(GateError): code, status = "tenant_not_found", 404
class KeyNotFound(GateError): code, status = "key_not_found", 404
class MethodNotAllowed(GateError): code, status = "method_not_allowed", 405
class RequestTimeout(GateError): code, status = "request_timeout", 408
class LeaseInvalid(GateError): code, status = "lease_invalid_or_expired", 409
class InvalidTransition(GateError): code, status = "invalid_state_transition", 409
class IdempotencyConflict(GateError): code, status = "idempotency_conflict", 409
class LeaseRenewalLimit(GateError): code, status = "lease_renewal_limit", 409
class LeaseLifetimeLimit(GateError): code, status = "lease_lifetime_limit", 409
class PayloadTooLarge(GateError): code, status = "payload_too_large", 413
class UnsupportedMediaType(GateError): code, status = "unsupported_media_type", 415
class Misdirected(GateError): code, status = "misdirected_request", 421
class TooManyWaiting(GateError): code, status = "rate_limit_exceeded", 429
class RateLimitExceeded(GateError): code, status = "rate_limit_exceeded", 429
class QuotaExceeded(GateError): code, status = "quota_exceeded", 429
class Overloaded(GateError): code, status = "overloaded", 503
class DatabaseUnavailable(GateError): code, status = "database_unavailable", 503
class LedgerUnavailable(GateError): code, status = "receipt_ledger_unavailable", 503
class ReceiptIdCollision(GateError): code, status = "receipt_id_collision", 409
class ArchiveUnavailable(GateError): code, status = "archive_unavailable", 503
class LimiterUnavailable(GateError): code, status = "rate_limiter_unavailable", 503
class IssuerUnavailable(GateError): code, status = "issuer_unavailable", 503


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


def fault(where: str, error: BaseException) -> GateError:
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
