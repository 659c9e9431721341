-- Who may come in, what is agreed with tenants, and what happened to either.

CREATE TABLE accounts (                     -- what is agreed with a tenant
    tenant_id       TEXT PRIMARY KEY,
    name            TEXT NOT NULL,
    created_at      REAL NOT NULL,
    tier            TEXT NOT NULL,          -- empty is the default
    suspended_at    REAL,                   -- since when none of its credentials is good
    exempt_until    REAL,                   -- from rate limits and quotas (spec 21.4.5)
    exempt_why      TEXT                    -- what was agreed
) WITHOUT ROWID;

CREATE TABLE api_keys (                     -- issued keys; what a holder shows is never stored
    tenant_id       TEXT NOT NULL,
    key_id          TEXT NOT NULL,          -- in the key's own text; no secret
    hash            TEXT NOT NULL,          -- Argon2id of its secret, as a PHC string
    name            TEXT NOT NULL,          -- what people call it
    principal_kind  TEXT NOT NULL,          -- for whom it stands
    principal_id    TEXT NOT NULL,          -- for whom it stands
    principal_instance_id TEXT,             -- for whom it stands, if it says
    role            TEXT NOT NULL,          -- agent worker admin
    scopes          TEXT NOT NULL,          -- JSON array, sorted
    capabilities    TEXT,                   -- JSON array: those it may claim tasks for; NULL is any
    task_types      TEXT,                   -- JSON array: those it may create and claim; NULL is any
    not_before      REAL NOT NULL,          -- when it begins to be good
    expires_at      REAL,                   -- when it ends
    revoked_at      REAL,                   -- when it was taken back
    rotated_to      TEXT,                   -- the key that takes its place
    version         INTEGER NOT NULL,       -- of the hash
    created_at      REAL NOT NULL,          -- when it was issued
    created_by      TEXT NOT NULL,          -- who issued it
    last_used_at    REAL,                   -- within a minute
    PRIMARY KEY (tenant_id, key_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX api_keys_id ON api_keys (key_id);    -- led by the id, which says whose it is

CREATE TABLE audit (                        -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    audit_id        TEXT NOT NULL,          -- the number with its zeros: lines sort as they are chained
    number          INTEGER NOT NULL,       -- 1, 2, 3, … in each tenant
    at              REAL NOT NULL,          -- when it happened
    event           TEXT NOT NULL,          -- what happened
    severity        TEXT NOT NULL,          -- info warning critical
    body            TEXT NOT NULL,          -- canonical JSON: who, from where, why
    hash            TEXT NOT NULL,          -- over all of this and the hash of the line before
    PRIMARY KEY (tenant_id, audit_id)
) WITHOUT ROWID;

CREATE TABLE audit_heads (                  -- where each tenant's audit log ends
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,       -- of the last line
    hash            TEXT NOT NULL           -- of the last line
) WITHOUT ROWID;

CREATE TABLE usage (                        -- what a tenant has of what its tier limits
    tenant_id       TEXT PRIMARY KEY,
    active          INTEGER NOT NULL,       -- tasks that have not ended
    leases          INTEGER NOT NULL,       -- that are live
    receipt_bytes   INTEGER NOT NULL,       -- of their bodies
    terminal        INTEGER NOT NULL        -- tasks that have ended
) WITHOUT ROWID;

CREATE TRIGGER audit_stay BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
-- INSERT OR REPLACE deletes without asking the triggers of a DELETE.
CREATE TRIGGER audit_once BEFORE INSERT ON audit
    WHEN EXISTS (SELECT 1 FROM audit WHERE tenant_id = NEW.tenant_id AND audit_id = NEW.audit_id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_keep BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;

CREATE TRIGGER accounts_insert_wall BEFORE INSERT ON accounts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER accounts_update_wall BEFORE UPDATE ON accounts
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER accounts_delete_wall BEFORE DELETE ON accounts
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_insert_wall BEFORE INSERT ON api_keys
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_update_wall BEFORE UPDATE ON api_keys
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER api_keys_delete_wall BEFORE DELETE ON api_keys
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_insert_wall BEFORE INSERT ON audit
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_insert_wall BEFORE INSERT ON audit_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_update_wall BEFORE UPDATE ON audit_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER audit_heads_delete_wall BEFORE DELETE ON audit_heads
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_insert_wall BEFORE INSERT ON usage
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_update_wall BEFORE UPDATE ON usage
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER usage_delete_wall BEFORE DELETE ON usage
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
