-- Erasing a receipt takes two roles: asyncgate_app moves it, asyncgate_archivist says that its segment has been written.
-- code: 1

-- As in the first file, for a database that is older than this role.
RESET ROLE;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'asyncgate_archivist') THEN
        CREATE ROLE asyncgate_archivist LOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN    -- another database was faster
    NULL;
END $$;
SET LOCAL ROLE asyncgate_owner;

CREATE TABLE asyncgate.segments (           -- files of the archive that whoever is not the gate's role has seen written
    tenant_id       uuid NOT NULL,
    segment         text NOT NULL,          -- the file, within the archive's folder
    registered_at   timestamptz NOT NULL DEFAULT now(),     -- when
    PRIMARY KEY (tenant_id, segment)
);
ALTER TABLE asyncgate.segments ENABLE ROW LEVEL SECURITY;
ALTER TABLE asyncgate.segments FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant ON asyncgate.segments TO asyncgate_app
    USING (tenant_id = (SELECT asyncgate.tenant())) WITH CHECK (tenant_id = (SELECT asyncgate.tenant()));
GRANT SELECT ON asyncgate.segments TO asyncgate_app;
CREATE POLICY archivist ON asyncgate.segments TO asyncgate_archivist
    USING (tenant_id = (SELECT asyncgate.tenant())) WITH CHECK (tenant_id = (SELECT asyncgate.tenant()));
CREATE POLICY keeper ON asyncgate.segments FOR SELECT TO asyncgate_owner
    USING (tenant_id = (SELECT asyncgate.tenant()));
GRANT USAGE ON SCHEMA asyncgate TO asyncgate_archivist;
GRANT SELECT, INSERT ON asyncgate.segments TO asyncgate_archivist;

-- For the function below, which looks at both as their owner.
CREATE POLICY keeper ON asyncgate.seal_heads FOR SELECT TO asyncgate_owner
    USING (tenant_id = (SELECT asyncgate.tenant()));
CREATE POLICY keeper ON asyncgate.obligations FOR SELECT TO asyncgate_owner
    USING (tenant_id = (SELECT asyncgate.tenant()));

CREATE OR REPLACE FUNCTION asyncgate.archive_receipts(ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    sealed text := (SELECT last_id FROM asyncgate.seal_heads WHERE tenant_id = tenant);
    id text;
    known boolean;
BEGIN
    FOREACH id IN ARRAY ids LOOP
        SELECT EXISTS (SELECT FROM asyncgate.segments AS s WHERE s.tenant_id = tenant AND s.segment = a.segment)
            INTO known FROM asyncgate.archived AS a WHERE a.tenant_id = tenant AND a.receipt_id = id;
        CONTINUE WHEN known IS NULL;        -- it has no pointer
        IF NOT known OR sealed IS NULL OR id COLLATE "C" > sealed COLLATE "C" OR EXISTS (
                SELECT FROM asyncgate.obligations AS o JOIN asyncgate.receipts AS r USING (tenant_id, to_kind, to_id)
                WHERE r.tenant_id = tenant AND r.receipt_id = id AND o.receipt_id = id) THEN
            RAISE 'receipt % may not go: its segment is not registered, it is not sealed, or it is owed', id
                USING ERRCODE = 'insufficient_privilege';
        END IF;
        DELETE FROM asyncgate.edges WHERE tenant_id = tenant AND child_id = id;
        DELETE FROM asyncgate.deliveries WHERE tenant_id = tenant AND receipt_id = id;
        DELETE FROM asyncgate.receipts WHERE tenant_id = tenant AND receipt_id = id;
    END LOOP;
END $$;
