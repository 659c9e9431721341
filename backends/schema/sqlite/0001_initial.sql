-- AsyncGate on SQLite.  Times are Unix seconds, JSON is text, ids sort by age.
--
-- In this order: tables by topic (the gate, tasks, receipts, schedules, identity, ledger, seals and archive); triggers
-- that keep what may not change; triggers that are the wall between tenants.


-- The gate itself.

CREATE TABLE meta (
    name            TEXT PRIMARY KEY,       -- schema_version, first_migration, cursor_key, instance_id, sign_of_life
    value           TEXT NOT NULL
) WITHOUT ROWID;

-- One row, for the triggers of the wall.  Asking the program instead would be a call into Python for each row, which
-- waits for whatever else the program is doing.
CREATE TABLE wall (
    tenant_id       TEXT                    -- of the running transaction, or of the last one
);
INSERT INTO wall VALUES (NULL);


-- Tasks.  From here on every row belongs to a tenant: tenant_id leads each key and each index, but for one index whose
-- reason stands beside it.

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
    fence           INTEGER NOT NULL,       -- leases so far, plus numbers that a move between databases skipped
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
    ready           INTEGER NOT NULL,       -- 1 if the queue may offer it; set again when its time comes
    handed          TEXT,                   -- JSON: what a ledger with custody must be told at the task's next lease:
                                            -- the fence, the receipt that gave custody back, to whom it went
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
    lease_id        TEXT NOT NULL,          -- random: only its holder was told it
    worker_kind     TEXT NOT NULL,          -- of the holder
    worker_id       TEXT NOT NULL,          -- of the holder
    worker_instance TEXT,                   -- of the holder, if it says
    fence           INTEGER NOT NULL,       -- the number of this lease among the leases of the task
    acquired_at     REAL NOT NULL,          -- when it was granted
    expires_at      REAL NOT NULL,          -- when it runs out
    renewals        INTEGER NOT NULL,       -- how often it was renewed
    accepted        TEXT NOT NULL,          -- its task.accepted receipt
    claim_id        TEXT,                   -- of the claim, if it had one
    ending          TEXT NOT NULL,          -- live completed failed expired released canceled
    ttl_seconds     INTEGER,                -- how long it was granted for: a renewal gives as much again
    resumed_by      TEXT,                   -- the instance that last resumed it, "" if that gave no name
    resumptions     INTEGER NOT NULL DEFAULT 0,     -- how often it was resumed, as far as that is known
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

CREATE TABLE events (                       -- what happened to a task and is no contract (spec 3)
    tenant_id       TEXT NOT NULL,
    event_id        TEXT NOT NULL,          -- UUIDv7
    task_id         TEXT NOT NULL,
    event_type      TEXT NOT NULL,
    payload         TEXT NOT NULL,          -- JSON
    created_at      REAL NOT NULL,
    PRIMARY KEY (tenant_id, task_id, event_id)
) WITHOUT ROWID;


-- Receipts.

-- Receipts lie in the order of their rows and fill one page after another; the key is an index.  In a tree ordered by
-- the key (WITHOUT ROWID) each append would move rows between the last pages.
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
);
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


-- Schedules and presences.

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
    late_at         REAL,                   -- when it becomes an anomaly; empty once that has been reported
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


-- Identity: who may come in, what is agreed with tenants, and what happened to either.

CREATE TABLE accounts (                     -- what is agreed with a tenant
    tenant_id       TEXT PRIMARY KEY,
    name            TEXT NOT NULL,
    created_at      REAL NOT NULL,
    tier            TEXT NOT NULL,          -- empty is the default
    suspended_at    REAL,                   -- since when all of its credentials are refused
    exempt_until    REAL,                   -- from rate limits and quotas (spec 21.4.5)
    exempt_why      TEXT,                   -- what was agreed
    stricter_calls  INTEGER,                -- calls an hour that it may make for a time
    stricter_tasks  INTEGER,                -- tasks an hour that it may create meanwhile
    stricter_until  REAL,                   -- the end of that time
    stricter_why    TEXT,                   -- what it did
    tokens_since    REAL                    -- access tokens issued before are refused, as after an incident
) WITHOUT ROWID;

