"""What facts of any database mean to an examination: overdue leases, and receipts that wait for the ledger."""

from __future__ import annotations

from collections.abc import Iterator

from asyncgate.parts.model import findings
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.words import say_length

LATE_SECONDS, LATE_SWEEPS = 30.0, 3         # a sweep is late when something waits for it longer than both
SKEW_SECONDS, BAD_SKEW_SECONDS = 2.0, 30.0
OLD_RECEIPT_SECONDS = 600.0                 # in the outbox


def late_after(settings: Settings) -> float:
    """Return the seconds after which something that upkeep has not looked at is late."""
    return max(LATE_SECONDS, LATE_SWEEPS * settings.lease_sweep_interval_seconds) + settings.lease_grace_seconds


def judge_overdue(late_seconds: float | None, what: str, serving: str,
                  settings: Settings) -> Iterator[findings.Finding]:
    """Yield what it means that a lease ran out so long ago; `serving` names whoever should have taken it back."""
    if late_seconds is None or late_seconds < late_after(settings):
        yield findings.all_well("no lease waits for the sweep")
    elif serving:
        yield findings.alarm(
            f"{what} ran out {say_length(late_seconds)} ago and was not taken back, although {serving} serves: "
            "its sweep is stuck", "look for `upkeep` in the gate's log, then restart the gate")
    else:
        yield findings.note(f"{what} ran out {say_length(late_seconds)} ago, and no gate serves",
                            "start a gate: `asyncgate serve`; it gives leases back the time in which none served")


def judge_outbox(waiting: int, parked: int, oldest_seconds: float, settings: Settings) -> Iterator[findings.Finding]:
    """Yield what it means that receipts have not reached the ledger."""
    integrated = settings.receipt_mode != "standalone"
    if parked:
        yield findings.warn(f"receipts that are parked, because the ledger refused them: {parked}",
                            "asyncgate reconcile shows why; stop the gate, and `asyncgate reconcile --repair` offers "
                            "them again")
    if waiting and not integrated:
        yield findings.alarm(
            f"receipts wait for a ledger ({waiting}), and receipt_mode is standalone: nobody sends them",
            "set receipt_mode and ledger.url back, or fetch what is there with `asyncgate receipts "
            "home`")
    elif waiting > settings.ledger.emission_retry.buffer_size or oldest_seconds > OLD_RECEIPT_SECONDS:
        yield findings.warn(f"receipts wait for the ledger ({waiting}), the oldest for {say_length(oldest_seconds)}",
                            "see what is said of the ledger; receipts are sent as soon as it takes them")
    elif integrated and not parked:
        yield findings.all_well(f"receipts that wait for the ledger: {waiting}; none is parked")


def judge_sharing(tenants: int, settings: Settings) -> Iterator[findings.Finding]:
    """Yield what it means that so many tenants share a gate."""
    if tenants > 1 and settings.security.rate_limiting.enabled is False:
        yield findings.warn(
            f"{tenants} tenants share this gate, and limits are off: one can use up the others' time and disk",
            findings.LIMIT_CURE)


def judge_skew(skew: float, unsure: float) -> Iterator[findings.Finding]:
    """Yield what it means that the database's clock is so many seconds ahead, give or take."""
    seen = f"the clock of the database is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} that of this machine"
    cure = "keep both clocks right with NTP: `timedatectl set-ntp true`"
    if abs(skew) - unsure > BAD_SKEW_SECONDS:
        yield findings.alarm(f"{seen}: good access tokens are refused, or expired ones accepted", cure)
    elif abs(skew) - unsure > SKEW_SECONDS:
        yield findings.warn(seen, cure)
    else:
        yield findings.all_well("the clocks of the database and of this machine agree")


NO_WAY_IN = findings.alarm("nobody can enter: there is no shared token, no key for access tokens, and no issued key",
                           "set ASYNCGATE_API_KEY, or `asyncgate keys issue --role admin --name first --principal-id "
                           "me`")


def needs_issued_key(settings: Settings) -> bool:
    """Whether nobody can enter without an issued key."""
    return not (settings.api_key or settings.allow_insecure_dev or settings.security.jwt.has_keys)
