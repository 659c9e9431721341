-- AsyncGate on SQLite, as it was first released.  Times are Unix seconds, JSON is text, ids order by age.
-- Every table but the first three belongs to tenants: tenant_id leads each key, and triggers compare it with the tenant
-- of the running transaction, so that a statement without its WHERE clause aborts instead of reaching a neighbour.

CREATE TABLE meta (
    name            TEXT PRIMARY KEY,       -- schema_version, cursor_key
    value           TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE tenants (                      -- who has stored anything: upkeep starts here
    tenant_id       TEXT PRIMARY KEY,
    since           REAL NOT NULL           -- of the first write
) WITHOUT ROWID;

CREATE TABLE lanes (                        -- the distinct (type, capabilities) pairs; a claim matches lanes, not tasks
    tenant_id       TEXT NOT NULL,
    lane            INTEGER NOT NULL,       -- 64 bits of SHA-256 over the pair: no database hands it out
    type            TEXT NOT NULL,          -- of the tasks in it
    capabilities    TEXT NOT NULL,          -- JSON array, sorted: what a worker needs for them
    PRIMARY KEY (tenant_id, lane)
) WITHOUT ROWID;

CREATE TABLE tasks (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- UUIDv7: its order is the order of creation
    lane            INTEGER NOT NULL,       -- where the queue finds it
    type            TEXT NOT NULL,          -- what kind of work it is
    payload         TEXT NOT NULL,          -- JSON as it came
    payload_pointer TEXT,                   -- where a peer keeps the payload instead
    requirements    TEXT NOT NULL,          -- JSON as it came
    terms           TEXT NOT NULL,          -- JSON: summary, instructions, expectations, timeouts
    owner_kind      TEXT NOT NULL,          -- the creator, for ever (H.1)
    owner_id        TEXT NOT NULL,          -- the creator's id
    principal_ai    TEXT NOT NULL,          -- a label for peers
    priority        INTEGER NOT NULL,       -- higher comes first
    max_attempts    INTEGER NOT NULL,       -- failures it may have
    retry_backoff_seconds INTEGER NOT NULL, -- before the first retry
    max_expiries    INTEGER NOT NULL,       -- leases it may lose before it is held; 0: any number
    created_at      REAL NOT NULL,          -- by the gate's clock
    duty            TEXT NOT NULL,          -- its task.assigned receipt
    idempotency_key TEXT,                   -- of the creator
    fingerprint     TEXT,                   -- of the contract that carried the key
    asyncgate_instance TEXT NOT NULL,       -- which gate sweeps it (Clarification C)
    updated_at      REAL NOT NULL,          -- of the last change
    status          TEXT NOT NULL,          -- queued leased running succeeded failed canceled
    attempt         INTEGER NOT NULL,       -- failures so far
    fence           INTEGER NOT NULL,       -- leases so far, and what moves to other databases skipped
    expiries        INTEGER NOT NULL,       -- leases lost so far
    owed            INTEGER NOT NULL,       -- 1 until its duty is discharged
    held            TEXT,                   -- why it is not offered although queued
    lost_to         TEXT NOT NULL,          -- JSON array: the workers that lost it
    next_eligible_at REAL,                  -- not to be leased before
    deadline_at     REAL,                   -- to be reported when it passes, once
    started_at      REAL,                   -- when its worker began
    completed_at    REAL,                   -- when it came to its end
    outcome         TEXT,                   -- JSON: the result or the error
    artifacts       TEXT,                   -- JSON array: where the result lies
    ready           INTEGER NOT NULL,       -- 1 if the queue may offer it; this backend's own, set again when time comes
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

CREATE TABLE leases (                       -- the latest of each task, apart from it: a heartbeat rewrites a narrow row
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    lease_id        TEXT NOT NULL,          -- random: who knows it was given it
    worker_kind     TEXT NOT NULL,          -- of the holder
    worker_id       TEXT NOT NULL,          -- of the holder
    worker_instance TEXT,                   -- of the holder, if it says
    fence           INTEGER NOT NULL,       -- the how-manieth lease of the task
    acquired_at     REAL NOT NULL,          -- when it was granted
    expires_at      REAL NOT NULL,          -- when it runs out
    renewals        INTEGER NOT NULL,       -- how often it was kept
    accepted        TEXT NOT NULL,          -- its task.accepted receipt
    claim_id        TEXT,                   -- of the claim, if it had one
    ending          TEXT NOT NULL,          -- live completed failed expired released canceled
    PRIMARY KEY (tenant_id, task_id)
) WITHOUT ROWID;
CREATE INDEX leases_live ON leases (tenant_id, expires_at) WHERE ending = 'live';
CREATE UNIQUE INDEX leases_id ON leases (tenant_id, lease_id) WHERE ending = 'live';
CREATE INDEX leases_claim ON leases (tenant_id, worker_kind, worker_id, claim_id)
    WHERE ending = 'live' AND claim_id IS NOT NULL;

CREATE TABLE progress (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    progress        TEXT NOT NULL,          -- JSON: the last report, handed to the next worker
    sequence        INTEGER NOT NULL,       -- reports so far
    fence           INTEGER NOT NULL,       -- the lease it was reported under
    updated_at      REAL NOT NULL,
    PRIMARY KEY (tenant_id, task_id)
) WITHOUT ROWID;

CREATE TABLE receipts (                     -- immutable: see the triggers
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- UUIDv7: its order is the order of commits
    receipt_key     TEXT NOT NULL,          -- of the logical receipt (H.3)
    receipt_type    TEXT NOT NULL,
    created_at      REAL NOT NULL,
    from_kind       TEXT NOT NULL,          -- who states it
    from_id         TEXT NOT NULL,
    to_kind         TEXT NOT NULL,          -- in whose inbox it lies
    to_id           TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- empty when it belongs to none
    lease_id        TEXT,
    schedule_id     TEXT,
    asyncgate_instance TEXT NOT NULL,       -- which gate wrote it (20.7)
    hash            TEXT NOT NULL,          -- of what it says (Clarification B)
    body            TEXT NOT NULL,          -- canonical JSON
    parent_id       TEXT,                   -- its first parent; further ones are edges
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX receipts_key ON receipts (tenant_id, task_id, receipt_key);     -- also finds a task's receipts
CREATE INDEX receipts_to ON receipts (tenant_id, to_kind, to_id, receipt_id);
CREATE INDEX receipts_parent ON receipts (tenant_id, parent_id) WHERE parent_id IS NOT NULL;

CREATE TABLE edges (                        -- the second and further parents of a receipt
    tenant_id       TEXT NOT NULL,
    child_id        TEXT NOT NULL,
    parent_id       TEXT NOT NULL,
    PRIMARY KEY (tenant_id, child_id, parent_id)
) WITHOUT ROWID;
CREATE INDEX edges_parent ON edges (tenant_id, parent_id, child_id);

CREATE TABLE obligations (                  -- the open ones: an index over the receipts, which are the evidence
    tenant_id       TEXT NOT NULL,
    to_kind         TEXT NOT NULL,          -- to whom something is owed
    to_id           TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- the receipt that opened it
    PRIMARY KEY (tenant_id, to_kind, to_id, receipt_id)
) WITHOUT ROWID;

CREATE TABLE deliveries (                   -- telemetry: when bootstrap handed a receipt over (H.8)
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    delivered_at    REAL NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;

CREATE TABLE events (                       -- what happened to a task and is no contract (spec 3)
    tenant_id       TEXT NOT NULL,
    event_id        TEXT NOT NULL,          -- UUIDv7
    task_id         TEXT NOT NULL,
    event_type      TEXT NOT NULL,
    payload         TEXT NOT NULL,          -- JSON
    created_at      REAL NOT NULL,
    PRIMARY KEY (tenant_id, task_id, event_id)
) WITHOUT ROWID;

CREATE TABLE schedules (                    -- what schedulers last said, so that their silence is noticed (H.7.4)
    tenant_id       TEXT NOT NULL,
    schedule_id     TEXT NOT NULL,
    owner_kind      TEXT NOT NULL,          -- who asked for it
    owner_id        TEXT NOT NULL,
    scheduler_kind  TEXT NOT NULL,          -- who runs it
    scheduler_id    TEXT NOT NULL,
    created         TEXT NOT NULL,          -- its schedule.created receipt
    enabled         INTEGER NOT NULL,
    next_run_at     REAL,
    interval_seconds REAL,
    late_at         REAL,                   -- when it is an anomaly, until that has been reported
    PRIMARY KEY (tenant_id, schedule_id)
) WITHOUT ROWID;
CREATE INDEX schedules_late ON schedules (tenant_id, late_at) WHERE late_at IS NOT NULL;

CREATE TABLE presences (                    -- since when principals have been talking to the gate
    tenant_id       TEXT NOT NULL,
    kind            TEXT NOT NULL,
    id              TEXT NOT NULL,
    instance_id     TEXT,                   -- the last one seen
    first_seen_at   REAL NOT NULL,
    last_seen_at    REAL NOT NULL,
    sessions        INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, kind, id)
) WITHOUT ROWID;

-- Receipts and events are never changed and never deleted.
CREATE TRIGGER receipts_stay BEFORE UPDATE ON receipts BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER receipts_keep BEFORE DELETE ON receipts BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_stay BEFORE UPDATE ON edges BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_keep BEFORE DELETE ON edges BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_keep BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;

-- The wall between tenants.
CREATE TRIGGER lanes_insert_wall BEFORE INSERT ON lanes WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER lanes_update_wall BEFORE UPDATE ON lanes WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER lanes_delete_wall BEFORE DELETE ON lanes WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER tasks_insert_wall BEFORE INSERT ON tasks WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER tasks_update_wall BEFORE UPDATE ON tasks WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER tasks_delete_wall BEFORE DELETE ON tasks WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER leases_insert_wall BEFORE INSERT ON leases WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER leases_update_wall BEFORE UPDATE ON leases WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER leases_delete_wall BEFORE DELETE ON leases WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER progress_insert_wall BEFORE INSERT ON progress WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER progress_update_wall BEFORE UPDATE ON progress WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER progress_delete_wall BEFORE DELETE ON progress WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER receipts_insert_wall BEFORE INSERT ON receipts WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER edges_insert_wall BEFORE INSERT ON edges WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER obligations_insert_wall BEFORE INSERT ON obligations WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER obligations_update_wall BEFORE UPDATE ON obligations WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER obligations_delete_wall BEFORE DELETE ON obligations WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_insert_wall BEFORE INSERT ON deliveries WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_update_wall BEFORE UPDATE ON deliveries WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_delete_wall BEFORE DELETE ON deliveries WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER events_insert_wall BEFORE INSERT ON events WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER schedules_insert_wall BEFORE INSERT ON schedules WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER schedules_update_wall BEFORE UPDATE ON schedules WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER schedules_delete_wall BEFORE DELETE ON schedules WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER presences_insert_wall BEFORE INSERT ON presences WHEN NEW.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER presences_update_wall BEFORE UPDATE ON presences WHEN NEW.tenant_id IS NOT current_tenant() OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
CREATE TRIGGER presences_delete_wall BEFORE DELETE ON presences WHEN OLD.tenant_id IS NOT current_tenant()
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
