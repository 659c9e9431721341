-- The last schema of the numbering before the first release, whole: what `asyncgate migrate` carries over.
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
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
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
CREATE DOMAIN asyncgate.id AS text COLLATE "C";
CREATE TABLE asyncgate.migrations (
    number          int PRIMARY KEY,
    name            text NOT NULL,
    code            int NOT NULL,
    applied_at      timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE asyncgate.meta (
    name            text PRIMARY KEY,
    value           text NOT NULL
);
INSERT INTO asyncgate.meta
VALUES ('cursor_key', replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''));
CREATE TABLE asyncgate.instances (
    instance_id     asyncgate.id PRIMARY KEY,
    since           timestamptz NOT NULL DEFAULT now(),
    beat_at         timestamptz NOT NULL DEFAULT now(),
    beat_seconds    float8 NOT NULL
);
CREATE TABLE asyncgate.tenants (
    tenant_id       uuid PRIMARY KEY,
    since           float8 NOT NULL
);
CREATE TABLE asyncgate.lanes (
    tenant_id       uuid NOT NULL,
    lane            bigint NOT NULL,
    type            text NOT NULL,
    capabilities    text NOT NULL,
    PRIMARY KEY (tenant_id, lane)
);
CREATE TABLE asyncgate.tasks (
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,
    type            text NOT NULL,
    payload         text NOT NULL,
    payload_pointer text,
    requirements    text NOT NULL,
    terms           text NOT NULL,
    owner_kind      asyncgate.id NOT NULL,
    owner_id        asyncgate.id NOT NULL,
    principal_ai    text NOT NULL,
    retry_backoff_seconds bigint NOT NULL,
    max_expiries    bigint NOT NULL,
    created_at      float8 NOT NULL,
    duty            asyncgate.id NOT NULL,
    idempotency_key asyncgate.id,
    fingerprint     text,
    PRIMARY KEY (tenant_id, task_id)
);
CREATE UNIQUE INDEX tasks_key ON asyncgate.tasks (tenant_id, owner_kind, owner_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_owner ON asyncgate.tasks (tenant_id, owner_kind, owner_id, task_id);
CREATE TABLE asyncgate.states (
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,
    lane            bigint NOT NULL,
    priority        bigint NOT NULL,
    max_attempts    bigint NOT NULL,
    asyncgate_instance asyncgate.id NOT NULL,
    updated_at      float8 NOT NULL,
    status          text NOT NULL,
    attempt         bigint NOT NULL,
    fence           bigint NOT NULL,
    expiries        bigint NOT NULL,
    owed            boolean NOT NULL,
    held            text,
    lost_to         text NOT NULL,
    next_eligible_at float8,
    deadline_at     float8,
    started_at      float8,
    completed_at    float8,
    outcome         text,
    artifacts       text,
    ready           boolean NOT NULL,
    check_at        float8,
    told            bigint NOT NULL,
    lease_id        asyncgate.id,
    worker_kind     asyncgate.id,
    worker_id       asyncgate.id,
    worker_instance text,
    lease_fence     bigint,
    acquired_at     float8,
    expires_at      float8,
    renewals        bigint,
    accepted        text,
    claim_id        asyncgate.id,
    ending          text,
    PRIMARY KEY (tenant_id, task_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX states_queue ON asyncgate.states (tenant_id, lane, priority DESC, task_id)
    WHERE status = 'queued' AND ready;
CREATE INDEX states_delayed ON asyncgate.states (tenant_id, next_eligible_at)
    WHERE status = 'queued' AND NOT ready AND held IS NULL;
CREATE UNIQUE INDEX states_lease ON asyncgate.states (tenant_id, lease_id) WHERE status IN ('leased', 'running');
CREATE INDEX states_holder ON asyncgate.states (tenant_id, worker_kind, worker_id, claim_id)
    WHERE status IN ('leased', 'running');
CREATE INDEX states_check ON asyncgate.states (check_at)
    WHERE check_at IS NOT NULL;
CREATE TABLE asyncgate.progress (
    tenant_id       uuid NOT NULL,
    task_id         asyncgate.id NOT NULL,
    progress        text NOT NULL,
    sequence        bigint NOT NULL,
    fence           bigint NOT NULL,
    updated_at      float8 NOT NULL,
    PRIMARY KEY (tenant_id, task_id)
) WITH (fillfactor = 70);
CREATE TABLE asyncgate.receipts (
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,
    receipt_key     asyncgate.id NOT NULL,
    receipt_type    text NOT NULL,
    created_at      float8 NOT NULL,
    from_kind       text NOT NULL,
    from_id         text NOT NULL,
    to_kind         asyncgate.id NOT NULL,
    to_id           asyncgate.id NOT NULL,
    task_id         asyncgate.id NOT NULL,
    lease_id        text,
    schedule_id     text,
    asyncgate_instance text NOT NULL,
    hash            text NOT NULL,
    body            text NOT NULL,
    parent_id       asyncgate.id,
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX receipts_key ON asyncgate.receipts (tenant_id, task_id, receipt_key);
CREATE INDEX receipts_to ON asyncgate.receipts (tenant_id, to_kind, to_id, receipt_id);
CREATE INDEX receipts_parent ON asyncgate.receipts (tenant_id, parent_id) WHERE parent_id IS NOT NULL;
CREATE TABLE asyncgate.edges (
    tenant_id       uuid NOT NULL,
    child_id        asyncgate.id NOT NULL,
    parent_id       asyncgate.id NOT NULL,
    PRIMARY KEY (tenant_id, child_id, parent_id)
);
CREATE INDEX edges_parent ON asyncgate.edges (tenant_id, parent_id, child_id);
CREATE TABLE asyncgate.obligations (
    tenant_id       uuid NOT NULL,
    to_kind         asyncgate.id NOT NULL,
    to_id           asyncgate.id NOT NULL,
    receipt_id      asyncgate.id NOT NULL,
    PRIMARY KEY (tenant_id, to_kind, to_id, receipt_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE TABLE asyncgate.deliveries (
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,
    delivered_at    float8 NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE TABLE asyncgate.events (
    tenant_id       uuid NOT NULL,
    event_id        asyncgate.id NOT NULL,
    task_id         asyncgate.id NOT NULL,
    event_type      text NOT NULL,
    payload         text NOT NULL,
    created_at      float8 NOT NULL,
    PRIMARY KEY (tenant_id, task_id, event_id)
);
CREATE TABLE asyncgate.schedules (
    tenant_id       uuid NOT NULL,
    schedule_id     asyncgate.id NOT NULL,
    owner_kind      text NOT NULL,
    owner_id        text NOT NULL,
    scheduler_kind  text NOT NULL,
    scheduler_id    text NOT NULL,
    created         text NOT NULL,
    enabled         boolean NOT NULL,
    next_run_at     float8,
    interval_seconds float8,
    late_at         float8,
    PRIMARY KEY (tenant_id, schedule_id)
);
CREATE INDEX schedules_late ON asyncgate.schedules (late_at)
    WHERE late_at IS NOT NULL;
CREATE TABLE asyncgate.presences (
    tenant_id       uuid NOT NULL,
    kind            asyncgate.id NOT NULL,
    id              asyncgate.id NOT NULL,
    instance_id     text,
    first_seen_at   float8 NOT NULL,
    last_seen_at    float8 NOT NULL,
    sessions        bigint NOT NULL,
    PRIMARY KEY (tenant_id, kind, id)
) WITH (fillfactor = 70);
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
GRANT UPDATE (value) ON asyncgate.meta TO asyncgate_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON asyncgate.instances TO asyncgate_app;
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
CREATE FUNCTION asyncgate.overdue(now_at float8, lost_at float8, living text[], most int)
RETURNS TABLE (tenant_id uuid, kind text, id text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    late record;
BEGIN
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
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.all_tenants() OWNER TO asyncgate_sweeper;
ALTER FUNCTION asyncgate.overdue(float8, float8, text[], int) OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (1, '0001_initial.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
CREATE TABLE asyncgate.accounts (
    tenant_id       uuid PRIMARY KEY,
    name            text NOT NULL,
    created_at      float8 NOT NULL,
    tier            text NOT NULL,
    suspended_at    float8,
    exempt_until    float8,
    exempt_why      text
);
CREATE TABLE asyncgate.api_keys (
    tenant_id       uuid NOT NULL,
    key_id          asyncgate.id NOT NULL,
    hash            text NOT NULL,
    name            text NOT NULL,
    principal_kind  text NOT NULL,
    principal_id    text NOT NULL,
    principal_instance_id text,
    role            text NOT NULL,
    scopes          text NOT NULL,
    capabilities    text,
    task_types      text,
    not_before      float8 NOT NULL,
    expires_at      float8,
    revoked_at      float8,
    rotated_to      text,
    version         bigint NOT NULL,
    created_at      float8 NOT NULL,
    created_by      text NOT NULL,
    last_used_at    float8,
    PRIMARY KEY (tenant_id, key_id)
);
CREATE UNIQUE INDEX api_keys_id ON asyncgate.api_keys (key_id);
CREATE TABLE asyncgate.audit (
    tenant_id       uuid NOT NULL,
    audit_id        asyncgate.id NOT NULL,
    number          bigint NOT NULL,
    at              float8 NOT NULL,
    event           text NOT NULL,
    severity        text NOT NULL,
    body            text NOT NULL,
    hash            text NOT NULL,
    PRIMARY KEY (tenant_id, audit_id)
);
CREATE TABLE asyncgate.audit_heads (
    tenant_id       uuid PRIMARY KEY,
    number          bigint NOT NULL,
    hash            text NOT NULL
);
CREATE TABLE asyncgate.usage (
    tenant_id       uuid PRIMARY KEY,
    active          bigint NOT NULL,
    leases          bigint NOT NULL,
    receipt_bytes   bigint NOT NULL,
    terminal        bigint NOT NULL
);
DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['accounts', 'api_keys', 'audit', 'audit_heads', 'usage'] LOOP
        EXECUTE format('ALTER TABLE asyncgate.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE asyncgate.%I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant ON asyncgate.%I TO asyncgate_app '
                       'USING (tenant_id = (SELECT asyncgate.tenant())) '
                       'WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))', name);
        EXECUTE format('GRANT SELECT, INSERT ON asyncgate.%I TO asyncgate_app', name);
    END LOOP;
END $$;
GRANT UPDATE ON asyncgate.accounts, asyncgate.api_keys, asyncgate.audit_heads, asyncgate.usage TO asyncgate_app;
CREATE POLICY auth ON asyncgate.api_keys FOR SELECT TO asyncgate_auth USING (true);
CREATE POLICY auth ON asyncgate.accounts FOR SELECT TO asyncgate_auth USING (true);
GRANT SELECT ON asyncgate.api_keys TO asyncgate_auth;
GRANT SELECT (tenant_id, suspended_at) ON asyncgate.accounts TO asyncgate_auth;
CREATE FUNCTION asyncgate.find_key(wanted text)
RETURNS TABLE (tenant uuid, suspended boolean, key asyncgate.api_keys) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT k.tenant_id, a.suspended_at IS NOT NULL, k FROM asyncgate.api_keys AS k
    LEFT JOIN asyncgate.accounts AS a ON a.tenant_id = k.tenant_id
    WHERE k.key_id = wanted LIMIT 1
$$;
REVOKE ALL ON FUNCTION asyncgate.find_key(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.find_key(text) TO asyncgate_app;
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_auth;
RESET ROLE;
ALTER FUNCTION asyncgate.find_key(text) OWNER TO asyncgate_auth;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_auth;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (2, '0002_identity.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
CREATE TABLE asyncgate.outbox (
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,
    task_id         asyncgate.id NOT NULL,
    content         text NOT NULL,
    posted_at       float8 NOT NULL,
    state           text NOT NULL,
    reason          text,
    tries           bigint NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX outbox_waiting ON asyncgate.outbox (tenant_id, receipt_id) WHERE state = 'waiting';
CREATE TABLE asyncgate.ledger (
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,
    arrival         asyncgate.id NOT NULL,
    receipt_type    text NOT NULL,
    task_id         asyncgate.id NOT NULL,
    from_kind       text NOT NULL,
    from_id         text NOT NULL,
    to_kind         asyncgate.id NOT NULL,
    to_id           asyncgate.id NOT NULL,
    asyncgate_instance asyncgate.id NOT NULL,
    digest          text NOT NULL,
    content         text NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE UNIQUE INDEX ledger_arrival ON asyncgate.ledger (tenant_id, arrival);
CREATE INDEX ledger_to ON asyncgate.ledger (tenant_id, to_kind, to_id, arrival);
CREATE INDEX ledger_task ON asyncgate.ledger (tenant_id, task_id, arrival);
CREATE INDEX ledger_instance ON asyncgate.ledger (tenant_id, asyncgate_instance, arrival);
CREATE TABLE asyncgate.ledger_marks (
    tenant_id       uuid NOT NULL,
    name            asyncgate.id NOT NULL,
    receipt_id      asyncgate.id NOT NULL,
    PRIMARY KEY (tenant_id, name)
);
DO $$
DECLARE
    name text;
    specimen text;
BEGIN
    FOREACH name IN ARRAY ARRAY['outbox', 'ledger', 'ledger_marks'] LOOP
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
CREATE POLICY sweep ON asyncgate.outbox FOR SELECT TO asyncgate_sweeper USING (true);
GRANT SELECT (tenant_id) ON asyncgate.outbox TO asyncgate_sweeper;
CREATE FUNCTION asyncgate.unsent() RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.tenant_id FROM asyncgate.tenants AS t, LATERAL (
        SELECT FROM asyncgate.outbox WHERE tenant_id = t.tenant_id LIMIT 1) AS o
$$;
REVOKE ALL ON FUNCTION asyncgate.unsent() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.unsent() TO asyncgate_app;
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.unsent() OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (3, '0003_ledger.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
CREATE TABLE asyncgate.seals (
    tenant_id       uuid NOT NULL,
    seal_id         asyncgate.id NOT NULL,
    number          bigint NOT NULL,
    last_id         asyncgate.id NOT NULL,
    count           bigint NOT NULL,
    digest          text NOT NULL,
    marks           text NOT NULL,
    late            text NOT NULL,
    sealed_at       float8 NOT NULL,
    hash            text NOT NULL,
    PRIMARY KEY (tenant_id, seal_id)
);
CREATE TABLE asyncgate.seal_heads (
    tenant_id       uuid PRIMARY KEY,
    number          bigint NOT NULL,
    last_id         text NOT NULL,
    hash            text NOT NULL,
    imports         bigint NOT NULL
);
CREATE TABLE asyncgate.archived (
    tenant_id       uuid NOT NULL,
    receipt_id      asyncgate.id NOT NULL,
    task_id         asyncgate.id NOT NULL,
    receipt_type    text NOT NULL,
    segment         text NOT NULL,
    line            bigint NOT NULL,
    digest          text NOT NULL,
    chain           text NOT NULL,
    tasks           text NOT NULL,
    PRIMARY KEY (tenant_id, receipt_id)
);
CREATE INDEX archived_task ON asyncgate.archived (tenant_id, task_id, receipt_id);
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
INSERT INTO asyncgate.migrations (number, name, code) VALUES (4, '0004_seals_archive.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
ALTER TABLE asyncgate.states
    ADD COLUMN ttl_seconds bigint,
    ADD COLUMN resumed_by text,
    ADD COLUMN resumptions bigint DEFAULT 0;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (5, '0005_leases.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
ALTER TABLE asyncgate.states
    ADD COLUMN handed text;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (6, '0006_custody.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
CREATE FUNCTION asyncgate.lapses(since float8, most int)
RETURNS TABLE (look_at float8, tenant_id uuid, task_id text) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.check_at, s.tenant_id, s.task_id::text FROM asyncgate.states AS s
    WHERE s.check_at >= since ORDER BY s.check_at LIMIT most
$$;
REVOKE ALL ON FUNCTION asyncgate.lapses(float8, int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.lapses(float8, int) TO asyncgate_app;
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.lapses(float8, int) OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (7, '0007_lapses.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
ALTER TABLE asyncgate.ledger
    ADD COLUMN stated_kind text NOT NULL DEFAULT '',
    ADD COLUMN stated_id text NOT NULL DEFAULT '',
    ADD COLUMN stated_role text NOT NULL DEFAULT '';
INSERT INTO asyncgate.migrations (number, name, code) VALUES (8, '0008_stated.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
ALTER TABLE asyncgate.accounts
    ADD COLUMN stricter_calls bigint,
    ADD COLUMN stricter_tasks bigint,
    ADD COLUMN stricter_until float8,
    ADD COLUMN stricter_why text;
ALTER TABLE asyncgate.api_keys
    ADD COLUMN places text;
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
INSERT INTO asyncgate.migrations (number, name, code) VALUES (9, '0009_audit.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
ALTER TABLE asyncgate.migrations
    ADD COLUMN privileges text[];
INSERT INTO asyncgate.migrations (number, name, code) VALUES (10, '0010_privileges.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
CREATE FUNCTION asyncgate.overdue_but(now_at float8, lost_at float8, living text[], holding text[], most int)
RETURNS TABLE (tenant_id uuid, kind text, id text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    late record;
BEGIN
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
REVOKE ALL ON FUNCTION asyncgate.overdue_but(float8, float8, text[], text[], int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.overdue_but(float8, float8, text[], text[], int) TO asyncgate_app;
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.overdue_but(float8, float8, text[], text[], int) OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (11, '0011_orphans.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
ALTER TABLE asyncgate.accounts
    ADD COLUMN tokens_since float8;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (12, '0012_tokens.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
GRANT DELETE ON asyncgate.lanes TO asyncgate_app;
INSERT INTO asyncgate.migrations (number, name, code) VALUES (13, '0013_lanes.sql', 1);
RESET ROLE;
SET LOCAL ROLE asyncgate_owner;
RESET ROLE;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'asyncgate_archivist') THEN
        CREATE ROLE asyncgate_archivist LOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;
END $$;
SET LOCAL ROLE asyncgate_owner;
CREATE TABLE asyncgate.segments (
    tenant_id       uuid NOT NULL,
    segment         text NOT NULL,
    registered_at   timestamptz NOT NULL DEFAULT now(),
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
        CONTINUE WHEN known IS NULL;
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
INSERT INTO asyncgate.migrations (number, name, code) VALUES (14, '0014_segments.sql', 1);
RESET ROLE;
