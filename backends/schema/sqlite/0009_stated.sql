-- A ledger knows who has stated a receipt, whoever the receipt says that it is from.

ALTER TABLE ledger ADD COLUMN stated_kind TEXT NOT NULL DEFAULT '';     -- whose credential it came with; empty: unknown
ALTER TABLE ledger ADD COLUMN stated_id TEXT NOT NULL DEFAULT '';       -- the id of that principal
ALTER TABLE ledger ADD COLUMN stated_role TEXT NOT NULL DEFAULT '';     -- the role of that credential
