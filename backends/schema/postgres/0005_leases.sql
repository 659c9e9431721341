-- Leases know how long they were granted for, and who took them up again.
-- code: 1

ALTER TABLE asyncgate.states
    ADD COLUMN ttl_seconds bigint,          -- how long the lease was granted for: a renewal gives as much again
    ADD COLUMN resumed_by text,             -- the instance that took it up again last, "" if that gave no name
    ADD COLUMN resumptions bigint DEFAULT 0;    -- how often it was taken up again, as far as that is told
