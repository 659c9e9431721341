-- Two things that made every write slower.
--
-- Receipts lay in a tree ordered by their key: each append moved rows between its last pages.  In the order of their
-- rows they fill one page after another, and the key is an index.
--
-- A trigger that may ABORT a statement makes SQLite note how every page was that the statement touches.  Nobody goes on
-- with a transaction that met the wall, so now it takes the whole transaction back.

CREATE TABLE receipts_by_age (
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
INSERT INTO receipts_by_age SELECT * FROM receipts ORDER BY tenant_id, receipt_id;
DROP TABLE receipts;
ALTER TABLE receipts_by_age RENAME TO receipts;
CREATE UNIQUE INDEX receipts_key ON receipts (tenant_id, task_id, receipt_key);     -- also finds a task's receipts
CREATE INDEX receipts_to ON receipts (tenant_id, to_kind, to_id, receipt_id);
CREATE INDEX receipts_parent ON receipts (tenant_id, parent_id) WHERE parent_id IS NOT NULL;
CREATE TRIGGER receipts_stay BEFORE UPDATE ON receipts BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;
CREATE TRIGGER receipts_keep BEFORE DELETE ON receipts BEGIN SELECT RAISE(ABORT, 'receipts are append-only'); END;

DROP TRIGGER lanes_insert_wall;
CREATE TRIGGER lanes_insert_wall BEFORE INSERT ON lanes
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER lanes_update_wall;
CREATE TRIGGER lanes_update_wall BEFORE UPDATE ON lanes
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER lanes_delete_wall;
CREATE TRIGGER lanes_delete_wall BEFORE DELETE ON lanes
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER tasks_insert_wall;
CREATE TRIGGER tasks_insert_wall BEFORE INSERT ON tasks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER tasks_update_wall;
CREATE TRIGGER tasks_update_wall BEFORE UPDATE ON tasks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER tasks_delete_wall;
CREATE TRIGGER tasks_delete_wall BEFORE DELETE ON tasks
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER leases_insert_wall;
CREATE TRIGGER leases_insert_wall BEFORE INSERT ON leases
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER leases_update_wall;
CREATE TRIGGER leases_update_wall BEFORE UPDATE ON leases
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER leases_delete_wall;
CREATE TRIGGER leases_delete_wall BEFORE DELETE ON leases
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER progress_insert_wall;
CREATE TRIGGER progress_insert_wall BEFORE INSERT ON progress
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER progress_update_wall;
CREATE TRIGGER progress_update_wall BEFORE UPDATE ON progress
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER progress_delete_wall;
CREATE TRIGGER progress_delete_wall BEFORE DELETE ON progress
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER receipts_insert_wall BEFORE INSERT ON receipts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER edges_insert_wall;
CREATE TRIGGER edges_insert_wall BEFORE INSERT ON edges
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER obligations_insert_wall;
CREATE TRIGGER obligations_insert_wall BEFORE INSERT ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER obligations_update_wall;
CREATE TRIGGER obligations_update_wall BEFORE UPDATE ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER obligations_delete_wall;
CREATE TRIGGER obligations_delete_wall BEFORE DELETE ON obligations
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER deliveries_insert_wall;
CREATE TRIGGER deliveries_insert_wall BEFORE INSERT ON deliveries
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER deliveries_update_wall;
CREATE TRIGGER deliveries_update_wall BEFORE UPDATE ON deliveries
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER deliveries_delete_wall;
CREATE TRIGGER deliveries_delete_wall BEFORE DELETE ON deliveries
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER events_insert_wall;
CREATE TRIGGER events_insert_wall BEFORE INSERT ON events
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER schedules_insert_wall;
CREATE TRIGGER schedules_insert_wall BEFORE INSERT ON schedules
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER schedules_update_wall;
CREATE TRIGGER schedules_update_wall BEFORE UPDATE ON schedules
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER schedules_delete_wall;
CREATE TRIGGER schedules_delete_wall BEFORE DELETE ON schedules
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER presences_insert_wall;
CREATE TRIGGER presences_insert_wall BEFORE INSERT ON presences
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER presences_update_wall;
CREATE TRIGGER presences_update_wall BEFORE UPDATE ON presences
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
DROP TRIGGER presences_delete_wall;
CREATE TRIGGER presences_delete_wall BEFORE DELETE ON presences
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
