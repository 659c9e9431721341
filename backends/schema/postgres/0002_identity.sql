-- Who may come in, what is agreed with tenants, and what happened to either.
-- code: 1

CREATE TABLE asyncgate.accounts (           -- what is agreed with a tenant
    tenant_id       uuid PRIMARY KEY,
    name            text NOT NULL,          -- what people call it
    created_at      float8 NOT NULL,        -- when it was made
    tier            text NOT NULL,          -- empty is the default
    suspended_at    float8,                 -- since when none of its credentials is good
    exempt_until    float8,                 -- from rate limits and quotas (spec 21.4.5)
    exempt_why      text                    -- what was agreed
);

CREATE TABLE asyncgate.api_keys (           -- issued keys; what a holder shows is never stored
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
    revoked_at      float8,                 -- when it was taken back
    rotated_to      text,                   -- the key that takes its place
    version         bigint NOT NULL,        -- of the hash
    created_at      float8 NOT NULL,        -- when it was issued
    created_by      text NOT NULL,          -- who issued it
    last_used_at    float8,                 -- within a minute
    PRIMARY KEY (tenant_id, key_id)
);
CREATE UNIQUE INDEX api_keys_id ON asyncgate.api_keys (key_id);    -- led by the id, which says whose it is

CREATE TABLE asyncgate.audit (              -- append-only: nobody is granted to change or delete a line
    tenant_id       uuid NOT NULL,
    audit_id        asyncgate.id NOT NULL,  -- the number with its zeros: lines sort as they are chained
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

CREATE TABLE asyncgate.usage (              -- what a tenant has of what its tier limits
    tenant_id       uuid PRIMARY KEY,
    active          bigint NOT NULL,        -- tasks that have not ended
    leases          bigint NOT NULL,        -- that are live
    receipt_bytes   bigint NOT NULL,        -- of their bodies
    terminal        bigint NOT NULL         -- tasks that have ended
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

-- The one look at keys before a tenant is known: one row, by its whole id.

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

-- It goes to the role that may look; only for that moment may that create anything here.
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_auth;
RESET ROLE;
ALTER FUNCTION asyncgate.find_key(text) OWNER TO asyncgate_auth;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_auth;
