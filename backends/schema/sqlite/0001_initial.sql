-- AsyncGate on SQLite.  Times are Unix seconds, JSON is text, ids sort by age.
--
-- In this order: the gate, tasks and receipts; all other tables; triggers that protect immutable rows.  The triggers that
-- are the wall between tenants are made for every table by `build_walls`.


-- The gate itself.

CREATE TABLE meta (
    name            TEXT PRIMARY KEY,       -- schema_version, first_migration, cursor_key, instance_id, sign_of_life
    value           TEXT NOT NULL
) WITHOUT ROWID;

-- One row, for the triggers of the wall.  A function in Python instead would be called for each row, and each call
-- would wait for the other Python threads.
CREATE TABLE wall (
    tenant_id       TEXT                    -- of the running transaction, or of the last one
);
INSERT INTO wall VALUES (NULL);


-- Tasks.  From here on every row belongs to a tenant: tenant_id leads each key and each index, except one index, whose
-- comment gives the reason.

CREATE TABLE tenants (                      -- the tenants that have stored anything; upkeep starts here
    tenant_id       TEXT PRIMARY KEY,
    since           REAL NOT NULL           -- of the first write
) WITHOUT ROWID;

CREATE TABLE lanes (                        -- the distinct (type, capabilities) pairs; a claim matches lanes, not tasks
    tenant_id       TEXT NOT NULL,
    lane            INTEGER NOT NULL,       -- 64 bits of SHA-256 over the pair, so that no database must allocate it
    type            TEXT NOT NULL,          -- of the tasks in it
    capabilities    TEXT NOT NULL,          -- JSON array, sorted: the capabilities that a worker needs
    pattern         TEXT,                   -- JSON: which limits its tasks have, and whether with a key
    PRIMARY KEY (tenant_id, lane)
) WITHOUT ROWID;

