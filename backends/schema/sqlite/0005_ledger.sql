-- Receipts on their way to a ledger, and those that others store here where the gate itself is the ledger.

CREATE TABLE outbox (                       -- written with its receipt, gone when the ledger has taken it
    tenant_id       TEXT NOT NULL,
    receipt_id      TEXT NOT NULL,          -- of the receipt, of which a skeleton without a body stays in receipts
    task_id         TEXT NOT NULL,          -- receipts of one task are sent in their order; empty: of none
    content         TEXT NOT NULL,          -- what is sent, byte by byte the same at each try
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
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX ledger_arrival ON ledger (tenant_id, arrival);
CREATE INDEX ledger_to ON ledger (tenant_id, to_kind, to_id, arrival);
CREATE INDEX ledger_task ON ledger (tenant_id, task_id, arrival);
CREATE INDEX ledger_instance ON ledger (tenant_id, asyncgate_instance, arrival);

CREATE TABLE ledger_marks (                 -- how far a ledger was looked through for what workers state there
    tenant_id       TEXT NOT NULL,
    name            TEXT NOT NULL,          -- what is looked for
    receipt_id      TEXT NOT NULL,          -- the last one seen
    PRIMARY KEY (tenant_id, name)
) WITHOUT ROWID;

CREATE TRIGGER ledger_stay BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_keep BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
-- INSERT OR REPLACE deletes without asking the triggers of a DELETE.
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
