-- Seals over the receipts: whoever changes, adds or takes away a receipt behind the gate's back is found.

CREATE TABLE seals (                        -- append-only: see the triggers
    tenant_id       TEXT NOT NULL,
    seal_id         TEXT NOT NULL,          -- the number with its zeros: seals sort as they are chained
    number          INTEGER NOT NULL,       -- 1, 2, 3, … in each tenant
    last_id         TEXT NOT NULL,          -- up to which receipt all are covered
    count           INTEGER NOT NULL,       -- of receipts
    digest          TEXT NOT NULL,          -- SHA-256 over the digests of the receipts, in their order
    marks           TEXT NOT NULL,          -- base64: the first bytes of each of them
    late            TEXT NOT NULL,          -- JSON array: the receipts, where they are older than some already sealed
    sealed_at       REAL NOT NULL,          -- when
    hash            TEXT NOT NULL,          -- over all of this and the hash of the seal before
    PRIMARY KEY (tenant_id, seal_id)
);

CREATE TABLE seal_heads (                   -- where each tenant's seals end
    tenant_id       TEXT PRIMARY KEY,
    number          INTEGER NOT NULL,       -- of the last seal
    last_id         TEXT NOT NULL,          -- of the last seal
    hash            TEXT NOT NULL,          -- of the last seal
    imports         INTEGER NOT NULL        -- how often older receipts were written among those already there
) WITHOUT ROWID;

CREATE TRIGGER seals_stay BEFORE UPDATE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER seals_once BEFORE INSERT ON seals
    WHEN EXISTS (SELECT 1 FROM seals WHERE tenant_id = NEW.tenant_id AND seal_id = NEW.seal_id)
    BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;
CREATE TRIGGER seals_keep BEFORE DELETE ON seals BEGIN SELECT RAISE(ABORT, 'seals are append-only'); END;

CREATE TRIGGER seals_insert_wall BEFORE INSERT ON seals
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_insert_wall BEFORE INSERT ON seal_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_update_wall BEFORE UPDATE ON seal_heads
    WHEN NEW.tenant_id IS NOT (SELECT tenant_id FROM wall)
        OR OLD.tenant_id IS NOT NEW.tenant_id
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
CREATE TRIGGER seal_heads_delete_wall BEFORE DELETE ON seal_heads
    WHEN OLD.tenant_id IS NOT (SELECT tenant_id FROM wall)
    BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END;
