-- Seals over the receipts: whoever changes, adds or takes away a receipt behind the gate's back is found.

CREATE TABLE seals (                        -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    seal_id         TEXT NOT NULL,          -- the number with its zeros: seals sort as they are chained
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

-- The archive (H.11): receipts move to segment files, and a pointer stays.  A receipt leaves the table only when its
-- pointer is there, a pointer only when its receipt is back.

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

CREATE TRIGGER archived_stay BEFORE UPDATE ON archived BEGIN SELECT RAISE(ABORT, 'pointers are append-only'); END;
CREATE TRIGGER archived_keep BEFORE DELETE ON archived
    WHEN NOT EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'a pointer stays until its receipt is back'); END;

DROP TRIGGER receipts_keep;
CREATE TRIGGER receipts_keep BEFORE DELETE ON receipts
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.receipt_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
DROP TRIGGER edges_keep;
CREATE TRIGGER edges_keep BEFORE DELETE ON edges
    WHEN NOT EXISTS (SELECT 1 FROM archived WHERE tenant_id = OLD.tenant_id AND receipt_id = OLD.child_id)
    BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER tasks_keep BEFORE DELETE ON tasks
    WHEN OLD.status IN ('queued', 'leased', 'running') OR OLD.owed
        OR EXISTS (SELECT 1 FROM receipts WHERE tenant_id = OLD.tenant_id AND task_id = OLD.task_id)
    BEGIN SELECT RAISE(ABORT, 'only a settled task whose receipts are in the archive goes'); END;
DROP TRIGGER events_keep;
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
