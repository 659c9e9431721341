-- What a ledger that keeps custody must be told when a task gets its next lease.
-- code: 1

ALTER TABLE asyncgate.states
    ADD COLUMN handed text;                 -- JSON: the fence, the receipt that gave custody back, to whom it went
