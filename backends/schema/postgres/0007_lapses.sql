-- code: 1
-- When upkeep has to look at a task, told beforehand: a lost lease is taken back at its end, not at the next sweep.

-- `look_at` may be earlier than the end of a lease: heartbeats leave check_at behind.
CREATE FUNCTION asyncgate.lapses(since float8, most int)
RETURNS TABLE (look_at float8, tenant_id uuid, task_id text) LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.check_at, s.tenant_id, s.task_id::text FROM asyncgate.states AS s
    WHERE s.check_at >= since ORDER BY s.check_at LIMIT most
$$;

REVOKE ALL ON FUNCTION asyncgate.lapses(float8, int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION asyncgate.lapses(float8, int) TO asyncgate_app;

-- It looks across tenants, so it belongs to the role that may; only for that moment may that role create anything here.
GRANT CREATE ON SCHEMA asyncgate TO asyncgate_sweeper;
RESET ROLE;
ALTER FUNCTION asyncgate.lapses(float8, int) OWNER TO asyncgate_sweeper;
SET LOCAL ROLE asyncgate_owner;
REVOKE CREATE ON SCHEMA asyncgate FROM asyncgate_sweeper;