CREATE TABLE api_keys (                     -- issued keys; the secret of a key is never stored
    tenant_id       TEXT NOT NULL,
    key_id          TEXT NOT NULL,          -- in the key's own text; no secret
    hash            TEXT NOT NULL,          -- Argon2id of its secret, as a PHC string
    name            TEXT NOT NULL,          -- what people call it
    principal_kind  TEXT NOT NULL,          -- for whom it stands
    principal_id    TEXT NOT NULL,          -- for whom it stands
    principal_instance_id TEXT,             -- for whom it stands, if it says
    role            TEXT NOT NULL,          -- agent worker admin
    scopes          TEXT NOT NULL,          -- JSON array, sorted
    capabilities    TEXT,                   -- JSON array: those it may claim tasks for; NULL is any
    task_types      TEXT,                   -- JSON array: those it may create and claim; NULL is any
    not_before      REAL NOT NULL,          -- when it begins to be good
    expires_at      REAL,                   -- when it ends
    revoked_at      REAL,                   -- when it was revoked
    rotated_to      TEXT,                   -- the key that takes its place
    version         INTEGER NOT NULL,       -- of the hash
    created_at      REAL NOT NULL,          -- when it was issued
    created_by      TEXT NOT NULL,          -- who issued it
    last_used_at    REAL,                   -- within a minute
    places          TEXT,                   -- JSON array: the networks that it was used from, the last one first
    PRIMARY KEY (tenant_id, key_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX api_keys_id ON api_keys (key_id);    -- led by the id, which says whose it is

CREATE TABLE audit (                        -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    audit_id        TEXT NOT NULL,          -- the number with leading zeros: lines sort as they are chained
    number          INTEGER NOT NULL,       -- 1, 2, 3, … in each tenant
    at              REAL NOT NULL,          -- when it happened
    event           TEXT NOT NULL,          -- what happened
    severity        TEXT NOT NULL,          -- info warning critical
    body            TEXT NOT NULL,          -- canonical JSON: who, from where, why
    hash            TEXT NOT NULL,          -- over all of this and the hash of the line before
    PRIMARY KEY (tenant_id, audit_id)
) WITHOUT ROWID;

CREATE TABLE audit_heads (                  -- where each tenant's audit log ends
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,       -- of the last line
    hash            TEXT NOT NULL           -- of the last line
) WITHOUT ROWID;

CREATE TABLE usage (                        -- what a tenant uses of what its tier limits
    tenant_id       TEXT PRIMARY KEY,
    active          INTEGER NOT NULL,       -- tasks that have not ended
    leases          INTEGER NOT NULL,       -- that are live
    receipt_bytes   INTEGER NOT NULL,       -- of their bodies
    terminal        INTEGER NOT NULL        -- tasks that have ended
) WITHOUT ROWID;


-- The ledger: receipts on their way to one, and those that others store here where the gate itself is the ledger.

CREATE TABLE outbox (                       -- written with its receipt, gone when the ledger has taken it
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- of the receipt, of which a skeleton without a body stays in receipts
    task_id         TEXT NOT NULL,          -- receipts of one task are sent in their order; empty: of none
    content         TEXT NOT NULL,          -- what is sent, the same bytes at each try
    posted_at       REAL NOT NULL,          -- since when it has been waiting
    state           TEXT NOT NULL,          -- waiting, or parked: refused, and not sent again
    reason          TEXT,                   -- what the ledger said last
    tries           INTEGER NOT NULL,       -- that brought no answer
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE INDEX outbox_waiting ON outbox (tenant_id, receipt_id) WHERE state = 'waiting';

CREATE TABLE ledger (                       -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- the author's: any text
    arrival         TEXT NOT NULL,          -- UUIDv7: its order is the order of commits
    receipt_type    TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- empty when it belongs to none
    from_kind       TEXT NOT NULL,          -- who states it
    from_id         TEXT NOT NULL,
    to_kind         TEXT NOT NULL,          -- in whose inbox it lies
    to_id           TEXT NOT NULL,
    asyncgate_instance TEXT NOT NULL,       -- which gate wrote it (20.7); empty when none did
    digest          TEXT NOT NULL,          -- of what it says
    content         TEXT NOT NULL,          -- JSON as it came
    stated_kind     TEXT NOT NULL DEFAULT '',   -- of the principal whose credential it came with; empty: unknown
    stated_id       TEXT NOT NULL DEFAULT '',   -- the id of that principal
    stated_role     TEXT NOT NULL DEFAULT '',   -- the role of that credential
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX ledger_arrival ON ledger (tenant_id, arrival);
CREATE INDEX ledger_to ON ledger (tenant_id, to_kind, to_id, arrival);
CREATE INDEX ledger_task ON ledger (tenant_id, task_id, arrival);
CREATE INDEX ledger_instance ON ledger (tenant_id, asyncgate_instance, arrival);

CREATE TABLE ledger_marks (                 -- how far a ledger was searched for what workers state there
    tenant_id       TEXT NOT NULL,
    name            TEXT NOT NULL,          -- what is searched for
    receipt_id      TEXT NOT NULL,          -- the last one seen
    PRIMARY KEY (tenant_id, name)
) WITHOUT ROWID;


-- Seals and archive.  Seals are over the receipts: they reveal a receipt that was changed, added or taken away behind
-- the gate's back.  The archive (H.11) takes receipts into segment files, and a pointer stays.

CREATE TABLE seals (                        -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    seal_id         TEXT NOT NULL,          -- the number with leading zeros: seals sort as they are chained
    number          INTEGER NOT NULL,       -- 1, 2, 3, … in each tenant
    last_id         TEXT NOT NULL,          -- up to which receipt all are covered
    count           INTEGER NOT NULL,       -- of receipts
    digest          TEXT NOT NULL,          -- SHA-256 over the digests of the receipts, in their order
    marks           TEXT NOT NULL,          -- base64: the first bytes of each of them
    late            TEXT NOT NULL,          -- JSON array: the receipts, where they are older than some already sealed
    sealed_at       REAL NOT NULL,          -- when
    hash            TEXT NOT NULL,          -- over all of this and the hash of the seal before
    PRIMARY KEY (tenant_id, seal_id)
);

CREATE TABLE seal_heads (                   -- where each tenant's seals end
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,       -- of the last seal
    last_id         TEXT NOT NULL,          -- of the last seal
    hash            TEXT NOT NULL,          -- of the last seal
    imports         INTEGER NOT NULL        -- how often older receipts were written among those already there
) WITHOUT ROWID;

CREATE TABLE archived (
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- what moved
    task_id         TEXT NOT NULL,          -- of that receipt
    receipt_type    TEXT NOT NULL,          -- of that receipt
    segment         TEXT NOT NULL,          -- the file, within the archive's folder
    line            INTEGER NOT NULL,       -- in the file
    digest          TEXT NOT NULL,          -- of every byte of it: seals still hold
    chain           TEXT NOT NULL,          -- the oldest receipt of all that moved together
    tasks           TEXT NOT NULL,          -- JSON array: the tasks of all that moved together
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;
CREATE INDEX archived_task ON archived (tenant_id, task_id, receipt_id);


-- What may not change.  None of these rows is ever updated; some are deleted, in the cases that the conditions name.
-- INSERT OR REPLACE deletes without asking the triggers of a DELETE: hence the triggers called `once`.

CREATE TRIGGER receipts_stay BEFORE UPDATE ON receipts BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_stay BEFORE UPDATE ON edges BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER archived_stay BEFORE UPDATE ON archived BEGIN SELECT RAISE(ABORT, 'pointers are append-only'); END;
CREATE TRIGGER seals_stay BEFORE UPDATE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER ledger_stay BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER audit_stay BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;

CREATE TRIGGER seals_once BEFORE INSERT ON seals
    WHEN EXISTS (SELECT 1 FROM seals WHERE tenant_id = NEW.tenant_id AND seal_id = NEW.seal_id)
    BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER seals_keep BEFORE DELETE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER ledger_once BEFORE INSERT ON ledger
    WHEN EXISTS (SELECT 1 FROM ledger WHERE tenant_id = NEW.tenant_id AND receipt_id = NEW.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_keep BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER audit_once BEFORE INSERT ON audit
    WHEN EXISTS (SELECT 1 FROM audit WHERE tenant_id = NEW.tenant_id AND audit_id = NEW.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;

-- A line of the audit log goes when it is the oldest and at least 90 days old (spec 21.7.4).  Another line in the log
-- says where it begins now.
CREATE TRIGGER audit_keep BEFORE DELETE ON audit
    WHEN OLD.at > strftime('%s', 'now') - 90 * 86400
        OR EXISTS (SELECT 1 FROM audit WHERE tenant_id = OLD.tenant_id AND audit_id < OLD.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only, and kept for 90 days at least'); END;

-- A receipt goes to the archive when its pointer is there, a pointer when its receipt is back, a settled task and its
-- events when the task has no receipts any more.
CREATE TRIGGER receipts_keep BEFORE DELETE ON receipts
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_keep BEFORE DELETE ON edges
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.child_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER archived_keep BEFORE DELETE ON archived
    WHEN NOT EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'a pointer stays until its receipt is back'); END;
CREATE TRIGGER tasks_keep BEFORE DELETE ON tasks
    WHEN OLD.status IN ('queued', 'leased', 'running') OR OLD.owed
        OR EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
    BEGIN SELECT RAISE(ABORT, 'only a settled task whose receipts are in the archive goes'); END;
CREATE TRIGGER events_keep BEFORE DELETE ON events
    WHEN EXISTS (SELECT 1 FROM tasks WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;


-- The wall between tenants: a statement without its WHERE clause stops instead of reaching a neighbour's rows.  All of
-- the transaction stops, because nobody goes on with one that met the wall: for a trigger that may ABORT one statement
-- SQLite notes the state of every page that the statement touches.  Where rows are never updated (or never deleted) no
-- trigger is needed for that.

CREATE TRIGGER lanes_insert_wall BEFORE INSERT ON lanes WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER lanes_update_wall BEFORE UPDATE ON lanes
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER lanes_delete_wall BEFORE DELETE ON lanes WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER tasks_insert_wall BEFORE INSERT ON tasks WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER tasks_update_wall BEFORE UPDATE ON tasks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER tasks_delete_wall BEFORE DELETE ON tasks WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER leases_insert_wall BEFORE INSERT ON leases WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER leases_update_wall BEFORE UPDATE ON leases
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER leases_delete_wall BEFORE DELETE ON leases WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER progress_insert_wall BEFORE INSERT ON progress WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER progress_update_wall BEFORE UPDATE ON progress
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER progress_delete_wall BEFORE DELETE ON progress WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER events_insert_wall BEFORE INSERT ON events WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER events_delete_wall BEFORE DELETE ON events WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER receipts_insert_wall BEFORE INSERT ON receipts WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER receipts_delete_wall BEFORE DELETE ON receipts WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER edges_insert_wall BEFORE INSERT ON edges WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER edges_delete_wall BEFORE DELETE ON edges WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER obligations_insert_wall BEFORE INSERT ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER obligations_update_wall BEFORE UPDATE ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER obligations_delete_wall BEFORE DELETE ON obligations
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER deliveries_insert_wall BEFORE INSERT ON deliveries WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_update_wall BEFORE UPDATE ON deliveries
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER deliveries_delete_wall BEFORE DELETE ON deliveries WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER schedules_insert_wall BEFORE INSERT ON schedules WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER schedules_update_wall BEFORE UPDATE ON schedules
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER schedules_delete_wall BEFORE DELETE ON schedules WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER presences_insert_wall BEFORE INSERT ON presences WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER presences_update_wall BEFORE UPDATE ON presences
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER presences_delete_wall BEFORE DELETE ON presences WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER accounts_insert_wall BEFORE INSERT ON accounts WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER accounts_update_wall BEFORE UPDATE ON accounts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER accounts_delete_wall BEFORE DELETE ON accounts WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER api_keys_insert_wall BEFORE INSERT ON api_keys WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_update_wall BEFORE UPDATE ON api_keys
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_delete_wall BEFORE DELETE ON api_keys WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER audit_insert_wall BEFORE INSERT ON audit WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_delete_wall BEFORE DELETE ON audit WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER audit_heads_insert_wall BEFORE INSERT ON audit_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_update_wall BEFORE UPDATE ON audit_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_delete_wall BEFORE DELETE ON audit_heads
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER usage_insert_wall BEFORE INSERT ON usage WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_update_wall BEFORE UPDATE ON usage
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_delete_wall BEFORE DELETE ON usage WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER outbox_insert_wall BEFORE INSERT ON outbox WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER outbox_update_wall BEFORE UPDATE ON outbox
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER outbox_delete_wall BEFORE DELETE ON outbox WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER ledger_insert_wall BEFORE INSERT ON ledger WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER ledger_marks_insert_wall BEFORE INSERT ON ledger_marks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER ledger_marks_update_wall BEFORE UPDATE ON ledger_marks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER ledger_marks_delete_wall BEFORE DELETE ON ledger_marks
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER seals_insert_wall BEFORE INSERT ON seals WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER seal_heads_insert_wall BEFORE INSERT ON seal_heads WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_update_wall BEFORE UPDATE ON seal_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall) OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_delete_wall BEFORE DELETE ON seal_heads WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

CREATE TRIGGER archived_insert_wall BEFORE INSERT ON archived WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER archived_delete_wall BEFORE DELETE ON archived WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
