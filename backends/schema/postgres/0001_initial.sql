-- AsyncGate on Postgres 14 or newer, as it was first released.  Times are Unix seconds, JSON is text, ids order by age.
-- code: 1
-- (The line above says which release of the schema a server must know at least, to work on this one.)

-- The roles belong to the whole server, so another database may have made them already.
--   asyncgate_owner     owns everything here; nobody logs in as it
--   asyncgate_app       the gate: sees one tenant at a time, may change no receipt, owns nothing
--   asyncgate_sweeper   owns the two functions that look across tenants, for upkeep
--   asyncgate_auth      will own those that find a credential before its tenant is known
--   asyncgate_archivist says which segments of the archive there are; without it no receipt leaves its table
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
            EXCEPTION WHEN duplicate_object OR unique_violation THEN    -- another database was faster
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
GRANT USAGE ON SCHEMA asyncgate TO asyncgate_app, asyncgate_sweeper, asyncgate_auth;

-- Compared byte by byte: by the rules of a language every index would be several times slower.
CREATE DOMAIN asyncgate.id AS text COLLATE "C";

-- What belongs to no tenant.

CREATE TABLE asyncgate.migrations (
    number          int PRIMARY KEY,        -- of the file
    name            text NOT NULL,          -- of the file
    code            int NOT NULL,           -- the oldest release of the schema whose server works on this one
    applied_at      timestamptz NOT NULL DEFAULT now()      -- when
);

CREATE TABLE asyncgate.meta (
    name            text PRIMARY KEY,       -- cursor_key
    value           text NOT NULL           -- of that name
);
INSERT INTO asyncgate.meta
VALUES ('cursor_key', replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''));

CREATE TABLE asyncgate.instances (          -- the gate processes; each also holds an advisory lock while it lives
    instance_id     asyncgate.id PRIMARY KEY,   -- its name, in receipts and on tasks
    since           timestamptz NOT NULL DEFAULT now(),     -- when it was first seen
    beat_at         timestamptz NOT NULL DEFAULT now(),     -- its last sign of life
    beat_seconds    float8 NOT NULL         -- how often it means to give one
);

-- What belongs to tenants.  tenant_id leads each key and each index but two, whose reason stands beside them.

CREATE TABLE asyncgate.tenants (            -- who has stored anything
    tenant_id       uuid PRIMARY KEY,
    since           float8 NOT NULL         -- of the first write
);

CREATE TABLE asyncgate.lanes (              -- the distinct (type, capabilities) pairs; a claim matches lanes, not tasks
    tenant_id       uuid NOT NULL,
    lane            bigint NOT NULL,        -- 64 bits of SHA-256 over the pair: no database hands it out
    type            text NOT NULL,          -- of the tasks in it
    capabilities    text NOT NULL,          -- JSON array, sorted: what a worker needs for them
    PRIMARY KEY (tenant_id, lane)
);

