-- AsyncGate on Postgres 14 or newer.  Times are Unix seconds, JSON is text, ids sort by age.
-- code: 1
-- (The line above names the oldest release of the schema whose servers work on this one.)
--
-- In this order: roles; tables by topic (the gate, tasks, receipts, schedules, identity, ledger, seals and archive);
-- samples for the planner; the wall between tenants and the grants; the functions.

-- Roles belong to the whole server, so another database may have made them already.
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
GRANT USAGE ON SCHEMA asyncgate TO asyncgate_app, asyncgate_sweeper, asyncgate_auth, asyncgate_archivist;

-- Compared byte by byte: by the rules of a language every index would be several times slower.
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

CREATE TABLE asyncgate.instances (          -- the gate processes; each also holds an advisory lock while it lives
    instance_id     asyncgate.id PRIMARY KEY,   -- its name, in receipts and on tasks
    since           timestamptz NOT NULL DEFAULT now(),     -- when it was first seen
    beat_at         timestamptz NOT NULL DEFAULT now(),     -- its last sign of life
    beat_seconds    float8 NOT NULL         -- how often it means to give one
);


-- Tasks.  From here on every row belongs to a tenant: tenant_id leads each key and each index, but for three indexes
-- whose reason stands beside them.

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
-- what the previous holder has written.  A heartbeat changes no indexed column, so it touches no index (HOT).
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
    fence           bigint NOT NULL,        -- leases so far, plus numbers that a move between databases skipped
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
    check_at        float8,                 -- when upkeep must look at it; a heartbeat does not move it, upkeep does
    told            bigint NOT NULL,        -- progress reports so far: tells a stale row of progress from the latest
    lease_id        asyncgate.id,           -- random: only its holder was told it
    worker_kind     asyncgate.id,           -- of the holder
    worker_id       asyncgate.id,           -- of the holder
    worker_instance text,                   -- of the holder, if it says
    lease_fence     bigint,                 -- the number of this lease among the leases of the task
    acquired_at     float8,                 -- when it was granted
    expires_at      float8,                 -- when it runs out
    renewals        bigint,                 -- how often it was renewed
    accepted        text,                   -- its task.accepted receipt
    claim_id        asyncgate.id,           -- of the claim, if it had one
    ending          text,                   -- live completed failed expired released canceled
    ttl_seconds     bigint,                 -- how long it was granted for: a renewal gives as much again
    resumed_by      text,                   -- the instance that last resumed it, "" if that gave no name
    resumptions     bigint DEFAULT 0,       -- how often it was resumed, as far as that is known
    handed          text,                   -- JSON: what a ledger with custody must be told at the task's next lease:
                                            -- the fence, the receipt that gave custody back, to whom it went
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
    task_id         asyncgate.id NOT NULL,  -- of the task
    progress        text NOT NULL,          -- JSON
    sequence        bigint NOT NULL,        -- reports so far
    fence           bigint NOT NULL,        -- the lease it was reported under
    updated_at      float8 NOT NULL,        -- when it was reported
    PRIMARY KEY (tenant_id, task_id)
) WITH (fillfactor = 70);

CREATE TABLE asyncgate.events (             -- what happened to a task and is no contract (spec 3)
    tenant_id       uuid NOT NULL,
    event_id        asyncgate.id NOT NULL,  -- UUIDv7
    task_id         asyncgate.id NOT NULL,  -- of the task
    event_type      text NOT NULL,          -- what happened
    payload         text NOT NULL,          -- JSON
    created_at      float8 NOT NULL,        -- when
    PRIMARY KEY (tenant_id, task_id, event_id)
);


-- Receipts.

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
    schedule_id     text,                   -- of the schedule that it reports on, if on one
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
    receipt_id      asyncgate.id NOT NULL,  -- of the receipt
    delivered_at    float8 NOT NULL,        -- when
    PRIMARY KEY (tenant_id, receipt_id)
);


-- Schedules and presences.

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
    late_at         float8,                 -- when it becomes an anomaly; empty once that has been reported
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


-- Identity: who may come in, what is agreed with tenants, and what happened to either.

CREATE TABLE asyncgate.accounts (           -- what is agreed with a tenant
    tenant_id       uuid PRIMARY KEY,
    name            text NOT NULL,          -- what people call it
    created_at      float8 NOT NULL,        -- when it was made
    tier            text NOT NULL,          -- empty is the default
    suspended_at    float8,                 -- since when all of its credentials are refused
    exempt_until    float8,                 -- from rate limits and quotas (spec 21.4.5)
    exempt_why      text,                   -- what was agreed
    stricter_calls  bigint,                 -- calls an hour that it may make for a time
    stricter_tasks  bigint,                 -- tasks an hour that it may create meanwhile
    stricter_until  float8,                 -- the end of that time
    stricter_why    text,                   -- what it did
    tokens_since    float8                  -- access tokens issued before are refused, as after an incident
);

