-- The last schema of the numbering before the first release, whole: what `asyncgate migrate` carries over.
CREATE TABLE meta (
    name            TEXT PRIMARY KEY,
    value           TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant_id       TEXT PRIMARY KEY,
    since           REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE lanes (
    tenant_id       TEXT NOT NULL,
    lane            INTEGER NOT NULL,
    type            TEXT NOT NULL,
    capabilities    TEXT NOT NULL,
    PRIMARY KEY (tenant_id, lane)
) WITHOUT ROWID;
CREATE TABLE tasks (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    lane            INTEGER NOT NULL,
    type            TEXT NOT NULL,
    payload         TEXT NOT NULL,
    payload_pointer TEXT,
    requirements    TEXT NOT NULL,
    terms           TEXT NOT NULL,
    owner_kind      TEXT NOT NULL,
    owner_id        TEXT NOT NULL,
    principal_ai    TEXT NOT NULL,
    priority        INTEGER NOT NULL,
    max_attempts    INTEGER NOT NULL,
    retry_backoff_seconds INTEGER NOT NULL,
    max_expiries    INTEGER NOT NULL,
    created_at      REAL NOT NULL,
    duty            TEXT NOT NULL,
    idempotency_key TEXT,
    fingerprint     TEXT,
    asyncgate_instance TEXT NOT NULL,
    updated_at      REAL NOT NULL,
    status          TEXT NOT NULL,
    attempt         INTEGER NOT NULL,
    fence           INTEGER NOT NULL,
    expiries        INTEGER NOT NULL,
    owed            INTEGER NOT NULL,
    held            TEXT,
    lost_to         TEXT NOT NULL,
    next_eligible_at REAL,
    deadline_at     REAL,
    started_at      REAL,
    completed_at    REAL,
    outcome         TEXT,
    artifacts       TEXT,
    ready           INTEGER NOT NULL, handed TEXT,
    PRIMARY KEY (tenant_id, task_id)
);
CREATE UNIQUE INDEX tasks_key ON tasks (tenant_id, owner_kind, owner_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_queue ON tasks (tenant_id, lane, priority DESC, task_id) WHERE status = 'queued' AND ready = 1;
CREATE INDEX tasks_delayed ON tasks (tenant_id, next_eligible_at)
    WHERE status = 'queued' AND ready = 0 AND held IS NULL;
CREATE INDEX tasks_owner ON tasks (tenant_id, owner_kind, owner_id, task_id);
CREATE INDEX tasks_deadline ON tasks (tenant_id, deadline_at)
    WHERE deadline_at IS NOT NULL AND status IN ('queued', 'leased', 'running');
CREATE INDEX tasks_spent ON tasks (tenant_id) WHERE status = 'queued' AND attempt >= max_attempts;
CREATE TABLE leases (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    lease_id        TEXT NOT NULL,
    worker_kind     TEXT NOT NULL,
    worker_id       TEXT NOT NULL,
    worker_instance TEXT,
    fence           INTEGER NOT NULL,
    acquired_at     REAL NOT NULL,
    expires_at      REAL NOT NULL,
    renewals        INTEGER NOT NULL,
    accepted        TEXT NOT NULL,
    claim_id        TEXT,
    ending          TEXT NOT NULL, ttl_seconds INTEGER, resumed_by TEXT, resumptions INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant_id, task_id)
) WITHOUT ROWID;
CREATE INDEX leases_live ON leases (tenant_id, expires_at) WHERE ending = 'live';
CREATE UNIQUE INDEX leases_id ON leases (tenant_id, lease_id) WHERE ending = 'live';
CREATE INDEX leases_claim ON leases (tenant_id, worker_kind, worker_id, claim_id)
    WHERE ending = 'live' AND claim_id IS NOT NULL;
CREATE TABLE progress (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    progress        TEXT NOT NULL,
    sequence        INTEGER NOT NULL,
    fence           INTEGER NOT NULL,
    updated_at      REAL NOT NULL,
    PRIMARY KEY (tenant_id, task_id)
) WITHOUT ROWID;
CREATE TABLE edges (
    tenant_id       TEXT NOT NULL,
    child_id        TEXT NOT NULL,
    parent_id       TEXT NOT NULL,
    PRIMARY KEY (tenant_id, child_id, parent_id)
) WITHOUT ROWID;
CREATE INDEX edges_parent ON edges (tenant_id, parent_id, child_id);
CREATE TABLE obligations (
    tenant_id       TEXT NOT NULL,
    to_kind         TEXT NOT NULL,
    to_id           TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    PRIMARY KEY (tenant_id, to_kind, to_id, receipt_id)
) WITHOUT ROWID;
CREATE TABLE deliveries (
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    delivered_at    REAL NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;
CREATE TABLE events (
    tenant_id       TEXT NOT NULL,
    event_id        TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    event_type      TEXT NOT NULL,
    payload         TEXT NOT NULL,
    created_at      REAL NOT NULL,
    PRIMARY KEY (tenant_id, task_id, event_id)
) WITHOUT ROWID;
CREATE TABLE schedules (
    tenant_id       TEXT NOT NULL,
    schedule_id     TEXT NOT NULL,
    owner_kind      TEXT NOT NULL,
    owner_id        TEXT NOT NULL,
    scheduler_kind  TEXT NOT NULL,
    scheduler_id    TEXT NOT NULL,
    created         TEXT NOT NULL,
    enabled         INTEGER NOT NULL,
    next_run_at     REAL,
    interval_seconds REAL,
    late_at         REAL,
    PRIMARY KEY (tenant_id, schedule_id)
) WITHOUT ROWID;
CREATE INDEX schedules_late ON schedules (tenant_id, late_at) WHERE late_at IS NOT NULL;
CREATE TABLE presences (
    tenant_id       TEXT NOT NULL,
    kind            TEXT NOT NULL,
    id              TEXT NOT NULL,
    instance_id     TEXT,
    first_seen_at   REAL NOT NULL,
    last_seen_at    REAL NOT NULL,
    sessions        INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, kind, id)
) WITHOUT ROWID;
CREATE TABLE wall (
    tenant_id       TEXT
);
CREATE TABLE "receipts" (
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    receipt_key     TEXT NOT NULL,
    receipt_type    TEXT NOT NULL,
    created_at      REAL NOT NULL,
    from_kind       TEXT NOT NULL,
    from_id         TEXT NOT NULL,
    to_kind         TEXT NOT NULL,
    to_id           TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    lease_id        TEXT,
    schedule_id     TEXT,
    asyncgate_instance TEXT NOT NULL,
    hash            TEXT NOT NULL,
    body            TEXT NOT NULL,
    parent_id       TEXT,
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX receipts_key ON receipts (tenant_id, task_id, receipt_key);
CREATE INDEX receipts_to ON receipts (tenant_id, to_kind, to_id, receipt_id);
CREATE INDEX receipts_parent ON receipts (tenant_id, parent_id) WHERE parent_id IS NOT NULL;
CREATE TABLE accounts (
    tenant_id       TEXT PRIMARY KEY,
    name            TEXT NOT NULL,
    created_at      REAL NOT NULL,
    tier            TEXT NOT NULL,
    suspended_at    REAL,
    exempt_until    REAL,
    exempt_why      TEXT
, stricter_calls INTEGER, stricter_tasks INTEGER, stricter_until REAL, stricter_why TEXT, tokens_since REAL) WITHOUT ROWID;
CREATE TABLE api_keys (
    tenant_id       TEXT NOT NULL,
    key_id          TEXT NOT NULL,
    hash            TEXT NOT NULL,
    name            TEXT NOT NULL,
    principal_kind  TEXT NOT NULL,
    principal_id    TEXT NOT NULL,
    principal_instance_id TEXT,
    role            TEXT NOT NULL,
    scopes          TEXT NOT NULL,
    capabilities    TEXT,
    task_types      TEXT,
    not_before      REAL NOT NULL,
    expires_at      REAL,
    revoked_at      REAL,
    rotated_to      TEXT,
    version         INTEGER NOT NULL,
    created_at      REAL NOT NULL,
    created_by      TEXT NOT NULL,
    last_used_at    REAL, places TEXT,
    PRIMARY KEY (tenant_id, key_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX api_keys_id ON api_keys (key_id);
CREATE TABLE audit (
    tenant_id       TEXT NOT NULL,
    audit_id        TEXT NOT NULL,
    number          INTEGER NOT NULL,
    at              REAL NOT NULL,
    event           TEXT NOT NULL,
    severity        TEXT NOT NULL,
    body            TEXT NOT NULL,
    hash            TEXT NOT NULL,
    PRIMARY KEY (tenant_id, audit_id)
) WITHOUT ROWID;
CREATE TABLE audit_heads (
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,
    hash            TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE usage (
    tenant_id       TEXT PRIMARY KEY,
    active          INTEGER NOT NULL,
    leases          INTEGER NOT NULL,
    receipt_bytes   INTEGER NOT NULL,
    terminal        INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE outbox (
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    content         TEXT NOT NULL,
    posted_at       REAL NOT NULL,
    state           TEXT NOT NULL,
    reason          TEXT,
    tries           INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE INDEX outbox_waiting ON outbox (tenant_id, receipt_id) WHERE state = 'waiting';
CREATE TABLE ledger (
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    arrival         TEXT NOT NULL,
    receipt_type    TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    from_kind       TEXT NOT NULL,
    from_id         TEXT NOT NULL,
    to_kind         TEXT NOT NULL,
    to_id           TEXT NOT NULL,
    asyncgate_instance TEXT NOT NULL,
    digest          TEXT NOT NULL,
    content         TEXT NOT NULL, stated_kind TEXT NOT NULL DEFAULT '', stated_id TEXT NOT NULL DEFAULT '', stated_role TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX ledger_arrival ON ledger (tenant_id, arrival);
CREATE INDEX ledger_to ON ledger (tenant_id, to_kind, to_id, arrival);
CREATE INDEX ledger_task ON ledger (tenant_id, task_id, arrival);
CREATE INDEX ledger_instance ON ledger (tenant_id, asyncgate_instance, arrival);
CREATE TABLE ledger_marks (
    tenant_id       TEXT NOT NULL,
    name            TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    PRIMARY KEY (tenant_id, name)
) WITHOUT ROWID;
CREATE TABLE seals (
    tenant_id       TEXT NOT NULL,
    seal_id         TEXT NOT NULL,
    number          INTEGER NOT NULL,
    last_id         TEXT NOT NULL,
    count           INTEGER NOT NULL,
    digest          TEXT NOT NULL,
    marks           TEXT NOT NULL,
    late            TEXT NOT NULL,
    sealed_at       REAL NOT NULL,
    hash            TEXT NOT NULL,
    PRIMARY KEY (tenant_id, seal_id)
);
CREATE TABLE seal_heads (
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,
    last_id         TEXT NOT NULL,
    hash            TEXT NOT NULL,
    imports         INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE archived (
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    receipt_type    TEXT NOT NULL,
    segment         TEXT NOT NULL,
    line            INTEGER NOT NULL,
    digest          TEXT NOT NULL,
    chain           TEXT NOT NULL,
    tasks           TEXT NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;
CREATE INDEX archived_task ON archived (tenant_id, task_id, receipt_id);
CREATE TRIGGER edges_stay BEFORE UPDATE ON edges BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER receipts_stay BEFORE UPDATE ON receipts BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER lanes_insert_wall BEFORE INSERT ON lanes
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER lanes_update_wall BEFORE UPDATE ON lanes
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER lanes_delete_wall BEFORE DELETE ON lanes
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER tasks_insert_wall BEFORE INSERT ON tasks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER tasks_update_wall BEFORE UPDATE ON tasks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER tasks_delete_wall BEFORE DELETE ON tasks
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER leases_insert_wall BEFORE INSERT ON leases
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER leases_update_wall BEFORE UPDATE ON leases
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER leases_delete_wall BEFORE DELETE ON leases
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER progress_insert_wall BEFORE INSERT ON progress
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER progress_update_wall BEFORE UPDATE ON progress
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER progress_delete_wall BEFORE DELETE ON progress
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER receipts_insert_wall BEFORE INSERT ON receipts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER edges_insert_wall BEFORE INSERT ON edges
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER obligations_insert_wall BEFORE INSERT ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER obligations_update_wall BEFORE UPDATE ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER obligations_delete_wall BEFORE DELETE ON obligations
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_insert_wall BEFORE INSERT ON deliveries
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_update_wall BEFORE UPDATE ON deliveries
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_delete_wall BEFORE DELETE ON deliveries
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER events_insert_wall BEFORE INSERT ON events
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER schedules_insert_wall BEFORE INSERT ON schedules
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER schedules_update_wall BEFORE UPDATE ON schedules
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER schedules_delete_wall BEFORE DELETE ON schedules
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER presences_insert_wall BEFORE INSERT ON presences
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER presences_update_wall BEFORE UPDATE ON presences
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER presences_delete_wall BEFORE DELETE ON presences
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_stay BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_once BEFORE INSERT ON audit
    WHEN EXISTS (SELECT 1 FROM audit WHERE tenant_id = NEW.tenant_id AND audit_id = NEW.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER accounts_insert_wall BEFORE INSERT ON accounts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER accounts_update_wall BEFORE UPDATE ON accounts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER accounts_delete_wall BEFORE DELETE ON accounts
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_insert_wall BEFORE INSERT ON api_keys
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_update_wall BEFORE UPDATE ON api_keys
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_delete_wall BEFORE DELETE ON api_keys
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_insert_wall BEFORE INSERT ON audit
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_insert_wall BEFORE INSERT ON audit_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_update_wall BEFORE UPDATE ON audit_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_delete_wall BEFORE DELETE ON audit_heads
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_insert_wall BEFORE INSERT ON usage
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_update_wall BEFORE UPDATE ON usage
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_delete_wall BEFORE DELETE ON usage
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER ledger_stay BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_keep BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_once BEFORE INSERT ON ledger
    WHEN EXISTS (SELECT 1 FROM ledger WHERE tenant_id = NEW.tenant_id AND receipt_id = NEW.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER outbox_insert_wall BEFORE INSERT ON outbox
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER outbox_update_wall BEFORE UPDATE ON outbox
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER outbox_delete_wall BEFORE DELETE ON outbox
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER ledger_insert_wall BEFORE INSERT ON ledger
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER ledger_marks_insert_wall BEFORE INSERT ON ledger_marks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER ledger_marks_update_wall BEFORE UPDATE ON ledger_marks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER ledger_marks_delete_wall BEFORE DELETE ON ledger_marks
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seals_stay BEFORE UPDATE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER seals_once BEFORE INSERT ON seals
    WHEN EXISTS (SELECT 1 FROM seals WHERE tenant_id = NEW.tenant_id AND seal_id = NEW.seal_id)
    BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER seals_keep BEFORE DELETE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER seals_insert_wall BEFORE INSERT ON seals
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_insert_wall BEFORE INSERT ON seal_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_update_wall BEFORE UPDATE ON seal_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_delete_wall BEFORE DELETE ON seal_heads
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER archived_stay BEFORE UPDATE ON archived BEGIN SELECT RAISE(ABORT, 'pointers are append-only'); END;
CREATE TRIGGER archived_keep BEFORE DELETE ON archived
    WHEN NOT EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'a pointer stays until its receipt is back'); END;
CREATE TRIGGER receipts_keep BEFORE DELETE ON receipts
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_keep BEFORE DELETE ON edges
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.child_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER tasks_keep BEFORE DELETE ON tasks
    WHEN OLD.status IN ('queued', 'leased', 'running') OR OLD.owed
        OR EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
    BEGIN SELECT RAISE(ABORT, 'only a settled task whose receipts are in the archive goes'); END;
CREATE TRIGGER events_keep BEFORE DELETE ON events
    WHEN EXISTS (SELECT 1 FROM tasks WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER archived_insert_wall BEFORE INSERT ON archived
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER archived_delete_wall BEFORE DELETE ON archived
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER receipts_delete_wall BEFORE DELETE ON receipts
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER edges_delete_wall BEFORE DELETE ON edges
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER events_delete_wall BEFORE DELETE ON events
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_keep BEFORE DELETE ON audit
    WHEN OLD.at > strftime('%s', 'now') - 90 * 86400
        OR EXISTS (SELECT 1 FROM audit WHERE tenant_id = OLD.tenant_id AND audit_id < OLD.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only, and kept for 90 days at least'); END;
CREATE TRIGGER audit_delete_wall BEFORE DELETE ON audit
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
