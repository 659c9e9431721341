-- A ledger knows who has stated a receipt, whoever the receipt says that it is from.
-- code: 1

ALTER TABLE asyncgate.ledger
    ADD COLUMN stated_kind text NOT NULL DEFAULT '',    -- of the principal whose credential it came with; empty: unknown
    ADD COLUMN stated_id text NOT NULL DEFAULT '',      -- the id of that principal
    ADD COLUMN stated_role text NOT NULL DEFAULT '';    -- the role of that credential
