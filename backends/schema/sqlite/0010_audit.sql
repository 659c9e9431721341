-- The audit log is kept for a time, incidents are answered, and a key is known by where it is used.

-- Lines go oldest first, and none that is younger than 90 days (spec 21.7.4); a line in the log says where it begins.
DROP TRIGGER audit_keep;
CREATE TRIGGER audit_keep BEFORE DELETE ON audit
    WHEN OLD.at > strftime('%s', 'now') - 90 * 86400
        OR EXISTS (SELECT 1 FROM audit WHERE tenant_id = OLD.tenant_id AND audit_id < OLD.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only, and kept for 90 days at least'); END;
CREATE TRIGGER audit_delete_wall BEFORE DELETE ON audit
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;

ALTER TABLE accounts ADD COLUMN stricter_calls INTEGER;    -- calls an hour that it may make for a time
ALTER TABLE accounts ADD COLUMN stricter_tasks INTEGER;    -- tasks an hour that it may create meanwhile
ALTER TABLE accounts ADD COLUMN stricter_until REAL;       -- how long
ALTER TABLE accounts ADD COLUMN stricter_why TEXT;         -- what it did
ALTER TABLE api_keys ADD COLUMN places TEXT;               -- JSON array: the networks that it was used from, the last first