CREATE TABLE tasks (
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- UUIDv7: its order is the order of creation
    lane            INTEGER NOT NULL,       -- its queue
    type            TEXT NOT NULL,          -- what kind of work it is
    payload         TEXT NOT NULL,          -- JSON, unchanged
    payload_pointer TEXT,                   -- where the payload is stored instead
    requirements    TEXT NOT NULL,          -- JSON, unchanged
    terms           TEXT NOT NULL,          -- JSON: summary, instructions, expectations, timeouts
    owner_kind      TEXT NOT NULL,          -- the creator, for ever (H.1)
    owner_id        TEXT NOT NULL,          -- the creator's id
    principal_ai    TEXT NOT NULL,          -- a label for other systems
    priority        INTEGER NOT NULL,       -- higher comes first
    max_attempts    INTEGER NOT NULL,       -- how often it may fail
    retry_backoff_seconds INTEGER NOT NULL, -- the pause before the first retry
    max_expiries    INTEGER NOT NULL,       -- leases it may lose before it is put on hold; 0: any number
    created_at      REAL NOT NULL,          -- by the gate's clock
    duty            TEXT NOT NULL,          -- its task.assigned receipt
    idempotency_key TEXT,                   -- of the creator
    fingerprint     TEXT,                   -- hash of the request that had the key
    parent_task_id  TEXT,                   -- the task whose child it is
    asyncgate_instance TEXT NOT NULL,       -- which gate sweeps it (Clarification C)
    updated_at      REAL NOT NULL,          -- of the last change
    status          TEXT NOT NULL,          -- queued leased running succeeded failed canceled
    attempt         INTEGER NOT NULL,       -- failures so far
    fence           INTEGER NOT NULL,       -- leases so far, plus numbers that a move between databases skipped
    expiries        INTEGER NOT NULL,       -- leases lost so far
    owed            INTEGER NOT NULL,       -- 1 until its duty is discharged
    held            TEXT,                   -- why it is on hold (not offered although queued)
    lost_to         TEXT NOT NULL,          -- JSON array: the workers that lost it
    next_eligible_at REAL,                  -- no lease before this time; or when what it waits for is late
    deadline_at     REAL,                   -- when it passes, it is reported once
    started_at      REAL,                   -- when its worker began
    completed_at    REAL,                   -- when it ended
    outcome         TEXT,                   -- JSON: the result or the error
    artifacts       TEXT,                   -- JSON array: where the result is
    ready           INTEGER NOT NULL,       -- 1 if the queue may offer it; set again when its time comes
    handed          TEXT,                   -- JSON, for a ledger with custody, sent with the task's next lease:
                                            -- the fence, the receipt that gave custody back, the receiver
    limits          TEXT,                   -- JSON: its key under each of its limits
    summary         TEXT,                   -- the beginning of its summary, to be looked for
    PRIMARY KEY (tenant_id, task_id)
);
CREATE UNIQUE INDEX tasks_key ON tasks (tenant_id, owner_kind, owner_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_queue ON tasks (tenant_id, lane, priority DESC, task_id) WHERE status = 'queued' AND ready = 1;
CREATE INDEX tasks_turn ON tasks (tenant_id, lane, limits, priority DESC, task_id)
    WHERE status = 'queued' AND ready = 1 AND limits IS NOT NULL;
CREATE INDEX tasks_limited ON tasks (tenant_id, next_eligible_at, lane, limits)     -- delayed ones, whose turns begin
    WHERE status = 'queued' AND ready = 0 AND held IS NULL AND limits IS NOT NULL;
CREATE INDEX tasks_delayed ON tasks (tenant_id, next_eligible_at, lane)     -- with the lane: counted without the rows
    WHERE status = 'queued' AND ready = 0 AND held IS NULL;
CREATE INDEX tasks_owner ON tasks (tenant_id, owner_kind, owner_id, task_id);
CREATE INDEX tasks_type ON tasks (tenant_id, type, task_id);
CREATE INDEX tasks_parent ON tasks (tenant_id, parent_task_id, task_id) WHERE parent_task_id IS NOT NULL;
CREATE INDEX tasks_summary ON tasks (tenant_id, summary, task_id) WHERE summary IS NOT NULL;
CREATE INDEX tasks_status ON tasks (tenant_id, status, task_id);
CREATE INDEX tasks_changed ON tasks (tenant_id, updated_at);
CREATE INDEX tasks_held ON tasks (tenant_id, task_id) WHERE held IS NOT NULL;
CREATE INDEX tasks_deadline ON tasks (tenant_id, deadline_at)
    WHERE deadline_at IS NOT NULL AND status IN ('queued', 'leased', 'running');
CREATE INDEX tasks_awaiting ON tasks (tenant_id, next_eligible_at) WHERE held IN ('input_required', 'children_open');
CREATE INDEX tasks_spent ON tasks (tenant_id) WHERE status = 'queued' AND attempt >= max_attempts;

CREATE TABLE queues (                       -- how many tasks each lane has: counted by each batch, never scanned
    tenant_id       TEXT NOT NULL,
    lane            INTEGER NOT NULL,
    type            TEXT NOT NULL,          -- of the tasks in it
    capabilities    TEXT NOT NULL,          -- JSON array, sorted: the capabilities that a worker needs
    queued          INTEGER NOT NULL,       -- tasks that may be claimed, now or later
    held            INTEGER NOT NULL,       -- queued tasks that are on hold
    leased          INTEGER NOT NULL,       -- leased and running ones
    counted_at      REAL NOT NULL,          -- when the numbers last changed
    PRIMARY KEY (tenant_id, lane)
) WITHOUT ROWID;

CREATE TABLE leases (                       -- the latest of each task, apart from it: a heartbeat rewrites a narrow row
    tenant_id       TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    lease_id        TEXT NOT NULL,          -- random: only the holder knows it
    worker_kind     TEXT NOT NULL,          -- of the holder
    worker_id       TEXT NOT NULL,          -- of the holder
    worker_instance TEXT,                   -- of the holder, if given
    fence           INTEGER NOT NULL,       -- the number of this lease among the leases of the task
    acquired_at     REAL NOT NULL,          -- when it was granted
    expires_at      REAL NOT NULL,          -- when it expires
    renewals        INTEGER NOT NULL,       -- how often it was renewed
    accepted        TEXT NOT NULL,          -- its task.accepted receipt
    claim_id        TEXT,                   -- the claim's id, if it had one
    ending          TEXT NOT NULL,          -- live completed failed expired released canceled
    ttl_seconds     INTEGER,                -- its length; a renewal extends by the same
    resumed_by      TEXT,                   -- the instance that last resumed it, "" if it gave no name
    resumptions     INTEGER NOT NULL DEFAULT 0,     -- how often it was resumed
    PRIMARY KEY (tenant_id, task_id)
) WITHOUT ROWID;
CREATE INDEX leases_live ON leases (tenant_id, expires_at) WHERE ending = 'live';
CREATE UNIQUE INDEX leases_id ON leases (tenant_id, lease_id) WHERE ending = 'live';
CREATE INDEX leases_holder ON leases (tenant_id, worker_kind, worker_id, claim_id)
    WHERE ending = 'live';


-- Receipts.

-- Receipts lie in the order of their rows and fill one page after another; the key is an index.  In a tree ordered by
-- the key (WITHOUT ROWID) each append would move rows between the last pages.
CREATE TABLE receipts (                     -- immutable: see the triggers
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- UUIDv7: its order is the order of commits
    receipt_key     TEXT NOT NULL,          -- of the logical receipt (H.3)
    receipt_type    TEXT NOT NULL,
    created_at      REAL NOT NULL,
    from_kind       TEXT NOT NULL,          -- the sender
    from_id         TEXT NOT NULL,
    to_kind         TEXT NOT NULL,          -- the recipient, in whose inbox it is
    to_id           TEXT NOT NULL,
    task_id         TEXT NOT NULL,          -- empty if it belongs to no task
    lease_id        TEXT,
    schedule_id     TEXT,
    asyncgate_instance TEXT NOT NULL,       -- the gate that wrote it (20.7)
    hash            TEXT NOT NULL,          -- of its content (Clarification B)
    body            TEXT NOT NULL,          -- canonical JSON
    salt            TEXT NOT NULL DEFAULT '', -- random, for the digest that seals have
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

CREATE TABLE deliveries (                   -- when bootstrap first returned a receipt (H.8)
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,
    delivered_at    REAL NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
) WITHOUT ROWID;


-- The tables of the stored kinds stand here: see backends/tables.py.

CREATE UNIQUE INDEX api_keys_id ON api_keys (key_id);    -- begins with the id, which says whose it is
CREATE INDEX schedules_owner ON schedules (tenant_id, owner_kind, owner_id, schedule_id);
CREATE INDEX schedules_late ON schedules (tenant_id, late_at) WHERE late_at IS NOT NULL;


-- What may not change.  None of these rows is ever updated, but for an erasure, which only takes content away; some are
-- deleted, in the cases that the conditions name.
-- INSERT OR REPLACE deletes without asking the triggers of a DELETE: hence the triggers called `once`.

CREATE TRIGGER receipts_stay BEFORE UPDATE ON receipts
    WHEN NOT EXISTS (
        SELECT 1 FROM erased AS e JOIN erasures AS u ON u.tenant_id = e.tenant_id AND u.ended_at IS NULL
        WHERE e.tenant_id = OLD.tenant_id AND e.source = 'receipts' AND e.row_id = OLD.receipt_id
            AND (NEW.body = '{"erased":"' || e.erasure_id || '","sealed":"' || e.before || '"}'
                 OR NEW.body = '' AND OLD.body = '')
            AND NEW.salt = ''
            AND (u.principal_kind = '' OR OLD.body LIKE '{"erased":"' || u.erasure_id || '"%'
                 OR u.principal_id IN (OLD.from_id, OLD.to_id) OR instr(OLD.body, u.principal_id)
                 OR EXISTS (SELECT 1 FROM receipts AS r
                            WHERE r.tenant_id = OLD.tenant_id AND r.task_id = OLD.task_id AND OLD.task_id <> ''
                                AND r.receipt_type = 'task.assigned'
                                AND (r.from_id = u.principal_id OR r.body LIKE '{"erased":"' || u.erasure_id || '"%')))
            AND (NEW.from_id = OLD.from_id OR NEW.from_id LIKE 'erased-%')
            AND (NEW.to_id = OLD.to_id OR NEW.to_id LIKE 'erased-%')
            AND (NEW.schedule_id IS OLD.schedule_id OR NEW.schedule_id LIKE 'erased-%'))
        OR (NEW.tenant_id, NEW.receipt_id, NEW.receipt_type, NEW.created_at, NEW.from_kind, NEW.to_kind, NEW.task_id,
            NEW.lease_id, NEW.asyncgate_instance, NEW.parent_id)
        IS NOT (OLD.tenant_id, OLD.receipt_id, OLD.receipt_type, OLD.created_at, OLD.from_kind, OLD.to_kind,
                OLD.task_id, OLD.lease_id, OLD.asyncgate_instance, OLD.parent_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER edges_stay BEFORE UPDATE ON edges BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER events_stay BEFORE UPDATE ON events
    WHEN NOT EXISTS (SELECT 1 FROM erasures WHERE tenant_id = OLD.tenant_id AND ended_at IS NULL
                     AND NEW.payload = '{"erased":"' || erasure_id || '"}')
        OR (NEW.tenant_id, NEW.event_id, NEW.task_id, NEW.event_type, NEW.created_at)
        IS NOT (OLD.tenant_id, OLD.event_id, OLD.task_id, OLD.event_type, OLD.created_at)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER archived_stay BEFORE UPDATE ON archived BEGIN SELECT RAISE(ABORT, 'pointers are append-only'); END;
CREATE TRIGGER seals_stay BEFORE UPDATE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER usage_events_stay BEFORE UPDATE ON usage_events
    BEGIN SELECT RAISE(ABORT, 'usage events are append-only'); END;
CREATE TRIGGER ledger_stay BEFORE UPDATE ON ledger
    WHEN NOT EXISTS (
        SELECT 1 FROM erased AS e JOIN erasures AS u ON u.tenant_id = e.tenant_id AND u.ended_at IS NULL
        WHERE e.tenant_id = OLD.tenant_id AND e.source = 'ledger' AND e.row_id = OLD.arrival
            AND NEW.content = '{"erased":"' || e.erasure_id || '","sealed":"' || e.before || '"}'
            AND (NEW.receipt_id = OLD.receipt_id OR NEW.receipt_id LIKE 'erased-%')
            AND (NEW.from_id = OLD.from_id OR NEW.from_id LIKE 'erased-%')
            AND (NEW.to_id = OLD.to_id OR NEW.to_id LIKE 'erased-%')
            AND (NEW.stated_id = OLD.stated_id OR NEW.stated_id LIKE 'erased-%'))
        OR (NEW.tenant_id, NEW.arrival, NEW.receipt_type, NEW.task_id, NEW.from_kind, NEW.to_kind,
            NEW.asyncgate_instance, NEW.stated_kind, NEW.stated_role)
        IS NOT (OLD.tenant_id, OLD.arrival, OLD.receipt_type, OLD.task_id, OLD.from_kind, OLD.to_kind,
                OLD.asyncgate_instance, OLD.stated_kind, OLD.stated_role)
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
-- Of a line of the audit log, members may go or become pseudonyms; none may come or say something else.
CREATE TRIGGER audit_stay BEFORE UPDATE ON audit
    WHEN NOT EXISTS (
        SELECT 1 FROM erased AS e JOIN erasures AS u ON u.tenant_id = e.tenant_id AND u.ended_at IS NULL
        WHERE e.tenant_id = OLD.tenant_id AND e.source = 'audit' AND e.row_id = OLD.audit_id
            AND json_extract(NEW.body, '$.erased') = e.erasure_id)
        OR EXISTS (SELECT 1 FROM json_each(NEW.body) AS n WHERE n.key <> 'erased' AND n.value NOT LIKE 'erased-%'
                   AND n.value IS NOT (SELECT o.value FROM json_each(OLD.body) AS o WHERE o.key = n.key))
        OR (NEW.tenant_id, NEW.audit_id, NEW.number, NEW.at, NEW.event, NEW.severity, NEW.hash)
        IS NOT (OLD.tenant_id, OLD.audit_id, OLD.number, OLD.at, OLD.event, OLD.severity, OLD.hash)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER erased_stay BEFORE UPDATE ON erased BEGIN SELECT RAISE(ABORT, 'what was erased stays noted'); END;
CREATE TRIGGER erased_keep BEFORE DELETE ON erased BEGIN SELECT RAISE(ABORT, 'what was erased stays noted'); END;
CREATE TRIGGER erasures_stay BEFORE UPDATE ON erasures WHEN OLD.ended_at IS NOT NULL
    BEGIN SELECT RAISE(ABORT, 'an erasure that has ended stays as it is'); END;
CREATE TRIGGER erasures_keep BEFORE DELETE ON erasures BEGIN SELECT RAISE(ABORT, 'erasures stay noted'); END;

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

-- A receipt may be deleted when its pointer exists, a pointer when its receipt is restored, and a settled task with its
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
        AND NOT EXISTS (SELECT 1 FROM erasures WHERE tenant_id = OLD.tenant_id AND ended_at IS NULL
                        AND (principal_kind = '' OR (principal_kind, principal_id) = (OLD.owner_kind, OLD.owner_id)))
    BEGIN SELECT RAISE(ABORT, 'only a settled task whose receipts are in the archive goes'); END;
-- A key may be deleted when it is revoked, in the erasure of whom it stands for.
CREATE TRIGGER api_keys_keep BEFORE DELETE ON api_keys
    WHEN OLD.tenant_id IS (SELECT tenant_id FROM wall)
        AND (OLD.revoked_at IS NULL
             OR NOT EXISTS (SELECT 1 FROM erasures WHERE tenant_id = OLD.tenant_id AND ended_at IS NULL
                            AND (principal_kind = ''
                                 OR (principal_kind, principal_id) = (OLD.principal_kind, OLD.principal_id))))
    BEGIN SELECT RAISE(ABORT, 'a key stays until who it stands for is erased'); END;
CREATE TRIGGER events_keep BEFORE DELETE ON events
    WHEN EXISTS (SELECT 1 FROM tasks WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
