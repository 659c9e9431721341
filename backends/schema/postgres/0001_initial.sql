-- AsyncGate on Postgres 14 or newer.  Times are Unix seconds, JSON is text, ids sort by age.
-- code: 1
-- (The line above names the oldest release of the schema whose servers work on this one.)
--
-- In this order: roles; tables (the gate, tasks, receipts, all others); samples for the planner; the wall between tenants and the grants; the functions.

-- Roles belong to the whole server, so they may exist already because of another database.
--   asyncgate_owner     owns everything here; it cannot log in
--   asyncgate_app       the gate's role: it sees one tenant at a time, may change no receipt, owns nothing
--   asyncgate_sweeper   owns the functions that look across tenants, for upkeep
--   asyncgate_auth      owns the function that finds a credential before its tenant is known
--   asyncgate_archivist registers the segments of the archive; without it no receipt leaves its table
DO $$
DECLARE
    name text;
    may_all boolean := (SELECT rolsuper FROM pg_roles WHERE rolname = current_user);
BEGIN
    FOREACH name IN ARRAY ARRAY['asyncgate_owner', 'asyncgate_app', 'asyncgate_sweeper', 'asyncgate_auth',
                               'asyncgate_archivist'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I %s', name, CASE WHEN name IN ('asyncgate_app', 'asyncgate_archivist')
                                                          THEN 'LOGIN' ELSE 'NOLOGIN' END);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN    -- another session was faster
                NULL;
            END;
        END IF;
        IF NOT may_all AND name NOT IN ('asyncgate_app', 'asyncgate_archivist') THEN
            EXECUTE format('GRANT %I TO CURRENT_USER', name);
        END IF;
    END LOOP;
END $$;

CREATE SCHEMA asyncgate AUTHORIZATION asyncgate_owner;
SET LOCAL ROLE asyncgate_owner;
GRANT USAGE ON SCHEMA asyncgate TO asyncgate_app, asyncgate_sweeper, asyncgate_auth, asyncgate_archivist;

-- Compared byte by byte: with a language's collation every index would be several times slower.
CREATE DOMAIN asyncgate.id AS text COLLATE "C";


-- The gate itself: these rows belong to no tenant.

CREATE TABLE asyncgate.migrations (
    number          int PRIMARY KEY,        -- of the file
    name            text NOT NULL,          -- of the file
    code            int NOT NULL,           -- the oldest release of the schema whose servers work on this one
    applied_at      timestamptz NOT NULL DEFAULT now(),     -- when
    privileges      text[]                  -- statements that make all owners, grants and policies again: a dump of the
                                            -- database carries these along, but not the roles; only the owner writes it
);

CREATE TABLE asyncgate.meta (
    name            text PRIMARY KEY,       -- cursor_key, first_migration
    value           text NOT NULL           -- of that name
);
INSERT INTO asyncgate.meta
VALUES ('cursor_key', replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''));

CREATE TABLE asyncgate.enqueuers (          -- roles of applications that may hand work over; only the owner reads and writes it
    role_name       name PRIMARY KEY,       -- of a login
    for_tenant      uuid NOT NULL,          -- in which tenant
    principal_kind  asyncgate.id NOT NULL,  -- as whom
    principal_id    asyncgate.id NOT NULL   -- that principal's id
);

CREATE TABLE asyncgate.instances (          -- the gate processes; each also holds an advisory lock while it lives
    instance_id     asyncgate.id PRIMARY KEY,   -- its name, in receipts and on tasks
    since           timestamptz NOT NULL DEFAULT now(),     -- when it was first seen
    beat_at         timestamptz NOT NULL DEFAULT now(),     -- its last sign of life
    beat_seconds    float8 NOT NULL         -- the interval of its heartbeats
);


-- Tasks.  From here on every row belongs to a tenant: tenant_id leads each key and each index, except three indexes,
-- whose comments give the reason.

CREATE TABLE asyncgate.tenants (            -- the tenants that have stored anything
    tenant_id       uuid PRIMARY KEY,
    since           float8 NOT NULL         -- of the first write
);

CREATE TABLE asyncgate.lanes (              -- the distinct (type, capabilities) pairs; a claim matches lanes, not tasks
    tenant_id       uuid NOT NULL,
    lane            bigint NOT NULL,        -- 64 bits of SHA-256 over the pair, so that no database must allocate it
    type            text NOT NULL,          -- of the tasks in it
    capabilities    text NOT NULL,          -- JSON array, sorted: the capabilities that a worker needs
    pattern         text,                   -- JSON: which limits its tasks have, and whether with a key
    PRIMARY KEY (tenant_id, lane)
);

