-- Leases know how long they were granted for, and who took them up again.

ALTER TABLE leases ADD COLUMN ttl_seconds INTEGER;      -- how long it was granted for: a renewal gives as much again
ALTER TABLE leases ADD COLUMN resumed_by TEXT;          -- the instance that took it up again last, "" without a name
ALTER TABLE leases ADD COLUMN resumptions INTEGER NOT NULL DEFAULT 0;   -- how often, as far as that is told