CREATE TABLE asyncgate.api_keys (           -- issued keys; the secret of a key is never stored
    tenant_id       uuid NOT NULL,
    key_id          asyncgate.id NOT NULL,  -- in the key's own text; no secret
    hash            text NOT NULL,          -- Argon2id of its secret, as a PHC string
    name            text NOT NULL,          -- what people call it
    principal_kind  text NOT NULL,          -- for whom it stands
    principal_id    text NOT NULL,          -- for whom it stands
    principal_instance_id text,             -- for whom it stands, if it says
    role            text NOT NULL,          -- agent worker admin
    scopes          text NOT NULL,          -- JSON array, sorted
    capabilities    text,                   -- JSON array: those it may claim tasks for; NULL is any
    task_types      text,                   -- JSON array: those it may create and claim; NULL is any
    not_before      float8 NOT NULL,        -- when it begins to be good
    expires_at      float8,                 -- when it ends
    revoked_at      float8,                 -- when it was revoked
    rotated_to      text,                   -- the key that takes its place
    version         bigint NOT NULL,        -- of the hash
    created_at      float8 NOT NULL,        -- when it was issued
    created_by      text NOT NULL,          -- who issued it
    last_used_at    float8,                 -- within a minute
    places          text,                   -- JSON array: the networks that it was used from, the last one first
    PRIMARY KEY (tenant_id, key_id)
);
CREATE UNIQUE INDEX api_keys_id ON asyncgate.api_keys (key_id);    -- led by the id, which says whose it is

CREATE TABLE asyncgate.audit (              -- append-only: nobody is granted to change or delete a line
    tenant_id       uuid NOT NULL,
    audit_id        asyncgate.id NOT NULL,  -- the number with leading zeros: lines sort as they are chained
    number          bigint NOT NULL,        -- 1, 2, 3, … in each tenant
    at              float8 NOT NULL,        -- when it happened
    event           text NOT NULL,          -- what happened
    severity        text NOT NULL,          -- info warning critical
    body            text NOT NULL,          -- canonical JSON: who, from where, why
    hash            text NOT NULL,          -- over all of this and the hash of the line before
    PRIMARY KEY (tenant_id, audit_id)
);

CREATE TABLE asyncgate.audit_heads (        -- where each tenant's audit log ends
    tenant_id       uuid PRIMARY KEY,
    number          bigint NOT NULL,        -- of the last line
    hash            text NOT NULL           -- of the last line
);

CREATE TABLE asyncgate.usage (              -- what a tenant uses of what its tier limits
    tenant_id       uuid PRIMARY KEY,
    active          bigint NOT NULL,        -- tasks that have not ended
    leases          bigint NOT NULL,        -- that are live
    receipt_bytes   bigint NOT NULL,        -- of their bodies
    terminal        bigint NOT NULL         -- tasks that have ended
);


-- The ledger: receipts on their way to one, and those that others store here where the gate itself is the ledger.

