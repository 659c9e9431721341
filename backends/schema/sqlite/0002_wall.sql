-- The triggers of the wall asked the program for the tenant of the transaction: a call into Python for each row, which
-- waited for whatever else the program was doing.  Now they ask a table of one row.

CREATE TABLE wall (
    tenant_id       TEXT                    -- of the running transaction, or of the last one
);
INSERT INTO wall VALUES (NULL);

DROP TRIGGER lanes_insert_wall;
CREATE TRIGGER lanes_insert_wall BEFORE INSERT ON lanes
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER lanes_update_wall;
CREATE TRIGGER lanes_update_wall BEFORE UPDATE ON lanes
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER lanes_delete_wall;
CREATE TRIGGER lanes_delete_wall BEFORE DELETE ON lanes
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER tasks_insert_wall;
CREATE TRIGGER tasks_insert_wall BEFORE INSERT ON tasks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER tasks_update_wall;
CREATE TRIGGER tasks_update_wall BEFORE UPDATE ON tasks
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER tasks_delete_wall;
CREATE TRIGGER tasks_delete_wall BEFORE DELETE ON tasks
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER leases_insert_wall;
CREATE TRIGGER leases_insert_wall BEFORE INSERT ON leases
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER leases_update_wall;
CREATE TRIGGER leases_update_wall BEFORE UPDATE ON leases
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER leases_delete_wall;
CREATE TRIGGER leases_delete_wall BEFORE DELETE ON leases
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER progress_insert_wall;
CREATE TRIGGER progress_insert_wall BEFORE INSERT ON progress
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER progress_update_wall;
CREATE TRIGGER progress_update_wall BEFORE UPDATE ON progress
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER progress_delete_wall;
CREATE TRIGGER progress_delete_wall BEFORE DELETE ON progress
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER receipts_insert_wall;
CREATE TRIGGER receipts_insert_wall BEFORE INSERT ON receipts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER edges_insert_wall;
CREATE TRIGGER edges_insert_wall BEFORE INSERT ON edges
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER obligations_insert_wall;
CREATE TRIGGER obligations_insert_wall BEFORE INSERT ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER obligations_update_wall;
CREATE TRIGGER obligations_update_wall BEFORE UPDATE ON obligations
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER obligations_delete_wall;
CREATE TRIGGER obligations_delete_wall BEFORE DELETE ON obligations
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER deliveries_insert_wall;
CREATE TRIGGER deliveries_insert_wall BEFORE INSERT ON deliveries
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER deliveries_update_wall;
CREATE TRIGGER deliveries_update_wall BEFORE UPDATE ON deliveries
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER deliveries_delete_wall;
CREATE TRIGGER deliveries_delete_wall BEFORE DELETE ON deliveries
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER events_insert_wall;
CREATE TRIGGER events_insert_wall BEFORE INSERT ON events
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER schedules_insert_wall;
CREATE TRIGGER schedules_insert_wall BEFORE INSERT ON schedules
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER schedules_update_wall;
CREATE TRIGGER schedules_update_wall BEFORE UPDATE ON schedules
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER schedules_delete_wall;
CREATE TRIGGER schedules_delete_wall BEFORE DELETE ON schedules
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER presences_insert_wall;
CREATE TRIGGER presences_insert_wall BEFORE INSERT ON presences
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER presences_update_wall;
CREATE TRIGGER presences_update_wall BEFORE UPDATE ON presences
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
DROP TRIGGER presences_delete_wall;
CREATE TRIGGER presences_delete_wall BEFORE DELETE ON presences
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ABORT, 'another tenant''s row'); END;
