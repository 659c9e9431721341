-- Receipts on their way to a ledger, and those that others store here where the gate itself is the ledger.
-- code: 1

CREATE TABLE asyncgate.outbox (             -- written with its receipt, gone when the ledger has taken it
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- of the receipt, of which a skeleton without a body stays in receipts
    task_id         asyncgate.id NOT NULL,  -- receipts of one task are sent in their order; empty: of none
    content         text NOT NULL,          -- what is sent, byte by byte the same at each try
    posted_at       float8 NOT NULL,        -- since when it has been waiting
    state           text NOT NULL,          -- waiting, or parked: refused, and not sent again
    reason          text,                   -- what the ledger said last
    tries           bigint NOT NULL,        -- that brought no answer
    PRIMARY KEY (tenant_id, receipt_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX outbox_waiting ON asyncgate.outbox (tenant_id, receipt_id) WHERE state = 'waiting';

CREATE TABLE asyncgate.ledger (             -- append-only: nobody is granted to change or delete a row
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- the author's: any text
    arrival         asyncgate.id NOT NULL,  -- UUIDv7: the order in which readers get them
    receipt_type    text NOT NULL,          -- what it states
    task_id         asyncgate.id NOT NULL,  -- empty when it belongs to none
    from_kind       text NOT NULL,          -- who states it
    from_id         text NOT NULL,          -- the sender's id
    to_kind         asyncgate.id NOT NULL,  -- in whose inbox it lies
    to_id           asyncgate.id NOT NULL,  -- the recipient's id
    asyncgate_instance asyncgate.id NOT NULL,   -- which gate wrote it (20.7); empty when none did
    digest          text NOT NULL,          -- of what it says
    content         text NOT NULL,          -- JSON as it came
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX ledger_arrival ON asyncgate.ledger (tenant_id, arrival);
CREATE INDEX ledger_to ON asyncgate.ledger (tenant_id, to_kind, to_id, arrival);
CREATE INDEX ledger_task ON asyncgate.ledger (tenant_id, task_id, arrival);
CREATE INDEX ledger_instance ON asyncgate.ledger (tenant_id, asyncgate_instance, arrival);

CREATE TABLE asyncgate.ledger_marks (       -- how far a ledger was looked through for what workers state there
    tenant_id       uuid NOT NULL,
    name            asyncgate.id NOT NULL,  -- what is looked for
    receipt_id      asyncgate.id NOT NULL,  -- the last one seen
    PRIMARY KEY (tenant_id, name)
);

DO $$
DECLARE
    name text;
    specimen text;
BEGIN
    FOREACH name IN ARRAY ARRAY['outbox', 'ledger', 'ledger_marks'] LOOP
        -- The planner is shown what rows will be like, as in the first file.
        SELECT string_agg(CASE WHEN attname = 'state' THEN '''waiting'''
                               WHEN atttypid = 'uuid'::regtype THEN 'md5((n % 2)::text)::uuid'
                               WHEN atttypid IN ('bigint'::regtype, 'float8'::regtype) THEN 'n'
                               ELSE 'n::text' END, ', ' ORDER BY attnum) INTO specimen
        FROM pg_attribute WHERE attrelid = format('asyncgate.%I', name)::regclass AND attnum > 0;
        EXECUTE format('INSERT INTO asyncgate.%I SELECT %s FROM generate_series(1, 40) AS n', name, specimen);
        EXECUTE format('ANALYZE asyncgate.%I', name);
        BEGIN
            EXECUTE format('TRUNCATE asyncgate.%I', name);
        EXCEPTION WHEN OTHERS THEN RAISE;
        END;
        EXECUTE format('ALTER TABLE asyncgate.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE asyncgate.%I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant ON asyncgate.%I TO asyncgate_app '
                       'USING (tenant_id = (SELECT asyncgate.tenant())) '
                       'WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))', name);
        EXECUTE format('GRANT SELECT, INSERT ON asyncgate.%I TO asyncgate_app', name);
    END LOOP;
END $$;
GRANT UPDATE, DELETE ON asyncgate.outbox TO asyncgate_app;
GRANT UPDATE ON asyncgate.ledger_marks TO asyncgate_app;

-- Which tenants have receipts that wait: across tenants, and nothing of what they say.

CREATE POLICY sweep ON asyncgate.outbox FOR SELECT TO asyncgate_sweeper USING (true);
GRANT SELECT (tenant_id, state) ON asyncgate.outbox TO asyncgate_sweeper;

CREATE FUNCTION asyncgate.unsent() RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.tenant_id FROM asyncgate.tenants AS t, LATERAL (
        SELECT FROM asyncgate.outbox WHERE tenant_id = t.tenant_id AND state = 'waiting' LIMIT 1) AS o
$$;
REVOKE ALL ON FUNCTION asyncgate.unsent() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.unsent() TO asyncgate_app;

-- It goes to the role that may look; only for that moment may that create anything here.
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.unsent() OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
