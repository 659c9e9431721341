-- The audit log is kept for a time, incidents are answered, and a key is known by where it is used.
-- code: 1

ALTER TABLE asyncgate.accounts
    ADD COLUMN stricter_calls bigint,       -- calls an hour that it may make for a time
    ADD COLUMN stricter_tasks bigint,       -- tasks an hour that it may create meanwhile
    ADD COLUMN stricter_until float8,       -- how long
    ADD COLUMN stricter_why text;           -- what it did
ALTER TABLE asyncgate.api_keys
    ADD COLUMN places text;                 -- JSON array: the networks that it was used from, the last first

-- The only way in which a line leaves the audit log: oldest first, and none that is younger than 90 days by the
-- database's own clock (spec 21.7.4).  A line in the log says where it begins now.

CREATE POLICY keeper ON asyncgate.audit TO asyncgate_owner
    USING (tenant_id = (SELECT asyncgate.tenant())) WITH CHECK (tenant_id = (SELECT asyncgate.tenant()));

CREATE FUNCTION asyncgate.prune_audit(ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    id text;
BEGIN
    FOREACH id IN ARRAY ids LOOP
        IF NOT EXISTS (SELECT FROM asyncgate.audit WHERE tenant_id = tenant AND audit_id < id) THEN
            DELETE FROM asyncgate.audit WHERE tenant_id = tenant AND audit_id = id
                AND at <= extract(epoch FROM clock_timestamp()) - 90 * 86400;
        END IF;
    END LOOP;
END $$;

REVOKE ALL ON FUNCTION asyncgate.prune_audit(text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.prune_audit(text[]) TO asyncgate_app;
