-- Seals over the receipts: whoever changes, adds or takes away a receipt behind the gate's back is found.
-- code: 1

CREATE TABLE asyncgate.seals (              -- append-only: nobody is granted to change or delete one
    tenant_id       uuid NOT NULL,
    seal_id         asyncgate.id NOT NULL,  -- the number with its zeros: seals sort as they are chained
    number          bigint NOT NULL,        -- 1, 2, 3, … in each tenant
    last_id         asyncgate.id NOT NULL,  -- up to which receipt all are covered
    count           bigint NOT NULL,        -- of receipts
    digest          text NOT NULL,          -- SHA-256 over the digests of the receipts, in their order
    marks           text NOT NULL,          -- base64: the first bytes of each of them
    late            text NOT NULL,          -- JSON array: the receipts, where they are older than some already sealed
    sealed_at       float8 NOT NULL,        -- when
    hash            text NOT NULL,          -- over all of this and the hash of the seal before
    PRIMARY KEY (tenant_id, seal_id)
);

CREATE TABLE asyncgate.seal_heads (         -- where each tenant's seals end
    tenant_id       uuid PRIMARY KEY,
    number          bigint NOT NULL,        -- of the last seal
    last_id         text NOT NULL,          -- of the last seal
    hash            text NOT NULL,          -- of the last seal
    imports         bigint NOT NULL         -- how often older receipts were written among those already there
);

-- The archive (H.11): receipts move to segment files, and a pointer stays.

CREATE TABLE asyncgate.archived (
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- what moved
    task_id         asyncgate.id NOT NULL,  -- of that receipt
    receipt_type    text NOT NULL,          -- of that receipt
    segment         text NOT NULL,          -- the file, within the archive's folder
    line            bigint NOT NULL,        -- in the file
    digest          text NOT NULL,          -- of every byte of it: seals still hold
    chain           text NOT NULL,          -- the oldest receipt of all that moved together
    tasks           text NOT NULL,          -- JSON array: the tasks of all that moved together
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE INDEX archived_task ON asyncgate.archived (tenant_id, task_id, receipt_id);

-- As for the first tables, the planner is shown what rows will be like: tenants are few and ids are many.
DO $$
BEGIN
    INSERT INTO asyncgate.archived
    SELECT md5((n % 2)::text)::uuid, n::text, n::text, n::text, n::text, n, n::text, n::text, n::text
    FROM generate_series(1, 40) AS n;
    ANALYZE asyncgate.archived;
    BEGIN
        TRUNCATE asyncgate.archived;
    EXCEPTION WHEN OTHERS THEN RAISE;
    END;
END $$;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['seals', 'seal_heads', 'archived'] LOOP
        EXECUTE format('ALTER TABLE asyncgate.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE asyncgate.%I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant ON asyncgate.%I TO asyncgate_app '
                       'USING (tenant_id = (SELECT asyncgate.tenant())) '
                       'WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))', name);
        EXECUTE format('GRANT SELECT, INSERT ON asyncgate.%I TO asyncgate_app', name);
    END LOOP;
END $$;
GRANT UPDATE ON asyncgate.seal_heads TO asyncgate_app;

-- The only ways in which a receipt, a pointer or a task leaves its table.  The owner does it, behind the wall of the
-- transaction's tenant, and each way looks whether the row may go: a receipt whose pointer is there, a pointer whose
-- receipt is back, a settled task that has no receipts any more.

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['receipts', 'edges', 'deliveries', 'archived', 'tasks', 'states', 'progress', 'events'] LOOP
        EXECUTE format('CREATE POLICY keeper ON asyncgate.%I TO asyncgate_owner '
                       'USING (tenant_id = (SELECT asyncgate.tenant())) '
                       'WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))', name);
    END LOOP;
END $$;

CREATE FUNCTION asyncgate.archive_receipts(ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    id text;
BEGIN
    FOREACH id IN ARRAY ids LOOP
        IF EXISTS (SELECT FROM asyncgate.archived WHERE tenant_id = tenant AND receipt_id = id) THEN
            DELETE FROM asyncgate.edges WHERE tenant_id = tenant AND child_id = id;
            DELETE FROM asyncgate.deliveries WHERE tenant_id = tenant AND receipt_id = id;
            DELETE FROM asyncgate.receipts WHERE tenant_id = tenant AND receipt_id = id;
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION asyncgate.forget_pointers(ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    id text;
BEGIN
    FOREACH id IN ARRAY ids LOOP
        IF EXISTS (SELECT FROM asyncgate.receipts WHERE tenant_id = tenant AND receipt_id = id) THEN
            DELETE FROM asyncgate.archived WHERE tenant_id = tenant AND receipt_id = id;
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION asyncgate.prune_tasks(ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    id text;
BEGIN
    FOREACH id IN ARRAY ids LOOP
        IF EXISTS (SELECT FROM asyncgate.states WHERE tenant_id = tenant AND task_id = id
                   AND status IN ('succeeded', 'failed', 'canceled') AND NOT owed)
            AND NOT EXISTS (SELECT FROM asyncgate.receipts WHERE tenant_id = tenant AND task_id = id) THEN
            DELETE FROM asyncgate.events WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.progress WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.states WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.tasks WHERE tenant_id = tenant AND task_id = id;
        END IF;
    END LOOP;
END $$;

REVOKE ALL ON FUNCTION asyncgate.archive_receipts(text[]), asyncgate.forget_pointers(text[]),
    asyncgate.prune_tasks(text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.archive_receipts(text[]), asyncgate.forget_pointers(text[]),
    asyncgate.prune_tasks(text[]) TO asyncgate_app;
