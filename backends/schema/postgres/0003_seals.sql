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

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['seals', 'seal_heads'] LOOP
        EXECUTE format('ALTER TABLE asyncgate.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE asyncgate.%I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant ON asyncgate.%I TO asyncgate_app '
                       'USING (tenant_id = (SELECT asyncgate.tenant())) '
                       'WITH CHECK (tenant_id = (SELECT asyncgate.tenant()))', name);
        EXECUTE format('GRANT SELECT, INSERT ON asyncgate.%I TO asyncgate_app', name);
    END LOOP;
END $$;
GRANT UPDATE ON asyncgate.seal_heads TO asyncgate_app;