CREATE TABLE asyncgate.tasks (              -- what never changes of a task: its contract
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,  -- UUIDv7: its order is the order of creation
    type            text NOT NULL,          -- what kind of work it is
    payload         text NOT NULL,          -- JSON as it came
    payload_pointer text,                   -- where a peer keeps the payload instead
    requirements    text NOT NULL,          -- JSON as it came
    terms           text NOT NULL,          -- JSON: summary, instructions, expectations, timeouts
    owner_kind      asyncgate.id NOT NULL,  -- the creator, for ever (H.1)
    owner_id        asyncgate.id NOT NULL,  -- the creator's id
    principal_ai    text NOT NULL,          -- a label for peers
    retry_backoff_seconds bigint NOT NULL,  -- before the first retry
    max_expiries    bigint NOT NULL,        -- leases it may lose before it is held; 0: any number
    created_at      float8 NOT NULL,        -- by the database's clock
    duty            asyncgate.id NOT NULL,  -- its task.assigned receipt
    idempotency_key asyncgate.id,           -- of the creator
    fingerprint     text,                   -- of the contract that carried the key
    PRIMARY KEY (tenant_id, task_id)
);
CREATE UNIQUE INDEX tasks_key ON asyncgate.tasks (tenant_id, owner_kind, owner_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_owner ON asyncgate.tasks (tenant_id, owner_kind, owner_id, task_id);

-- What changes of a task, and its latest lease: one narrow row and one lock, so that whoever waited for the lock reads
-- what the one before has written.  A heartbeat changes no indexed column, so it touches no index (HOT).
CREATE TABLE asyncgate.states (
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,  -- of its contract
    lane            bigint NOT NULL,        -- where the queue finds it
    priority        bigint NOT NULL,        -- higher comes first
    max_attempts    bigint NOT NULL,        -- failures it may have
    asyncgate_instance asyncgate.id NOT NULL, -- which gate sweeps it (Clarification C)
    updated_at      float8 NOT NULL,        -- of the last change
    status          text NOT NULL,          -- queued leased running succeeded failed canceled
    attempt         bigint NOT NULL,        -- failures so far
    fence           bigint NOT NULL,        -- leases so far, and what moves to other databases skipped
    expiries        bigint NOT NULL,        -- leases lost so far
    owed            boolean NOT NULL,       -- until its duty is discharged
    held            text,                   -- why it is not offered although queued
    lost_to         text NOT NULL,          -- JSON array: the workers that lost it
    next_eligible_at float8,                -- not to be leased before
    deadline_at     float8,                 -- to be reported when it passes, once
    started_at      float8,                 -- when its worker began
    completed_at    float8,                 -- when it came to its end
    outcome         text,                   -- JSON: the result or the error
    artifacts       text,                   -- JSON array: where the result lies
    ready           boolean NOT NULL,       -- whether the queue may offer it; set again when its time comes
    check_at        float8,                 -- when upkeep must look at it; heartbeats leave it behind, upkeep moves it on
    told            bigint NOT NULL,        -- progress reports so far: tells a stale row of progress from the latest
    lease_id        asyncgate.id,           -- random: who knows it was given it
    worker_kind     asyncgate.id,           -- of the holder
    worker_id       asyncgate.id,           -- of the holder
    worker_instance text,                   -- of the holder, if it says
    lease_fence     bigint,                 -- the how-manieth lease of the task
    acquired_at     float8,                 -- when it was granted
    expires_at      float8,                 -- when it runs out
    renewals        bigint,                 -- how often it was kept
    accepted        text,                   -- its task.accepted receipt
    claim_id        asyncgate.id,           -- of the claim, if it had one
    ending          text,                   -- live completed failed expired released canceled
    PRIMARY KEY (tenant_id, task_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX states_queue ON asyncgate.states (tenant_id, lane, priority DESC, task_id)
    WHERE status = 'queued' AND ready;
CREATE INDEX states_delayed ON asyncgate.states (tenant_id, next_eligible_at)
    WHERE status = 'queued' AND NOT ready AND held IS NULL;
CREATE UNIQUE INDEX states_lease ON asyncgate.states (tenant_id, lease_id) WHERE status IN ('leased', 'running');
CREATE INDEX states_holder ON asyncgate.states (tenant_id, worker_kind, worker_id, claim_id)
    WHERE status IN ('leased', 'running');
CREATE INDEX states_check ON asyncgate.states (check_at)    -- led by time: upkeep asks for all tenants at once
    WHERE check_at IS NOT NULL;

CREATE TABLE asyncgate.progress (           -- the last report of a task, handed to the next worker
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,  -- whose
    progress        text NOT NULL,          -- JSON
    sequence        bigint NOT NULL,        -- reports so far
    fence           bigint NOT NULL,        -- the lease it was reported under
    updated_at      float8 NOT NULL,        -- when it was reported
    PRIMARY KEY (tenant_id, task_id)
) WITH (fillfactor = 70);

CREATE TABLE asyncgate.receipts (           -- immutable: nobody is granted to change or delete one
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- UUIDv7: its order is the order of age
    receipt_key     asyncgate.id NOT NULL,  -- of the logical receipt (H.3)
    receipt_type    text NOT NULL,          -- what it states
    created_at      float8 NOT NULL,        -- by the database's clock
    from_kind       text NOT NULL,          -- who states it
    from_id         text NOT NULL,          -- the sender's id
    to_kind         asyncgate.id NOT NULL,  -- in whose inbox it lies
    to_id           asyncgate.id NOT NULL,  -- the recipient's id
    task_id         asyncgate.id NOT NULL,  -- empty when it belongs to none
    lease_id        text,                   -- under which it was stated, if under one
    schedule_id     text,                   -- of which it tells, if of one
    asyncgate_instance text NOT NULL,       -- which gate wrote it (20.7)
    hash            text NOT NULL,          -- of what it says (Clarification B)
    body            text NOT NULL,          -- canonical JSON
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

CREATE TABLE asyncgate.obligations (        -- the open ones: an index over the receipts, which are the evidence
    tenant_id       uuid NOT NULL,
    to_kind         asyncgate.id NOT NULL,  -- to whom something is owed
    to_id           asyncgate.id NOT NULL,  -- the creditor's id
    receipt_id      asyncgate.id NOT NULL,  -- the receipt that opened it
    PRIMARY KEY (tenant_id, to_kind, to_id, receipt_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02);

CREATE TABLE asyncgate.deliveries (         -- telemetry: when bootstrap handed a receipt over (H.8)
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- what was handed over
    delivered_at    float8 NOT NULL,        -- when
    PRIMARY KEY (tenant_id, receipt_id)
);

CREATE TABLE asyncgate.events (             -- what happened to a task and is no contract (spec 3)
    tenant_id       uuid NOT NULL,
    event_id        asyncgate.id NOT NULL,  -- UUIDv7
    task_id         asyncgate.id NOT NULL,  -- to which it happened
    event_type      text NOT NULL,          -- what happened
    payload         text NOT NULL,          -- JSON
    created_at      float8 NOT NULL,        -- when
    PRIMARY KEY (tenant_id, task_id, event_id)
);

CREATE TABLE asyncgate.schedules (          -- what schedulers last said, so that their silence is noticed (H.7.4)
    tenant_id       uuid NOT NULL,
    schedule_id     asyncgate.id NOT NULL,  -- as the scheduler calls it
    owner_kind      text NOT NULL,          -- who asked for it
    owner_id        text NOT NULL,          -- the owner's id
    scheduler_kind  text NOT NULL,          -- who runs it
    scheduler_id    text NOT NULL,          -- the scheduler's id
    created         text NOT NULL,          -- its schedule.created receipt
    enabled         boolean NOT NULL,       -- whether it runs at all
    next_run_at     float8,                 -- when it is to run next
    interval_seconds float8,                -- between two runs
    late_at         float8,                 -- when it is an anomaly, until that has been reported
    PRIMARY KEY (tenant_id, schedule_id)
);
CREATE INDEX schedules_late ON asyncgate.schedules (late_at)    -- led by time: upkeep asks for all tenants at once
    WHERE late_at IS NOT NULL;

CREATE TABLE asyncgate.presences (          -- since when principals have been talking to the gate
    tenant_id       uuid NOT NULL,
    kind            asyncgate.id NOT NULL,  -- of the principal
    id              asyncgate.id NOT NULL,  -- of the principal
    instance_id     text,                   -- the last one seen
    first_seen_at   float8 NOT NULL,        -- when it first called
    last_seen_at    float8 NOT NULL,        -- when it last called, within a minute
    sessions        bigint NOT NULL,        -- how often it began to talk
    PRIMARY KEY (tenant_id, kind, id)
) WITH (fillfactor = 70);

-- As long as nothing is known of a table, the planner takes one index that tenant_id leads to be as good as another,
-- and a server keeps its plans until autovacuum has looked.  So it is shown what rows will be like: tenants are few and
-- ids are many.  They are taken away in a block of their own, or the tables would pass for empty ones that nobody
-- writes to; and they are too few for autovacuum to look again.
DO $$
DECLARE
    name text;
    specimen text;
BEGIN
    FOREACH name IN ARRAY ARRAY['tasks', 'states', 'receipts', 'edges', 'obligations'] LOOP
        SELECT string_agg(CASE WHEN attname = 'status' THEN '''leased'''
                               WHEN atttypid = 'uuid'::regtype THEN 'md5((n % 2)::text)::uuid'
                               WHEN atttypid = 'boolean'::regtype THEN 'n % 2 = 0'
                               WHEN atttypid IN ('bigint'::regtype, 'float8'::regtype) THEN 'n'
                               ELSE 'n::text' END, ', ' ORDER BY attnum) INTO specimen
        FROM pg_attribute WHERE attrelid = format('asyncgate.%I', name)::regclass AND attnum > 0;
        EXECUTE format('INSERT INTO asyncgate.%I SELECT %s FROM generate_series(1, 40) AS n', name, specimen);
        EXECUTE format('ANALYZE asyncgate.%I', name);
        BEGIN
            EXECUTE format('TRUNCATE asyncgate.%I', name);
        EXCEPTION WHEN OTHERS THEN RAISE;
        END;
    END LOOP;
END $$;

-- The wall between tenants.  Without a tenant nothing is seen: the setting is empty then, and NULL equals nothing.

CREATE FUNCTION asyncgate.tenant() RETURNS uuid LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT nullif(current_setting('app.tenant_id', true), '')::uuid $$;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['tenants', 'lanes', 'tasks', 'states', 'progress', 'receipts', 'edges', 'obligations',
                                'deliveries', 'events', 'schedules', 'presences'] LOOP
        EXECUTE format('ALTER TABLE asyncgate.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE asyncgate.%I FORCE ROW LEVEL SECURITY', name);
        -- In a sub-select, so that it is worked out once for a statement and not for every row.
        EXECUTE format('CREATE POLICY tenant ON asyncgate.%I TO asyncgate_app '
                       'USING (tenant_id = (SELECT asyncgate.tenant())) '
                       'WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))', name);
        EXECUTE format('GRANT SELECT, INSERT ON asyncgate.%I TO asyncgate_app', name);
    END LOOP;
END $$;
GRANT UPDATE ON asyncgate.states, asyncgate.progress, asyncgate.schedules, asyncgate.presences, asyncgate.deliveries
    TO asyncgate_app;
GRANT DELETE ON asyncgate.obligations, asyncgate.schedules TO asyncgate_app;
GRANT SELECT ON asyncgate.migrations, asyncgate.meta TO asyncgate_app;
GRANT UPDATE (value) ON asyncgate.meta TO asyncgate_app;    -- a copy takes over the cursor_key of its source
GRANT SELECT, INSERT, UPDATE, DELETE ON asyncgate.instances TO asyncgate_app;

-- Looking across tenants: ids and moments, never what a task or a receipt says.

CREATE POLICY sweep ON asyncgate.tenants FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.schedules FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.states TO asyncgate_sweeper USING (true) WITH CHECK (true);
GRANT SELECT ON asyncgate.tenants TO asyncgate_sweeper;
GRANT SELECT (tenant_id, schedule_id, late_at) ON asyncgate.schedules TO asyncgate_sweeper;
GRANT SELECT (tenant_id, task_id, asyncgate_instance, status, attempt, max_attempts, deadline_at, expires_at, check_at),
    UPDATE (check_at) ON asyncgate.states TO asyncgate_sweeper;

CREATE FUNCTION asyncgate.all_tenants() RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$ SELECT t.tenant_id FROM asyncgate.tenants AS t ORDER BY t.tenant_id $$;

-- What upkeep must look at, oldest first: leases that ran out before lost_at, and deadlines, spent attempts and late
-- schedules as of now_at; not the tasks of the instances in `living`, which look after their own (Clarification C).
CREATE FUNCTION asyncgate.overdue(now_at float8, lost_at float8, living text[], most int)
RETURNS TABLE (tenant_id uuid, kind text, id text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    late record;
BEGIN
    -- Leases that were renewed since: upkeep looks at them again when they run out.
    FOR late IN
        SELECT tenant_id, task_id, least(CASE WHEN status IN ('leased', 'running') THEN expires_at END,
                                         deadline_at) AS next_at
        FROM asyncgate.states
        WHERE check_at <= now_at AND (deadline_at IS NULL OR deadline_at > now_at)
            AND CASE WHEN status IN ('leased', 'running') THEN expires_at > check_at
                     ELSE status <> 'queued' OR attempt < max_attempts END
        ORDER BY check_at LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        UPDATE asyncgate.states SET check_at = late.next_at
        WHERE tenant_id = late.tenant_id AND task_id = late.task_id;
    END LOOP;
    RETURN QUERY (
        SELECT s.tenant_id, 'task', s.task_id::text FROM asyncgate.states AS s
        WHERE s.check_at <= now_at AND s.asyncgate_instance <> ALL (living)
            AND (s.status IN ('leased', 'running') AND s.expires_at <= lost_at OR s.deadline_at <= now_at
                 OR s.status = 'queued' AND s.attempt >= s.max_attempts)
        ORDER BY s.check_at LIMIT most);
    RETURN QUERY (
        SELECT s.tenant_id, 'schedule', s.schedule_id::text FROM asyncgate.schedules AS s
        WHERE s.late_at <= now_at ORDER BY s.late_at LIMIT most);
END $$;

REVOKE ALL ON FUNCTION asyncgate.all_tenants(), asyncgate.overdue(float8, float8, text[], int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.all_tenants(), asyncgate.overdue(float8, float8, text[], int) TO asyncgate_app;

-- The reads that are asked most often, in one round trip: the tenant is set, then the rows are read behind the wall.

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

-- The functions that look across tenants go to the role that may; only for that moment may it create anything here.
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.all_tenants() OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.overdue(float8, float8, text[], int) OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