CREATE TABLE asyncgate.tasks (              -- the fields of a task that never change: its contract
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,  -- UUIDv7: its order is the order of creation
    type            asyncgate.id NOT NULL,  -- what kind of work it is
    payload         text NOT NULL,          -- JSON, unchanged
    payload_pointer text,                   -- where the payload is stored instead
    requirements    text NOT NULL,          -- JSON, unchanged
    terms           text NOT NULL,          -- JSON: summary, instructions, expectations, timeouts
    owner_kind      asyncgate.id NOT NULL,  -- the creator, for ever (H.1)
    owner_id        asyncgate.id NOT NULL,  -- the creator's id
    principal_ai    text NOT NULL,          -- a label for other systems
    retry_backoff_seconds bigint NOT NULL,  -- the pause before the first retry
    max_expiries    bigint NOT NULL,        -- leases it may lose before it is put on hold; 0: any number
    created_at      float8 NOT NULL,        -- by the database's clock
    duty            asyncgate.id NOT NULL,  -- its task.assigned receipt
    idempotency_key asyncgate.id,           -- of the creator
    fingerprint     text,                   -- hash of the request that had the key
    parent_task_id  asyncgate.id,           -- the task whose child it is
    summary         asyncgate.id,           -- the beginning of its summary, to be looked for
    PRIMARY KEY (tenant_id, task_id)
);
CREATE UNIQUE INDEX tasks_key ON asyncgate.tasks (tenant_id, owner_kind, owner_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_owner ON asyncgate.tasks (tenant_id, owner_kind, owner_id, task_id);
CREATE INDEX tasks_type ON asyncgate.tasks (tenant_id, type, task_id);
CREATE INDEX tasks_parent ON asyncgate.tasks (tenant_id, parent_task_id, task_id) WHERE parent_task_id IS NOT NULL;
CREATE INDEX tasks_summary ON asyncgate.tasks (tenant_id, summary, task_id) WHERE summary IS NOT NULL;

-- The fields of a task that change, and its latest lease: one narrow row with one row lock, so that a transaction that
-- waited for the lock reads what the previous one has written.  A heartbeat changes no indexed column, so it touches no
-- index (HOT).
CREATE TABLE asyncgate.states (
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,  -- of its contract
    lane            bigint NOT NULL,        -- its queue
    priority        bigint NOT NULL,        -- higher comes first
    max_attempts    bigint NOT NULL,        -- how often it may fail
    asyncgate_instance asyncgate.id NOT NULL, -- which gate sweeps it (Clarification C)
    updated_at      float8 NOT NULL,        -- of the last change
    status          text NOT NULL,          -- queued leased running succeeded failed canceled
    attempt         bigint NOT NULL,        -- failures so far
    fence           bigint NOT NULL,        -- leases so far, plus numbers that a move between databases skipped
    expiries        bigint NOT NULL,        -- leases lost so far
    owed            boolean NOT NULL,       -- true until its duty is discharged
    held            text,                   -- why it is on hold (not offered although queued)
    lost_to         text NOT NULL,          -- JSON array: the workers that lost it
    next_eligible_at float8,                -- no lease before this time; or when what it waits for is late
    deadline_at     float8,                 -- when it passes, it is reported once
    started_at      float8,                 -- when its worker began
    completed_at    float8,                 -- when it ended
    outcome         text,                   -- JSON: the result or the error
    artifacts       text,                   -- JSON array: where the result is
    ready           boolean NOT NULL,       -- whether the queue may offer it; set again when its time comes
    check_at        float8,                 -- when upkeep must check it; only upkeep moves it, not a heartbeat
    told            bigint NOT NULL,        -- progress reports so far: tells a stale row of progress from the latest
    lease_id        asyncgate.id,           -- random: only the holder knows it
    worker_kind     asyncgate.id,           -- of the holder
    worker_id       asyncgate.id,           -- of the holder
    worker_instance text,                   -- of the holder, if given
    lease_fence     bigint,                 -- the number of this lease among the leases of the task
    acquired_at     float8,                 -- when it was granted
    expires_at      float8,                 -- when it expires
    renewals        bigint,                 -- how often it was renewed
    accepted        text,                   -- its task.accepted receipt
    claim_id        asyncgate.id,           -- the claim's id, if it had one
    ending          text,                   -- live completed failed expired released canceled
    ttl_seconds     bigint,                 -- its length; a renewal extends by the same
    resumed_by      text,                   -- the instance that last resumed it, "" if it gave no name
    resumptions     bigint DEFAULT 0,       -- how often it was resumed
    handed          text,                   -- JSON, for a ledger with custody, sent with the task's next lease:
                                            -- the fence, the receipt that gave custody back, the receiver
    limits          asyncgate.id,           -- JSON: its key under each of its limits
    PRIMARY KEY (tenant_id, task_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX states_queue ON asyncgate.states (tenant_id, lane, priority DESC, task_id)
    WHERE status = 'queued' AND ready;
CREATE INDEX states_turn ON asyncgate.states (tenant_id, lane, limits, priority DESC, task_id)
    WHERE status = 'queued' AND ready AND limits IS NOT NULL;
CREATE INDEX states_limited ON asyncgate.states (tenant_id, next_eligible_at)      -- delayed ones, whose turns begin
    WHERE status = 'queued' AND NOT ready AND held IS NULL AND limits IS NOT NULL;
CREATE INDEX states_delayed ON asyncgate.states (tenant_id, next_eligible_at)
    WHERE status = 'queued' AND NOT ready AND held IS NULL;
CREATE UNIQUE INDEX states_lease ON asyncgate.states (tenant_id, lease_id) WHERE status IN ('leased', 'running');
CREATE INDEX states_holder ON asyncgate.states (tenant_id, worker_kind, worker_id, claim_id)
    WHERE status IN ('leased', 'running');
CREATE INDEX states_status ON asyncgate.states (tenant_id, status, task_id);
CREATE INDEX states_changed ON asyncgate.states (tenant_id, updated_at);
CREATE INDEX states_held ON asyncgate.states (tenant_id, task_id) WHERE held IS NOT NULL;
CREATE INDEX states_check ON asyncgate.states (check_at)    -- begins with the time: upkeep reads all tenants at once
    WHERE check_at IS NOT NULL;

CREATE TABLE asyncgate.queues (             -- how many tasks each lane has: counted by each batch, never scanned
    tenant_id       uuid NOT NULL,
    lane            bigint NOT NULL,        -- of the tasks
    slot            bigint NOT NULL,        -- where a batch counts, apart from other batches; only the sum of all counts
    queued          bigint NOT NULL,        -- tasks that may be claimed, now or later
    held            bigint NOT NULL,        -- queued tasks that are on hold
    leased          bigint NOT NULL,        -- leased and running ones
    counted_at      float8 NOT NULL,        -- when the numbers last changed
    type            asyncgate.id NOT NULL,  -- of the tasks
    capabilities    text NOT NULL,          -- JSON array, sorted: the capabilities that a worker needs
    PRIMARY KEY (tenant_id, lane, slot)
) WITH (fillfactor = 30, autovacuum_vacuum_scale_factor = 0.02);


-- Receipts.

CREATE TABLE asyncgate.receipts (           -- immutable: no role may change or delete a row
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- UUIDv7: its order is the order of age
    receipt_key     asyncgate.id NOT NULL,  -- of the logical receipt (H.3)
    receipt_type    text NOT NULL,          -- its type
    created_at      float8 NOT NULL,        -- by the database's clock
    from_kind       text NOT NULL,          -- the sender
    from_id         text NOT NULL,          -- the sender's id
    to_kind         asyncgate.id NOT NULL,  -- the recipient, in whose inbox it is
    to_id           asyncgate.id NOT NULL,  -- the recipient's id
    task_id         asyncgate.id NOT NULL,  -- empty if it belongs to no task
    lease_id        text,                   -- the lease under which it was stated, if any
    schedule_id     text,                   -- the schedule that it is about, if any
    asyncgate_instance text NOT NULL,       -- the gate that wrote it (20.7)
    hash            text NOT NULL,          -- of its content (Clarification B)
    body            text NOT NULL,          -- canonical JSON
    salt            text NOT NULL DEFAULT '', -- random, for the digest that seals have
    parent_id       asyncgate.id,           -- its first parent; further ones are edges
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX receipts_key ON asyncgate.receipts (tenant_id, task_id, receipt_key);   -- and a task's receipts
CREATE INDEX receipts_to ON asyncgate.receipts (tenant_id, to_kind, to_id, receipt_id);
CREATE INDEX receipts_parent ON asyncgate.receipts (tenant_id, parent_id) WHERE parent_id IS NOT NULL;

CREATE TABLE asyncgate.edges (              -- the second and further parents of a receipt
    tenant_id       uuid NOT NULL,
    child_id        asyncgate.id NOT NULL,  -- the receipt that names them
    parent_id       asyncgate.id NOT NULL,  -- one of them
    PRIMARY KEY (tenant_id, child_id, parent_id)
);
CREATE INDEX edges_parent ON asyncgate.edges (tenant_id, parent_id, child_id);

CREATE TABLE asyncgate.deliveries (         -- when bootstrap first returned a receipt (H.8)
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- of the receipt
    delivered_at    float8 NOT NULL,        -- when
    PRIMARY KEY (tenant_id, receipt_id)
);


-- The tables of the stored kinds stand here: see backends/tables.py.

ALTER TABLE asyncgate.progress SET (fillfactor = 70);
ALTER TABLE asyncgate.presences SET (fillfactor = 70);
ALTER TABLE asyncgate.meters SET (fillfactor = 50);
ALTER TABLE asyncgate.traffic SET (fillfactor = 50);
ALTER TABLE asyncgate.obligations SET (autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE asyncgate.outbox SET (autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE asyncgate.handovers SET (autovacuum_vacuum_scale_factor = 0.02);
CREATE UNIQUE INDEX api_keys_id ON asyncgate.api_keys (key_id);     -- begins with the id, which says whose it is
CREATE INDEX schedules_owner ON asyncgate.schedules (tenant_id, owner_kind, owner_id, schedule_id)
    WHERE owner_kind IS NOT NULL;       -- always so: without it a small table is searched by id through this index
CREATE INDEX schedules_late ON asyncgate.schedules (late_at)    -- begins with the time: upkeep reads all tenants
    WHERE late_at IS NOT NULL;

-- Deleting a receipt needs two roles: asyncgate_app requests it, asyncgate_archivist confirms that the segment is
-- written.
CREATE TABLE asyncgate.segments (           -- files of the archive that the archivist has confirmed
    tenant_id       uuid NOT NULL,
    segment         text NOT NULL,          -- the file, within the archive's folder
    registered_at   timestamptz NOT NULL DEFAULT now(),     -- when
    PRIMARY KEY (tenant_id, segment)
);


-- Samples for the planner.  Without statistics it treats all indexes that begin with tenant_id as equally good, and a
-- server keeps such plans until autovacuum has analyzed the table.  So each table with several indexes gets samples of
-- typical rows: few tenants and many ids.  The samples are removed in a block of their own, or the statistics would be
-- those of an empty table; they are too few to make autovacuum analyze again.
DO $$
DECLARE
    name text;
    sample text;
BEGIN
    FOREACH name IN ARRAY ARRAY['tasks', 'states', 'receipts', 'edges', 'obligations', 'outbox', 'ledger',
                                'ledger_marks', 'archived', 'webhook_deliveries'] LOOP
        SELECT string_agg(CASE WHEN attname = 'status' THEN '''leased'''
                               WHEN attname = 'state' THEN '''waiting'''
                               WHEN atttypid = 'uuid'::regtype THEN 'md5((n % 2)::text)::uuid'
                               WHEN atttypid = 'boolean'::regtype THEN 'n % 2 = 0'
                               WHEN atttypid IN ('bigint'::regtype, 'float8'::regtype) THEN 'n'
                               ELSE 'n::text' END, ', ' ORDER BY attnum) INTO sample
        FROM pg_attribute WHERE attrelid = format('asyncgate.%I', name)::regclass AND attnum > 0;
        EXECUTE format('INSERT INTO asyncgate.%I SELECT %s FROM generate_series(1, 40) AS n', name, sample);
        EXECUTE format('ANALYZE asyncgate.%I', name);
        BEGIN
            EXECUTE format('TRUNCATE asyncgate.%I', name);
        EXCEPTION WHEN OTHERS THEN RAISE;
        END;
    END LOOP;
END $$;


-- The wall between tenants.  A transaction without a tenant sees no rows: the setting is then empty, and NULL equals no
-- value.

CREATE FUNCTION asyncgate.tenant() RETURNS uuid LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT nullif(current_setting('app.tenant_id', true), '')::uuid $$;

DO $$
DECLARE
    name text;
    -- In a sub-select, so that it is evaluated once per statement and not for every row.
    own text := 'USING (tenant_id = (SELECT asyncgate.tenant())) WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))';
BEGIN
    FOR name IN SELECT relname FROM pg_class AS c JOIN pg_attribute ON attrelid = c.oid AND attname = 'tenant_id'
                WHERE relnamespace = 'asyncgate'::regnamespace AND relkind = 'r' LOOP
        EXECUTE format('ALTER TABLE asyncgate.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE asyncgate.%I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant ON asyncgate.%I TO asyncgate_app %s', name, own);
        EXECUTE format('GRANT SELECT ON asyncgate.%I TO asyncgate_app', name);
        IF name <> 'segments' THEN
            EXECUTE format('GRANT INSERT ON asyncgate.%I TO asyncgate_app', name);
        END IF;
    END LOOP;
    -- The owner deletes and erases rows, in the functions at the end of this file, behind the same wall.
    FOREACH name IN ARRAY ARRAY['receipts', 'edges', 'deliveries', 'archived', 'tasks', 'states', 'progress', 'steps', 'outputs', 'events',
                                'audit', 'ledger', 'api_keys'] LOOP
        EXECUTE format('CREATE POLICY keeper ON asyncgate.%I TO asyncgate_owner %s', name, own);
    END LOOP;
    -- Those functions also read these tables.
    FOREACH name IN ARRAY ARRAY['segments', 'seal_heads', 'obligations', 'erasures', 'erased'] LOOP
        EXECUTE format('CREATE POLICY keeper ON asyncgate.%I FOR SELECT TO asyncgate_owner '
                       'USING (tenant_id = (SELECT asyncgate.tenant()))', name);
    END LOOP;
    -- What an application hands over: the rows of the principal as which the session's own role does.
    CREATE POLICY handing_over ON asyncgate.handovers TO asyncgate_owner USING (EXISTS (
        SELECT FROM asyncgate.enqueuers AS e WHERE e.role_name = session_user AND e.for_tenant = tenant_id
        AND e.principal_kind = owner_kind AND e.principal_id = owner_id));
    EXECUTE format('CREATE POLICY archivist ON asyncgate.segments TO asyncgate_archivist %s', own);
END $$;

GRANT UPDATE ON asyncgate.states, asyncgate.queues, asyncgate.progress, asyncgate.deliveries TO asyncgate_app;
GRANT DELETE ON asyncgate.lanes, asyncgate.queues, asyncgate.obligations TO asyncgate_app;
GRANT SELECT ON asyncgate.migrations, asyncgate.meta TO asyncgate_app;
GRANT UPDATE (value) ON asyncgate.meta TO asyncgate_app;    -- a copied database gets its source's cursor_key
GRANT SELECT, INSERT, UPDATE, DELETE ON asyncgate.instances TO asyncgate_app;
GRANT SELECT, INSERT ON asyncgate.segments TO asyncgate_archivist;

-- Upkeep and metrics read across tenants: ids, types, counts and times, never the content of a task or a receipt.
CREATE POLICY sweep ON asyncgate.tenants FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.schedules FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.queues FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.states TO asyncgate_sweeper USING (true) WITH CHECK (true);
CREATE POLICY sweep ON asyncgate.outbox FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.webhook_heads FOR SELECT TO asyncgate_sweeper USING (true);
GRANT SELECT ON asyncgate.tenants TO asyncgate_sweeper;
GRANT SELECT (tenant_id, schedule_id, late_at) ON asyncgate.schedules TO asyncgate_sweeper;
GRANT SELECT (tenant_id, lane, type, queued, held, leased) ON asyncgate.queues TO asyncgate_sweeper;
GRANT SELECT (tenant_id, task_id, asyncgate_instance, status, attempt, max_attempts, deadline_at, expires_at, check_at,
              lane, priority, ready, held, updated_at, next_eligible_at),
    UPDATE (check_at) ON asyncgate.states TO asyncgate_sweeper;
GRANT SELECT (tenant_id) ON asyncgate.outbox TO asyncgate_sweeper;
GRANT SELECT ON asyncgate.webhook_heads TO asyncgate_sweeper;
CREATE POLICY sweep ON asyncgate.lanes FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.limits FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.holds FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.cascades FOR SELECT TO asyncgate_sweeper USING (true);
GRANT SELECT (tenant_id, task_id, since) ON asyncgate.cascades TO asyncgate_sweeper;
CREATE POLICY sweep ON asyncgate.handovers FOR SELECT TO asyncgate_sweeper USING (true);
GRANT SELECT (tenant_id) ON asyncgate.handovers TO asyncgate_sweeper;
GRANT SELECT (tenant_id, lane, pattern) ON asyncgate.lanes TO asyncgate_sweeper;
GRANT SELECT (tenant_id, name, stopped_until) ON asyncgate.limits TO asyncgate_sweeper;
GRANT SELECT (tenant_id, limit_name) ON asyncgate.holds TO asyncgate_sweeper;

-- A key is looked up before its tenant is known.
CREATE POLICY auth ON asyncgate.api_keys FOR SELECT TO asyncgate_auth USING (true);
CREATE POLICY auth ON asyncgate.accounts FOR SELECT TO asyncgate_auth USING (true);
GRANT SELECT ON asyncgate.api_keys TO asyncgate_auth;
GRANT SELECT (tenant_id, suspended_at) ON asyncgate.accounts TO asyncgate_auth;


-- The most frequent reads, in one round trip: each sets the tenant, then reads the rows behind the wall.

CREATE FUNCTION asyncgate.one_task(tenant uuid, wanted text)
RETURNS TABLE (task asyncgate.tasks, state asyncgate.states, progress asyncgate.progress) LANGUAGE plpgsql
AS $$
#variable_conflict use_column
BEGIN
    PERFORM set_config('app.tenant_id', tenant::text, true);
    RETURN QUERY
        SELECT t, s, p FROM asyncgate.tasks AS t
        JOIN asyncgate.states AS s ON s.tenant_id = tenant AND s.task_id = wanted
        LEFT JOIN asyncgate.progress AS p ON p.tenant_id = tenant AND p.task_id = wanted
        WHERE t.tenant_id = tenant AND t.task_id = wanted;
END $$;

CREATE FUNCTION asyncgate.open_obligations(tenant uuid, kind text, id text, since text, most int)
RETURNS TABLE (receipt asyncgate.receipts, delivered_at float8, further text[]) LANGUAGE plpgsql
AS $$
#variable_conflict use_column
BEGIN
    PERFORM set_config('app.tenant_id', tenant::text, true);
    RETURN QUERY
        SELECT (SELECT r FROM asyncgate.receipts AS r
                WHERE r.tenant_id = tenant AND r.receipt_id = o.receipt_id LIMIT 1),
               (SELECT d.delivered_at FROM asyncgate.deliveries AS d
                WHERE d.tenant_id = tenant AND d.receipt_id = o.receipt_id LIMIT 1),
               ARRAY(SELECT e.parent_id::text FROM asyncgate.edges AS e
                     WHERE e.tenant_id = tenant AND e.child_id = o.receipt_id)
        FROM asyncgate.obligations AS o
        WHERE o.tenant_id = tenant AND o.to_kind = kind AND o.to_id = id AND o.receipt_id > since
        ORDER BY o.receipt_id LIMIT most;
END $$;


-- The queries across tenants, for upkeep; and the query for a key by its whole id.

CREATE FUNCTION asyncgate.all_tenants() RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$ SELECT t.tenant_id FROM asyncgate.tenants AS t ORDER BY t.tenant_id $$;

-- Tenants with receipts that the ledger does not have.
CREATE FUNCTION asyncgate.unsent() RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.tenant_id FROM asyncgate.tenants AS t, LATERAL (
        SELECT FROM asyncgate.outbox WHERE tenant_id = t.tenant_id LIMIT 1) AS o
$$;

-- Tenants that have endpoints for webhooks.
CREATE FUNCTION asyncgate.webhook_tenants() RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$ SELECT h.tenant_id FROM asyncgate.webhook_heads AS h WHERE h.number > 0 OR h.tasks > 0 $$;

-- What upkeep must check, oldest first: leases that expired before lost_at; deadlines, spent attempts and late
-- schedules as of now_at.  An expired lease is left to its own instance only while that process holds its instance lock
-- (`holding`); everything else is left to instances with a recent sign of life (`living`) (Clarification C).  A row of
-- the kind `others` says that an expired lease was left to its own instance, which may die meanwhile.
CREATE FUNCTION asyncgate.overdue(now_at float8, lost_at float8, living text[], holding text[], most int)
RETURNS TABLE (tenant_id uuid, kind text, id text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    late record;
BEGIN
    -- Leases that were renewed since: upkeep checks them again when they expire.
    FOR late IN
        SELECT tenant_id, task_id, least(CASE WHEN status IN ('leased', 'running') THEN expires_at END, deadline_at,
                                         CASE WHEN held IN ('input_required', 'children_open')
                                              THEN next_eligible_at END) AS next_at
        FROM asyncgate.states
        WHERE check_at <= now_at AND (deadline_at IS NULL OR deadline_at > now_at)
            AND (held IN ('input_required', 'children_open') AND next_eligible_at <= now_at) IS NOT TRUE
            AND CASE WHEN status IN ('leased', 'running') THEN expires_at > check_at
                     ELSE status <> 'queued' OR attempt < max_attempts END
        ORDER BY check_at LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        UPDATE asyncgate.states SET check_at = late.next_at
        WHERE tenant_id = late.tenant_id AND task_id = late.task_id;
    END LOOP;
    RETURN QUERY (
        SELECT s.tenant_id, 'task', s.task_id::text FROM asyncgate.states AS s
        WHERE s.check_at <= now_at
            AND (s.status IN ('leased', 'running') AND s.expires_at <= lost_at AND s.asyncgate_instance <> ALL (holding)
                 OR (s.deadline_at <= now_at OR s.status = 'queued' AND s.attempt >= s.max_attempts
                     OR s.held IN ('input_required', 'children_open') AND s.next_eligible_at <= now_at)
                    AND s.asyncgate_instance <> ALL (living))
        ORDER BY s.check_at LIMIT most);
    RETURN QUERY (
        SELECT s.tenant_id, 'others', s.task_id::text FROM asyncgate.states AS s
        WHERE s.check_at <= now_at AND s.status IN ('leased', 'running') AND s.expires_at <= lost_at
            AND array_position(holding, s.asyncgate_instance::text) IS NOT NULL
        ORDER BY s.check_at LIMIT 1);
    RETURN QUERY (
        SELECT s.tenant_id, 'schedule', s.schedule_id::text FROM asyncgate.schedules AS s
        WHERE s.late_at <= now_at ORDER BY s.late_at LIMIT most);
END $$;

-- When upkeep must check a task: so an expired lease is taken back at its end, not at the next sweep.
-- `look_at` may be earlier than the end of a lease: heartbeats leave check_at behind.
CREATE FUNCTION asyncgate.lapses(since float8, most int)
RETURNS TABLE (look_at float8, tenant_id uuid, task_id text) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.check_at, s.tenant_id, s.task_id::text FROM asyncgate.states AS s
    WHERE s.check_at >= since ORDER BY s.check_at LIMIT most
$$;

-- What the queues of all tenants have by type, and since when the oldest claimable task waits: the head of each
-- priority of a lane, or a delayed task whose time has come while nobody claimed.
CREATE FUNCTION asyncgate.depths(now_at float8, most_priorities int, most_due int)
RETURNS TABLE (type text, queued bigint, held bigint, leased bigint, oldest_at float8)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH lanes AS MATERIALIZED (
        SELECT q.tenant_id, q.lane, q.type::text, sum(q.queued)::bigint AS queued, sum(q.held)::bigint AS held,
               sum(q.leased)::bigint AS leased
        FROM asyncgate.queues AS q GROUP BY q.tenant_id, q.lane, q.type),
    due AS MATERIALIZED (
        SELECT d.lane, t.tenant_id, min(d.next_eligible_at) AS since FROM asyncgate.tenants AS t, LATERAL (
            SELECT s.lane, s.next_eligible_at FROM asyncgate.states AS s
            WHERE s.tenant_id = t.tenant_id AND s.status = 'queued' AND NOT s.ready AND s.held IS NULL
                AND s.next_eligible_at <= now_at ORDER BY s.next_eligible_at LIMIT most_due) AS d
        GROUP BY d.lane, t.tenant_id),
    waits AS (
        SELECT l.*, least((
            WITH RECURSIVE heads AS (
                (SELECT s.priority, greatest(s.updated_at, coalesce(s.next_eligible_at, 0)) AS since, 1 AS number
                 FROM asyncgate.states AS s
                 WHERE s.tenant_id = l.tenant_id AND s.lane = l.lane AND s.status = 'queued' AND s.ready
                 ORDER BY s.priority DESC, s.task_id LIMIT 1)
                UNION ALL
                SELECT n.priority, n.since, h.number + 1 FROM heads AS h, LATERAL (
                    SELECT s.priority, greatest(s.updated_at, coalesce(s.next_eligible_at, 0)) AS since
                    FROM asyncgate.states AS s
                    WHERE s.tenant_id = l.tenant_id AND s.lane = l.lane AND s.status = 'queued' AND s.ready
                        AND s.priority < h.priority
                    ORDER BY s.priority DESC, s.task_id LIMIT 1) AS n
                WHERE h.number < most_priorities)
            SELECT min(h.since) FROM heads AS h WHERE l.queued > 0),
            (SELECT d.since FROM due AS d WHERE d.tenant_id = l.tenant_id AND d.lane = l.lane)) AS since
        FROM lanes AS l)
    SELECT w.type, sum(w.queued)::bigint, sum(w.held)::bigint, sum(w.leased)::bigint, min(w.since)
    FROM waits AS w GROUP BY w.type
$$;

-- Live leases that have expired, found by the index that upkeep uses.
CREATE FUNCTION asyncgate.count_overdue(lost_at float8, most int) RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) FROM (
        SELECT FROM asyncgate.states AS s
        WHERE s.check_at <= lost_at AND s.status IN ('leased', 'running') AND s.expires_at <= lost_at LIMIT most) AS s
$$;

-- Tasks that are on hold for an answer, and since when the first of them is.
CREATE FUNCTION asyncgate.count_unanswered(most int) RETURNS TABLE (number bigint, since float8)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*), min(h.updated_at) FROM (
        SELECT s.updated_at FROM asyncgate.tenants AS t, LATERAL (
            SELECT s.updated_at FROM asyncgate.states AS s
            WHERE s.tenant_id = t.tenant_id AND s.held = 'input_required' LIMIT most) AS s
        LIMIT most) AS h
$$;

-- What limits have by name, and in one row what waits for those that nobody has set.
CREATE FUNCTION asyncgate.limit_depths(most int)
RETURNS TABLE (name text, is_set boolean, held bigint, waiting bigint, stopped_until float8)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH named AS MATERIALIZED (
        SELECT l.tenant_id, j.name, sum(q.queued)::bigint AS waiting
        FROM asyncgate.lanes AS l JOIN asyncgate.queues AS q USING (tenant_id, lane),
            json_object_keys(l.pattern::json) AS j (name)
        WHERE l.pattern IS NOT NULL GROUP BY l.tenant_id, j.name HAVING sum(q.queued) > 0)
    SELECT l.name::text, true, sum(h.number)::bigint, sum(coalesce(n.waiting, 0))::bigint, max(l.stopped_until)
    FROM asyncgate.limits AS l
    CROSS JOIN LATERAL (SELECT count(*) AS number FROM (
        SELECT FROM asyncgate.holds AS h WHERE h.tenant_id = l.tenant_id AND h.limit_name = l.name LIMIT most) AS c) AS h
    LEFT JOIN named AS n ON n.tenant_id = l.tenant_id AND n.name = l.name
    GROUP BY l.name
    UNION ALL
    SELECT min(n.name), false, 0, sum(n.waiting)::bigint, NULL FROM named AS n
    WHERE NOT EXISTS (SELECT FROM asyncgate.limits AS l WHERE l.tenant_id = n.tenant_id AND l.name = n.name)
    HAVING count(*) > 0
$$;

-- Cascades that are not finished: the process that began them may be gone.
CREATE FUNCTION asyncgate.cut_cascades(before float8, most int) RETURNS TABLE (tenant uuid, task_id text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT c.tenant_id, c.task_id::text FROM asyncgate.cascades AS c WHERE c.since <= before ORDER BY c.since LIMIT most
$$;

-- Tenants in which something is handed over, waiting or refused.
CREATE FUNCTION asyncgate.handover_tenants() RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE tenants AS (
        (SELECT h.tenant_id FROM asyncgate.handovers AS h ORDER BY h.tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT h.tenant_id FROM asyncgate.handovers AS h WHERE h.tenant_id > t.tenant_id
                ORDER BY h.tenant_id LIMIT 1)
        FROM tenants AS t WHERE t.tenant_id IS NOT NULL)
    SELECT t.tenant_id FROM tenants AS t WHERE t.tenant_id IS NOT NULL
$$;

CREATE FUNCTION asyncgate.find_key(wanted text)
RETURNS TABLE (tenant uuid, suspended boolean, key asyncgate.api_keys) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT k.tenant_id, a.suspended_at IS NOT NULL, k FROM asyncgate.api_keys AS k
    LEFT JOIN asyncgate.accounts AS a ON a.tenant_id = k.tenant_id
    WHERE k.key_id = wanted LIMIT 1
$$;


-- The only ways to delete a row from a table that the gate's role may not delete from.  The functions run as the owner,
-- behind the wall of the transaction's tenant, and check that the row may be deleted.

-- A receipt may be deleted when its pointer exists, its segment is registered, a seal covers it, and no obligation that
-- it opened is still open.
CREATE FUNCTION asyncgate.archive_receipts(ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
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

-- A pointer may be deleted when its receipt is restored.
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

-- The contract of a task may be replaced while it waits for its first lease.
CREATE FUNCTION asyncgate.amend_tasks(ids text[], payloads text[], pointers text[], all_terms text[], summaries text[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    one record;
BEGIN
    FOR one IN SELECT * FROM unnest(ids, payloads, pointers, all_terms, summaries)
                             AS n (item, payload, pointer, terms, summary) LOOP
        UPDATE asyncgate.tasks AS t
        SET payload = one.payload, payload_pointer = one.pointer, terms = one.terms, summary = one.summary
        WHERE t.tenant_id = tenant AND t.task_id = one.item
            AND EXISTS (SELECT FROM asyncgate.states AS s WHERE s.tenant_id = tenant AND s.task_id = one.item
                        AND s.status = 'queued' AND s.lease_id IS NULL);
        IF NOT FOUND THEN
            RAISE 'the payload of task % may not be replaced: a worker has had it', one.item
                USING ERRCODE = 'insufficient_privilege';
        END IF;
    END LOOP;
END $$;

-- A settled task may be deleted when it has no receipts any more, or in the erasure of its owner.
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
            AND (NOT EXISTS (SELECT FROM asyncgate.receipts WHERE tenant_id = tenant AND task_id = id)
                 OR EXISTS (SELECT FROM asyncgate.erasures AS u, asyncgate.tasks AS t
                            WHERE u.tenant_id = tenant AND u.ended_at IS NULL AND t.tenant_id = tenant AND t.task_id = id
                            AND (u.principal_kind = '' OR (u.principal_kind, u.principal_id)
                                                        = (t.owner_kind::text, t.owner_id::text)))) THEN
            DELETE FROM asyncgate.events WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.progress WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.steps WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.outputs WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.states WHERE tenant_id = tenant AND task_id = id;
            DELETE FROM asyncgate.tasks WHERE tenant_id = tenant AND task_id = id;
        END IF;
    END LOOP;
END $$;

-- A line of the audit log may be deleted when it is the oldest and at least 90 days old (spec 21.7.4), by the
-- database's own clock.  A later line of the log records where the log begins now.
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


-- Erasure.  Each function only takes away: content becomes a note of the erasure, identifiers become pseudonyms.  It
-- refuses unless an erasure is open, and for a receipt unless that is about whom the erasure is of.

CREATE FUNCTION asyncgate.is_pseudonym_or(old text, new text) RETURNS boolean LANGUAGE sql IMMUTABLE
AS $$ SELECT new IS NOT DISTINCT FROM old OR new LIKE 'erased-%' $$;

CREATE FUNCTION asyncgate.erase_receipts(ids text[], keys text[], senders text[], recipients text[], schedules text[],
                                         hashes text[], bodies text[], salts text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    one record;
BEGIN
    FOR one IN SELECT * FROM unnest(ids, keys, senders, recipients, schedules, hashes, bodies, salts)
                             AS n (item, key, sender, recipient, schedule, hash, body, salt) LOOP
        UPDATE asyncgate.receipts AS r
        SET receipt_key = one.key, from_id = one.sender, to_id = one.recipient, schedule_id = one.schedule,
            hash = one.hash, body = one.body, salt = one.salt
        WHERE r.tenant_id = tenant AND r.receipt_id = one.item AND one.salt = ''
            AND asyncgate.is_pseudonym_or(r.from_id, one.sender)
            AND asyncgate.is_pseudonym_or(r.to_id, one.recipient)
            AND asyncgate.is_pseudonym_or(r.schedule_id, one.schedule)
            AND EXISTS (
                SELECT FROM asyncgate.erased AS e JOIN asyncgate.erasures AS u ON u.tenant_id = tenant
                WHERE e.tenant_id = tenant AND e.source = 'receipts' AND e.row_id = one.item AND u.ended_at IS NULL
                AND (one.body = '{"erased":"' || e.erasure_id || '","sealed":"' || e.before || '"}'
                     OR one.body = '' AND r.body = '')
                AND (u.principal_kind = '' OR r.body LIKE '{"erased":"' || u.erasure_id || '"%'
                     OR u.principal_id IN (r.from_id, r.to_id) OR strpos(r.body, u.principal_id) > 0
                     OR EXISTS (SELECT FROM asyncgate.receipts AS a
                                WHERE a.tenant_id = tenant AND a.task_id = r.task_id AND r.task_id <> ''
                                AND a.receipt_type = 'task.assigned'
                                AND (a.from_id = u.principal_id
                                     OR a.body LIKE '{"erased":"' || u.erasure_id || '"%'))));
        IF NOT FOUND THEN
            RAISE 'receipt % may not be erased: no open erasure is about it', one.item
                USING ERRCODE = 'insufficient_privilege';
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION asyncgate.erase_events(tasks text[], ids text[], payloads text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    one record;
BEGIN
    FOR one IN SELECT * FROM unnest(tasks, ids, payloads) AS n (task_id, item, payload) LOOP
        UPDATE asyncgate.events AS v SET payload = one.payload
        WHERE v.tenant_id = tenant AND v.task_id = one.task_id AND v.event_id = one.item
            AND EXISTS (SELECT FROM asyncgate.erasures AS u WHERE u.tenant_id = tenant AND u.ended_at IS NULL
                        AND one.payload = '{"erased":"' || u.erasure_id || '"}');
        IF NOT FOUND THEN
            RAISE 'event % may not be erased: no erasure is open', one.item USING ERRCODE = 'insufficient_privilege';
        END IF;
    END LOOP;
END $$;

-- Of a line of the audit log, members may go or become pseudonyms; none may come or say something else.
CREATE FUNCTION asyncgate.erase_audit(ids text[], bodies text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    one record;
BEGIN
    FOR one IN SELECT * FROM unnest(ids, bodies) AS n (item, body) LOOP
        UPDATE asyncgate.audit AS l SET body = one.body
        WHERE l.tenant_id = tenant AND l.audit_id = one.item
            AND EXISTS (
                SELECT FROM asyncgate.erased AS e JOIN asyncgate.erasures AS u ON u.tenant_id = tenant
                WHERE e.tenant_id = tenant AND e.source = 'audit' AND e.row_id = one.item AND u.ended_at IS NULL
                AND one.body::jsonb ->> 'erased' = e.erasure_id)
            AND NOT EXISTS (
                SELECT FROM jsonb_each(one.body::jsonb) AS n
                WHERE n.key <> 'erased' AND n.value #>> '{}' NOT LIKE 'erased-%'
                AND n.value IS DISTINCT FROM l.body::jsonb -> n.key);
        IF NOT FOUND THEN
            RAISE 'line % of the audit log may not be erased so', one.item USING ERRCODE = 'insufficient_privilege';
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION asyncgate.erase_entries(arrivals text[], ids text[], senders text[], recipients text[], authors text[],
                                        digests text[], contents text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    one record;
BEGIN
    FOR one IN SELECT * FROM unnest(arrivals, ids, senders, recipients, authors, digests, contents)
                             AS n (arrival, item, sender, recipient, author, digest, content) LOOP
        UPDATE asyncgate.ledger AS l
        SET receipt_id = one.item, from_id = one.sender, to_id = one.recipient, stated_id = one.author,
            digest = one.digest, content = one.content
        WHERE l.tenant_id = tenant AND l.arrival = one.arrival AND asyncgate.is_pseudonym_or(l.receipt_id, one.item)
            AND asyncgate.is_pseudonym_or(l.from_id, one.sender)
            AND asyncgate.is_pseudonym_or(l.to_id, one.recipient)
            AND asyncgate.is_pseudonym_or(l.stated_id, one.author)
            AND EXISTS (
                SELECT FROM asyncgate.erased AS e JOIN asyncgate.erasures AS u ON u.tenant_id = tenant
                WHERE e.tenant_id = tenant AND e.source = 'ledger' AND e.row_id = one.arrival AND u.ended_at IS NULL
                AND one.content = '{"erased":"' || e.erasure_id || '","sealed":"' || e.before || '"}');
        IF NOT FOUND THEN
            RAISE 'entry % may not be erased: no erasure is open', one.arrival
                USING ERRCODE = 'insufficient_privilege';
        END IF;
    END LOOP;
END $$;

-- A key may be deleted when it is revoked, in the erasure of whom it stands for.
CREATE FUNCTION asyncgate.erase_keys(ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tenant uuid := asyncgate.tenant();
    id text;
BEGIN
    FOREACH id IN ARRAY ids LOOP
        DELETE FROM asyncgate.api_keys AS k
        WHERE k.tenant_id = tenant AND k.key_id = id AND k.revoked_at IS NOT NULL
            AND EXISTS (SELECT FROM asyncgate.erasures AS u WHERE u.tenant_id = tenant AND u.ended_at IS NULL
                        AND (u.principal_kind = '' OR (u.principal_kind, u.principal_id)
                                                    = (k.principal_kind::text, k.principal_id::text)));
    END LOOP;
END $$;

-- An erasure that has ended never opens again.
CREATE FUNCTION asyncgate.refuse_change() RETURNS trigger LANGUAGE plpgsql
AS $$
BEGIN
    RAISE 'an erasure that has ended stays as it is' USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER erasures_stay BEFORE UPDATE ON asyncgate.erasures FOR EACH ROW WHEN (OLD.ended_at IS NOT NULL)
    EXECUTE FUNCTION asyncgate.refuse_change();


-- Applications whose tables lie in the same database hand work over in their own transaction.  What they may is to call
-- these functions: a function runs as the owner, and the policy shows it the rows of the principal as which the session's
-- own role hands over (session_user: SET ROLE does not change it), nothing else.

CREATE FUNCTION asyncgate.allow_enqueue(login text, tenant uuid, kind text, id text)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF kind NOT IN ('agent', 'worker', 'service', 'human') OR id = '' THEN
        RAISE 'a role hands work over as an agent, a worker, a service or a human with an id, and not as % %', kind, id
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO asyncgate.enqueuers VALUES (login, tenant, kind, id) ON CONFLICT (role_name) DO UPDATE
    SET for_tenant = excluded.for_tenant, principal_kind = excluded.principal_kind, principal_id = excluded.principal_id;
    EXECUTE format('GRANT USAGE ON SCHEMA asyncgate TO %I', login);
    EXECUTE format('GRANT EXECUTE ON FUNCTION asyncgate.enqueue(jsonb), asyncgate.list_handovers(), '
                   'asyncgate.retry_handover(text, jsonb), asyncgate.drop_handover(text) TO %I', login);
END $$;
REVOKE ALL ON FUNCTION asyncgate.allow_enqueue(text, uuid, text, text) FROM PUBLIC;

CREATE FUNCTION asyncgate.check_handover(request jsonb) RETURNS void LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF jsonb_typeof(request) IS DISTINCT FROM 'object' OR jsonb_typeof(request -> 'type') IS DISTINCT FROM 'string' THEN
        RAISE 'a request is an object with the fields of create_task: {"type": …, "payload": …}'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(request::text) > 1048576 THEN
        RAISE 'a request has 1048576 bytes at most, and this one has %', octet_length(request::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store the payload elsewhere, and hand over payload_pointer.';
    END IF;
END $$;

-- Hand over a task: it is created soon after the commit, and only then.  Returns its idempotency key.
CREATE FUNCTION asyncgate.enqueue(request jsonb) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    who asyncgate.enqueuers;
    id text := lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000000)::bigint), 14, '0')
               || '-' || replace(gen_random_uuid()::text, '-', '');
BEGIN
    SELECT * INTO who FROM asyncgate.enqueuers AS e WHERE e.role_name = session_user;
    IF NOT FOUND THEN
        RAISE 'the role % may not hand work over: the owner of the gate''s tables calls asyncgate.allow_enqueue for it',
            session_user USING ERRCODE = 'insufficient_privilege';
    END IF;
    PERFORM asyncgate.check_handover(request);
    INSERT INTO asyncgate.handovers (tenant_id, stage, owner_kind, owner_id, handover_id, request, at)
    VALUES (who.for_tenant, 'waiting', who.principal_kind, who.principal_id, id, request::text,
            extract(epoch FROM clock_timestamp())::float8);
    PERFORM asyncgate.call_courier(who.for_tenant);
    RETURN coalesce(request ->> 'idempotency_key', id);
END $$;

-- Wake the gates when this transaction commits.
CREATE FUNCTION asyncgate.call_courier(tenant uuid) RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('asyncgate', json_build_object('sender', '', 'news', json_build_array(
        json_build_object('tenant_id', tenant, 'handed', true)))::text)
$$;

-- What the calling role has handed over and is no task yet; with its problem, if the gate refuses it for good.
CREATE FUNCTION asyncgate.list_handovers()
RETURNS TABLE (handover_id text, handed_over_at timestamptz, request jsonb, problem text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT h.handover_id::text, to_timestamp(h.at), h.request::jsonb, h.problem
    FROM asyncgate.handovers AS h ORDER BY h.handover_id
$$;

-- Hand over a refused one again, perhaps mended; returns whether there is one.
CREATE FUNCTION asyncgate.retry_handover(id text, mended jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    who asyncgate.enqueuers;
BEGIN
    IF mended IS NOT NULL THEN
        PERFORM asyncgate.check_handover(mended);
    END IF;
    SELECT * INTO who FROM asyncgate.enqueuers AS e WHERE e.role_name = session_user;
    UPDATE asyncgate.handovers AS h
    SET stage = 'waiting', problem = NULL, request = coalesce(mended::text, h.request)
    WHERE h.tenant_id = who.for_tenant AND h.stage = 'refused' AND h.owner_kind = who.principal_kind
    AND h.owner_id = who.principal_id AND h.handover_id = id;
    IF FOUND THEN
        PERFORM asyncgate.call_courier(who.for_tenant);
        RETURN true;
    END IF;
    RETURN false;
END $$;

-- Drop a refused one; returns whether there was one.
CREATE FUNCTION asyncgate.drop_handover(id text) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    who asyncgate.enqueuers;
BEGIN
    SELECT * INTO who FROM asyncgate.enqueuers AS e WHERE e.role_name = session_user;
    DELETE FROM asyncgate.handovers AS h WHERE h.tenant_id = who.for_tenant AND h.stage = 'refused'
    AND h.owner_kind = who.principal_kind AND h.owner_id = who.principal_id AND h.handover_id = id;
    RETURN FOUND;
END $$;


-- Who may call the functions, and as which role they run.  The functions that read across tenants get the roles that
-- may; only for this step may these roles create objects here.

DO $$
DECLARE
    name regprocedure;
BEGIN
    FOR name IN SELECT oid FROM pg_proc WHERE pronamespace = 'asyncgate'::regnamespace AND prosecdef LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', name);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO asyncgate_app', name);
    END LOOP;
END $$;

GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper, asyncgate_auth;
RESET ROLE;
ALTER FUNCTION asyncgate.all_tenants() OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.unsent() OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.webhook_tenants() OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.overdue(float8, float8, text[], text[], int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.lapses(float8, int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.depths(float8, int, int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.count_overdue(float8, int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.count_unanswered(int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.limit_depths(int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.cut_cascades(float8, int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.handover_tenants() OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.find_key(text) OWNER TO asyncgate_auth;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper, asyncgate_auth;
