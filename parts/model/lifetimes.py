"""How long each stored row is kept, and who deletes it or why nobody does (spec 21.12.1): every table, once.

The data map (docs/data-map.md) shows it, and `tests/test_personal.py` holds it against the tables, so that no row is
stored for ever because nobody has thought of its end.
"""

from __future__ import annotations

from msgspec import Struct


class Lifetime(Struct, frozen=True):
    """How long the rows of a table are kept."""

    how_long: str       # with the settings that decide it, as code
    ended_by: str       # who deletes them; "nobody: " and why
    what: str = ""      # what they are, where the table is no kind of row by itself

    def list_settings(self) -> list[str]:
        """Return the settings that decide it."""
        return self.how_long.split("`")[1::2]


HOURLY, SOMETIMES, WITH_IT = "upkeep, hourly", "upkeep, four times a day", "whoever deletes that"
OF_TASK, OF_RECEIPT = "as long as its task", "as long as its receipt"
OF_TENANT, OF_ARCHIVE, OF_DATABASE = "as long as the tenant", "as long as the archive", "as long as the database"

LIFETIMES: dict[str, Lifetime] = {
    "tasks": Lifetime("`task_retention_days` after its end",
                      "the archive run, once its receipts are archived; without an archive nobody"),
    "states": Lifetime(OF_TASK, WITH_IT, "what changes of a task (Postgres)"),
    "leases": Lifetime(OF_TASK, WITH_IT),
    "progress": Lifetime(OF_TASK, WITH_IT),
    "events": Lifetime(OF_TASK, WITH_IT),
    "lanes": Lifetime("until no task waits in it", "upkeep, each minute", "which tasks need which capabilities"),
    "queues": Lifetime("an hour after its last task", "upkeep, each minute", "how many tasks of a lane wait"),
    "receipts": Lifetime("`receipt_retention_days`, and `archive.terminal_days` after its task's end; then in the "
                         "archive", "the archive run; without an archive nobody: they are the evidence"),
    "edges": Lifetime(OF_RECEIPT, WITH_IT, "further parents of a receipt"),
    "deliveries": Lifetime(OF_RECEIPT, WITH_IT, "when a receipt was first handed out"),
    "obligations": Lifetime("until it is discharged", "the transaction that discharges it"),
    "archived": Lifetime(OF_ARCHIVE, "whoever restores the receipt; else nobody: it is found by this row"),
    "segments": Lifetime(OF_ARCHIVE, "nobody: no receipt leaves the database without it",
                         "which files of the archive are written (Postgres)"),
    "seals": Lifetime(OF_TENANT, "nobody: each one covers the one before"),
    "seal_heads": Lifetime(OF_TENANT, "nobody: the next seal begins there"),
    "outbox": Lifetime("until the ledger has stored it", "the sender of receipts"),
    "ledger": Lifetime(OF_TENANT, "nobody: it is the evidence of other gates, which rebuild from it"),
    "ledger_marks": Lifetime(OF_TENANT, "nobody: reading goes on there"),
    "schedules": Lifetime("until it is deleted", "the transaction of its `schedule.deleted`"),
    "presences": Lifetime("`presence_retention_days` after its last call", SOMETIMES),
    "pauses": Lifetime("until the pause ends", "whoever pauses or resumes next"),
    "bulks": Lifetime("`bulk_retention_days` after its end", SOMETIMES),
    "traffic": Lifetime("an hour", "the process that stores newer rows of the tenant"),
    "accounts": Lifetime(OF_TENANT, "nobody: a suspended tenant must stay suspended; an erasure takes its name away"),
    "api_keys": Lifetime(OF_TENANT, "an erasure; else nobody: the audit log names keys, and revoked ones stay refused"),
    "audit": Lifetime("`security.audit_logging.retention_days`, 90 at least",
                      "upkeep, hourly; a new line of the chain has number and hash of the last one that went"),
    "audit_heads": Lifetime(OF_TENANT, "nobody: it proves where the log ends"),
    "usage": Lifetime(OF_TENANT, "nobody: it is one row of counts"),
    "meters": Lifetime("until they are in a usage event, some minutes", "upkeep, with that event"),
    "usage_heads": Lifetime(OF_TENANT, "nobody: the next event begins there"),
    "usage_events": Lifetime("`usage_retention_days`", "upkeep, daily"),
    "webhooks": Lifetime("until an admin removes it", "that admin"),
    "webhook_heads": Lifetime(OF_TENANT, "nobody: it is a count"),
    "webhook_deliveries": Lifetime("`webhooks.log_days` after its last attempt", HOURLY),
    "oauth_clients": Lifetime("until an admin removes it; one that came by itself "
                              "`security.oauth.client_retention_days` if nobody signs in with it, and 100 days after "
                              "the last sign-in",
                              "that admin, or upkeep, hourly"),
    "oauth_users": Lifetime("until an admin removes them", "that admin"),
    "oauth_consents": Lifetime("until it is withdrawn; `security.oauth.session_retention_days`, or as long as its last "
                               "session is kept", "the person, an admin, or upkeep, hourly"),
    "oauth_grants": Lifetime("`security.oauth.session_retention_days` after its end", HOURLY),
    "oauth_links": Lifetime("`security.oauth.session_retention_days` after it was used or ended", HOURLY),
    "revocations": Lifetime("until all tokens that it refuses have expired", HOURLY),
    "revocation_heads": Lifetime(OF_TENANT, "nobody: no number is given twice"),
    "erasures": Lifetime(OF_TENANT, "nobody: they are evidence"),
    "erased": Lifetime(OF_TENANT, "nobody: erased rows are verified by it"),
    "tenants": Lifetime(OF_DATABASE, "nobody: upkeep begins there", "which tenants have stored anything"),
    "instances": Lifetime("a day after it ended", "the other processes", "which processes serve (Postgres)"),
    "wall": Lifetime(OF_DATABASE, "nobody: it is one row", "the tenant of the running transaction (SQLite)"),
    "meta": Lifetime(OF_DATABASE, "nobody: it is some rows", "what the database says of itself"),
    "migrations": Lifetime(OF_DATABASE, "nobody: it is some rows", "which schema it has (Postgres)"),
}
