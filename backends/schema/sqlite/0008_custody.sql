-- What a ledger that keeps custody must be told when a task gets its next lease.

ALTER TABLE tasks ADD COLUMN handed TEXT;   -- JSON: the fence, the receipt that gave custody back, and to whom it went
