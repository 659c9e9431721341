-- Lanes in which nothing waits are dropped.
-- code: 1

GRANT DELETE ON asyncgate.lanes TO asyncgate_app;