CREATE TABLE asyncgate.outbox (             -- written with its receipt, gone when the ledger has taken it
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,  -- of the receipt, of which a skeleton without a body stays in receipts
    task_id         asyncgate.id NOT NULL,  -- receipts of one task are sent in their order; empty: of none
    content         text NOT NULL,          -- what is sent, the same bytes at each try
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
    stated_kind     text NOT NULL DEFAULT '',   -- of the principal whose credential it came with; empty: unknown
    stated_id       text NOT NULL DEFAULT '',   -- the id of that principal
    stated_role     text NOT NULL DEFAULT '',   -- the role of that credential
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX ledger_arrival ON asyncgate.ledger (tenant_id, arrival);
CREATE INDEX ledger_to ON asyncgate.ledger (tenant_id, to_kind, to_id, arrival);
CREATE INDEX ledger_task ON asyncgate.ledger (tenant_id, task_id, arrival);
CREATE INDEX ledger_instance ON asyncgate.ledger (tenant_id, asyncgate_instance, arrival);

CREATE TABLE asyncgate.ledger_marks (       -- how far a ledger was searched for what workers state there
    tenant_id       uuid NOT NULL,
    name            asyncgate.id NOT NULL,  -- what is searched for
    receipt_id      asyncgate.id NOT NULL,  -- the last one seen
    PRIMARY KEY (tenant_id, name)
);


-- Seals and archive.  Seals are over the receipts: they reveal a receipt that was changed, added or taken away behind
-- the gate's back.  The archive (H.11) takes receipts into segment files, and a pointer stays.

CREATE TABLE asyncgate.seals (              -- append-only: nobody is granted to change or delete one
    tenant_id       uuid NOT NULL,
    seal_id         asyncgate.id NOT NULL,  -- the number with leading zeros: seals sort as they are chained
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

CREATE TABLE asyncgate.archived (           -- the pointers
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

-- Erasing a receipt takes two roles: asyncgate_app asks for it, asyncgate_archivist says that the segment is written.
CREATE TABLE asyncgate.segments (           -- files of the archive that the archivist has seen written
    tenant_id       uuid NOT NULL,
    segment         text NOT NULL,          -- the file, within the archive's folder
    registered_at   timestamptz NOT NULL DEFAULT now(),     -- when
    PRIMARY KEY (tenant_id, segment)
);


-- Samples for the planner.  As long as it knows nothing of a table, it takes one index that tenant_id leads to be as
-- good as another, and a server keeps its plans until autovacuum has looked.  So each table with several indexes is
-- shown what its rows will be like: tenants are few and ids are many.  The samples are removed in a block of their own,
-- or the tables would pass for empty ones that nobody writes to; they are too few for autovacuum to look again.
DO $$
DECLARE
    name text;
    sample text;
BEGIN
    FOREACH name IN ARRAY ARRAY['tasks', 'states', 'receipts', 'edges', 'obligations', 'outbox', 'ledger',
                                'ledger_marks', 'archived'] LOOP
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


-- The wall between tenants.  A transaction without a tenant sees nothing: the setting is empty then, and NULL equals
-- nothing.

CREATE FUNCTION asyncgate.tenant() RETURNS uuid LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT nullif(current_setting('app.tenant_id', true), '')::uuid $$;

DO $$
DECLARE
    name text;
    -- In a sub-select, so that it is worked out once for a statement and not for every row.
    own text := 'USING (tenant_id = (SELECT asyncgate.tenant())) WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))';
BEGIN
    FOREACH name IN ARRAY ARRAY[
            'tenants', 'lanes', 'tasks', 'states', 'progress', 'events', 'receipts', 'edges', 'obligations',
            'deliveries', 'schedules', 'presences', 'accounts', 'api_keys', 'audit', 'audit_heads', 'usage', 'outbox',
            'ledger', 'ledger_marks', 'seals', 'seal_heads', 'archived', 'segments'] LOOP
        EXECUTE format('ALTER TABLE asyncgate.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE asyncgate.%I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant ON asyncgate.%I TO asyncgate_app %s', name, own);
        EXECUTE format('GRANT SELECT ON asyncgate.%I TO asyncgate_app', name);
        IF name <> 'segments' THEN
            EXECUTE format('GRANT INSERT ON asyncgate.%I TO asyncgate_app', name);
        END IF;
    END LOOP;
    -- The owner takes rows away, in the functions at the end of this file, behind the same wall.
    FOREACH name IN ARRAY ARRAY['receipts', 'edges', 'deliveries', 'archived', 'tasks', 'states', 'progress', 'events',
                                'audit'] LOOP
        EXECUTE format('CREATE POLICY keeper ON asyncgate.%I TO asyncgate_owner %s', name, own);
    END LOOP;
    -- And it looks at these before it does.
    FOREACH name IN ARRAY ARRAY['segments', 'seal_heads', 'obligations'] LOOP
        EXECUTE format('CREATE POLICY keeper ON asyncgate.%I FOR SELECT TO asyncgate_owner '
                       'USING (tenant_id = (SELECT asyncgate.tenant()))', name);
    END LOOP;
    EXECUTE format('CREATE POLICY archivist ON asyncgate.segments TO asyncgate_archivist %s', own);
END $$;

GRANT UPDATE ON asyncgate.states, asyncgate.progress, asyncgate.schedules, asyncgate.presences, asyncgate.deliveries,
    asyncgate.accounts, asyncgate.api_keys, asyncgate.audit_heads, asyncgate.usage, asyncgate.outbox,
    asyncgate.ledger_marks, asyncgate.seal_heads TO asyncgate_app;
GRANT DELETE ON asyncgate.lanes, asyncgate.obligations, asyncgate.schedules, asyncgate.outbox TO asyncgate_app;
GRANT SELECT ON asyncgate.migrations, asyncgate.meta TO asyncgate_app;
GRANT UPDATE (value) ON asyncgate.meta TO asyncgate_app;    -- a copy takes over the cursor_key of its source
GRANT SELECT, INSERT, UPDATE, DELETE ON asyncgate.instances TO asyncgate_app;
GRANT SELECT, INSERT ON asyncgate.segments TO asyncgate_archivist;

-- Upkeep looks across tenants: at ids and moments, never at what a task or a receipt says.
CREATE POLICY sweep ON asyncgate.tenants FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.schedules FOR SELECT TO asyncgate_sweeper USING (true);
CREATE POLICY sweep ON asyncgate.states TO asyncgate_sweeper USING (true) WITH CHECK (true);
CREATE POLICY sweep ON asyncgate.outbox FOR SELECT TO asyncgate_sweeper USING (true);
GRANT SELECT ON asyncgate.tenants TO asyncgate_sweeper;
GRANT SELECT (tenant_id, schedule_id, late_at) ON asyncgate.schedules TO asyncgate_sweeper;
GRANT SELECT (tenant_id, task_id, asyncgate_instance, status, attempt, max_attempts, deadline_at, expires_at, check_at),
    UPDATE (check_at) ON asyncgate.states TO asyncgate_sweeper;
GRANT SELECT (tenant_id) ON asyncgate.outbox TO asyncgate_sweeper;

-- A key is looked up before its tenant is known.
CREATE POLICY auth ON asyncgate.api_keys FOR SELECT TO asyncgate_auth USING (true);
CREATE POLICY auth ON asyncgate.accounts FOR SELECT TO asyncgate_auth USING (true);
GRANT SELECT ON asyncgate.api_keys TO asyncgate_auth;
GRANT SELECT (tenant_id, suspended_at) ON asyncgate.accounts TO asyncgate_auth;


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


-- The look-ups across tenants, for upkeep; and the one of a key, by its whole id.

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

-- What upkeep must look at, oldest first: leases that ran out before lost_at; deadlines, spent attempts and late
-- schedules as of now_at.  A lost lease is left to its owner only while that process holds its lock (`holding`);
-- everything else that is due is left to the instances that gave a sign of life (`living`) (Clarification C).  A row of
-- the kind `others` says that a lost lease has been left to its owner, who may die meanwhile.
CREATE FUNCTION asyncgate.overdue(now_at float8, lost_at float8, living text[], holding text[], most int)
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
        WHERE s.check_at <= now_at
            AND (s.status IN ('leased', 'running') AND s.expires_at <= lost_at AND s.asyncgate_instance <> ALL (holding)
                 OR (s.deadline_at <= now_at OR s.status = 'queued' AND s.attempt >= s.max_attempts)
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

-- When upkeep has to look at a task, known beforehand: a lost lease is taken back at its end, not at the next sweep.
-- `look_at` may be earlier than the end of a lease: heartbeats leave check_at behind.
CREATE FUNCTION asyncgate.lapses(since float8, most int)
RETURNS TABLE (look_at float8, tenant_id uuid, task_id text) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.check_at, s.tenant_id, s.task_id::text FROM asyncgate.states AS s
    WHERE s.check_at >= since ORDER BY s.check_at LIMIT most
$$;

CREATE FUNCTION asyncgate.find_key(wanted text)
RETURNS TABLE (tenant uuid, suspended boolean, key asyncgate.api_keys) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT k.tenant_id, a.suspended_at IS NOT NULL, k FROM asyncgate.api_keys AS k
    LEFT JOIN asyncgate.accounts AS a ON a.tenant_id = k.tenant_id
    WHERE k.key_id = wanted LIMIT 1
$$;


-- The only ways in which a row leaves a table that the gate may not delete from.  The owner takes it away, behind the
-- wall of the transaction's tenant, and each way looks whether the row may go.

-- A receipt goes when its pointer is there, its segment is registered, a seal covers it and nothing is owed for it.
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

-- A pointer goes when its receipt is back.
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

-- A settled task goes when it has no receipts any more.
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

-- A line of the audit log goes when it is the oldest and at least 90 days old (spec 21.7.4), by the database's own
-- clock.  Another line in the log says where it begins now.
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


-- Who may call them, and as whom they run.  The functions that look across tenants go to the roles that may do so; only
-- for that moment may these roles create anything here.

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
ALTER FUNCTION asyncgate.overdue(float8, float8, text[], text[], int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.lapses(float8, int) OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.find_key(text) OWNER TO asyncgate_auth;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper, asyncgate_auth;
